"""The documentation as a site: ``python tools/site.py build/site``.

The pages of docs/, and those of `OUTSIDE`, are written for a reader of the repository. This writes
them for the generator that mkdocs.yml is for: a link from one page to another stays a link; one to
any other file of the repository goes to `repo_url`, and without one only its text is kept. A link
whose text is the page's file name gets the page's title, pictures open in full size, and fences
lose what stands behind their language, which tests alone read. A notebook becomes a page with the
outputs that are stored in it. In what the generator made, `G_i`
and `CV^2` are set with indices and powers. A link that leads nowhere ends the build.
"""

import argparse
import base64
import json
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "docker/README.md": "docker.md",
    "examples/real_models/results.md": "real-models.md",
    "examples/replicate/README.md": "replicate.md",
    "examples/replicate/results.md": "results.md",
    "examples/replicate/grid/README.md": "grid.md",
    "megasink/balance/README.md": "scale.md",
    "megasink/training/recipes/README.md": "recipe-sources.md",
    "examples/notebooks/1-look-inside.ipynb": "notebook-1.md",
    "examples/notebooks/2-switch-heads-off.ipynb": "notebook-2.md",
    "examples/notebooks/3-balance-heads.ipynb": "notebook-3.md",
    "tools/site.css": "site.css",
}
PICTURES = ("examples/real_models/figures/", "examples/replicate/figures/")
"""Pictures of pages of `OUTSIDE`, which the site has in figures/."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^```(\w+) .*$", re.M)
_TAG = re.compile(r"(<[^>]+>)")
_PLAIN = r"(code|pre|script|style)\b"
_INDEX = re.compile(r"((?<![\w.])(?!sm_)[A-Za-z]{1,5}'?\*?|\))_([a-z0-9]|i[0jk]|lh)(?![\w*])")
_POWER = re.compile(r"(?<=[\w)>])\^(-?(?:[\d.]*\d|\w+))")


def titles(nav: Any) -> Iterator[tuple[str, str]]:
    """Yield (page, title) of everything in mkdocs.yml's nav."""
    for entry in nav:
        for title, inside in entry.items():
            if isinstance(inside, str):
                yield inside, title
            else:
                yield from titles(inside)


def page_of(markdown: str, source: str, named: dict[str, str], repo_url: str) -> str:
    """Return a page of the repository with the links of the site.

    Args:
        source: its path in the repository.
        named: the titles of pages.
        repo_url: of the public repository; "" for none.
    """

    def of_site(link: re.Match[str]) -> str:
        picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if ":" in target or not (ROOT / path).exists():
            return link[0]  # an address, code that looks like a link, or one that --strict names
        there = OUTSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if path.startswith(PICTURES):
            there = f"figures/{posixpath.basename(path)}"
        if picture:
            return f"[![{text}]({there})]({there})"
        if there:
            if posixpath.basename(text) == posixpath.basename(path):
                text = named.get(there, text)
            return f"[{text}]({there}{anchor})"
        return f"[{text}]({repo_url.rstrip('/')}/blob/main/{path}{anchor})" if repo_url else text

    return _LINK.sub(of_site, _FENCE.sub(r"```\1", markdown))


def notebook_page(notebook: Path, page: Path) -> None:
    """Write a notebook as a page, and its pictures beside it."""
    parts = []
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for place, output in enumerate(cell.get("outputs", [])):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                picture = page.with_name(f"{page.stem}-{number}-{place}.png")
                picture.write_bytes(base64.b64decode("".join(data["image/png"])))
                parts.append(f"![output of the cell]({picture.name})")
            elif "text/html" in data:
                parts.append(f"<div>{''.join(data['text/html'])}</div>")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def set_formulas(html: str) -> str:
    """Return a page of the generator with its formulas' indices and powers set, but for code."""
    plain, parts = 0, _TAG.split(html)
    for number, part in enumerate(parts):
        if number % 2:
            plain += bool(re.match("<" + _PLAIN, part)) - bool(re.match("</" + _PLAIN, part))
        elif not plain:
            indexed = _INDEX.sub(r"\1<sub>\2</sub>", part)
            parts[number] = _POWER.sub(r"<sup>\1</sup>", indexed)
    return "".join(parts)


def build(docs: Path, settings: dict[str, Any], output: Path, errors: Path | None) -> int:
    """Write the site of a folder of pages; return the generator's exit status.

    Args:
        errors: the reference of errors, which tests/errors_page.py generates; None leaves it out.
    """
    if errors:
        (reference,) = (part["Reference"] for part in settings["nav"] if "Reference" in part)
        reference.insert(1, {"Errors and what to do": "errors.md"})
    named = dict(titles(settings.get("nav", [])))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shutil.copytree(docs, work / "docs")
        if docs == ROOT / "docs":
            for source, page in OUTSIDE.items():
                if source.endswith(".ipynb"):
                    notebook_page(ROOT / source, work / "docs" / page)
                else:
                    shutil.copyfile(ROOT / source, work / "docs" / page)
            for pictures in PICTURES:
                shutil.copytree(ROOT / pictures, work / "docs" / "figures", dirs_exist_ok=True)
        if errors:
            shutil.copyfile(errors, work / "docs" / "errors.md")
        sources = {page: source for source, page in OUTSIDE.items()}
        for file in (work / "docs").rglob("*.md"):
            name = str(file.relative_to(work / "docs"))
            text = file.read_text(encoding="utf-8")
            source = sources.get(name, f"docs/{name}")
            file.write_text(page_of(text, source, named, settings.get("repo_url", "")), "utf-8")
        here = settings | {"docs_dir": "docs", "site_dir": "site"}
        (work / "mkdocs.yml").write_text(yaml.safe_dump(here, sort_keys=False), "utf-8")
        program = Path(sys.executable).with_name("zensical")
        line = [str(program), "build", "--strict", "--config-file", str(work / "mkdocs.yml")]
        status = subprocess.run(line, check=False).returncode
        if status == 0:
            for file in (work / "site").rglob("*.html"):
                file.write_text(set_formulas(file.read_text(encoding="utf-8")), "utf-8")
            shutil.rmtree(output, ignore_errors=True)
            shutil.copytree(work / "site", output)
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="the site's folder, which is replaced")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the folder of pages")
    parser.add_argument("--settings", type=Path, default=ROOT / "mkdocs.yml")
    parser.add_argument("--errors", type=Path, help="the page that tests/errors_page.py wrote")
    args = parser.parse_args()
    settings = yaml.safe_load(args.settings.read_text(encoding="utf-8"))
    sys.exit(build(args.docs.resolve(), settings, args.output, args.errors))
