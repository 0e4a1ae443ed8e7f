"""Flags of Megatron-LM with another name here, and flags that nothing reads."""

from argparse import ArgumentParser

import pytest
from megatron.training.arguments import add_megatron_arguments

from megasink.options.run_options import add_options
from megasink.training.checks import all_checks
from megasink.training.reinterpreted_flags import READERS
from tests.parsing import read
from tests.training.command_lines import MOCK

PARSER = add_megatron_arguments(ArgumentParser())
add_options(PARSER)
ACTIONS = {a.dest: a for a in PARSER._actions}
HYBRID = "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("--softmax-type learnable", {"attention_variant": "sink"}),
        ("--softmax-type off-by-one", {"attention_variant": "off-by-one"}),
        (
            "--attention-output-gate",
            {"attention_variant": "gated", "gate_granularity": "elementwise"},
        ),
        ("--attention-backend fused --use-flash-attn", {"use_flash_attn": False}),
        ("--apply-query-key-layer-scaling", {"apply_query_key_layer_scaling": False}),
        (
            "--reset-attention-mask --reset-position-ids",
            {"dataloader_inter_document_masking": True, "reset_position_ids": False},
        ),
        ("--rampup-batch-size 2 2 8", {"rampup_batch_size": [2, 2, 8]}),
        ("--reset-attention-mask", {"dataloader_inter_document_masking": True}),
        ("--reset-position-ids", {"reset_position_ids": False}),
        (f"--hybrid-layer-pattern *- --spec {HYBRID}", {"spec": None}),
        (
            "--num-layers 4 --linear-attention-freq 2 --experimental-attention-variant "
            "gated_delta_net --pipeline-model-parallel-size 2 --num-experts 4 --moe-layer-freq 2",
            {"hybrid_layer_pattern": "GE*-|GE*-", "experimental_attention_variant": None},
        ),
    ],
)
def test_a_flag_of_megatron_becomes_the_one_with_the_same_meaning(given, wanted):
    args = read([*MOCK, *given.split()])
    assert {name: getattr(args, name) for name in wanted} == wanted
    (note,) = args.flag_notes
    assert note.startswith("--")
    flags = [word for word in given.split() if word.startswith("--")]
    assert any(flag in note for flag in flags)


@pytest.mark.parametrize(
    "given",
    [
        "--softmax-type learnable --attention-variant gated",
        "--attention-output-gate --attention-variant gated",
        "--reset-attention-mask --position-embedding-type learned_absolute",
        "--spec my_module my_spec",
        # Stages of unequal length have no pattern.
        "--linear-attention-freq 2 --experimental-attention-variant gated_delta_net "
        "--num-layers 3 --pipeline-model-parallel-size 2",
    ],
)
def test_what_has_no_meaning_here_is_refused(given):
    args = read([*MOCK, *given.split()])
    args.world_size = 2
    text = "\n".join(all_checks.of_line(args)[0])
    assert given.split()[0] in text or "--experimental-attention-variant" in text


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: f"{reader.needs}-{reader.flags[0]}")
def test_a_flag_that_nothing_reads_is_named(reader):
    for name in reader.flags:
        action = ACTIONS[name]
        value = next(iter(action.choices)) if action.choices else "1"
        words = [action.option_strings[0], *([] if action.nargs == 0 else [str(value)])]
        line = [word for word in MOCK if word not in ("--position-embedding-type", "rope")]
        line += ["--attention-variant", "vanilla"]
        notes = read([*line, "--optimizer", "lion", *words]).flag_notes
        if "adam" in reader.needs:
            notes = read([*line, "--optimizer", "sgd", *words]).flag_notes
        assert any(action.option_strings[0] in note and reader.needs in note for note in notes)
    assert read(MOCK).flag_notes == []
