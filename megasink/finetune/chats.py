"""Conversations from files as tokens, with the assistant's tokens marked for the loss.

Files hold TRL's format, or ShareGPT's: JSON Lines, also compressed, or parquet.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from megasink.data.hf_tokenizer import load_tokenizer
from megasink.data.input_files import BYTE_ORDER_MARK, expand, open_lines, readable
from megasink.data.text_tokenizer import text_tokenizer
from megasink.errors import UserError, reason_of
from megasink.files.json_file import kind_of
from megasink.finetune.options import NO_TEMPLATE

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"from": "role", "value": "content", "human": "user", "gpt": "assistant"}
IGNORED = -100
"""Label of a token that is not trained on."""
_FORMAT = "use an object with 'messages', a list of objects with role and content"
_MARK = "put {% generation %} and {% endgeneration %} around the template's assistant turns"


class Chat(NamedTuple):
    """A conversation: its file and number, its messages, and the JSON schemas of its tools."""

    place: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def read_chats(paths: Sequence[Path]) -> Iterator[Chat]:
    """Yield the conversations of files; an error names the place of a wrong record."""
    for path in paths:
        for place, record in _records(path):
            yield _chat(record, place)


class ChatTokenizer:
    """The chat template and the tokenizer of a model; `turn_end` is the id that ends an answer.

    A template without marks around the assistant's turns is replaced by TRL's, if TRL knows it. For
    others, an answer is the text that the template writes after the prompt for it.
    """

    def __init__(self, folder: Path):
        from trl.chat_template_utils import get_training_chat_template, has_generation_markers

        self.tokenizer = load_tokenizer(folder)
        self._backend = text_tokenizer(self.tokenizer, parse_special_tokens=True).backend
        added = self._backend.get_added_tokens_decoder().items()
        self._special = {number for number, token in added if token.special}
        self._template: str | None = None
        if not self.tokenizer.chat_template:
            raise UserError(NO_TEMPLATE.format(folder))
        self._marked = has_generation_markers(self.tokenizer.chat_template)
        if not self._marked:
            # It renders conversations of its own, and templates raise anything.
            with contextlib.suppress(Exception):
                self._template = get_training_chat_template(self.tokenizer)
            self._marked = self._template is not None
        self.turn_end = self._turn_end()

    def read(self, chat: Chat) -> tuple[list[int], list[int]]:
        """Return the tokens of a conversation, and labels for the assistant's tokens."""
        try:
            text, spans = self._rendered(chat)
            encoding = self._backend.encode(text, add_special_tokens=False)
            if not self._marked:
                spans = list(self._answers(chat, text, encoding))
        except Exception as error:  # templates raise anything
            known = isinstance(error, UserError)
            what = "" if known else "the chat template rejects the conversation: "
            raise UserError(f"{chat.place}: {what}{reason_of(error)}") from error
        counts = np.zeros(len(text) + 1, np.int64)  # number of assistant characters before each one
        for start, end in spans:
            counts[start + 1 : end + 1] = 1
        counts = counts.cumsum()
        first, last = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
        if not self._marked:  # a token that begins in the prompt is not the assistant's
            last = np.minimum(first + 1, last)
        said = counts[last] > counts[first]
        if not said.any():
            raise UserError(f"{chat.place}: the chat template marks no assistant tokens")
        return encoding.ids, np.where(said, encoding.ids, IGNORED).tolist()

    def _rendered(
        self, chat: Chat, most: int | None = None, *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of the first messages, and the characters marked by the template."""
        render: Any = render_jinja_template  # its annotations name one of its results
        (text,), spans = render(
            [chat.messages[:most]],
            chat.tools,
            chat_template=self.tokenizer.get_chat_template(self._template, chat.tools),
            return_assistant_tokens_mask=self._marked,
            add_generation_prompt=prompt,
            **self.tokenizer.special_tokens_map,
        )
        return text, spans[0] if self._marked else []

    def _answers(self, chat: Chat, text: str, encoding: Any) -> Iterator[tuple[int, int]]:
        """Yield the characters at which each answer begins and ends, of an unmarked template.

        An answer ends with its last special token, if only white space follows it.
        """
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        ends = [end for token, (_, end) in pairs if token in self._special]
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._rendered(chat, number, prompt=True)
            after, _ = self._rendered(chat, number + 1)
            if not (text.startswith(after) and after.startswith(before)):
                raise UserError(
                    "the chat template marks no assistant tokens, and adding an answer changes the "
                    f"text before it (message {number + 1}): {_MARK}"
                )
            bare, _ = self._rendered(chat, number)
            content = message.get("content", "").strip()
            if bare == before and not after[len(before) :].lstrip().startswith(content):
                raise UserError(
                    "the chat template marks no assistant tokens, and add_generation_prompt adds "
                    f"nothing before an answer (message {number + 1}): {_MARK}"
                )
            last = max((n for n in ends if len(before) < n <= len(after)), default=len(after))
            yield len(before), len(after) if text[last : len(after)].strip() else last

    def _turn_end(self) -> int | None:
        asked, answered = ({"role": role, "content": "a"} for role in ("user", "assistant"))
        eos: int = self.tokenizer.eos_token_id
        # Some templates end the last answer only when another message follows.
        for messages in ([asked, answered], [asked, answered, asked]):
            try:
                _, labels = self.read(Chat("", messages))
            except UserError:
                return eos  # reading the first conversation reports the problem
            ids = [label for label in labels if label != IGNORED]
            shown = [n for n in ids if str(self.tokenizer.decode([n])).strip()]
            if shown and shown[-1] in self._special:
                return shown[-1]
        return None


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of a file, each with its place."""
    (file,) = expand(str(path), "messages", 0)
    if file.kind == "text":
        raise UserError(f"{path} is neither JSON Lines (.jsonl, .jsonl.gz, .jsonl.zst) nor parquet")
    if file.kind == "parquet":
        yield from _rows(path)
        return
    with readable(path), open_lines(path, file.compression) as (lines, _):
        for number, line in enumerate(lines, 1):
            place = f"{path}:{number}"
            try:
                text = line.decode().removeprefix(BYTE_ORDER_MARK)
                if text.strip():
                    yield place, json.loads(text)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place} is not valid JSON in UTF-8: {error}") from None


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        batches = parquet.ParquetFile(path).iter_batches(1000)
        records = (record for batch in batches for record in batch.to_pylist())
        for number, record in enumerate(records, 1):
            # A nested column gives every row the fields of all rows.
            messages = record.get("messages") or ()
            calls = (isinstance(one, dict) and one.get("tool_calls") for one in messages)
            if record.get("tools") or any(calls):
                raise UserError(
                    f"{path}:{number}: parquet cannot store tools exactly: use JSON Lines"
                )
            yield f"{path}:{number}", record
    except (OSError, ArrowException) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _chat(record: Any, place: str) -> Chat:
    given = isinstance(record, dict) and (record.get("messages") or record.get("conversations"))
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise UserError(f"{place}: {_FORMAT}")
    messages = [_message(message, f"{place}: message {n}") for n, message in enumerate(given, 1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(
            f"{place} has no message with the role assistant, so there is nothing to learn"
        )
    tools = record.get("tools") or None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise UserError(f"{place}: 'tools' is not a list of JSON schemas (objects)")
    return Chat(place, messages, tools)


def _message(given: dict[str, Any], place: str) -> dict[str, Any]:
    message = {k: v for k, v in given.items() if v is not None}
    if "role" not in message and "from" in message:  # ShareGPT's
        message = {_SHAREGPT.get(key, key): value for key, value in message.items()}
        message["role"] = _SHAREGPT.get(str(message["role"]), message["role"])
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise UserError(f"{place} has role {role!r}: use {', '.join(ROLES)}")
    if isinstance(content, str):
        message["content"] = content.removeprefix(BYTE_ORDER_MARK)
    elif content is not None or not message.get("tool_calls"):
        has = "no content" if content is None else f"content of type {kind_of(content)}, not text"
        raise UserError(f"{place} ({role}) has {has}")
    return message
