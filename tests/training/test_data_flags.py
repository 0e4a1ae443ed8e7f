"""No flag of Megatron's about data is ignored: it reaches the datasets, or it is refused."""

import argparse
import dataclasses
import json
from argparse import Namespace

import numpy as np
import pytest
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.arguments import _add_data_args

from megasink.errors import ConfigError
from megasink.training import build_datasets
from megasink.training.checks import all_checks, data_contents
from megasink.training.dataset_blends import drawn_validation, parts
from tests.parsing import read, refuse
from tests.training.command_lines import MODEL

NO_FLAG = {"drop_last_partial_validation_sequence", "add_extra_token_to_sequence"}
REFUSED = {"sequences_per_dataset", "fast_cache_load", "defer_npy_index_mmap"}
# Read in other places than the datasets, each by its own line.
ELSEWHERE = {
    "phase_transition_iterations": "megasink/training/rank_phases.py",
    "mock_data": "the kind of dataset",
    "encoder_seq_length": "another name of seq_length",
    "num_workers": "the data loader",
    "create_attention_mask_in_dataloader": "always off: kernels apply masks",
    "fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix": "of --fim-data",
    "fim_prefix_token fim_middle_token fim_suffix_token fim_pad_token": "of --fim-data",
    "fim_eod_token": "of --fim-data",
}
DATA_FLAGS = _add_data_args(argparse.ArgumentParser())._actions[1:]


@pytest.fixture
def config_of(monkeypatch):
    """The fields that reach the dataclass, of a command line."""
    monkeypatch.setattr(build_datasets, "GPTDatasetConfig", lambda **fields: fields)
    monkeypatch.setattr(build_datasets, "get_tokenizer", lambda: None)

    def fields_of(args: Namespace) -> dict:
        args.data_parallel_size = 1
        return build_datasets.dataset_config(args)

    return fields_of


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "a", [[1, 2, 3], [4, 5]])


def write(path, documents, dtype=np.uint16):
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(f"{path}.idx")
    return str(path)


NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "256"]


def problems(*flags: str) -> list[str]:
    """What the command line is refused for before any rank starts."""
    try:
        refuse([*MODEL, *NULL, *flags], 1)
    except ConfigError as error:
        return error.problems
    return []


def rank_problems(*flags: str) -> list[str]:
    args = read([*MODEL, *NULL, *flags])
    args.rank = 0
    return list(data_contents.problems(args))


def test_every_field_of_upstreams_dataclass_is_given(config_of):
    given = set(config_of(read([*MODEL, "--mock-data"])))
    fields = {field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init}
    assert given == fields - NO_FLAG - REFUSED


@pytest.mark.parametrize("action", DATA_FLAGS, ids=lambda action: action.dest)
def test_every_flag_about_data_is_passed_on_or_refused(config_of, action, tmp_path, monkeypatch):
    args = read([*MODEL, *NULL])
    args.rank, args.world_size = 0, 1
    before = config_of(args)
    value = _other_value(action, tmp_path)
    assert value != action.default
    setattr(args, action.dest, value)
    if any(action.dest in names.split() for names in ELSEWHERE):
        return
    if config_of(args) != before:
        return
    flags = [name for name in action.option_strings if name.startswith("--")]
    refused = all_checks.of_line(args)[0]
    assert any(flag in problem for flag in flags for problem in refused), refused


def _other_value(action, folder):
    if action.nargs == 0:
        return action.const
    if action.dest.endswith("_args_path"):
        parts = folder / "parts"
        split = '{"train": "b", "valid": null, "test": null}'
        parts.write_text(split if "split" in action.dest else "b")
        return str(parts)
    if action.nargs == "*":
        return ["b"]
    return "other" if action.type in (None, str) else (action.default or 0) + 1


