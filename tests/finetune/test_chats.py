"""Conversations of files, and what is learned of them."""

import gzip
import json
import shutil

import pyarrow
import pytest
from pyarrow import parquet

from megasink.cli import main
from megasink.transformers.chats import (
    IGNORED,
    Chat,
    learns_to_stop,
    load_chat_tokenizer,
    read_chats,
    tokens_of,
)
from tests.chats import ENDS, MARKED, UNMARKED, chat_tokenizer, write_chats
from tests.finetune.commands import command


def test_what_the_assistant_says_is_learned_with_its_end(root):
    tokenizer, template = load_chat_tokenizer(root / "model")
    assert template is None
    assert learns_to_stop(tokenizer, None)
    for chat in read_chats([root / "chats.jsonl"]):
        row = tokens_of(chat, tokenizer, None, 10_000)
        learned = [token for token in row["labels"] if token != IGNORED]
        said = [m["content"] + ENDS for m in chat.messages if m["role"] == "assistant"]
        assert tokenizer.decode(learned) == "".join(said)
        assert len(row["input_ids"]) == row["whole"]
        cut = tokens_of(chat, tokenizer, None, 9)
        assert cut == {k: v if k == "whole" else v[:9] for k, v in row.items()}


def test_a_template_of_a_family_that_trl_knows_gets_its_marks(root, tmp_path):
    from trl.chat_template_utils import qwen3_chat_template, qwen3_training_chat_template

    chat_tokenizer(root / "tokenizer", tmp_path, qwen3_chat_template)
    tokenizer, template = load_chat_tokenizer(tmp_path)
    assert template == qwen3_training_chat_template
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "list"}]
    row = tokens_of(Chat("here", messages, None), tokenizer, template, 1000)
    assert tokenizer.decode([t for t in row["labels"] if t != IGNORED]).count("list") == 1
    assert tokenizer.chat_template == qwen3_chat_template  # of the export


def test_a_template_without_marks_teaches_the_same(root, tmp_path):
    """Its text is that of the one with marks, and so is what is learned of it."""
    marked, _ = load_chat_tokenizer(root / "model")
    chat_tokenizer(root / "model", tmp_path, UNMARKED)
    tokenizer, template = load_chat_tokenizer(tmp_path)
    assert template is None
    assert learns_to_stop(tokenizer, None)
    tool_call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    calling = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [tool_call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "c"},
    ]
    chats = [*read_chats([root / "chats.jsonl"]), Chat("here", calling, [{"name": "f"}])]
    for chat in chats:
        assert tokens_of(chat, tokenizer, None, 1000) == tokens_of(chat, marked, None, 1000)


def test_a_template_without_marks_or_prompt_has_answers_behind_the_question(root, tmp_path):
    """As Mistral's; the answer begins with its content, so nothing else can be learned."""
    turn = "{% if m.role == 'user' %}[Q]{{ m.content }}[/Q]{% else %}{{ m.content }}<|im_end|>"
    chat_tokenizer(
        root / "model", tmp_path, f"{{% for m in messages %}}{turn}{{% endif %}}{{% endfor %}}"
    )
    tokenizer, _ = load_chat_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "list"}] * 2
    row = tokens_of(Chat("here", messages, None), tokenizer, None, 1000)
    learned = [token for token in row["labels"] if token != IGNORED]
    assert tokenizer.decode(learned) == "list<|im_end|>" * 2


def test_every_kind_of_file_holds_the_same_conversations(root, tmp_path):
    lines = (root / "chats.jsonl").read_text()
    records = [json.loads(line) for line in lines.splitlines()]
    with gzip.open(tmp_path / "chats.jsonl.gz", "wt") as file:
        file.write(lines)
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "chats.parquet")
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    shared = [
        [{"from": names[m["role"]], "value": m["content"]} for m in record["messages"]]
        for record in records
    ]
    write_chats(tmp_path / "sharegpt.jsonl", shared, "conversations")
    expected = [(r["messages"], None) for r in records]
    for path in tmp_path.iterdir():
        assert [(c.messages, c.tools) for c in read_chats([path])] == expected, path


def test_tools_reach_the_template_as_they_are(root):
    """Arguments of other names in other calls add nothing to a call, as a table would."""
    tokenizer, _ = load_chat_tokenizer(root / "model")
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
    ]
    row = tokens_of(Chat("here", messages, [{"name": "f"}]), tokenizer, None, 1000)
    assert '"arguments": {"x": 1}' in tokenizer.decode(row["input_ids"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"messages": [{"role": "robot", "content": "x"}]}', ":1: message 1 has role 'robot'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', ":1 has no message of the role assis"),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', "a content of type list, not text"),
        ('{"messages": [{"role": "user", "content": 3}]}', "a content of type number, not text"),
        ('{"messages": [{"role": "user", "text": "x"}]}', "message 1 (user) has no content"),
        ('\n{"messages', ":2 is not JSON"),
        ('{"text": "x"}', ":1: give an object with 'messages', a list of role and content"),
        ("", "no conversations"),
        ("\xff", "cannot be read: 'utf-8' codec can't decode"),
        ("PAR1", "cannot be read: Parquet file size is 4 bytes"),
    ],
)
def test_bad_conversations_are_told_with_their_place(root, capsys, text, problem):
    (root / "bad.jsonl").write_bytes(text.encode("latin-1"))
    assert main(command(root, out="refused", data="bad.jsonl")) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "bad.jsonl" in told
    assert problem in told
    assert not (root / "refused").exists()


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            UNMARKED.replace("{{ m.content }}", "{% if loop.last %}{{ m.content }}{% endif %}"),
            "the chat template marks nothing, and writes what comes before an answer "
            "differently with it and without it (message ",
        ),
        (
            UNMARKED.partition("{% if add_generation_prompt %}")[0],
            "the chat template marks nothing, and add_generation_prompt adds nothing to what it ",
        ),
        (None, "has no chat template: put a chat_template.jinja there"),
        ("{{ raise_exception('no') }}" + MARKED, "chats.jsonl:1: the chat template refuses it: no"),
        ("{{ messages.x.y }}" + MARKED, "chats.jsonl:1: the chat template refuses it: "),
        (MARKED.replace("'assistant'", "'x'"), "marks nothing of what the assistant says"),
    ],
)
def test_bad_templates_are_told_in_one_line(root, tmp_path, capsys, template, problem):
    shutil.copytree(root / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    if template is not None:
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
    shutil.copy(root / "chats.jsonl", tmp_path)
    assert main(command(tmp_path)) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("megasink: error: ")
    assert problem in told
    assert not (tmp_path / "out").exists()


def test_a_template_that_leaves_out_the_end_of_a_turn_is_seen(root):
    tokenizer, _ = load_chat_tokenizer(root / "model")
    marks = "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
    assert not learns_to_stop(tokenizer, MARKED.replace(*marks))
    tokenizer.chat_template = UNMARKED.replace("<|im_end|>{% else %}", "{% else %}")
    assert not learns_to_stop(tokenizer, None)
