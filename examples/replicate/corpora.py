"""Real text for the replications: 24,282 documents, 207 MB of Debian's documentation.

    python -m examples.replicate.corpora data/text

downloads the packages of text_sources.toml into data/text/downloads with `apt-get download`, takes
the text of their pages, drops what repeats, and writes data/text/train.jsonl, held-out.jsonl and
sources.json (what each package gave). Each package that is done is kept, so a repeated call goes
on. Where there is no apt-get, or no Debian 12, put the files into the folder yourself: their
addresses are in text_sources.toml, and every file's sha256 is checked. snapshot.debian.org keeps
versions that the mirrors have replaced.

Needs lxml (part of the extra "eval") and 1.5 GB of disk. About 10 minutes of CPU.
"""

import argparse
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from examples.replicate.debian_package import files_of
from examples.replicate.html_text import text_of_html
from megasink.cli.data import main as data
from megasink.console.progress import tracked
from megasink.data.corpus import Corpus
from megasink.data.hf_tokenizer import load_tokenizer, train_tokenizer
from megasink.errors import ConfigError, UserError
from megasink.files.atomic import atomic_file, atomic_text

SOURCES_FILE = Path(__file__).with_name("text_sources.toml")
HELD_OUT = 0.01
"""Share of the documents that is held out, by hash."""
_SAMPLE = 64  # held-out documents for analyses
_SHORTEST_DOCUMENT = 400  # characters that stood in no document before
_SHORTEST_PARAGRAPH = 40  # shorter ones, such as "Parameters:", may repeat
_ENGLISH = 0.95  # share of ASCII letters among the letters
_LETTERS = 0.5  # share of letters among the characters: tables of numbers and symbols have less


@dataclass(frozen=True)
class Source:
    """A package: where its text is, and which file it must be.

    Attributes:
        name, version: of the Debian package.
        url: of the file, on the mirrors while this version is current.
        sha256: of the file, in hexadecimal.
        take: regular expression that is searched in the paths of the package.
        license: of the text, after the package's copyright file.
    """

    name: str
    version: str
    url: str
    sha256: str
    take: str
    license: str

    @property
    def file_name(self) -> str:
        """The name that apt-get gives the file: it quotes the colon of an epoch."""
        _, end = self.url.rsplit("_", 1)
        return f"{self.name}_{self.version.replace(':', '%3a')}_{end}"


class Counts(NamedTuple):
    """What is left of a source: documents and bytes of UTF-8 text."""

    documents: int
    text_bytes: int


def read_sources(path: Path = SOURCES_FILE) -> dict[str, Source]:
    """Return the sources of a file by name."""
    tables = tomllib.loads(path.read_text())
    return {name: Source(name=name, **table) for name, table in tables.items()}


def make_text(
    out: Path, sources: Sequence[Source], *, jobs: int = 1, held_out: float = HELD_OUT
) -> dict[str, Counts]:
    """Write `train.jsonl`, `held-out.jsonl` and `sources.json`; what is done is not done again.

    A paragraph of at least 40 characters that stood in an earlier document is dropped (paragraphs
    are compared without case, digits and spaces, as CCNet does), and a document that has no 400
    new characters left is dropped whole. Documents are then sorted by hash, so that every part of
    the file is a mixture, and those with the lowest hashes are held out: no long paragraph is in
    both parts, and more sources behind these do not move a document from one to the other.

    Args:
        out: the folder; made if missing.
        sources: of `read_sources`; in this order, since the first to have a paragraph keeps it.
        jobs: processes that take text from pages.
        held_out: share of the documents for `held-out.jsonl`.

    Returns:
        what each source gave.

    Raises:
        ConfigError: packages that cannot be had, all in one message.
        UserError: a package is damaged.
    """
    packages = fetch(out / "downloads", sources)
    (out / "pages").mkdir(parents=True, exist_ok=True)
    missing = [(p, s, _pages(out, s)) for p, s in zip(packages, sources, strict=True)]
    missing = [(p, s, pages) for p, s, pages in missing if not pages.is_file()]
    with ProcessPoolExecutor(jobs) as pool:
        done = pool.map(_take, *zip(*missing, strict=True)) if missing else iter(())
        for _ in tracked(done, "taking text", len(missing), "packages"):
            pass
    return _write(out, sources, held_out)


