"""Identify a picture or page by a comment inside it, so that no other file is overwritten.

The check runs before matplotlib and torch are imported.
"""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from html import unescape
from pathlib import Path

from PIL import Image

from megasink.console.printable import printable
from megasink.errors import UserError
from megasink.files.json_file import open_file
from megasink.files.output_folder import folder_problem


def comment_of(output: Path, line: str, of: Sequence[object], *, overwrite: bool) -> str:
    """Return the identifying comment of a picture that is about to be written."""
    if output.suffix.lower() != ".png":
        raise UserError(f"--output {output}: the picture is a PNG: name it {output.name}.png")
    if problem := folder_problem(output.parent):
        raise UserError(f"--output {output} {problem}")
    digest = hashlib.sha256(repr([*map(str, of)]).encode()).hexdigest()[:12]
    comment = f"megasink {line} ({digest})"
    for path in () if overwrite else (output, output.with_suffix(".html")):
        before = _comment_in(path) if path.exists() else comment
        if before != comment:
            ours = before.startswith("megasink ")
            what = (
                f"was written by `{printable(before)[:200]}`"
                if ours
                else "exists and was not written by megasink"
            )
            raise UserError(
                f"--output {path} {what}: choose another, or replace it with --overwrite"
            )
    return comment


def _comment_in(path: Path) -> str:
    """Return the comment in a picture, or in the head of a page; empty without one."""
    with suppress(OSError), open_file(path) as file, suppress(ValueError, SyntaxError):
        if path.suffix == ".html":
            head = file.read(10_000).decode(errors="replace")
            comment = re.search('<meta name="description" content="([^"]*)">', head)
            return unescape(comment[1]) if comment else ""
        with Image.open(file, formats=["PNG"]) as image:
            return str(image.info.get("Comment", ""))
    return ""
