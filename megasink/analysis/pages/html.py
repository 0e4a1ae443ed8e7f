"""The self-contained pages of all commands, made by the macros of page.html, which escape text."""

import base64
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from megasink.analysis.pages.drawing import Numbers, Picture, page_files
from megasink.analysis.result_store import PAGE_FILES, write_results
from megasink.attention.constants import SINK_EPSILON
from megasink.console.papers import PAPERS
from megasink.console.printable import say


class Page:
    """A page: a heading, followed by its contents in the order of the calls."""

    def __init__(self, title: str, heading: str, about: str = ""):
        self._title, self._heading, self._about = title, heading, about
        self._contents: dict[str, list[str]] = {}
        self._body: list[str] = []

    def section(self, title: str, *parts: str) -> None:
        """Begin a section with these parts; text not made by the functions below is escaped."""
        self._contents[title] = []
        self._body += [_macros.heading(2, title), *parts]

    def subsection(self, title: str, *parts: str) -> None:
        """Begin a part of the section with a heading of its own."""
        self._contents[next(reversed(self._contents))].append(title)
        self._body += [_macros.heading(3, title), *parts]

    def text(self) -> str:
        """Return the whole page, which loads nothing from elsewhere and runs no scripts."""
        return str(
            _macros.page(self._title, self._heading, self._about, self._contents, self._body)
        )


def paragraph(text: str, kind: str = "") -> Markup:
    """Return a paragraph, with `code` in backticks; `kind` is "note" or "warning"."""
    return _macros.paragraph(re.split(r"`([^`]+)`", text), kind)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    kind: str = "numbers",
    links: Sequence[str] = (),
) -> Markup:
    """Return a table with a header row and a header column, which scrolls if it is too wide."""
    return _macros.table(head, [(row[0], row[1:]) for row in rows], kind, links)


def facts(title: str, of: Mapping[str, object]) -> Markup:
    """Return a table of values, without None and empty ones."""
    rows = [
        [key.replace("_", " "), ", ".join(map(str, v)) if isinstance(v, list) else str(v)]
        for key, v in of.items()
        if v not in (None, "", [])
    ]
    return table(["", title], rows, kind="facts")


def figure(picture: Picture, alt: str, caption: str) -> Markup:
    """Return a picture with its caption, a title on hover for each mark, and its table."""
    png = picture.files["png"]
    width, height = (int.from_bytes(png[i : i + 4], "big") for i in (16, 20))
    numbers = Markup("")
    for title, head, rows in picture.numbers.tables:
        numbers += (paragraph(title, "note") if title else "") + table(head, rows)
    if not picture.numbers.is_whole:
        numbers += paragraph("The page cannot hold more numbers: see the files in this folder.")
    alt += f". {picture.finding or _finding(picture.numbers) or picture.caption}"
    data = base64.b64encode(png).decode()
    return _macros.figure(picture, data, width, height, alt, caption, numbers)


def term(name: str, meaning: str) -> Markup:
    """Return a word with its meaning below it."""
    return Markup("{}<br><small>{}</small>").format(_linked(name), _linked(meaning))


def _linked(text: str) -> Markup:
    """Escape a text, and link the rows of papers in it, such as P3.7, to their papers."""
    if isinstance(text, Markup):
        return text

    def link(found: re.Match[str]) -> str:
        title, number = PAPERS[found[1]]
        about = f"{title}: row {found[0]} of docs/papers.md"
        return f'<a href="https://arxiv.org/abs/{number}" title="{about}">{found[0]}</a>'

    return Markup(re.sub(r"\b(P[0-4])\.\d+\b", link, str(escape(text))))


def words_and_papers() -> str:
    """Return the glossary of a report, and the papers that define its numbers."""
    words = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
    rows = [[word, meaning.format(epsilon=SINK_EPSILON)] for word, meaning in words.items()]
    papers = [[key, title, f"arXiv {number}"] for key, (title, number) in PAPERS.items()]
    links = [f"https://arxiv.org/abs/{number}" for _, number in PAPERS.values()]
    note = "Names such as P0.10 are rows of docs/papers.md, which lists the definitions of each "
    note += "paper. The sink center, and the limits in the summary, are megasink's own."
    return Markup("").join(
        [
            table(["word", "meaning"], rows, kind="facts"),
            table(["", "paper", ""], papers, kind="facts", links=links),
            paragraph(note, "note"),
        ]
    )


def _finding(numbers: Numbers, most: int = 6) -> str:
    """Return the places of a picture's lowest and highest values, for readers who cannot see it."""
    found = []
    for title, head, rows in numbers.tables:
        across, _, by = head[0].partition(", by ")
        series: dict[str, dict[str, float]] = {}
        for first, *cells in rows:
            for name, cell in zip(head[1:], cells, strict=True):
                if cell and (name != first or name.isdecimal()):  # a score agrees with itself
                    of, place = ("", f"{first}, {by} {name}") if by else (name, first)
                    series.setdefault(of, {})[f"{across} {place}"] = float(cell)
        for name, at in series.items():
            low, high = min(at, key=at.__getitem__), max(at, key=at.__getitem__)
            what = ", ".join(dict.fromkeys(filter(None, (title, name))))
            found.append(f"{what}: from {at[low]:.4g} ({low}) to {at[high]:.4g} ({high})")
    return "; ".join(found[:most])


_environment = Environment(
    loader=PackageLoader("megasink.analysis.pages", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
)
_filters: dict[str, Any] = {
    "anchor": lambda title: re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"),
    "pixels": lambda size, least=0.0: f"{max(size, least):.0f}",
    "linked": _linked,
}
_environment.filters |= _filters
_macros: Any = _environment.get_template("page.html").module


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
    """Write a page with sections around its pictures, and the files of numbers; print its words."""
    made = Page(f"megasink {command}: {model}", f"{model}: {heading}")
    sections: dict[str, Sequence[str]] = {"Summary": [paragraph(line) for line in words]}
    sections |= before or {}
    for picture in pictures:
        alt = f"{picture.title}: {model}"
        sections[picture.title] = [figure(picture, alt, picture.caption)]
    for title, parts in (sections | dict(after)).items():
        if parts:
            made.section(title, *parts)
    write_results(output, page_files(made.text(), pictures) | dict(files), PAGE_FILES)
    for line in (*words, *lines):
        say(line)
    print(f"wrote {output}/report.html, {', '.join(n for n in files if files[n])}, figures/")
