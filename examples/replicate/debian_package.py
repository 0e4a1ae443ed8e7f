"""Read the files of a Debian package (.deb) as a stream, without unpacking it to disk.

A package is an `ar` archive of three members: its version, `control.tar.*` and `data.tar.*`
(deb(5)). Nothing is written, so names in the archive lead nowhere.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megasink.errors import UserError

_MAGIC = b"!<arch>\n"
_HEADER = 60  # bytes: name 16, date 12, owner 6, group 6, mode 8, size 10, the two bytes "`\n"
_LARGEST = 64 << 20  # bytes of one file; a page of documentation has less


def files_of(package: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the absolute path and the contents of every regular file, in the order of the package.

    Raises:
        UserError: the file is no Debian package, is cut off, or has a file of over 64 MiB.
    """
    with package.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise UserError(f"{package} is not a Debian package: no ar archive")
        _seek_data(file, package)
        try:
            # A stream reads no further than the end of the tar, so the ar member needs no bound.
            with tarfile.open(fileobj=file, mode="r|*") as archive:
                for member in archive:
                    if not member.isreg():
                        continue
                    if member.size > _LARGEST:
                        raise UserError(f"{package}: {member.name} has {member.size:,} bytes")
                    contents = archive.extractfile(member)
                    assert contents is not None  # only links and devices have none
                    yield "/" + member.name.removeprefix("./"), contents.read()
        except (tarfile.TarError, EOFError, OSError) as error:
            raise UserError(f"{package} is damaged: {error}") from error


def _seek_data(file: BinaryIO, package: Path) -> None:
    """Move to the contents of `data.tar.*`."""
    while header := file.read(_HEADER):
        if len(header) < _HEADER or header[58:] != b"`\n" or not header[48:58].strip().isdigit():
            break
        name = header[:16].rstrip(b" /")
        if name.startswith(b"data.tar"):
            return
        size = int(header[48:58])
        file.seek(size + size % 2, 1)  # members start at even offsets
    raise UserError(f"{package} is damaged: it has no data.tar")
