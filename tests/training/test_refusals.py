"""What Megatron asserts is said in one line."""

import io
from argparse import Namespace

import pytest

from megasink.errors import ConfigError
from megasink.training.parse_arguments import refusals_of_megatron

SOURCE = """
def bare(args):
    if args:
        assert not args

def worded(args):
    assert not args, "--num-layers must be even,\\n says --save"

def valued(args):
    args.num_layers = args.fp8 = 5
    assert args.num_layers < args.fp8

def exits(args):
    print("use --recompute-activations")
    exit()

def raises(args):
    raise ValueError("no")
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bare", "validate.py:4: assert not args"),
        ("worded", "--num-layers must be even, says --save (validate.py:7: assert not args)"),
        (
            "valued",
            "validate.py:11: assert args.num_layers < args.fp8: --num-layers 5, --fp8-format 5",
        ),
        ("exits", "use --recompute-activations"),
        ("raises", "no"),
    ],
)
def test_a_refusal_is_one_line(tmp_path, name, text):
    path, names, printed = tmp_path / "validate.py", {}, io.StringIO()
    path.write_text(SOURCE)
    exec(compile(SOURCE, path, "exec"), names)
    names["print"] = lambda *words: print(*words, file=printed)
    with pytest.raises(ConfigError) as error, refusals_of_megatron(printed):
        names[name](Namespace())
    (problem,) = error.value.problems
    assert problem.startswith(f"Megatron refuses this configuration: {text}")
    assert "\n" not in problem


def test_what_is_no_refusal_passes():
    for error in (KeyboardInterrupt(), ConfigError(["ours"])):
        with pytest.raises(type(error)) as raised, refusals_of_megatron():
            raise error
        assert raised.value is error
