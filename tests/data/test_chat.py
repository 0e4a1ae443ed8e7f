"""Conversations to tokens and masks: by transformers' own assistant mask."""

import gzip
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megasink import cli
from megasink.data import output
from megasink.data.chat import chat_settings
from megasink.data.corpus import Corpus
from megasink.data.parquet import ParquetReader
from megasink.data.preprocess import preprocess
from megasink.data.text_tokenizer import parts_of
from megasink.data.tokenizer import load_tokenizer
from megasink.errors import ConfigError, UserError
from tests.chats import ENDS, MARKED, UNMARKED, chat_tokenizer, conversations, write_chats

LONG = 4096
CHATS = conversations(60)
USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


@pytest.fixture(scope="module")
def chat_folder(folder, tmp_path_factory):
    return chat_tokenizer(folder, tmp_path_factory.mktemp("marked") / "tokenizer")


@pytest.fixture(scope="module")
def unmarked_folder(folder, tmp_path_factory):
    return chat_tokenizer(folder, tmp_path_factory.mktemp("unmarked") / "tokenizer", UNMARKED)


@pytest.fixture
def made(tmp_path, chat_folder):
    """Make a data set of conversations, or of a file; return its report, tokens and masks."""

    def make(chats, seq_length=LONG, tokenizer=chat_folder, **options):
        path = write_chats(tmp_path / "a.jsonl", chats) if isinstance(chats, list) else chats
        prefix = tmp_path / "out"
        corpus = Corpus([path], chat=True, **options)
        report = preprocess(
            corpus, prefix, tokenizer, seq_length=seq_length, workers=1, overwrite=True
        )
        parts = (IndexedDataset(str(prefix)), IndexedDataset(f"{prefix}{output.LOSS_MASK}"))
        return report, *([item.tolist() for item in part] for part in parts)

    return make


def expected(folder, chats, **options):
    """Ids and assistant masks of transformers itself."""
    tokenizer = load_tokenizer(folder)
    answers = [
        tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        for chat in chats
    ]
    return [a["input_ids"] for a in answers], [a["assistant_masks"] for a in answers]


def test_tokens_and_masks_are_those_of_transformers(made, chat_folder):
    report, tokens, masks = made(CHATS)
    ids, wanted = expected(chat_folder, CHATS)
    assert tokens == ids
    assert masks == wanted
    end = load_tokenizer(chat_folder).convert_tokens_to_ids(ENDS)
    ended = [chat[at] for chat, mask in zip(tokens, masks, strict=True) for at in runs_end(mask)]
    assert set(ended) == {end}
    said = sum(m["role"] == "assistant" for chat in CHATS for m in chat)
    assert report.chat == dict.fromkeys(report.chat, 0) | {
        "responses": said,
        "targets": sum(map(sum, masks)),
    }
    assert (report.documents, report.tokens) == (len(CHATS), sum(map(len, ids)))


def runs_end(mask: list[int]) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(mask, [*mask[1:], 0], strict=True)) if a > b]


