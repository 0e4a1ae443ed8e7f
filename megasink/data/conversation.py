"""One conversation: read from its record, rendered, and the responses found in it.

Workers import this file. Of transformers they import its template renderer alone.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megasink.data.records import record_of
from megasink.errors import UserError

_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT (`from`, `value`) that have other names in templates."""
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""Opens what transformers' `return_assistant_tokens_mask` counts."""
_ANSWERS = "assistant"


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a record as a template reads them, and the schemas of its tools, or None."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    source: str


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's text, and the characters [start, end) of each response in it.

    Attributes:
        text: what the template made of the messages.
        responses: Spans in the order of the text.
        marked: whether the template marks them itself; otherwise they include whatever the template
            puts after the end of a turn.
    """

    text: str
    responses: list[tuple[int, int]]
    marked: bool


def conversation_of(line: bytes, source: str, key: str) -> Conversation | None:
    """Return the conversation of a record; None if it holds null, or no message.

    Args:
        line: a JSON object with a list of messages, of `role` and `content` (or ShareGPT's `from`
            and `value`), and maybe `tools`, a list of schemas. Other keys of a message, such as
            `tool_calls`, are left to the template.
        source: path and line number, for errors.
        key: key that holds the messages.

    Raises:
        UserError: errors of `record_of`, messages that are not of this form, or no Unicode text.
    """
    record = record_of(line, source, key)
    if record is None or record[key] is None or record[key] == []:
        return None
    found, tools = record[key], record.get("tools")
    if not isinstance(found, list):
        raise UserError(f"{source}: {key!r} holds a {type(found).__name__}, not a list of messages")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise UserError(f"{source}: 'tools' is not a list of JSON schemas (objects)")
    messages = [_message(m, f"{source}: message {i}") for i, m in enumerate(found, 1)]
    try:
        json.dumps([messages, tools], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{source} holds half of a character (a lone surrogate)") from error
    return Conversation(messages, tools or None, source)


def _message(found: Any, place: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise UserError(f"{place} is a {type(found).__name__}, not an object with role and content")
    # A template tells a missing key from a null, which stands for the same in records.
    message = {name: value for name, value in found.items() if value is not None}
    if "role" not in message and {"from", "value"} <= message.keys():
        role = message.pop("from")
        message = {"role": _ROLES.get(role, role) if isinstance(role, str) else role} | message
        message["content"] = message.pop("value")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise UserError(f"{place} has no role: give each message a 'role' and a 'content'")
    if isinstance(content, list):
        raise UserError(f"{place} has content in parts: only text, as one string, can be trained")
    if content is None and "tool_calls" not in message:
        raise UserError(f"{place} ({role}) has no content")
    if content is not None and not isinstance(content, str):
        raise UserError(f"{place}: its content is a {type(content).__name__}, not a string")
    return message


def has_markers(template: str) -> bool:
    """Return whether a template marks its responses with `{% generation %}`."""
    return _MARKER.search(template) is not None


class Renderer:
    """Renders conversations with a template, as transformers' `apply_chat_template` does.

    A response is what the template puts between `{% generation %}` and `{% endgeneration %}`. If it
    has no such markers, it is what a message of the role `assistant` adds to the text of the
    messages before it with the prompt to generate. That is exact if a conversation's text begins
    with the text of its first messages, which is verified for every response.

    Args:
        template: Jinja source.
        special_tokens: names and texts of the tokenizer's special tokens, which templates use.
    """

    def __init__(self, template: str, special_tokens: dict[str, Any]):
        self._template, self._special_tokens = template, special_tokens
        self._marked = has_markers(template)
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render: Callable[..., Any] = render_jinja_template

    def __call__(self, conversation: Conversation) -> Rendered:
        """Return the text of a conversation, and its responses.

        Raises:
            UserError: the template fails on it, or does not tell where a response begins or ends.
        """
        if self._marked:
            text, spans = self._text(conversation, conversation.messages, marked=True)
            return Rendered(text, spans, marked=True)
        text, _ = self._text(conversation, conversation.messages)
        spans = [
            self._response(conversation, text, at)
            for at, message in enumerate(conversation.messages)
            if message["role"] == _ANSWERS
        ]
        return Rendered(text, spans, marked=False)

    def _response(self, conversation: Conversation, text: str, at: int) -> tuple[int, int]:
        messages = conversation.messages
        end, problem = text, "begins the conversation"
        if at + 1 < len(messages):
            end, _ = self._text(conversation, messages[: at + 1])
        if at:
            start, _ = self._text(conversation, messages[:at], prompt=True)
            if text.startswith(end) and end.startswith(start):
                return len(start), len(end)
            problem = "is rendered differently with the messages around it"
        raise UserError(
            f"{conversation.source}: message {at + 1} {problem}, and the chat template has no "
            "{% generation %} markers: put {% generation %} and {% endgeneration %} around what "
            "the model says, end-of-turn token included"
        )

    def _text(
        self,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        *,
        marked: bool = False,
        prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            texts, spans = self._render(
                [messages],
                tools=conversation.tools,
                chat_template=self._template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template may raise anything
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UserError(
                f"{conversation.source}: the tokenizer's chat template fails on it: {reason}"
            ) from error
        return texts[0], spans[0] if marked else []