def test_all_problems_of_blends_are_in_one_message(prefix, tmp_path):
    lists = tmp_path / "parts.json"
    split = {"train": f"1 {prefix} 0 {prefix}b", "valid": [0.5, prefix, 0.5], "test": 7}
    lists.write_text(json.dumps(split))
    found = problems("--per-split-data-args-path", str(lists))
    flag = f"--per-split-data-args-path {lists}"
    assert found == [
        f"{flag}, train: the weight of {prefix}b must be above 0",
        f"{flag}, train {prefix}b: {prefix}b.bin and {prefix}b.idx not found",
        f"{flag}, valid: 0.5 looks like a weight, but 3 words are not pairs of weight and prefix: "
        "put a weight before every prefix, or before none",
        f"{flag}: 'test' must be null, or a list of weights and prefixes",
    ]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--data-args-path", "nowhere", "--split", "1,0,0"],
            "nowhere cannot be read (No such file",
        ),
        (["--per-split-data-args-path", "nowhere"], "nowhere cannot be read (No such file"),
        (["--data-path", "{}"] * 1 + ["--train-data-path", "{}"], "choose one"),
        (["--train-data-path", "{}", "--split", "1,0,0"], "--split 1,0,0 with --train-data-path"),
        (["--data-path"], "no training data"),
        (["--data-path", "{}.bin"], "{0}.bin.idx not found: give {0}, the prefix of both files"),
        (["--data-path", "."], "not found: . is a folder; give the --output of megasink data"),
        (["--mock-data", "--split", "0,90,10"], "--split 0,90,10 provides no training data"),
        (["--valid-data-path", "{}"], "--valid-data-path alone provides no training data"),
        (["--data-path", "2", "{}", "x", "{}"], "2 looks like a weight, but 4 words"),
        (["--data-path", "nan", "{}"], "the weight of {} must be above 0"),
        (["--data-path", "s3://bucket/a"], "s3:// data needs --object-storage-cache-path FOLDER"),
        (["--data-path", "{}", "--object-storage-cache-path", "c"], "--object-storage-cache-path"),
        (["--data-path", "{}", "--mask-prob", "0.3"], "--mask-prob: Megatron's GPT datasets ign"),
    ],
)
def test_what_is_refused_at_the_command_line(prefix, flags, says):
    found = problems(*(flag.format(prefix) for flag in flags))
    assert any(says.format(prefix) in problem for problem in found), found


def test_of_many_missing_data_sets_some_are_named(tmp_path):
    found = problems("--data-path", *(str(tmp_path / f"p{n}") for n in range(101)))
    assert len(found) == 9
    assert found[-1] == "--data-path: 101 of 101 datasets are incomplete; the first 8 are above"


def test_validation_data_of_a_data_set_is_found(prefix, tmp_path, config_of, capsys):
    """`megasink data --validation` names it in PREFIX.json."""
    record = {"share": 0.5, "seed": 1, "data": "a-validation"}
    (tmp_path / "a.json").write_text(json.dumps({"validation": record}))
    drawn = f"{prefix}-validation"
    flags = ["--data-path", "0.5", prefix, "--split", "95,5,0"]
    assert any(f"validation {drawn}: {drawn}.bin and" in problem for problem in problems(*flags))
    write(drawn, [[7, 8]])
    assert problems(*flags) == []
    assert rank_problems(*flags) == []
    assert f"data: validation uses 0.5 {drawn}, not a share of --split" in capsys.readouterr().out
    args = read([*MODEL, *NULL, *flags])
    assert parts(args) == (True, True, False)
    fields = config_of(args)
    assert fields["blend_per_split"] == [([prefix], [0.5]), ([drawn], [0.5]), None]
    assert (fields["blend"], fields["split"]) == (None, None)
    other = write(tmp_path / "b", [[1, 2, 3]])
    (problem,) = problems("--data-path", prefix, other, "--split", "95,5,0")
    assert problem.startswith(f"--data-path: {prefix} has a validation set")
    record["data"] = "../elsewhere"  # beside it, nowhere else
    (tmp_path / "a.json").write_text(json.dumps({"validation": record}))
    assert drawn_validation([prefix]) is None


def test_a_part_without_a_token_is_refused(tmp_path):
    empty = write(tmp_path / "empty", [[], []])
    (problem,) = rank_problems("--train-data-path", empty)
    assert problem == f"--train-data-path {empty}: all 2 documents are empty"


def test_contents_are_read_once_per_job_and_the_tokenizer_is_hashed_once(monkeypatch, prefix):
    args = read([*MODEL, *NULL, "--data-path", prefix, "--split", "1,0,0"])
    monkeypatch.setattr(data_contents, "data_problem", lambda *_: pytest.fail("read"))
    args.rank = 1
    assert list(data_contents.problems(args)) == []
    # Presence is looked at by one rank of each node.
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert problems("--data-path", "nowhere") == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "8")
    (problem,) = problems("--data-path", "nowhere")
    assert "nowhere.bin and nowhere.idx not found on " in problem
