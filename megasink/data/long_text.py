"""The text of a long file, which is never whole in memory."""

import codecs
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from megasink.data.files import open_file, readable
from megasink.errors import UserError

WHOLE_BYTES = 8 << 20
"""Files of at most so many bytes, decompressed, are read at once."""
BYTE_ORDER_MARK = "\ufeff"
"""Some programs write it before a text, in UTF-8 too; decoders of utf-8-sig leave it out."""
_BLOCK = 1 << 20


class LongText:
    """A text file that has been read once, and is read again wherever its text is needed.

    Args:
        path: the file.
        compression: of `open_file`.
        characters: of the text.
    """

    def __init__(self, path: Path, compression: str | None, characters: int):
        self._path, self._compression, self._characters = path, compression, characters

    def __len__(self) -> int:
        return self._characters

    def __str__(self) -> str:
        return "".join(self.pieces())

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces of about a million characters.

        Raises:
            UserError: the file cannot be read, or has changed since it was read first.
        """
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        left = self._characters
        with readable(self._path), open_file(self._path, self._compression) as (stream, _):
            while left:
                block = stream.read(_BLOCK)
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError:
                    text, block = "", b""
                left -= len(text)
                if left < 0 or not block:
                    raise UserError(f"{self._path} changed while it was read: run this again")
                yield text


class HeldText:
    """A long text in memory as UTF-8, which as a string may take four times as much.

    Args:
        content: valid UTF-8.
        characters: of the text.
    """

    def __init__(self, content: memoryview, characters: int):
        self._content, self._characters = content, characters

    def __len__(self) -> int:
        return self._characters

    def __str__(self) -> str:
        return str(self._content, "utf-8")

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces of about a million bytes."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, len(self._content), _BLOCK):
            yield decoder.decode(self._content[start : start + _BLOCK])


def examine(head: bytes, stream: BufferedReader, most: int) -> tuple[int | None, int]:
    """Return the characters of a long text, None if it is none, and its bytes up to `most` + 1.

    Args:
        head: what has been read of it.
        stream: the rest.
        most: bytes to read.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    size = characters = 0
    is_utf8, block = True, head
    while block:
        size += len(block)
        # NUL is valid UTF-8, but no text file has it: this skips archives in a folder.
        if b"\0" in block:
            return None, min(size, most)
        if is_utf8:
            try:
                characters += len(decoder.decode(block))
            except UnicodeDecodeError:
                is_utf8 = False
        block = stream.read(min(_BLOCK, most + 1 - size)) if size <= most else b""
    if is_utf8:
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            is_utf8 = False
    return (characters if is_utf8 else None), size
