"""The self-contained pages of all commands: style, tables, figures. All text is escaped here."""

import base64
import re
from collections.abc import Mapping, Sequence
from html import escape

from megasink.analysis.pages.drawing import Picture

STYLE = """
:root { color-scheme: light dark; }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: #1c2430;
       background: #fff; max-width: 76rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem;
       overflow-wrap: anywhere; }
h1 { font-size: 1.65rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .75rem; padding-top: .75rem; border-top: 1px solid #d8dde5; }
h3 { font-size: 1.02rem; margin: 2rem 0 .5rem; }
p, li { max-width: 56rem; }
nav ul { columns: 18rem; padding-left: 1.2rem; margin: .5rem 0; }
nav > ul > li { break-inside: avoid; }
nav ul ul { columns: auto; }
a { color: #0b5cad; }
.facts td { text-align: left; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .8rem; border-bottom: 1px solid #d8dde5; text-align: right;
         overflow-wrap: normal; vertical-align: top; }
thead th { border-bottom: 2px solid #8a93a1; max-width: 16rem; overflow-wrap: normal; }
tbody th, th:first-child { text-align: left; font-weight: normal; }
figure { margin: 1rem 0 2rem; }
img { max-width: 100%; height: auto; display: block; }
.picture { position: relative; width: fit-content; }
.picture svg { position: absolute; inset: 0; width: 100%; height: 100%; fill: transparent; }
.picture rect:hover { stroke: #000; stroke-width: 2; }
@media (max-width: 48rem) {
  .picture { width: max-content; }
  .picture img { max-width: 55rem; }
}
summary { cursor: pointer; }
figcaption, .note { color: #48515e; font-size: .9rem; max-width: 62rem; margin-top: .4rem; }
.warning { background: #fff3d6; padding: .6rem 1rem; border-left: 4px solid #b8860b; }
@media (prefers-color-scheme: dark) {
  body { color: #e3e7ee; background: #14181f; }
  h2, th, td { border-color: #3a4350; }
  thead th { border-color: #76808e; }
  a { color: #7db7f2; }
  figcaption, .note { color: #b3bcc8; }
  .warning { background: #3a2f12; border-color: #d9a520; }
  img { background: #fff; border-radius: 4px; }
}
"""


class Page:
    """A page: a heading, its contents, and then what is added, in this order.

    Args:
        title: of the window.
        heading: of the page.
        about: what the page is of, in its head.
    """

    def __init__(self, title: str, heading: str, about: str = ""):
        self._title, self._heading, self._about = title, heading, about
        self._contents: dict[str, list[str]] = {}
        self._body: list[str] = []

    def section(self, title: str, *parts: str) -> None:
        """Begin a section, with these parts."""
        self._contents[title] = []
        self._body += [heading(2, title), *parts]

    def subsection(self, title: str, *parts: str) -> None:
        """Begin a part of the section with a heading of its own."""
        self._contents[next(reversed(self._contents))].append(title)
        self._body += [heading(3, title), *parts]

    def text(self) -> str:
        """Return the whole page."""
        top = ["<header>", f"<h1>{escape(self._heading)}</h1>", contents(self._contents)]
        body = [*top, "</header><main>", *self._body, "</main>"]
        return document(self._title, body, self._about)


def document(title: str, body: Sequence[str], about: str = "") -> str:
    """Return a whole page, which loads nothing from elsewhere and runs no scripts."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<link rel="icon" href="data:,">',
            f'<meta name="description" content="{escape(about or title)}">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def anchor(title: str) -> str:
    """Return the id of a heading."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def heading(level: int, title: str) -> str:
    """Return a heading that the table of contents can link to."""
    return f'<h{level} id="{anchor(title)}">{escape(title)}</h{level}>'


def contents(sections: dict[str, list[str]]) -> str:
    """Return the table of contents: headings and their subheadings."""
    items = []
    for section, titles in sections.items():
        below = "".join(f"<li>{_link(title)}</li>" for title in dict.fromkeys(titles))
        items.append(f"<li>{_link(section)}{f'<ul>{below}</ul>' if below else ''}</li>")
    listed = f"<ul>{''.join(items)}</ul>"
    return (
        f'<nav aria-label="Contents"><details><summary>Contents</summary>{listed}</details></nav>'
    )


def _link(title: str) -> str:
    return f'<a href="#{anchor(title)}">{escape(title)}</a>'


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph, with `code` in backticks; `kind` is "note" or "warning"."""
    inner = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return f'<p class="{kind}">{inner}</p>' if kind else f"<p>{inner}</p>"


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    kind: str = "numbers",
    links: Sequence[str] = (),
) -> str:
    """Return a table with a header row and a header column, which scrolls if it is too wide.

    Args:
        kind: "numbers" or "facts".
        links: a URL for the first cell of each row.
    """
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = []
    for index, (first, *rest) in enumerate(rows):
        text = escape(first)
        if links:
            text = f'<a href="{escape(links[index])}">{text}</a>'
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{text}</th>{cells}</tr>')
    return (
        f'<div class="scroll {kind}" tabindex="0"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def facts(title: str, of: Mapping[str, object]) -> str:
    """Return a table of what is known, without what is None or empty."""
    rows = [
        [key.replace("_", " "), ", ".join(map(str, v)) if isinstance(v, list) else str(v)]
        for key, v in of.items()
        if v not in (None, "", [])
    ]
    return table(["", title], rows, kind="facts")


def figure(picture: Picture, alt: str, caption: str) -> str:
    """Return a picture with its caption, a title on hover for each mark, and the table behind it.

    It scrolls on a narrow screen.
    """
    png = picture.files["png"]
    data = base64.b64encode(png).decode()
    width, height = (int.from_bytes(png[i : i + 4], "big") for i in (16, 20))
    return (
        '<figure><div class="scroll" tabindex="0"><div class="picture">'
        f'<img alt="{escape(alt)}" width="{width}" height="{height}" '
        f'src="data:image/png;base64,{data}">{_marks(picture, width, height)}</div></div>'
        f"<figcaption>{escape(caption)}</figcaption>{_numbers(picture)}</figure>"
    )


def _marks(picture: Picture, width: int, height: int) -> str:
    """Return what lies over the picture: a box for each mark, with its title."""
    boxes = "".join(
        f'<rect x="{left * width:.0f}" y="{top * height:.0f}" '
        f'width="{max(1, (right - left) * width):.0f}" '
        f'height="{max(1, (bottom - top) * height):.0f}"><title>{escape(text)}</title></rect>'
        for left, top, right, bottom, text in picture.numbers.marks
    )
    if not boxes:
        return ""
    return f'<svg viewBox="0 0 {width} {height}" aria-hidden="true">{boxes}</svg>'


def _numbers(picture: Picture) -> str:
    tables = "".join(
        (paragraph(title, "note") if title else "") + table(head, rows)
        for title, head, rows in picture.numbers.tables
    )
    if not picture.numbers.is_whole:
        tables += paragraph("There are more numbers than a page holds: see the files beside it.")
    return f"<details><summary>The numbers</summary>{tables}</details>" if tables else ""
