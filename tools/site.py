"""MkDocs' hook (mkdocs.yml): pages that are written for a reader of the repository, as a site.

Pages of the repository outside of docs/ that OUTSIDE names join the site. A link from one page to
another stays a link; one to any other file of the repository goes to `repo_url`, and without one
only its text is kept. Fences lose what stands behind their language, which tests alone read.
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
}
_SOURCES = {page: source for source, page in OUTSIDE.items()}
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^```(\w+) .*$", re.M)


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
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if ":" in target or not (ROOT / path).exists():
            return link[0]  # an address, code that looks like a link, or one that --strict names
        if path in OUTSIDE:
            return f"{text}({OUTSIDE[path]}{anchor})"
        if path.startswith("docs/"):
            return f"{text}({path.removeprefix('docs/')}{anchor})"
        if config.repo_url:
            return f"{text}({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})"
        return text[1:-1]

    return _LINK.sub(of_site, _FENCE.sub(r"```\1", markdown))
