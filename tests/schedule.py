"""Which tests run when, and in which order: one tier for each.

- ``first``: `make test`, a sample of every room: files that take at most `SHORT` seconds, and what
  schedule.toml names of the others;
- ``rest``: `make test-rest`, what a change must pass besides; the CI runs both, in one session;
- ``later``: only `make test-all`, which runs everything.

How long a file takes is measured, and stands in durations.json; a new file counts as short until
it is measured again::

    make test test-rest PYTEST_ADDOPTS='--durations 0 --durations-min 0' | tee log
    .venv/bin/python -m tests.schedule < log

xdist's workers take whole files (a file's fixtures are made once), or whole folders where a fixture
of all files takes long, and those first that take longest, so that no worker ends minutes after the
other.
"""

import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import pytest

RECORD = Path(__file__).with_name("durations.json")
# Seconds of the files that take at least one.
SECONDS: dict[str, float] = json.loads(RECORD.read_text())
SHORT = 6.0
# Folders with a fixture that takes seconds: a server that imports everything, and TRL.
TOGETHER = ("tests/finetune/", "tests/plan/hollow/")
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
FIRST, LATER, OTHER_VERSIONS = (tuple(TABLE[n]) for n in ("first", "later", "other_versions"))
SAMPLED: dict[str, int] = TABLE["sampled"]


def scope(nodeid: str) -> str:
    """What one worker takes: a file, or a folder of `TOGETHER`."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The same items, those first whose scope takes longest."""
    seconds: Counter[str] = Counter()
    for file, of_file in SECONDS.items():
        seconds[scope(file)] += of_file
    return sorted(items, key=lambda item: -seconds[scope(item.nodeid)])


def is_first(nodeid: str) -> bool:
    """Whether `make test` runs a test, or some test of a file, unless it is a later one."""
    file = nodeid.partition("::")[0]
    if SECONDS.get(file, 0.0) <= SHORT:
        return True
    return nodeid.startswith(FIRST) or (nodeid == file and any(n.startswith(file) for n in FIRST))


def tiers(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, str]]:
    """Yield every test and its tier."""
    cases: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        left_out = item.nodeid.startswith(LATER) or cases[test] % SAMPLED.get(test, 1)
        if left_out or item.get_closest_marker("later"):
            yield item, "later"
        else:
            yield item, "first" if is_first(item.nodeid) else "rest"
        cases[test] += 1


def is_for_other_versions(nodeid: str) -> bool:
    """Whether a test is in the sample that other versions of packages are tried with."""
    return nodeid.startswith(OTHER_VERSIONS)


def measured(log: Iterable[str]) -> dict[str, float]:
    """Seconds of files, from what pytest prints with ``--durations 0``."""
    seconds: Counter[str] = Counter()
    for line in log:
        if found := re.match(r"([\d.]+)s (?:setup|call|teardown) +(\S+?)::", line):
            seconds[found[2]] += float(found[1])
    return {file: round(s, 1) for file, s in sorted(seconds.items()) if s >= 1.0}


def record(argv: Sequence[str], log: TextIO) -> None:
    """Write durations.json from a log; refuse arguments, a terminal and a log without durations."""
    usage = f"run it as python -m tests.schedule < log; {RECORD.name} is unchanged"
    if argv:
        raise SystemExit(f"unknown: {' '.join(argv)}: {usage}")
    if log.isatty():
        raise SystemExit(f"stdin is a terminal: {usage}")
    if not (seconds := measured(log)):
        cure = "pytest prints them with --durations 0 --durations-min 0"
        raise SystemExit(f"stdin has no durations of 1 s or more: {cure}; {usage}")
    RECORD.write_text(json.dumps(seconds, indent=1) + "\n")


if __name__ == "__main__":
    record(sys.argv[1:], sys.stdin)
