"""Conversations of files, and what is learned of them."""

import gzip
import json
import shutil

import pyarrow
import pytest
from pyarrow import parquet

from megasink.cli import main
from megasink.errors import UserError
from megasink.finetune.chats import IGNORED, Chat, ChatTokenizer, read_chats
from tests.chats import ENDS, MARKED, UNMARKED, chat_tokenizer, write_chats
from tests.finetune.commands import command


def said(chats, chat):
    """What is learned of a conversation."""
    _, labels = chats.read(chat)
    return chats.tokenizer.decode([n for n in labels if n != IGNORED])


def stock(chats, messages, **options):
    """The tokens and labels of transformers, by the marks of the template."""
    found = chats.tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
    return found["input_ids"], [n if said else IGNORED for n, said in pairs]


def end_of(chats):
    return chats.tokenizer.convert_ids_to_tokens(chats.turn_end)


def test_what_the_assistant_says_is_learned_with_its_end(root):
    """And the tokens are those that transformers gives and marks."""
    chats = ChatTokenizer(root / "model")
    assert end_of(chats) == ENDS
    for chat in read_chats([root / "chats.jsonl"]):
        answers = [m["content"] + ENDS for m in chat.messages if m["role"] == "assistant"]
        assert said(chats, chat) == "".join(answers)
        assert chats.read(chat) == stock(chats, chat.messages)


def test_a_template_of_a_family_that_trl_knows_gets_its_marks(root, tmp_path):
    from trl.chat_template_utils import qwen3_chat_template, qwen3_training_chat_template

    chat_tokenizer(root / "tokenizer", tmp_path, qwen3_chat_template)
    chats = ChatTokenizer(tmp_path)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "list"}]
    expected = stock(chats, messages, chat_template=qwen3_training_chat_template)
    assert chats.read(Chat("here", messages)) == expected
    assert said(chats, Chat("here", messages)).count("list") == 1


def test_a_template_without_marks_teaches_the_same(root, tmp_path):
    """Its text is that of the one with marks, and so is what is learned of it."""
    marked = ChatTokenizer(root / "model")
    chat_tokenizer(root / "model", tmp_path, UNMARKED)
    chats = ChatTokenizer(tmp_path)
    assert end_of(chats) == ENDS
    tool_call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    calling = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [tool_call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "c"},
    ]
    for chat in [*read_chats([root / "chats.jsonl"]), Chat("here", calling, [{"name": "f"}])]:
        assert chats.read(chat) == marked.read(chat)


def test_a_template_without_marks_or_prompt_has_answers_behind_the_question(root, tmp_path):
    """As Mistral's; the answer begins with its content, so nothing else can be learned."""
    turn = "{% if m.role == 'user' %}[Q]{{ m.content }}[/Q]{% else %}{{ m.content }}<|im_end|>"
    chat_tokenizer(
        root / "model", tmp_path, f"{{% for m in messages %}}{turn}{{% endif %}}{{% endfor %}}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "list"}] * 2
    assert said(ChatTokenizer(tmp_path), Chat("here", messages)) == "list<|im_end|>" * 2


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_dropout_truncation_and_padding_of_the_tokenizer_stay_off(root, tmp_path, template):
    """A tokenizer.json may hold them; dropout of merges draws other tokens at every call."""
    plain, noisy = (chat_tokenizer(root / "model", tmp_path / n, template) for n in "ab")
    path = noisy / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["dropout"] = 0.5
    state["truncation"] = {"max_length": 5, "strategy": "LongestFirst", "stride": 0}
    state["truncation"]["direction"] = "Right"
    path.write_text(json.dumps(state))
    for chat in read_chats([root / "chats.jsonl"]):
        assert ChatTokenizer(noisy).read(chat) == ChatTokenizer(plain).read(chat)
        break


def test_byte_order_marks_are_no_text(root, tmp_path):
    """At the start of a file, of a line (files joined by cat) and of a message."""
    lines = (root / "chats.jsonl").read_text().splitlines()[:3]
    records = [json.loads(line) for line in lines]
    for message in records[1]["messages"]:
        message["content"] = "\ufeff" + message["content"]
    marked = ["\ufeff" + json.dumps(record, ensure_ascii=False) for record in records]
    (tmp_path / "marked.jsonl").write_text("\n".join(marked))
    found = [c.messages for c in read_chats([tmp_path / "marked.jsonl"])]
    assert found == [json.loads(line)["messages"] for line in lines]


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
    chats = ChatTokenizer(root / "model")
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
    ]
    ids, _ = chats.read(Chat("here", messages, [{"name": "f"}]))
    assert '"arguments": {"x": 1}' in chats.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"messages": [{"role": "robot", "content": "x"}]}', ":1: message 1 has role 'robot'"),
        ('{"conversations": [{"from": ["x"], "value": "x"}]}', ":1: message 1 has role ['x']"),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            ":1 has no message with the role assis",
        ),
        (
            '{"messages": [{"role": "user", "content": ["x"]}]}',
            "has content of type list, not text",
        ),
        ('{"messages": [{"role": "user", "content": 3}]}', "has content of type number, not text"),
        ('{"messages": [{"role": "user", "text": "x"}]}', "message 1 (user) has no content"),
        ('\n{"messages', ":2 is not valid JSON"),
        (
            '{"text": "x"}',
            ":1: use an object with 'messages', a list of objects with role and",
        ),
        ("", "no conversations"),
        ("\xff", ":1 is not valid JSON in UTF-8: 'utf-8' codec can't decode"),
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
            "the chat template marks no assistant tokens, and adding an answer changes the text ",
        ),
        (
            UNMARKED.partition("{% if add_generation_prompt %}")[0],
            "the chat template marks no assistant tokens, and add_generation_prompt adds nothing ",
        ),
        (None, "has no chat template: put a chat_template.jinja there"),
        (
            "{{ raise_exception('no') }}" + MARKED,
            "chats.jsonl:1: the chat template rejects the conversation: no",
        ),
        (
            "{{ messages.x.y }}" + MARKED,
            "chats.jsonl:1: the chat template rejects the conversation: ",
        ),
        (MARKED.replace("'assistant'", "'x'"), "the chat template marks no assistant tokens"),
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


@pytest.mark.parametrize(
    "change",
    [
        ("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
        ("<|im_end|>{% endgeneration %}", "{% endgeneration %}"),
    ],
)
def test_a_template_that_leaves_out_the_end_of_a_turn_is_seen(root, tmp_path, change):
    chat_tokenizer(root / "model", tmp_path, MARKED.replace(*change))
    assert ChatTokenizer(tmp_path).turn_end is None


def test_a_damaged_or_cut_file_is_refused(root, tmp_path):
    """A cut .zst too, which some readers take for its end."""
    import zstandard

    whole = (root / "chats.jsonl").read_bytes() * 50
    packed = zstandard.compress(whole)
    for name, data in (
        ("a.jsonl.zst", packed[: len(packed) * 2 // 3]),
        ("b.jsonl.gz", gzip.compress(whole)[:-9]),
        ("c.parquet", b"PAR1"),
        ("d.txt", whole),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=name):
            list(read_chats([tmp_path / name]))
