"""Run every case of several hosts, as root, and print which were named where, and how soon.

python -m tests.hosts --output hosts.json
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests import forkserver
from tests.hosts.cases import CASES
from tests.hosts.job import Outcome, Template, run
from tests.training.hosts import lacking


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("--only", nargs="+", help="cases whose name contains one of these")
    parser.add_argument("--part", default="1/1", help="every Nth case, from the Kth on, as K/N")
    parser.add_argument("--output", type=Path, default=Path("hosts.json"))
    args = parser.parse_args()
    if reason := lacking():
        parser.error(reason)
    only = args.only or [""]
    chosen = {name: case for name, case in CASES.items() if any(part in name for part in only)}
    part, parts = map(int, args.part.split("/"))
    chosen = dict(list(chosen.items())[part - 1 :: parts])
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        template = Template(Path(folder))
        for name, case in chosen.items():
            try:
                outcome = run(name, case, template)
            except Exception as error:
                outcome = Outcome(name, wrong=[f"{type(error).__name__}: {error}"])
            outcomes.append(outcome)
            print(
                f"{len(outcomes)}/{len(chosen)}  {name}: named {outcome.named}, exit codes "
                f"{outcome.codes}; {'; '.join(outcome.wrong) or 'fine'}  "
                f"[{time.monotonic() - began:.0f} s]",
                flush=True,
            )
            for key, line in outcome.lines.items():
                print(f"    {key}: {line}", flush=True)
            args.output.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")
    wrong = [one for one in outcomes if one.wrong]
    slowest = max((s for one in outcomes for s in one.named.values()), default=0.0)
    print(f"{len(outcomes)} cases, {len(wrong)} with something wrong, slowest {slowest} s")
    forkserver.server().close()
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
