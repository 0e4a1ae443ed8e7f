"""What --resume takes from the command line that stands in a run folder."""

import re

import pytest

from megasink.errors import UserError
from megasink.training import flag_file
from megasink.training.flag_file import refused
from megasink.training.resume_flags import replayed
from tests.training.command_lines import MODEL

HARMLESS = set(
    """
    disable-msc fp8-amax-history-len inference-text-gen-server-logging
    no-inference-text-gen-server-logging no-inference-wandb-logging resume
    """.split()
)
OWN = [
    *MODEL,
    *"--data-path 0.3 /data/a 0.7 ../b --tokenizer-model /data/tokenizer".split(),
    *"--load /runs/x/checkpoints".split(),
    *"--window-size 15,0 --split 99,1,0 --moe-layer-freq ([0]+[1]*23)*2 --lr=3e-4".split(),
    *"--recompute-modules core_attn mlp --attention-variant gated --bf16 --min-lr .1".split(),
    "--validation-set-names",
    "first try (again)",
]


def test_the_flags_of_ones_own_run_are_taken(tmp_path):
    inside = ["--tensorboard-dir", str(tmp_path / "tb"), "--save", str(tmp_path / "x" / "..")]
    flags = replayed([*OWN, *inside], [], tmp_path)
    assert flags == [*" ".join(OWN[:-1]).replace("=", " ").split(), OWN[-1], *inside]


@pytest.mark.parametrize(
    "line",
    [
        "--save /elsewhere",
        "--save RUN/../elsewhere",
        "--tensorboard-dir=~/x",
        "--data-cache-path /home/user/.config",
        "--spec module function",
        "--plugin module",
        "--plugin=one --plugin two",
        "--yaml-cfg RUN/model.yaml",
        "--fp8-quantizer-factory module.function",
        "--trust-remote-code",
        "--record-memory-history",
        "--wandb-project heads",
        "--wandb-entity somebody",
        "--adlr-autoresume",
        "--use-checkpoint-args",
        "--position-embedding-type ../x",
        "--moe-layer-freq __import__('os').system('x')",
        "--unknown-option /a/place",
        "--run-dir=/elsewhere",
    ],
)
def test_what_somebody_else_would_decide_is_asked_for(tmp_path, line):
    words = line.replace("RUN", str(tmp_path)).split()
    with pytest.raises(UserError, match="is not reused, for safety: pass it"):
        replayed([*OWN, *words], [], tmp_path)
    name = words[0].partition("=")[0]
    assert name not in replayed([*OWN, *words], [name, "mine"], tmp_path)


def test_text_that_no_list_names_is_not_taken(pool):
    """So that a new option of Megatron's is looked at before it is replayed."""
    (found, _) = pool.run("tests.security.tasks:flags_of_any_text")
    taken = set(flag_file._text_flags())
    assert taken - set(found["all"]) == set()
    text = set(found["text"]) - taken
    assert len(text) > 50
    for name in text:
        assert refused([f"--{name}", "word"]) == {name: f"--{name} word"}
    telling = re.compile("wandb|resume$|server|straggler$|remote|msc$|ft-package|history|unsafe")
    for name in set(found["all"]) - HARMLESS:
        if telling.search(name):
            assert refused([f"--{name}"]) or refused([f"--{name}", "word"]), name


@pytest.mark.parametrize(
    "line",
    [
        "--lr-decay-style cosine",
        "--optimizer adam",
        "--num-layers 2",
        "--attention-similarity sigmoid",
    ],
)
def test_numbers_and_choices_need_no_list(line):
    assert refused(line.split()) == {}
    name = line.split()[0]
    assert refused([name, "a/path"]) == {name[2:]: f"{name} a/path"}
