"""What Megatron asserts is said in one line, with the flags that its condition reads."""

import io
from argparse import Namespace

import pytest

from megasink.errors import ConfigError
from megasink.training.arguments import refusals_of_megatron

SOURCE = """
def bare(args):
    if args.save is not None:
        assert args.save_interval is not None

def worded(args):
    assert args.num_layers % 2 == 0, "--num-layers must be even,\\n says --save"

def exits(args):
    if args.checkpoint_activations:
        print("use --recompute-activations")
        exit()

def many(args):
    if args.a_name_of_no_flag and args.seq_length and args.lr and args.bf16:
        if args.fp16 or args.num_layers:
            raise ValueError("no")
"""
GIVEN = Namespace(
    **{"save": "x", "save_interval": None, "num_layers": 3, "checkpoint_activations": True},
    **{"a_name_of_no_flag": 1, "seq_length": 64, "lr": 0.1, "bf16": True, "fp16": False},
)


@pytest.fixture(params=["file", "no file"])
def functions(request, tmp_path):
    """Functions of a file, or of code that has none."""
    path = tmp_path / "validate.py"
    if request.param == "file":
        path.write_text(SOURCE)
    names = {}
    exec(compile(SOURCE, path, "exec"), names)
    return names, request.param == "file"


@pytest.mark.parametrize(
    ("name", "flags", "text"),
    [
        ("bare", "--save-interval not given, --save x", "validate.py:4:"),
        ("worded", "this configuration", "--num-layers must be even, says --save"),
        ("exits", "--checkpoint-activations", "use --recompute-activations"),
        ("many", "--fp16 not given, --num-layers 3, --seq-length 64, --lr 0.1", "no"),
    ],
)
def test_a_refusal_names_the_flags_of_its_condition(functions, name, flags, text):
    names, has_file = functions
    printed = io.StringIO()
    names["print"] = lambda *words: print(*words, file=printed)
    with pytest.raises(ConfigError) as error, refusals_of_megatron(GIVEN, printed):
        names[name](GIVEN)
    (problem,) = error.value.problems
    flags = flags if has_file else "this configuration"
    assert problem.startswith(f"Megatron refuses {flags}: {text}")
    assert "\n" not in problem


def test_what_is_no_refusal_passes():
    for error in (KeyboardInterrupt(), ConfigError(["ours"])):
        with pytest.raises(type(error)) as raised, refusals_of_megatron(GIVEN):
            raise error
        assert raised.value is error
