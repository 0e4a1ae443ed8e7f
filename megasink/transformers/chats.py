"""Conversations of files, and their tokens with those that the assistant says marked for the loss.

Files hold TRL's format, or ShareGPT's: JSON Lines, also compressed, or parquet.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megasink.errors import UserError
from megasink.json_file import kind_of
from megasink.transformers.turns import unmarked_tokens

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant"}
IGNORED = -100
"""Label of a token that is not learned."""
_FORMAT = "give an object with 'messages', a list of role and content"


class Chat(NamedTuple):
    """A conversation.

    Attributes:
        place: Its file and number, for messages.
        messages: Of role and content, with what else the template reads.
        tools: JSON schemas.
    """

    place: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def read_chats(paths: Sequence[Path]) -> Iterator[Chat]:
    """Yield the conversations of files.

    Raises:
        UserError: A file that cannot be read, or a record that is no conversation with an answer;
            with its place.
    """
    for path in paths:
        with path.open("rb") as file:
            is_parquet = file.read(4) == b"PAR1"
        for number, record in _of_parquet(path) if is_parquet else _of_lines(path):
            yield _chat(record, f"{path}:{number}", is_parquet)


def load_chat_tokenizer(folder: Path) -> tuple[Any, str | None]:
    """Return the tokenizer of a folder, and the template to train with if it is not its own.

    A template without marks around what the assistant says is replaced by TRL's, of those that TRL
    knows.

    Raises:
        UserError: There is no tokenizer, or no template.
    """
    from transformers import AutoTokenizer
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"the tokenizer in {folder} cannot be read: {reason}") from error
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer in {folder} has no chat template: put a chat_template.jinja there"
        )
    if has_generation_markers(tokenizer.chat_template):
        return tokenizer, None
    try:
        return tokenizer, get_training_chat_template(tokenizer)
    except Exception:  # it renders conversations of its own, and templates raise anything
        return tokenizer, None  # none that TRL knows: `unmarked_tokens` reads it


def learns_to_stop(tokenizer: Any, template: str | None) -> bool:
    """Whether the token that ends a turn is among what is learned."""
    from trl.chat_template_utils import (
        has_generation_markers,
        is_chat_template_stop_token_trained,
    )

    if has_generation_markers(template or tokenizer.chat_template):
        return bool(is_chat_template_stop_token_trained(tokenizer, chat_template=template))
    probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        ids, said = unmarked_tokens(tokenizer, probe, None)
    except Exception:  # told of the first conversation that is read, with its place
        return True
    learned = [token for token, is_said in zip(ids, said, strict=True) if is_said]
    return str(tokenizer.decode(learned)).strip() != "b"


def tokens_of(chat: Chat, tokenizer: Any, template: str | None, most: int) -> dict[str, Any]:
    """Return the first tokens of a conversation.

    What is learned from a token depends on the tokens before it alone, so a conversation that is
    cut off teaches the same as far as it goes.

    Args:
        template: None for the tokenizer's.
        most: Number of tokens.

    Returns:
        `input_ids`, `labels` (`IGNORED` where nothing is learned) and `whole`, the number of
        tokens before the cut.

    Raises:
        UserError: The template refuses the conversation, or marks nothing in it.
    """
    from trl.chat_template_utils import has_generation_markers

    try:
        if has_generation_markers(template or tokenizer.chat_template):
            found = tokenizer.apply_chat_template(
                chat.messages,
                tools=chat.tools,
                chat_template=template,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            ids, mask = found["input_ids"], found["assistant_masks"]
        else:
            ids, mask = unmarked_tokens(tokenizer, chat.messages, chat.tools)
    except UserError as error:
        raise UserError(f"{chat.place}: {error}") from None
    except Exception as error:  # templates raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{chat.place}: the chat template refuses it: {reason}") from error
    if not any(mask):
        raise UserError(f"{chat.place}: the chat template marks nothing of what the assistant says")
    labels = [token if marked else IGNORED for token, marked in zip(ids, mask, strict=True)]
    return {"input_ids": ids[:most], "labels": labels[:most], "whole": len(ids)}


def _of_lines(path: Path) -> Iterator[tuple[int, Any]]:
    import fsspec

    try:
        with fsspec.open(str(path), "rt", encoding="utf-8", compression="infer") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _json(line, f"{path}:{number}")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _json(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from None


def _of_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(1000):
            for record in batch.to_pylist():
                yield (number := number + 1), record
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _chat(record: Any, place: str, is_parquet: bool) -> Chat:
    if not isinstance(record, dict):
        raise UserError(f"{place}: {_FORMAT}")
    given = record.get("messages") or record.get("conversations")
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise UserError(f"{place}: {_FORMAT}")
    messages = [_message(message, f"{place}: message {n}") for n, message in enumerate(given, 1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{place} has no message of the role assistant: there is nothing to learn")
    tools = record.get("tools") or None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise UserError(f"{place}: 'tools' is not a list of JSON schemas (objects)")
    if is_parquet:
        # A nested column gives every row the fields of all rows.
        if tools or any(message.get("tool_calls") for message in messages):
            raise UserError(f"{place}: parquet cannot hold tools exactly: give JSON Lines")
        messages = [{k: v for k, v in one.items() if v is not None} for one in messages]
    return Chat(place, messages, tools)


def _message(given: dict[str, Any], place: str) -> dict[str, Any]:
    message = dict(given)
    if "role" not in message and "from" in message:  # ShareGPT's
        message["role"] = _SHAREGPT.get(role := message.pop("from"), role)
        message["content"] = message.pop("value", None)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise UserError(f"{place} has role {role!r}: use {', '.join(ROLES)}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        has = "no content" if content is None else f"a content of type {kind_of(content)}, not text"
        raise UserError(f"{place} ({role}) has {has}")
    return message
