"""The tokenizer of a trained model, and the copy of it in each run."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megasink.data.hf_tokenizer import id_count, load_tokenizer, tokenizer_hash
from megasink.errors import UserError
from megasink.files.atomic import atomic_folder
from megasink.files.system_errors import missing_folder
from megasink.megatron.embedding_rows import counted_rows

OWN = "tokenizer"
"""Folder of the copy, next to config.json, also in imported models."""

# Files that transformers reads for a tokenizer; the folder may also hold weights.
_FILES = (
    "tokenizer*.json tokenizer*.model special_tokens_map.json added_tokens.json vocab*.json "
    "vocab*.txt merges.txt spiece.model sentencepiece*.model *.bpe.model *.tiktoken "
    "chat_template.json chat_template.jinja additional_chat_templates/*.jinja config.json"
).split()


def copy_tokenizer(folder: Path, run: Path) -> None:
    """Copy a tokenizer into a run that has none, and warn if the copy would differ."""
    own = run / OWN
    if own.exists():
        return
    try:
        with atomic_folder(own) as partial:
            for path in _files(folder):
                copy = partial / path.relative_to(folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
            if not _mean_the_same(partial, folder):
                raise UserError(f"the tokenizer could not be copied into the run: keep {folder}")
    except UserError as error:
        print(f"megasink: {error}", flush=True)


def same_tokenizer(config: Path, before: str | None, now: str | None) -> bool:
    """Return whether a run's tokenizer, its own copy first, and another one are the same."""
    own = config.parent / OWN
    reference = own if own.is_dir() else Path(before or "")
    if not before or not now or not Path(now).is_dir() or not reference.is_dir():
        return before == now
    return digests(reference) == digests(Path(now)) or _mean_the_same(reference, Path(now))


def tokenizer_problem(folder: Path) -> str | None:
    """Return why a folder has no tokenizer, by the names of its files; None if it may have one."""
    if not folder.is_dir():
        return missing_folder(folder)
    if all(path.name == "config.json" for path in _files(folder)):
        return f"{folder} has no tokenizer files, such as tokenizer.json"
    return None


def is_of_tokenizer(path: Path) -> bool:
    """Return whether transformers reads this file for a tokenizer."""
    return any(path.match(pattern) for pattern in _FILES)


def _files(folder: Path) -> Iterator[Path]:
    paths = {path for pattern in _FILES for path in folder.glob(pattern)}
    return (path for path in sorted(paths) if path.is_file())


def digests(folder: Path) -> dict[str, str]:
    """Return {name: sha256} of a tokenizer's files."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in _files(folder)}


def _mean_the_same(one: Path, other: Path) -> bool:
    """Return whether two tokenizers assign the same ids, regardless of file format."""
    try:
        return tokenizer_hash(load_tokenizer(one)) == tokenizer_hash(load_tokenizer(other))
    except UserError:
        return False


def tokenizer_of(saved: Mapping[str, Any], given: str | Path | None, config: Path) -> Any:
    """Load the transformers tokenizer that a run was trained with, or the given folder instead."""
    if given is None:
        if saved.get("tokenizer_type") != "HuggingFaceTokenizer":
            return None
        own = config.parent / OWN
        given = own if own.is_dir() else Path(saved["tokenizer_model"])
        if not given.is_dir():
            raise UserError(
                f"{config}: the tokenizer {given} was not found (relative paths are resolved "
                "from the current folder): pass its folder with --tokenizer"
            )
    tokenizer = load_tokenizer(given)
    if (tokens := id_count(tokenizer)) > (rows := counted_rows(saved)):
        raise UserError(
            f"the tokenizer {given} has {tokens} tokens, but the model has only {rows}: pass the "
            "tokenizer with which the run was trained"
        )
    return tokenizer
