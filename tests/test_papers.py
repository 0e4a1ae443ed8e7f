"""docs/papers.md names code that exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "papers.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_a_file_or_folder_exists(name):
    """In the package, or by its path from the root: a bare name of a file elsewhere is wrong."""
    assert (ROOT / "megasink" / name).exists() or (ROOT / name).exists()


def test_every_row_names_code():
    rows = [
        line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| P\d", line)
    ]
    assert len(rows) >= 50
    assert len(NAMED) >= 40
    for row in rows:
        assert "`" in row[-1] or row[-1].startswith("not implemented"), row
