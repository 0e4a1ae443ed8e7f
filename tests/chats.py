"""Conversations, and tiny tokenizers with a chat template."""

import json
import random
from pathlib import Path
from typing import Any

# `{{ '\n' }}`: a template engine that trims blocks drops the line feed behind a tag.
_TURN = "<|im_start|>{{ m.role }}{{ '\\n' }}"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
_TOOLS = "{% if tools %}<|im_start|>tools{{ '\\n' }}{{ tools | tojson }}<|im_end|>{% endif %}"
_CALLS = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
MARKED = (
    f"{_TOOLS}{{% for m in messages %}}{_TURN}"
    f"{{% if m.role == 'assistant' %}}{{% generation %}}{{{{ m.content }}}}{_CALLS}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}"
    f"{{% endfor %}}{_PROMPT}"
)
"""ChatML, whose responses include the token that ends a turn and not the line feed behind it."""
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""The same text."""
ENDS = "<|im_end|>"
_WORDS = "def return class import self value none true index list the of naïve 🙂 x1 2048".split()


def chat_tokenizer(source: Path, folder: Path, template: str = MARKED) -> Path:
    """A copy of a tokenizer with the two tokens of ChatML and a template; return its folder."""
    from megasink.data.hf_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", ENDS]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def conversations(
    count: int, *, exchanges: int = 3, words: int = 12, seed: int = 0
) -> list[list[dict[str, Any]]]:
    """Conversations of up to so many exchanges, and words each turn."""
    draw = random.Random(seed)

    def text() -> str:
        spoken = " ".join(draw.choices(_WORDS, k=draw.randint(1, words)))
        return draw.choice(["", " ", "\n"]) + spoken + draw.choice(["", ".", "\n\n"])

    def said() -> list[dict[str, Any]]:
        start = [{"role": "system", "content": text()}] if draw.random() < 0.3 else []
        turns = (
            {"role": role, "content": text()}
            for _ in range(draw.randint(1, exchanges))
            for role in ("user", "assistant")
        )
        return [*start, *turns]

    return [said() for _ in range(count)]


def write_chats(path: Path, chats: list[Any], key: str = "messages") -> Path:
    """A file of JSON Lines."""
    path.write_text("".join(json.dumps({key: chat}) + "\n" for chat in chats))
    return path
