"""What the assistant says in a conversation, by a chat template that does not mark it.

The template is asked twice for each answer: for the messages before it, with the prompt that has
the model answer, and for those with the answer. What the second has more is the answer, as the
model would have to write it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from megasink.errors import UserError

MARK = "put {% generation %} and {% endgeneration %} around the assistant's turns in it"


def unmarked_tokens(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and which of them the assistant says.

    A turn ends with its last special token, if white space alone follows that one; a token that
    begins in the prompt is not the assistant's.

    Raises:
        UserError: The template writes a conversation differently once an answer follows, or has no
            prompt for an answer that begins with more than its content.
    """
    text = _rendered(tokenizer, messages, tools)
    read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = read["input_ids"], read["offset_mapping"]
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(n for n, token in added.items() if token.special)}
    said = [False] * len(ids)
    for start, end in _answers(tokenizer, messages, tools, text):
        inside = [n for n, (first, _) in enumerate(offsets) if start <= first < end]
        ends = [n for n in inside if ids[n] in special]
        if ends and not text[offsets[ends[-1]][1] : end].strip():
            inside = [n for n in inside if n <= ends[-1]]
        for n in inside:
            said[n] = True
    return ids, said


def _answers(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any, text: str
) -> Iterator[tuple[int, int]]:
    """Yield the characters at which each answer begins and ends."""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _rendered(tokenizer, messages[:number], tools, add_generation_prompt=True)
        after = _rendered(tokenizer, messages[: number + 1], tools)
        if not (text.startswith(after) and after.startswith(before)):
            raise UserError(
                "the chat template marks nothing, and writes what comes before an answer "
                f"differently with it and without it (message {number + 1}): {MARK}"
            )
        bare = _rendered(tokenizer, messages[:number], tools)
        answer, content = after[len(before) :], message["content"] or ""
        if bare == before and not answer.lstrip().startswith(content.strip()):
            raise UserError(
                "the chat template marks nothing, and add_generation_prompt adds nothing to what "
                f"it writes before an answer (message {number + 1}): {MARK}"
            )
        yield len(before), len(after)


def _rendered(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any, **options: Any
) -> str:
    text: str = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=False, **options
    )
    return text
