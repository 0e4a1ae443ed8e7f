"""The heart: what comes with the layer spec and the loss hook, and how much of it there is."""

import json
import subprocess
import sys

LINES, FILES = 6_500, 60
# What nobody wants who takes an attention head: the training room, the plots, other stacks.
NOT = ("megatron.training", "matplotlib", "scipy", "sklearn", "transformers", "numpy.distutils")
ROOMS = {
    "",  # the package itself
    *("attention", "balance", "megatron", "lora"),
    *("config", "errors", "printable"),
}
PROGRAM = """
import json, sys
from megasink.megatron import HeadBalance, layer_spec
print(json.dumps({name: getattr(module, "__file__", None) for name, module in sys.modules.items()}))
"""


def test_the_heart_is_small_and_comes_alone():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout.splitlines()[-1])
    ours = {n: f for n, f in loaded.items() if f and (n == "megasink" or n.startswith("megasink."))}
    lines = {}
    for name, path in ours.items():
        with open(path) as file:  # noqa: PTH123
            lines[name] = sum(1 for _ in file)
    assert sum(lines.values()) <= LINES, sorted(lines.items(), key=lambda item: -item[1])
    assert len(lines) <= FILES, sorted(lines)
    assert [name for name in loaded if name.startswith(NOT)] == []
    assert {name.partition("megasink.")[2].split(".")[0] for name in ours} <= ROOMS
    # `lora` is an options class alone, and no patch of upstream is known.
    assert {name for name in ours if ".lora" in name} <= {"megasink.lora", "megasink.lora.options"}


OLDER = """
import logging
from megatron import core
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import spec_utils, torch_norm
del torch_norm.LayerNormBuilder  # new in 0.17
core.__version__ = "0.16.0"
spec_utils.import_module(["megasink.megatron", "layer_spec"])
"""


def test_an_older_megatron_is_named_with_what_it_lacks():
    """And ends the run, where an ImportError would be a line of its log."""
    command = [sys.executable, "-W", "ignore", "-c", OLDER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert "megasink is for Megatron-Core 0.19 and 0.20, and this is 0.16.0: " in last
    assert "cannot import name 'LayerNormBuilder'" in last
