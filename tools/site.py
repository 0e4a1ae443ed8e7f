"""MkDocs' hook (mkdocs.yml): pages that are written for a reader of the repository, as a site.

Pages of the repository outside of docs/ that OUTSIDE names join the site. A link from one page to
another stays a link; one to any other file of the repository goes to `repo_url`, and without one
only its text is kept. A link whose text is the page's file name gets the page's title, pictures
open in full size, `G_i` and `CV^2` are set with indices and powers, and fences lose what stands
behind their language, which tests alone read.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "docker/README.md": "docker.md",
    "examples/replicate/README.md": "replicate.md",
    "tools/site.css": "site.css",
}
_SOURCES = {page: source for source, page in OUTSIDE.items()}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^```(\w+) .*$", re.M)
_TAG = re.compile(r"(<[^>]+>)")
_INDEX = re.compile(r"((?<![\w.])(?!sm_)[A-Za-z]{1,5}'?\*?|\))_([a-z0-9]|i[0jk]|lh)(?![\w*])")
_POWER = re.compile(r"(?<=[\w)>])\^(-?(?:[\d.]*\d|\w+))")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages of OUTSIDE to those of docs/."""
    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Return the page with the links of the site."""
    source = _SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def of_site(link: re.Match[str]) -> str:
        picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if ":" in target or not (ROOT / path).exists():
            return link[0]  # an address, code that looks like a link, or one that --strict names
        there = OUTSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if picture:
            return f"[![{text}]({there})]({there})"
        if there:
            file = files.get_file_from_path(there)
            if file and file.page and posixpath.basename(text) == posixpath.basename(path):
                text = file.page.title or text
            return f"[{text}]({there}{anchor})"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})"
        return text

    return _LINK.sub(of_site, _FENCE.sub(r"```\1", markdown))


def on_page_content(html: str, *, page: Page, config: Any, files: Files) -> str:
    """Return the page with its formulas' indices and powers set as such, but for code."""
    code, parts = 0, _TAG.split(html)
    for number, part in enumerate(parts):
        if number % 2:
            code += bool(re.match(r"<(code|pre)\b", part)) - bool(re.match(r"</(code|pre)\b", part))
        elif not code:
            indexed = _INDEX.sub(r"\1<sub>\2</sub>", part)
            parts[number] = _POWER.sub(r"<sup>\1</sup>", indexed)
    return "".join(parts)
