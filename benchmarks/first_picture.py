"""Time from nothing to the first pictures of a Hugging Face folder: README's three commands.

python benchmarks/first_picture.py FOLDER        (FOLDER is made; the environment takes 5.6 GB)

The model is a Llama of two layers with random weights, the text this repository's documentation.
Wall and CPU seconds of each command, of the commands together, and the files that came out.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.light.session import make_model  # noqa: E402

COMMANDS = (
    "{python} -m venv env",
    "env/bin/pip install --quiet {root}",
    "env/bin/megasink analyze model --data text.txt --output look",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True)
    make_model(folder / "model")
    pages = sorted((ROOT / "docs").glob("*.md"))
    (folder / "text.txt").write_text("".join(page.read_text() for page in pages)[:20_000])

    base = Path(sys.base_prefix, "bin", "python3")
    total = [0.0, 0.0]
    for command in COMMANDS:
        words = command.format(python=base, root=ROOT).split()
        wall, cpu = time.perf_counter(), _children()
        subprocess.run(words, cwd=folder, check=True)
        seconds = (time.perf_counter() - wall, _children() - cpu)
        total = [sum(pair) for pair in zip(total, seconds, strict=True)]
        print(f"{seconds[0]:6.1f} s, {seconds[1]:6.1f} CPU s   {command}", flush=True)
    found = sorted(str(path.relative_to(folder)) for path in (folder / "look").rglob("*.png"))
    page = folder / "look" / "report.html"
    outcome = f"together; {page.name} and {len(found)} pictures"
    print(f"{total[0]:6.1f} s, {total[1]:6.1f} CPU s   {outcome}")
    assert page.exists()
    assert found


def _children() -> float:
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    main()
