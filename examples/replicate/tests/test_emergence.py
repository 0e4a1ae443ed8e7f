"""Experiment b: the trainer takes the flags of every cell; the fixed token stands for no text."""

import tomllib
from pathlib import Path

from examples.replicate.grid.file import read_grid
from megasink.cli.demo_runs import LETTERS, write_tokenizer
from megasink.data.corpus import Document
from megasink.data.hf_tokenizer import load_tokenizer, train_tokenizer

FOLDER = Path(__file__).parents[1] / "b_emergence"


def fixed_tokens(form):
    cells = read_grid(FOLDER / f"{form}.toml").cells
    return {cell.flags.get("replace-tokens-with") for cell in cells} - {None, "random", False}


def test_the_fixed_token_of_the_fast_form_is_a_letter_that_its_language_lacks(tmp_path):
    told = tomllib.loads((FOLDER / "experiment.toml").read_text())
    letters = told["data"]["stream"]["fast"]["letters"]
    write_tokenizer(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert tokenizer.convert_ids_to_tokens(list(fixed_tokens("fast"))) == [LETTERS[-1]]
    assert LETTERS[-1] not in LETTERS[:letters]


def test_the_fixed_token_of_the_full_form_is_in_no_text(tmp_path):
    """A byte that UTF-8 does not have, in a vocabulary of any size."""
    train_tokenizer([Document(Path(__file__).read_text() * 3, "test")], 340, tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    names = {tokenizer.convert_ids_to_tokens(token) for token in fixed_tokens("full")}
    assert names == {"<0xC0>"}
