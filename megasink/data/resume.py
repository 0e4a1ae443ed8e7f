"""Record the progress of `megasink data`, so that a killed command resumes."""

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megasink.data.corpus import Corpus
from megasink.data.dataset_files import (
    LENGTHS,
    PROGRESS,
    Validation,
    Written,
    partial_of,
    validation_of,
)
from megasink.data.input_files import Place
from megasink.errors import UserError
from megasink.files.atomic import atomic_text
from megasink.files.json_file import read_object


@dataclass(frozen=True)
class Progress:
    """The contents of a data set's partial files."""

    made_of: str  # SHA-256 of the inputs and settings; another command starts over
    # Vocabulary size and BOS of the tokenizer that the command trained; None if it was given one.
    trained: tuple[int, bool] | None
    place: Place  # position in the corpus
    counts: list[dict[str, int]]  # of the documents so far, by data set
    written: list[Written]  # the written part of each


def made_of(corpus: Corpus, settings: Any, validation: Validation | None) -> str:
    """Return the SHA-256 (hex) of a data set's settings and files (path, size and time)."""
    parts = [
        corpus.identity(),
        [corpus.json_key, corpus.max_document_bytes],
        corpus.is_split,
        corpus.partition,
        asdict(settings),
        None if validation is None else asdict(validation),
        version("tokenizers"),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def save(prefix: Path, progress: Progress) -> None:
    """Replace the progress record of the data set of `prefix`, whose files are on disk by then."""
    atomic_text(partial_of(prefix, PROGRESS), json.dumps(asdict(progress)))


def load(prefix: Path) -> Progress | None:
    """Return the progress of the data set of `prefix`; None if there is nothing to resume."""
    try:
        path = partial_of(prefix, PROGRESS)
        saved = read_object(path)
        from megasink.files.checked_fields import from_json  # imports pydantic, 0.1 s

        progress = from_json(Progress, saved, str(path))
        sets = (prefix, validation_of(prefix))
        for each, (documents, token_bytes) in zip(sets, progress.written, strict=False):
            for suffix, size in ((".bin", token_bytes), (LENGTHS, 4 * documents)):
                path = partial_of(each, suffix)
                if size and (path.is_symlink() or path.stat().st_size < size):
                    return None
    except (UserError, OSError):
        return None
    return progress