def write_text(
    folder: Path, name: str, *, vocabulary: int = 4096, megabytes: float | None = None
) -> None:
    """Write documentation as tokens: `NAME.bin` and `.idx`; and `NAME-sample.jsonl`, held out.

    The text is made once for all names, in `folder/documentation`, and so is the tokenizer,
    `folder/text-tokenizer`.

    Args:
        vocabulary: tokens of the tokenizer.
        megabytes: of the text, from its beginning, which is a mixture; None for all of it.

    Raises:
        UserError: as `make_text`; or the tokenizer there has another vocabulary.
    """
    text, tokenizer = folder / "documentation", folder / "text-tokenizer"
    if not (text / "sources.json").is_file():
        make_text(text, list(read_sources().values()))
    if not tokenizer.is_dir():
        corpus = Corpus([str(text / "train.jsonl")])
        train_tokenizer(corpus.tracked("reading texts for the tokenizer"), vocabulary, tokenizer)
    elif (found := len(load_tokenizer(tokenizer))) != vocabulary:
        raise UserError(f"{tokenizer} has {found} tokens, not {vocabulary}: use another folder")
    with (text / "held-out.jsonl").open("rb") as lines:
        sample = b"".join(itertools.islice(lines, _SAMPLE))
    atomic_text(folder / f"{name}-sample.jsonl", sample.decode())
    source = text / "train.jsonl"
    if megabytes is not None:
        source = folder / f"{name}.jsonl"
        _copy(text / "train.jsonl", source, round(megabytes * 1e6))
    data(
        [str(source), "--tokenizer", str(tokenizer), "--output", str(folder / name), "--overwrite"]
    )


def _copy(text: Path, part: Path, size: int) -> None:
    """Write the first whole lines of a file up to `size` bytes, and one at least."""
    with text.open("rb") as lines, atomic_file(part) as file:
        for line in lines:
            if file.tell() and file.tell() + len(line) > size:
                return
            file.write(line)


