"""Chat data is recognized by its sidecar, and refused where it does not fit, before step 1."""

import json
import shutil
from argparse import Namespace

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megasink.data.corpus import Corpus
from megasink.data.output import CHAT, LOSS_MASK
from megasink.data.preprocess import preprocess
from megasink.errors import ConfigError
from megasink.training import early
from megasink.training.checks import data_files
from megasink.training.checks.chat import recognize
from tests.chats import chat_data, conversations
from tests.documented import refuse
from tests.training.command_lines import MODEL

CHATS = conversations(20, words=4)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Chat data, text of the same tokenizer, and the tokenizer."""
    folder = tmp_path_factory.mktemp("chat")
    chat_data(folder, CHATS, 64)
    (folder / "a.txt").write_text("some text\n" * 50)
    preprocess(Corpus([folder / "a.txt"]), folder / "text", folder / "tokenizer", workers=1)
    return folder


@pytest.fixture
def data(sound, tmp_path):
    """A copy of them, and flags to train on the chat data."""
    shutil.copytree(sound, tmp_path / "data")
    return tmp_path / "data"


def flags(data, *prefixes):
    argv = [*MODEL, "--tokenizer-model", str(data / "tokenizer"), "--split", "1,0,0"]
    return [*argv, "--data-path", *(str(data / prefix) for prefix in prefixes or ["chat"])]


def problems(argv) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        refuse(argv, 1)
    return caught.value.problems


def recognized(argv) -> Namespace:
    args = early.read(argv)
    args.rank = 0
    recognize(args)
    return args


def test_it_is_recognized_wherever_it_is_named(data):
    blend = {"train": [str(data / "chat")], "valid": None, "test": None}
    (data / "blend.json").write_text(json.dumps(blend))
    (data / "blend.txt").write_text(f"1 {data / 'chat'} 2 {data / 'chat'}")
    base = flags(data)[:-2]
    for named in (
        ["--data-path", str(data / "chat")],
        ["--train-data-path", str(data / "chat")],
        ["--per-split-data-args-path", str(data / "blend.json")],
        ["--data-args-path", str(data / "blend.txt")],
    ):
        args = recognized([*base, *named])
        assert args.chat_data
        assert args.calculate_per_token_loss
        assert args.dataloader_inter_document_masking
    args = recognized(flags(data, "text"))
    assert not args.chat_data
    assert not args.calculate_per_token_loss
    refuse(flags(data), 1)


def test_it_is_not_mixed_with_text(data):
    (problem,) = problems(flags(data, "chat", "text"))
    assert f"{data / 'chat'} is chat data and {data / 'text'} is not: " in problem


def test_the_context_is_that_of_the_data(data):
    (problem,) = problems([*flags(data), "--seq-length", "32"])
    assert problem.startswith(f"--seq-length 32: {data / 'chat'} was made for 64 tokens; give")


@pytest.mark.parametrize("suffix", [s for s in CHAT if LOSS_MASK in s])
def test_a_missing_mask(data, suffix):
    (data / f"chat{suffix}").unlink()
    (problem,) = problems(flags(data))
    assert problem == f"{data / 'chat'}: {data / 'chat'}{suffix} not found: make the data again"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--eod-mask-loss"], "--eod-mask-loss with chat data: "),
        (["--sink-token"], "--sink-token with --dataloader-inter-document-masking"),
        (["--prefix-lm-tokens", "3"], "--prefix-lm-tokens with --dataloader-inter-document-mas"),
        (["--sft"], "--sft: make the data with megasink data --chat"),
        (["--sft-tokenizer-prompt-format", "default"], "--sft-tokenizer-prompt-format: make the"),
    ],
)
def test_what_does_not_go_with_it(data, given, says):
    (problem,) = problems([*flags(data), *given])
    assert problem.startswith(says)


def test_a_mask_of_other_data_or_damaged(data):
    args = recognized(flags(data))
    assert list(data_files.problems(args)) == []
    mask = data / f"chat{LOSS_MASK}.bin"
    mask.write_bytes(mask.read_bytes()[:-1])
    (problem,) = data_files.problems(args)
    assert f"{mask} has" in problem
    assert problem.endswith("make the data set again")
    builder = IndexedDatasetBuilder(str(mask), dtype=np.uint8)
    for _ in CHATS:
        builder.add_document(np.ones(5, np.uint8), [5])
    builder.finalize(str(mask.with_suffix(".idx")))
    (problem,) = data_files.problems(args)
    assert "other conversations than" in problem


def test_chat_data_without_its_sidecar_is_not_taken_for_text(data):
    (data / "chat.json").unlink()
    (problem,) = problems(flags(data))
    assert "chat_loss_mask.idx is a mask of chat data, but" in problem


def test_a_different_tokenizer(data):
    argv = flags(data)
    argv[argv.index("--tokenizer-model") + 1] = str(data / "plain")
    found = list(data_files.problems(recognized(argv)))
    assert any("whose tokens differ" in problem for problem in found)
