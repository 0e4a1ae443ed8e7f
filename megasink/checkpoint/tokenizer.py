"""The tokenizer of a trained model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasink.errors import UserError


def tokenizer_of(saved: Mapping[str, Any], given: str | Path | None, config: Path) -> Any:
    """The tokenizer of transformers that a run was trained with.

    Args:
        saved: the arguments of the run.
        given: a folder in place of the one that they name.
        config: the file that they come from, for messages.

    Returns:
        None where the run had none of transformers and none is given.

    Raises:
        UserError: its folder is gone, or it has more tokens than the model.
    """
    from megasink.data.tokenizer import load_tokenizer

    if given is None:
        if saved.get("tokenizer_type") != "HuggingFaceTokenizer":
            return None
        given = Path(saved["tokenizer_model"])
        if not given.is_dir():
            raise UserError(
                f"{config}: its tokenizer {given} is gone (a relative path counts from here); "
                "say where it is with --tokenizer"
            )
    tokenizer = load_tokenizer(given)
    if len(tokenizer) > saved["padded_vocab_size"]:
        raise UserError(
            f"the tokenizer {given} has {len(tokenizer)} tokens but the model only "
            f"{saved['padded_vocab_size']}: it is not the one that the run was trained with"
        )
    return tokenizer
