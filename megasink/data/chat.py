"""Encode conversations, and mark the tokens of their responses.

Shapes: N tokens.
"""

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.data.conversation import (
    Conversation,
    Rendered,
    Renderer,
    conversation_of,
    has_markers,
)
from megasink.data.encode import Encoded
from megasink.data.text_tokenizer import TextTokenizer, parts_of, text_json
from megasink.errors import UserError

COUNTS = (
    "empty",
    "no_response",
    "beyond_context",
    "truncated",
    "responses",
    "cut_responses",
    "unclosed_responses",
    "spelled",
    "targets",
)
"""What `ChatEncoder` counts, in conversations, responses and (`targets`) tokens:

empty: conversations without a message.
no_response: left out, as none of their tokens is a response's.
beyond_context: left out, as no token of their responses is in the context.
truncated: kept, and longer than the context.
responses: in the conversations that are kept, as far as they begin in the context.
cut_responses: those of them that the context cuts.
unclosed_responses: those that it does not cut, without a special token.
spelled: kept, with a special token of the tokenizer spelled out in a message.
targets: tokens of responses.
"""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings for conversations.

    Attributes:
        tokenizer_json: the tokenizer.
        template: its chat template, for conversations without tools.
        tool_template: and with tools.
        special_tokens: names and texts of special tokens, for templates.
        dtype: of token ids.
        key: of a record's messages.
        most_tokens: of a conversation; the rest is cut off.
    """

    tokenizer_json: str
    template: str
    tool_template: str
    special_tokens: dict[str, Any]
    dtype: str
    key: str
    most_tokens: int

    def encoder(self) -> "ChatEncoder":
        """Return the encoder of conversations."""
        return ChatEncoder(self)


def chat_settings(tokenizer: Any, dtype: str, key: str, seq_length: int) -> ChatSettings:
    """Return the settings for a tokenizer and a context of `seq_length` tokens.

    Raises:
        UserError: the tokenizer has no chat template.
    """
    try:
        template = tokenizer.get_chat_template()
        tool_template = tokenizer.get_chat_template(tools=[{}])
    except ValueError as error:
        raise UserError(
            f"the tokenizer in {tokenizer.name_or_path} has no chat template: use the tokenizer of "
            "a chat model, or put a chat_template.jinja beside its files"
        ) from error
    return ChatSettings(
        # Without its post-processor: some take the spaces of a word off the characters that its
        # token holds.
        tokenizer_json=text_json(tokenizer),
        template=template,
        tool_template=tool_template,
        special_tokens=dict(tokenizer.special_tokens_map),
        dtype=dtype,
        key=key,
        # The last token of a conversation is a target alone, as in a sample of Megatron's.
        most_tokens=seq_length + 1,
    )


class ChatEncoder:
    """Turns a list of (record, source) into an `Encoded`.

    A conversation is encoded as transformers' `apply_chat_template` does. Its last token is a
    target and never an input, so that a context of S tokens holds S + 1. What is longer is cut off
    at the end: a target depends on the tokens before it alone, so that those that remain are
    learned from the same context as in the whole conversation. Conversations without a target are
    left out.
    """

    def __init__(self, settings: ChatSettings):
        self.settings = settings
        self.tokenizer = TextTokenizer(settings.tokenizer_json, parse_special_tokens=True)
        added = self.tokenizer.backend.get_added_tokens_decoder()
        special = {i: token.content for i, token in added.items() if token.special}
        self._special_ids = np.array(sorted(special), dtype=np.int64)
        longest_first = sorted(special.values(), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        renderers = {t: Renderer(t, settings.special_tokens) for t in self._templates}
        self._renderers = [renderers[t] for t in self._templates]

    @property
    def _templates(self) -> tuple[str, str]:
        return self.settings.template, self.settings.tool_template

    def __call__(self, records: list[tuple[str, str]]) -> Encoded:
        tokens: list[NDArray[np.integer]] = [np.zeros(0, self.settings.dtype)]
        masks: list[NDArray[np.uint8]] = [np.zeros(0, np.uint8)]
        counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        text_bytes = 0
        for record, source in records:
            conversation = conversation_of(record.encode(), source, self.settings.key)
            if conversation is None:
                counts["empty"] += 1
                continue
            rendered = self._renderers[conversation.tools is not None](conversation)
            ids, mask, characters = self._encode(rendered, counts)
            if not mask.any():
                continue
            counts["spelled"] += self._spells(conversation)
            counts["targets"] += int(mask.sum())
            text_bytes += len(rendered.text[:characters].encode())
            tokens.append(ids.astype(self.settings.dtype))
            masks.append(mask)
        lengths = list(map(len, tokens[1:]))
        return Encoded(np.concatenate(tokens), lengths, text_bytes, np.concatenate(masks), counts)

    def _encode(
        self, rendered: Rendered, counts: Counter[str]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], int]:
        """Return ids and loss mask, cut to the context, and the characters that they hold."""
        tokens = _Tokens(self.tokenizer, rendered.text)
        ids = np.array(tokens.ids, dtype=np.int64)
        most = self.settings.most_tokens
        special = np.isin(ids, self._special_ids)
        mask = np.zeros(len(ids), np.uint8)
        found: Counter[str] = Counter()
        for begin, end in rendered.responses:
            # A token is the response's if it holds a character of it.
            first = max(tokens.holding(begin), 1)
            last = max(tokens.holding(end), tokens.holding(end - 1) + 1) if end > begin else first
            closing = np.flatnonzero(special[first:last])
            if len(closing) and not rendered.marked:
                # The template's text between turns, such as a line feed, is not the model's.
                last = first + int(closing[-1]) + 1
            mask[first:last] = 1
            if first < min(last, most):
                found["responses"] += 1
                found["cut_responses"] += last > most
                found["unclosed_responses"] += last <= most and not len(closing)
        if not mask[:most].any():
            counts["beyond_context" if mask.any() else "no_response"] += 1
        else:
            counts.update(found)
            counts["truncated"] += len(ids) > most
        return ids[:most], mask[:most], tokens.end(min(len(ids), most))

    def _spells(self, conversation: Conversation) -> bool:
        return any(
            isinstance(value, str) and self._spelled.search(value)
            for message in conversation.messages
            for value in message.values()
        )


class _Tokens:
    """The tokens of a text, and the characters that they hold.

    Attributes:
        ids: of the tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, text: str):
        self.ids: list[int] = []
        self._length = len(text)
        # Of each part: its first character, its first token, what was made of it, and what to
        # subtract from characters and tokens there for those of the text.
        self._parts: list[tuple[int, int, Any, int, int]] = []
        characters = 0
        for part in parts_of((text,)):
            encoding, first, stop = tokenizer.part_encoding(part)
            shifts = len(part.before) - characters, first - len(self.ids)
            self._parts.append((characters, len(self.ids), encoding, *shifts))
            self.ids += encoding.ids[first:stop]
            characters += len(part.text)

    def holding(self, character: int) -> int:
        """Return the first token that holds a character or, if none does, the next that one does.

        The number of tokens if there is none.
        """
        part = bisect_right(self._parts, character, key=itemgetter(0)) - 1
        while character < self._length:
            if part + 1 < len(self._parts) and character >= self._parts[part + 1][0]:
                part += 1
            _, _, encoding, characters, tokens = self._parts[part]
            if (found := encoding.char_to_token(character + characters)) is not None:
                return int(found) - tokens
            character += 1
        return len(self.ids)

    def end(self, count: int) -> int:
        """Return how many characters the first `count` tokens hold."""
        part = bisect_left(self._parts, count, key=itemgetter(1)) - 1
        if part < 0:
            return 0
        _, _, encoding, characters, tokens = self._parts[part]
        return int(encoding.token_to_chars(count - 1 + tokens)[1]) - characters


def template_facts(settings: ChatSettings) -> dict[str, Any]:
    """Return what a sidecar says about the template: its SHA-256, and how responses are found."""
    return {
        "chat_template_sha256": hashlib.sha256(settings.template.encode()).hexdigest(),
        "responses_by": "generation markers" if has_markers(settings.template) else "prefixes",
    }
