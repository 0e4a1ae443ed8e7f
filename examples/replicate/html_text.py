"""The text of an HTML page of documentation."""

import re
from typing import Any

# What a page is about, in the markup of Sphinx, DocBook, Doxygen, rustdoc, javadoc and others.
_MAIN = (
    "//main",
    "//*[@role='main']",
    "//article",
    "//div[contains(concat(' ', @class, ' '), ' body ')]",
    "//div[@id='content']",
    "//body",
)
_DROPPED = {
    *("script", "style", "head", "nav", "header", "footer", "noscript", "svg", "form", "button"),
    *("select", "template", "iframe", "object", "audio", "video"),
}
_DROPPED_CLASSES = {
    *("headerlink", "sphinxsidebar", "related", "footer", "navheader", "navfooter", "navigation"),
    *("toc", "toctree-wrapper", "breadcrumb", "breadcrumbs", "sidebar", "anchor", "linenos"),
    *("navsettop", "navsetbottom", "tocset", "versionbox", "header", "heading-anchor", "permalink"),
}
_PARAGRAPHS = {
    *("p", "div", "pre", "ul", "ol", "dl", "table", "blockquote", "section", "article", "figure"),
    *("h1", "h2", "h3", "h4", "h5", "h6"),
}
_LINES = {"li", "tr", "br", "dt", "dd", "caption", "summary", "details"}
_CELLS = {"td", "th"}
_SPACES = re.compile(r"[^\S\n]+")


def text_of_html(page: bytes) -> str:
    """Return the text of a page without navigation, scripts and styles.

    Paragraphs are separated by an empty line; `pre` keeps its lines and indentation. The empty
    string if there is no text, or the page is not UTF-8.
    """
    from lxml import etree, html

    try:
        page.decode()
    except UnicodeDecodeError:
        return ""
    parser = html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True)
    try:
        root = html.document_fromstring(page, parser=parser)
    except (etree.ParserError, etree.XMLSyntaxError):
        return ""
    found = next((elements for path in _MAIN if (elements := root.xpath(path))), [])
    pieces: list[str] = []
    for element in found[:1]:
        _collect(element, pieces)
    return _joined(pieces)


def _collect(root: Any, pieces: list[str]) -> None:
    """Append text and breaks, in the order of the page; without recursion, since pages are deep."""
    stack: list[tuple[Any, bool, bool]] = [(root, False, False)]
    while stack:
        element, in_pre, leaving = stack.pop()
        tag = element.tag
        mark = "\n\n" if tag in _PARAGRAPHS else "\n" if tag in _LINES else ""
        if leaving:
            pieces.append(mark)
            if element is not root:
                _append(pieces, element.tail, in_pre)
            continue
        if _is_dropped(element):
            if element is not root:
                _append(pieces, element.tail, in_pre)
            continue
        pieces.append("\t" if tag in _CELLS else mark)
        inside = in_pre or tag in ("pre", "textarea")
        _append(pieces, element.text, inside)
        stack.append((element, in_pre, True))
        stack.extend((child, inside, False) for child in reversed(element))


def _is_dropped(element: Any) -> bool:
    if not isinstance(element.tag, str) or element.tag in _DROPPED:
        return True
    names = element.get("class")
    return names is not None and not _DROPPED_CLASSES.isdisjoint(names.split())


def _append(pieces: list[str], text: str | None, in_pre: bool) -> None:
    if text:
        # Kept lines travel as \v and their indentation as \f, which _joined turns back.
        kept = text.replace("\n", "\v").replace("  ", "\f\f") if in_pre else " ".join(text.split())
        if not in_pre:
            kept = f"{' ' if text[0].isspace() else ''}{kept}{' ' if text[-1].isspace() else ''}"
        pieces.append(kept)


def _joined(pieces: list[str]) -> str:
    text = _SPACES.sub(_space, "".join(pieces))
    text = re.sub(r" ?\n ?", "\n", text)
    text = re.sub(r"\n{2,}", "\n\n", text)
    lines = text.replace("\v", "\n").replace("\f", " ").split("\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip()


def _space(found: re.Match[str]) -> str:
    text = found.group()
    return text if "\v" in text or "\f" in text else "\t" if "\t" in text else " "
