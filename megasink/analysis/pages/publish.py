"""The results of a command: a page of words, pictures and tables, and files of numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasink.analysis.pages import html
from megasink.analysis.pages.drawing import Picture, page_files
from megasink.analysis.store import PAGE_FILES, write_results
from megasink.console.printable import say

Sections = Mapping[str, Sequence[str]]
"""Title -> the parts of a section; one without parts is left out."""


def publish(
    output: Path,
    command: str,
    *,
    model: str,
    heading: str,
    words: Sequence[str],
    pictures: Sequence[Picture],
    files: Mapping[str, Any],
    after: Sections,
    before: Sections | None = None,
    lines: Sequence[str] = (),
) -> None:
    """Write a page and the files of numbers, and print its words.

    Args:
        model: its name.
        before, after: sections before and after the pictures.
        lines: what is printed below the words.
    """
    made = html.Page(f"megasink {command}: {model}", f"{model}: {heading}")
    sections: dict[str, Sequence[str]] = {"Summary": [html.paragraph(line) for line in words]}
    sections |= before or {}
    for picture in pictures:
        alt = f"{picture.title}: {model}"
        sections[picture.title] = [html.figure(picture, alt, picture.caption)]
    for title, parts in (sections | dict(after)).items():
        if parts:
            made.section(title, *parts)
    write_results(output, page_files(made.text(), pictures) | dict(files), PAGE_FILES)
    for line in (*words, *lines):
        say(line)
    print(f"wrote {output}/report.html, {', '.join(n for n in files if files[n])}, figures/")