def fetch(folder: Path, sources: Sequence[Source]) -> list[Path]:
    """Return the files of the packages; download what the folder lacks.

    Raises:
        ConfigError: packages that apt-get does not give, and files with another sha256.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths, problems = [folder / source.file_name for source in sources], []
    pairs = list(zip(sources, paths, strict=True))
    for source, path in tracked(pairs, "packages", len(pairs), "packages"):
        problem = None if path.is_file() else _download(source, folder)
        if problem is None and not path.is_file():
            problem = f"apt-get gave no {path.name}"
        if problem is None and (found := _sha256(path)) != source.sha256:
            problem = f"{path} has the sha256 {found}, not {source.sha256}: remove it"
        if problem is not None:
            problems.append(f"{source.name} {source.version}: {problem}")
    if problems:
        advice = (
            f"Put the files into {folder}: text_sources.toml has their addresses, and "
            "snapshot.debian.org keeps versions that are gone from there"
        )
        raise ConfigError([*problems, advice])
    return paths


def _download(source: Source, folder: Path) -> str | None:
    """Download a package, which apt checks against Debian's signature; return what went wrong."""
    program = shutil.which("apt-get")
    if program is None:
        return "there is no apt-get here to download it with"
    words = [program, "--quiet=2", "download", f"{source.name}={source.version}"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"apt-get: {done.stderr.strip().splitlines()[-1:]} (run apt-get update first)"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pages(out: Path, source: Source) -> Path:
    return out / "pages" / f"{source.name}-{source.sha256[:8]}.jsonl"


def _take(package: Path, source: Source, pages: Path) -> None:
    """Write the text of the pages of a package, one JSON string per line."""
    wanted = re.compile(source.take)
    with atomic_file(pages) as file:
        for name, page in files_of(package):
            if wanted.search(name):
                text = text_of_html(page)
                if text:
                    file.write(json.dumps(text).encode() + b"\n")


def _write(out: Path, sources: Sequence[Source], held_out: float) -> dict[str, Counts]:
    seen: set[int] = set()
    places: list[tuple[bytes, int, int]] = []  # hash, offset and length of a line
    counts = {}
    unsorted = out / "unsorted.jsonl"
    with unsorted.open("w+b") as file:
        for source in tracked(sources, "dropping repetitions", len(sources), "packages"):
            documents = size = 0
            for text in _fresh(_pages(out, source), seen):
                encoded = text.encode()
                line = json.dumps({"text": text, "source": source.name}).encode() + b"\n"
                places.append((_hash(encoded), file.tell(), len(line)))
                file.write(line)
                documents, size = documents + 1, size + len(encoded)
            counts[source.name] = Counts(documents, size)
        places.sort()
        below = int(held_out * 2**64).to_bytes(9)
        for name, is_held_out in (("held-out", True), ("train", False)):
            with atomic_file(out / f"{name}.jsonl") as sorted_file:
                for key, offset, length in places:
                    if (b"\0" + key < below) != is_held_out:
                        continue
                    file.seek(offset)
                    sorted_file.write(file.read(length))
    unsorted.unlink()
    facts = [asdict(s) | counts[s.name]._asdict() for s in sources]
    atomic_text(out / "sources.json", json.dumps(facts, indent=1) + "\n")
    return counts


def _fresh(pages: Path, seen: set[int]) -> Iterator[str]:
    """Yield the documents of a package without the paragraphs in `seen`, which grows."""
    with pages.open() as lines:
        for line in lines:
            kept, new = [], 0
            for paragraph in json.loads(line).split("\n\n"):
                if len(paragraph) >= _SHORTEST_PARAGRAPH:
                    key = _key(paragraph)
                    if key in seen:
                        continue
                    seen.add(key)
                    new += len(paragraph)
                kept.append(paragraph)
            text = "\n\n".join(kept)
            if new >= _SHORTEST_DOCUMENT and _is_english(text):
                yield text


def _key(paragraph: str) -> int:
    plain = re.sub(r"[\s\d]+", "", paragraph.lower())
    return int.from_bytes(_hash(plain.encode()))


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _is_english(text: str) -> bool:
    ascii_letters = len(re.findall(r"[A-Za-z]", text))
    letters = ascii_letters + sum(c.isalpha() for c in text if c > "\x7f")
    return ascii_letters >= _ENGLISH * letters and letters >= _LETTERS * len(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the corpus, and print what each package gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("output", type=Path, metavar="FOLDER", help="where to write the corpus")
    parser.add_argument("--sources", nargs="+", metavar="NAME", help="packages (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    args = parser.parse_args(argv)
    sources = read_sources()
    try:
        unknown = [name for name in args.sources or () if name not in sources]
        if unknown:
            raise ConfigError([f"--sources {n}: not in {SOURCES_FILE.name}" for n in unknown])
        chosen = [sources[name] for name in args.sources or sources]
        counts = make_text(args.output, chosen, jobs=args.jobs)
    except UserError as error:
        parser.exit(2, f"{error}\n")
    for name, count in counts.items():
        print(f"{name:26} {count.documents:7,} documents {count.text_bytes / 1e6:8.1f} MB")
    documents = sum(count.documents for count in counts.values())
    size = sum(count.text_bytes for count in counts.values())
    print(f"{'total':26} {documents:7,} documents {size / 1e6:8.1f} MB")
    return 0


_Raw = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    raise SystemExit(main())
