"""Read a tokenizer from its files alone, because importing transformers takes seconds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasink.files.json_file import read_object

# transformers reads tokenizer.json as it stands for these, and rebuilds it for other classes.
_AS_IT_STANDS = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Files from which transformers takes tokens that tokenizer.json may not have.
_MORE_TOKENS = ("added_tokens.json", "special_tokens_map.json")


@dataclass(frozen=True, eq=False)
class FileTokenizer:
    """The meaning of a tokenizer's ids, with the fields that `tokenizer_hash` reads."""

    vocabulary: dict[str, int]  # token -> id, with added tokens
    eos_token_id: int  # of the end-of-document token
    is_certain: bool  # whether transformers has the same vocabulary, and loads the folder

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary."""
        return self.vocabulary

    def __len__(self) -> int:
        return len(self.vocabulary)


def read_files(folder: str | Path) -> FileTokenizer | None:
    """Return the tokenizer of a folder's JSON files; None if only transformers can read it."""
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    try:
        config = read_object(folder / "tokenizer_config.json")
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the class that tokenizers raises, and UserError
        return None
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    added = set(backend.get_added_tokens_decoder())
    eos = vocabulary.get(_text(config.get("eos_token")))
    if eos is None or len(vocabulary) <= len(added):
        return None
    certain = (
        config.get("tokenizer_class") in _AS_IT_STANDS
        and not any((folder / name).exists() for name in _MORE_TOKENS)
        and all(token in vocabulary for token in _named(config))
    )
    return FileTokenizer(vocabulary, eos, certain)


def _named(config: dict[str, Any]) -> list[str]:
    """Return the tokens that a tokenizer_config.json names."""
    added = config.get("added_tokens_decoder")
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    values = [
        *(value for name, value in config.items() if name.endswith("_token")),
        *(added.values() if isinstance(added, dict) else []),
        *(more.values() if isinstance(more, dict) else more),
    ]
    return [text for text in map(_text, values) if text]


def _text(token: Any) -> str:
    """Return the text of a token, which may be an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""
