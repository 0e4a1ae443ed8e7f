"""Oldest and newest versions that the tests are tried with: ``make versions``.

``python -m tests.versions oldest newest`` makes an environment of each in build/versions, runs the
sample of tests/schedule.py there, and writes the result to tests/versions.json, from which
``python -m tests.verified`` makes the table of docs/verified.md. An environment takes 5 GB; its
Python must be on the PATH.
"""

import json
import os
import shutil
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("versions.json")


class Row(NamedTuple):
    """What a row is tried with.

    Attributes:
        python: The interpreter's name on the PATH.
        packages: What pip is asked for beside megasink[train,eval] and `_TESTS`. What is not named
            is the newest that pip finds.
    """

    python: str
    packages: tuple[str, ...] = ()


ROWS = {
    "oldest": Row("python3.12", ("torch==2.11.0", "transformers==5.6.0", "megatron-core==0.19.0")),
    "newest": Row("python3.13"),
}
TOLD = ("torch", "transformers", "megatron-core", "tokenizers", "numpy")
_TESTS = "pytest pytest-timeout pytest-xdist accelerate zstandard pyyaml jsonschema".split()


def tried(row: str) -> dict[str, object]:
    """Install a row's versions and run the sample of tests with them.

    Raises:
        subprocess.CalledProcessError: Making the environment failed, or pip.
        SystemExit: The row's Python is not on the PATH.
    """
    interpreter = shutil.which(ROWS[row].python)
    if interpreter is None:
        sys.exit(f"the row {row!r} needs {ROWS[row].python} on the PATH")
    folder = ROOT / "build" / "versions" / row
    python = folder / "bin" / "python"
    subprocess.run([interpreter, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    wanted = ["--no-compile", "--editable", ".[train,eval]", *_TESTS, *ROWS[row].packages]
    subprocess.run([*pip, *wanted], cwd=ROOT, check=True)
    told = "import json, sys, importlib.metadata as m; print(json.dumps("
    told += "{'python': '.'.join(map(str, sys.version_info[:3]))}"
    told += f" | {{name: m.version(name) for name in {TOLD}}}))"
    found = subprocess.run(
        [str(python), "-c", told], capture_output=True, text=True, check=True, cwd=folder
    )
    report = folder / "report.xml"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "-m", "versions", f"--junitxml={report}"]
    command += ["--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"]
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    suite = ElementTree.parse(report).getroot()
    suite = suite if suite.tag == "testsuite" else suite[0]
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    return {
        "date": date.today().isoformat(),
        "versions": json.loads(found.stdout),
        "passed": int(suite.get("tests", 0)) - failed - skipped,
        "skipped": skipped,
        "failed": failed,
    }


def table(results: dict[str, dict[str, object]]) -> str:
    """The results as Markdown."""
    lines = [f"| | python | {' | '.join(TOLD)} | tests |", "|---" * (len(TOLD) + 3) + "|"]
    for row, result in results.items():
        versions = dict(result["versions"])  # type: ignore[call-overload]
        cells = [versions[name] for name in ("python", *TOLD)]
        counts = f"{result['passed']} passed, {result['failed']} failed, {result['date']}"
        lines.append(f"| {row} | {' | '.join(cells)} | {counts} |")
    return "\n".join(lines) + "\n"


def is_old(package: str) -> bool:
    """Whether an older version is installed than every other test runs with (constraints.txt)."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{package}=="))
    return Version(metadata.version(package)) < Version(line.partition("==")[2])


def pinned(row: str) -> dict[str, str]:
    """{package: version} that a row asks for."""
    found = map(Requirement, ROWS[row].packages)
    return {each.name: next(iter(each.specifier)).version for each in found}


if __name__ == "__main__":
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in sys.argv[1:] or ROWS:
        results[name] = tried(name)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
        print(table({name: results[name]}))
    sys.exit(any(result["failed"] for result in results.values()))