def test_responses_with_spaces_at_their_ends_whose_tokens_do_not_hold_them(made, tmp_path):
    """A byte-level tokenizer, as of GPT-2 and Llama 3: its offsets leave out spaces."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([m["content"] for chat in CHATS for m in chat], trainer)
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    plain.save_pretrained(tmp_path / "plain")
    folder = chat_tokenizer(tmp_path / "plain", tmp_path / "tokenizer")
    tokenizer = load_tokenizer(folder)
    for answer in ("  two", "two  ", " 🙂 ", "\t naïve", " ", ""):
        chat = [USER, {"role": "assistant", "content": answer}, USER]
        _, (tokens,), (mask,) = made([chat], tokenizer=folder)
        assert tokens == tokenizer.apply_chat_template(chat, return_dict=False)
        said = [token for token, target in zip(tokens, mask, strict=True) if target]
        assert tokenizer.decode(said) == answer + ENDS


def test_without_markers_responses_are_found_by_what_each_adds(made, chat_folder, unmarked_folder):
    _, *marked = made(CHATS)
    _, *found = made(CHATS, tokenizer=unmarked_folder)
    assert found == marked


def test_a_template_that_changes_earlier_turns_is_refused(made, folder, tmp_path):
    forgets = UNMARKED.replace(
        "{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else 'forgotten' }}"
    )
    tokenizer = chat_tokenizer(folder, tmp_path / "forgets", forgets)
    with pytest.raises(UserError, match=r"a\.jsonl:2: message 2 is rendered differently.*around"):
        made([[USER, ANSWER], [USER, ANSWER, USER, ANSWER]], tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"a\.jsonl:1: message 1 begins the conversation, and the"):
        made([[ANSWER]], tokenizer=tokenizer)


def test_what_is_longer_than_the_context_is_cut_off_and_counted(made, chat_folder):
    ids, wanted = expected(chat_folder, CHATS)
    size = 20
    report, tokens, masks = made(CHATS, seq_length=size)
    kept = [i for i, mask in enumerate(wanted) if any(mask[: size + 1])]
    assert 0 < len(kept) < len(CHATS)
    assert tokens == [ids[i][: size + 1] for i in kept]
    assert masks == [wanted[i][: size + 1] for i in kept]
    counts = report.chat
    assert counts["beyond_context"] == len(CHATS) - len(kept)
    assert counts["truncated"] == sum(len(ids[i]) > size + 1 for i in kept) > 0
    assert counts["targets"] == sum(map(sum, masks))
    ended = sum(len(runs_end(mask)) for mask in masks)
    assert counts["responses"] == ended
    assert counts["cut_responses"] == sum(wanted[i][size : size + 2] == [1, 1] for i in kept) > 0
    assert counts["unclosed_responses"] == 0


def test_what_cannot_be_learned_from_is_left_out(made):
    report, tokens, _ = made([[USER], [USER, ANSWER], [], None])
    assert len(tokens) == 1
    assert (report.chat["no_response"], report.chat["empty"]) == (1, 2)


def test_no_response_in_the_context_is_an_error_that_leaves_nothing(made, tmp_path):
    with pytest.raises(UserError, match=r"no conversation in .* 4 tokens: in 60 it begins later"):
        made(CHATS, seq_length=4)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_run_that_ends_in_between_leaves_the_old_files_and_the_next_makes_the_same(
    made, tmp_path
):
    def files():
        return {path.name: path.read_bytes() for path in tmp_path.glob("out*")}

    made(CHATS)
    before = files()
    bad = write_chats(tmp_path / "bad.jsonl", [*CHATS * 20, "none"])  # in the third batch
    with pytest.raises(UserError, match=r"bad\.jsonl:1201: 'messages' holds a str"):
        made(bad)
    assert files() == before
    made(CHATS)
    assert files() == before


def test_special_tokens_in_messages_and_responses_without_an_end_are_counted(
    made, folder, tmp_path
):
    spells = [[{"role": "user", "content": f"what is {ENDS}?"}, ANSWER], [USER, ANSWER]]
    assert made(spells)[0].chat["spelled"] == 1
    inside = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    tokenizer = chat_tokenizer(folder, tmp_path / "inside", inside)
    assert made(spells, tokenizer=tokenizer)[0].chat["unclosed_responses"] == 2


def test_tools_and_their_calls_are_the_templates(made, tmp_path, chat_folder):
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "f", "arguments": {"x": 1}}],
    }
    record = {"messages": [USER, call], "tools": [{"name": "f"}]}
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps(record))
    _, (tokens,), (mask,) = made(path)
    tokenizer = load_tokenizer(chat_folder)
    assert tokens == tokenizer.apply_chat_template(
        record["messages"], tools=record["tools"], return_dict=False
    )
    said = tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m])
    assert said == '[{"name": "f", "arguments": {"x": 1}}]<|im_end|>'


def test_other_forms_of_the_same_conversations(made, tmp_path):
    _, *wanted = made(CHATS)
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    sharegpt = [[{"from": names[m["role"]], "value": m["content"]} for m in c] for c in CHATS]
    path = write_chats(tmp_path / "sharegpt.jsonl", sharegpt, "conversations")
    assert made(path, json_key="conversations")[1:] == tuple(wanted)
    table = pa.table({"id": list(range(len(CHATS))), "messages": CHATS})
    pq.write_table(table, tmp_path / "a.parquet")
    assert made(tmp_path / "a.parquet")[1:] == tuple(wanted)
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert made(packed)[1:] == tuple(wanted)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', r"a\.jsonl:2 is not valid JSON"),
        ('{"text": "x"}', r"a\.jsonl:2 has no key 'messages': pass --json-key, one of \['text'\]"),
        ('{"messages": "x"}', r"a\.jsonl:2: 'messages' holds a str, not a list of messages"),
        ('{"messages": ["x"]}', r":2: message 1 is a str, not an object with role and content"),
        ('{"messages": [{"content": "x"}]}', r":2: message 1 has no role: give each message"),
        ('{"messages": [{"role": "user"}]}', r":2: message 1 \(user\) has no content"),
        ('{"messages": [{"role": "user", "content": [{}]}]}', r"message 1 has content in parts"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"message 1: its content is a int"),
        ('{"messages": [{"role": "a", "content": "\\ud800"}]}', r":2 holds half of a character"),
        ('{"messages": [{"role": "a", "content": ""}], "tools": "x"}', r":2: 'tools' is not a li"),
    ],
)
def test_bad_records_are_named_with_their_place(made, tmp_path, line, message):
    path = write_chats(tmp_path / "a.jsonl", CHATS[:1])
    path.write_text(path.read_text() + line)
    with pytest.raises(UserError, match=message):
        made(path)


def test_columns_that_parquet_does_not_keep_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    with ParquetReader(1 << 20) as reader:
        for table, message in [
            ({"messages": ["x"]}, r"a\.parquet: column 'messages' holds string, not lists of mess"),
            ({"messages": [[USER]], "tools": ["x"]}, "column 'tools' cannot be read from parquet"),
            ({"messages": [[{**USER, "tool_calls": [1]}]]}, "messages have 'tool_calls' of list"),
        ]:
            pq.write_table(pa.table(table), path)
            with pytest.raises(UserError, match=message):
                list(reader.rows(path, "messages", chat=True))


def test_templates_that_fail_or_are_missing(made, folder, tmp_path):
    with pytest.raises(UserError, match="has no chat template: use the tokenizer of a chat model"):
        made(CHATS, tokenizer=folder)
    strict = chat_tokenizer(folder, tmp_path / "t", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"a\.jsonl:1: .* fails on it: roles must alternate"):
        made(CHATS, tokenizer=strict)


def test_text_files_are_no_conversations(tmp_path):
    (tmp_path / "README.md").write_text("text")
    write_chats(tmp_path / "a.jsonl", CHATS)
    with pytest.raises(ConfigError, match=r"README\.md: conversations are read from \.jsonl"):
        Corpus([tmp_path], chat=True)


def test_workers_can_be_sent_the_settings(chat_folder):
    settings = chat_settings(load_tokenizer(chat_folder), "uint16", "messages", LONG)
    records = [(json.dumps({"messages": chat}), "a") for chat in CHATS]
    here, there = (s.encoder()(records) for s in (settings, pickle.loads(pickle.dumps(settings))))
    assert np.array_equal(here.tokens, there.tokens)
    assert np.array_equal(here.loss_mask, there.loss_mask)
    assert here.counts == there.counts


def test_long_conversations_are_tokenized_in_pieces(chat_folder, monkeypatch):
    settings = chat_settings(load_tokenizer(chat_folder), "uint16", "messages", LONG)
    records = [(json.dumps({"messages": chat}), "a") for chat in CHATS]
    whole = settings.encoder()(records)
    monkeypatch.setattr(parts_of, "__defaults__", ("a text", 256, 64))
    pieces = settings.encoder()(records)
    assert pieces.lengths == whole.lengths
    assert np.array_equal(pieces.loss_mask, whole.loss_mask)


def test_the_parts_of_a_corpus_make_the_same_as_the_whole(made, tmp_path):
    _, *whole = made(CHATS)
    parts = [made(part)[1:] for part in (CHATS[:20], CHATS[20:])]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole


def test_the_command_says_what_it_made(tmp_path, chat_folder, capsys):
    path = write_chats(tmp_path / "a.jsonl", [*CHATS, [USER]])
    prefix = tmp_path / "out"
    argv = ["data", str(path), "--output", str(prefix), "--tokenizer", str(chat_folder)]
    assert cli.main([*argv, "--workers", "1", "--chat"]) == 2
    assert "--chat needs --seq-length" in capsys.readouterr().err
    assert cli.main([*argv, "--workers", "1", "--seq-length", "20"]) == 2
    assert "--seq-length needs --chat" in capsys.readouterr().err
    assert cli.main([*argv, "--workers", "1", "--chat", "--seq-length", "20"]) == 0
    said = capsys.readouterr().out
    sidecar = json.loads((tmp_path / "out.json").read_text())
    assert (sidecar["kind"], sidecar["seq_length"], sidecar["json_key"]) == ("chat", 20, "messages")
    assert sidecar["responses_by"] == "generation markers"
    assert f"targets: {sidecar['targets']:,} tokens of {sidecar['responses']} responses (" in said
    assert f"cut off at 20 tokens: {sidecar['truncated']} conversations, " in said
    assert "left out, no response: 1 conversations" in said
    assert f"--seq-length 20 --data-path {prefix}" in said
    assert {p.name for p in tmp_path.glob("out*")} == {f"out{s}" for s in output.CHAT}

    # Text in its place leaves no mask behind.
    (tmp_path / "a.txt").write_text("text")
    argv[1] = str(tmp_path / "a.txt")
    assert cli.main([*argv, "--workers", "1", "--overwrite"]) == 0
    assert {p.name for p in tmp_path.glob("out*")} == {f"out{s}" for s in output.TEXT}
