"""The documentation builds as a site whose links lead somewhere and which fetches nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build(folder, config=ROOT / "mkdocs.yml"):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    result = build(folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def test_a_page_fetches_nothing_from_another_host(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    loaded = r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*"""
    linked = r"""<link\b[^>]*\brel=["']?(?:stylesheet|preconnect|preload|icon)[^>]*//[^>]*"""
    for page in pages:
        assert not re.findall(f"{loaded}|{linked}", page.read_text()), page.name
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text())


def test_every_block_of_code_is_one(site):
    for page in site.glob("*.html"):
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", page.read_text(), flags=re.S)
        assert "```" not in text, page.name


def test_pages_outside_of_docs_are_linked_within_the_site(site):
    home = (site / "index.html").read_text()
    for page in ("contributing.html", "docker.html", "maths.html", "demo.png"):
        assert f'"{page}"' in home, page
    assert "../tests/hollow/allowed.py" not in (site / "gpu.html").read_text()


def test_an_anchor_that_is_missing_ends_the_build(tmp_path):
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text("# One\n\n[two](#two)\n")
    settings = (ROOT / "mkdocs.yml").read_text().split("nav:")[0]
    settings = settings.replace("docs_dir: docs\n", "").replace("hooks: [tools/site.py]\n", "")
    (tmp_path / "mkdocs.yml").write_text(settings)
    result = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert result.returncode != 0
    assert "#two" in result.stderr
