"""The documentation builds as a site whose links lead somewhere and which fetches nothing."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import errors_page
from tests.analysis.pages.browser import CHROMIUM, seen

ROOT = Path(__file__).parents[1]


def build(folder, *flags):
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "site.py", folder, *flags],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder, errors = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("errors") / "page.md"
    errors.write_text(errors_page.page({"misspelt-command": "    $ megasink trian"}))
    result = build(folder, "--errors", errors)
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


def test_names_of_files_and_formulas_are_set_for_a_reader(site):
    maths = (site / "maths.html").read_text()
    assert '<a href="papers.html">Papers and their rows</a>' in maths
    assert "G<sub>i</sub> = sigmoid(LSE<sub>i</sub> - s<sub>h</sub>)" in maths
    assert "|dO<sub>i0</sub>| &lt; 2<sup>-60</sup> |g<sub>i</sub>|" in maths
    assert "softmax(z<sub>i</sub>)<sub>j</sub> v<sub>j</sub>" in maths
    assert "dL/dLSE<sub>i</sub>" in maths
    assert "dL/dImp_h = 2 lambda [(Imp_h - mu) / mu^2" in maths  # code stays as it is written
    home = (site / "index.html").read_text()
    assert re.search(r'<a href="demo.png"><img [^>]*src="demo.png"', home)


def test_pages_outside_of_docs_are_linked_within_the_site(site):
    home = (site / "index.html").read_text()
    for page in ("contributing.html", "docker.html", "maths.html", "demo.png"):
        assert f'"{page}"' in home, page
    assert "../megasink/plan/hollow/README.md" not in (site / "gpu.html").read_text()


def test_pages_that_are_generated_elsewhere_are_in_the_site(site):
    assert "$ megasink trian" in (site / "errors.html").read_text()
    assert '"./errors.html"' in (site / "options.html").read_text()
    text = "".join((site / page).read_text() for page in ("results.html", "real-models.html"))
    pictures = re.findall(r'<img [^>]*src="(figures/[^"]+)"', text)
    assert len([name for name in pictures if "/results-" in name]) >= 5
    assert len([name for name in pictures if "/results-" not in name]) == 5
    assert all((site / name).stat().st_size > 1000 for name in pictures)


def test_a_notebook_is_a_page_with_its_outputs(site):
    text = (site / "notebook-1.html").read_text()
    pictures = re.findall(r'src="(notebook-1-[\d-]+\.png)"', text)
    assert len(pictures) == 3
    assert all((site / name).stat().st_size > 10_000 for name in pictures)
    assert "30 layers of 9 heads" in text  # SmolLM2's, not those of the model in its place
    assert 'href="notebook-2.html"' in text
    assert 'href="notebook-1.html"' in (site / "python.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="needs MEGASINK_TEST_CHROMIUM")
@pytest.mark.parametrize("page", ["concepts.html", "results.html"])
def test_a_page_fits_a_wide_and_a_narrow_screen(site, page, tmp_path):
    """The page with the drawings, and the one with the widest tables."""
    folder = shutil.copytree(site, tmp_path / "site")
    measured = seen(folder / page, (1280, 390), folder).measured
    assert set(measured) == {1280, 390}
    for width, found in measured.items():
        assert found["scroll"] <= width
        assert found["images"] >= 5
        assert found["blank"] == []
        assert found["outside"] == 0


def test_an_anchor_that_is_missing_ends_the_build(tmp_path):
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text("# One\n\n[two](#two)\n")
    settings = (ROOT / "mkdocs.yml").read_text().split("nav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings.replace("extra_css: [site.css]", ""))
    site = tmp_path / "site"
    result = build(site, "--docs", pages, "--settings", tmp_path / "mkdocs.yml")
    assert result.returncode != 0
    assert "anchor does not exist" in result.stdout + result.stderr
    assert not site.exists()
