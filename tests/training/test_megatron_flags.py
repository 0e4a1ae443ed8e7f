"""The one list of Megatron's flags: each stands once, and is one."""

import dataclasses
from argparse import ArgumentParser, Namespace

import pytest
from megatron.training.arguments import add_megatron_arguments

from megasink.errors import nearest
from megasink.options.command_parser import CLOSE
from megasink.options.dataclass_flags import flag_of
from megasink.options.megatron_flags import _KNOWN, CHOICES, KNOWN, REFUSED, having, refused
from megasink.options.run_options import OPTIONS
from megasink.training.checks.exclusive_options import EXCLUDED

# What Megatron derives, or keeps beside the flags, and what megasink does.
DERIVED = set(
    """
    rank world_size local_rank data_parallel_size inprocess_active_world_size unknown_flags
    transformer_pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    variable_seq_lengths sink_token_id gtp_weight_remat_size expert_gtp_weight_remat_size
    use_kitchen_attention kitchen_config_file kitchen_recipe_number
    """.split()
)
PARSER = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
FLAGS = {action.dest for action in PARSER._actions}
OWN = {field.name for options in OPTIONS for field in dataclasses.fields(options)}


def test_every_name_is_one_of_megatron_or_of_ours():
    rows = [(when, name) for when, row in (REFUSED | EXCLUDED).items() for name, *_ in row]
    assert len(set(rows)) == len(rows)
    assert set(EXCLUDED) <= FLAGS | OWN
    assert {*KNOWN, *(name for _, name in rows)} - FLAGS - OWN <= DERIVED
    words = [word for line in _KNOWN.split("\n") for word in line.partition(":")[0].split()]
    assert sorted(words) == sorted(KNOWN)


def test_choices_are_those_of_the_parser():
    actions = PARSER._option_string_actions
    assert {f"--{name}" for name in CHOICES} <= {n for n, a in actions.items() if a.choices}


def test_no_flag_of_megatron_is_taken_for_a_misspelt_one_of_ours():
    """The launcher refuses what is close to an option of megasink, before Megatron is imported."""
    own = [flag_of(name) for name in (*OWN, "ranks")]
    found = (name for name in PARSER._option_string_actions if nearest(name, own, cutoff=CLOSE))
    assert list(found) == []


def test_facts_are_those_that_are_explained():
    assert set().union(*KNOWN.values()) == set(
        "shape model context run described process needed needed-to-train count amount positive "
        "share text read written place host length warmup decay activation norm data package "
        "outside".split()
    )
    assert set(having("needed")) == set(
        "num_layers hidden_size num_attention_heads seq_length max_position_embeddings "
        "micro_batch_size".split()
    )


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, []),
        ({"openai_gelu": False, "mtp_num_layers": None}, []),
        ({"openai_gelu": True, "mtp_num_layers": 0}, ["--openai-gelu"]),
        ({"openai_gelu": True, "mtp_num_layers": 2}, ["--mtp-num-layers", "--openai-gelu"]),
    ],
)
def test_a_value_that_is_not_fine_is_found(given, found):
    assert [flag for flag, *_ in refused(Namespace(**given), "in an export")] == found
    assert [value for _, value, _ in refused(given, "in an export")] == [
        given[flag[2:].replace("-", "_")] for flag in found
    ]
