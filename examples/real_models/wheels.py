"""Wheels of PyPI by their sha256, and files in them. Nothing of a wheel is installed or run."""

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasink.errors import UserError

FOLDER = Path("runs/real-models")
SOURCES_FILE = Path(__file__).with_name("sources.toml")
_ASIDE = ("WARNING", "[notice]")
_BROKEN = re.compile(r"connection broken by '(\w+)")


@dataclass(frozen=True)
class Wheel:
    """A wheel: its file name, which has package and version, and its sha256 in hexadecimal."""

    file: str
    sha256: str

    @property
    def requirement(self) -> str:
        """As pip takes it, such as `networkx==3.6.1`."""
        name, version, *_ = self.file.split("-")
        return f"{name.replace('_', '-')}=={version}"


def sources() -> dict[str, Any]:
    """Return the tables of sources.toml."""
    return tomllib.loads(SOURCES_FILE.read_text())


def fetch(wheel: Wheel, folder: Path = FOLDER) -> Path:
    """Return the file of a wheel in `folder/wheels`; download it if it is not there.

    Raises:
        UserError: pip cannot get it, or its sha256 is another; nothing is left behind.
    """
    path = folder / "wheels" / wheel.file
    with told(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            # In the same file system, so that the file is renamed and never half there.
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as partial:
                _download(wheel, Path(partial))
                _check(Path(partial) / wheel.file, wheel)
                (Path(partial) / wheel.file).replace(path)
        else:
            _check(path, wheel)
    return path


def members(path: Path, names: list[str]) -> Iterator[bytes]:
    """Yield the contents of files of a wheel."""
    with zipfile.ZipFile(path) as archive:
        for name in names:
            yield archive.read(name)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turn an error of the operating system, such as a full disk, into one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or what}: {error.strerror or error}") from error


def _download(wheel: Wheel, folder: Path) -> None:
    # One file for every machine: texts are read from it, and nothing of it runs.
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    words += ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--retries=1"]
    words += ["--platform=manylinux_2_28_x86_64", f"--dest={folder}", wheel.requirement]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        # pip's last line has the reason, after a traceback too.
        said = [line for line in done.stderr.splitlines() if line and not line.startswith(_ASIDE)]
        why = (said or [f"exit code {done.returncode}"])[-1].removeprefix("ERROR: ")
        if broken := _BROKEN.search(done.stderr):  # which pip answers with "no distribution"
            why = f"PyPI was not reached ({broken[1]})"
        raise UserError(
            f"{wheel.requirement}: pip did not download it: {why}; without a network put "
            f"{wheel.file} into {folder.parent} yourself"
        )
    if not (folder / wheel.file).is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise UserError(f"{wheel.requirement}: pip gave {found or 'no file'}, not {wheel.file}")


def _check(path: Path, wheel: Wheel) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise UserError(f"{path} has the sha256 {found}, not {wheel.sha256}: remove it")
