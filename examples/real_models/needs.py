"""What a step needs of a model: a step that is for few models says so, and the others go on."""

from pathlib import Path

from megasink.errors import UserError
from megasink.files.json_file import read_object


class LeftOut(UserError):
    """A step is not for this model; the message has the reason."""


def need_llama(folder: Path) -> None:
    """Raise LeftOut unless a model has Llama's architecture, and heads for three ranks."""
    config = read_object(folder / "config.json")
    if (kind := config.get("model_type")) != "llama":
        raise LeftOut(f"it is for Llama's architecture, and {folder} is {kind}")
    heads = config.get("num_attention_heads", 0)
    groups = config.get("num_key_value_heads") or heads
    if heads % 3 or groups % 3:
        raise LeftOut(f"three ranks cannot share the {heads} heads and {groups} keys of {folder}")


def need_chats(folder: Path) -> None:
    """Raise LeftOut unless a tokenizer has a chat template."""
    beside, path = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    own = read_object(path).get("chat_template") if path.is_file() else None
    if not (own or beside.is_file()):
        raise LeftOut(f"it trains on conversations, and the tokenizer of {folder} has no template")
