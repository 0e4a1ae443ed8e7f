"""The heart: what comes with the layer spec and the loss hook, and how much of it there is."""

import json
import os
import subprocess
import sys

import pytest

from megasink.tried import HEART
from tests.distributed.layout import Layout
from tests.distributed.pool import ROOT

LINES, FILES = 5_500, 45
# What nobody wants who takes an attention head: the training room, the plots, other stacks.
NOT = ("megatron.training", "matplotlib", "scipy", "sklearn", "transformers", "numpy.distutils")
ROOMS = {
    "",  # the package itself
    *("attention", "balance", "megatron"),
    *("config", "console", "errors", "tried"),
}
FORK = """
import json, sys
for name in ("megasink.upstream", "megasink.cpu", "megatron.training"):
    sys.modules[name] = None  # not to be imported
import tests  # it imports the progress of commands, which does not count
for name in [name for name in sys.modules if name.partition(".")[0] == "megasink"]:
    del sys.modules[name]
import torch
from megatron.core import parallel_state
before = set(sys.modules)
from megasink.megatron import HeadBalance, stack_spec
imported = set(sys.modules) - before
from tests.megatron.host_tasks import steps_on_a_cpu
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel()
steps = {variant: steps_on_a_cpu(variant) for variant in ("sink", "vanilla", "gated")}
ours = {n: m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "megasink" and m}
print(json.dumps({"imported": list(imported), "steps": steps, "ours": ours}))
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def fork():
    """Steps without our patches and CPU platform, as in a fork of Megatron with other lines."""
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment = os.environ | path | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_heart_is_small_and_comes_alone(fork):
    """All that four steps load with sinks, without, and with gates: not the import alone."""
    assert [name for name in fork["imported"] if name.startswith(NOT)] == []
    lines = {}
    for name, path in fork["ours"].items():
        with open(path) as file:  # noqa: PTH123
            lines[name] = sum(1 for _ in file)
    assert {"megasink.attention.kernels.aten_cpu", "megasink.megatron.gated_attention"} <= {*lines}
    assert sum(lines.values()) <= LINES, sorted(lines.items(), key=lambda item: -item[1])
    assert len(lines) <= FILES, sorted(lines)
    assert {name.partition("megasink.")[2].split(".")[0] for name in lines} <= ROOMS


OTHERS = """
import json, sys, warnings
from megatron import core
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import TransformerConfig, spec_utils, torch_norm

def imported(version):
    if version:
        core.__version__ = version
    for name in [name for name in sys.modules if name.startswith("megasink")]:
        del sys.modules[name]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        spec_utils.import_module(["megasink.megatron", "layer_spec"])
    print(json.dumps([str(each.message) for each in told if "megatron-core" in str(each.message)]))

imported("0.19.2+1234567")
imported("0.21.0")
del core.__version__
imported(None)
del TransformerConfig.experimental_attention_variant_loss_scale_func  # new in 0.19
imported("0.18.2")
del torch_norm.LayerNormBuilder  # new in 0.17
imported("0.16.0")
"""


def test_another_megatron_is_named_with_what_it_lacks():
    """What cannot be imported ends the run, where an ImportError would be a line of its log."""
    command = [sys.executable, "-W", "ignore", "-c", OTHERS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    tried, newer, unknown, older = (json.loads(line) for line in done.stdout.splitlines())
    oldest, newest = HEART
    assert tried == []
    (line,) = newer
    assert line.startswith(
        f"megatron-core 0.21.0 was not tested: megasink.megatron was tested with {oldest}"
    )
    (line,) = unknown
    assert line.startswith("megatron-core of unknown version was not tested: ")
    (line,) = older
    assert line.startswith("megatron-core 0.18.2 does not pass the loss scale")
    assert "set_loss_scale" in line
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.endswith(
        "megatron-core 0.16.0 lacks megatron.core.transformer.torch_norm.LayerNormBuilder: "
        f"megasink.megatron was tested with {oldest} to {newest}"
    )


def test_the_heart_steps_where_no_patch_applies(pool, fork):
    for variant, steps in fork["steps"].items():
        (patched,) = pool.run("tests.megatron.host_tasks:steps_on_a_cpu", Layout(), variant=variant)
        assert len(steps) == len(patched) == 4
        # An imbalance is a small difference of importances, which are float32.
        for (loss, imbalance), wanted in zip(steps, patched, strict=True):
            assert loss == pytest.approx(wanted[0], rel=1e-6)
            assert imbalance == pytest.approx(wanted[1], rel=2e-5)
        assert steps[-1][0] < steps[0][0]
        assert all(imbalance > 0 for _, imbalance in steps)
