"""Kill real runs at random moments, resume them, and compare them with runs that never stopped.

    python -m tests.kills --count 40 --seed 1 --output kills.json

Every run is killed several times on its way and resumed each time. What is counted: lost (a whole
checkpoint, or a step that was to be saved), hung, orphans, unequal (metrics.jsonl, to the bit).
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.forkserver import ForkServer
from tests.kills.configurations import CONFIGURATIONS, STEPS, Configuration
from tests.kills.trial import KINDS, Outcome, Run, steps

COUNTS = ("lost", "hung", "orphans", "unequal")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=40, help="kills in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the runs")
    parser.add_argument("--only", help="configurations whose name contains this")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument(
        "--plain-resume", action="store_true", help="--resume in place of --resume auto"
    )
    parser.add_argument("--output", type=Path, default=Path("kills.json"))
    args = parser.parse_args()
    chosen = [c for c in CONFIGURATIONS if not args.only or args.only in c.name]
    if not chosen:
        parser.error(f"--only {args.only}: no such configuration")
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, load(args.load), nursing() as n:
        for index, configuration in enumerate(chosen):
            share = args.count // len(chosen) + (index < args.count % len(chosen))
            generator = random.Random(f"{args.seed} {configuration.name}")
            runs = [
                Run(n, configuration, Path(folder, f"{index}-{name}"), not args.plain_resume)
                for name in ("killed", "whole")
            ]
            try:
                for outcome in kills(*runs, share, args.kinds, generator):
                    outcomes.append(outcome)
                    progress(outcomes, args.count, began)
                    args.output.write_text(report(args, outcomes, began))
            except RuntimeError as error:
                print(f"{configuration.name}: {error}", flush=True)
                return 1
    print(table(outcomes, chosen))
    bad = sum(bool(o.lost or o.hung or o.orphans or o.unequal) for o in outcomes)
    print(f"{len(outcomes)} kills, {bad} with something wrong; {args.output}")
    return bool(bad)


def kills(
    run: Run, whole: Run, count: int, kinds: list[str], generator: random.Random
) -> Iterator[Outcome]:
    """Kill a run so many times on its way, then let it end, and compare."""
    if whole.to_the_end() != 0:
        raise RuntimeError(f"the run that is not killed failed: {whole.said()}")
    expected = steps(whole.folder)
    possible = [k for k in kinds if run.configuration.saves_in_background or "helper" not in k]
    possible = [k for k in possible if run.configuration.ranks > 1 or "SIGSTOP" not in k]
    order = [kind for _ in range(count) for kind in generator.sample(possible, len(possible))]
    for number, kind in enumerate(order[:count], 1):
        if len(steps(run.folder)) >= STEPS - 10:
            finish(run, expected)
            run.begin_anew()
        outcome = run.kill(kind, generator)
        outcome.unequal = unequal(run, expected)
        if number == count:
            outcome.unequal += finish(run, expected)
        yield outcome


def finish(run: Run, expected: dict[int, tuple[object, ...]]) -> int:
    """Resume to the end; how many steps are not as they should be."""
    if run.to_the_end() != 0:
        raise RuntimeError(f"the killed run did not get to its end: {run.said()}")
    return unequal(run, expected) + sum(step not in steps(run.folder) for step in expected)


def unequal(run: Run, expected: dict[int, tuple[object, ...]]) -> int:
    return sum(values != expected[step] for step, values in steps(run.folder).items())


@contextlib.contextmanager
def nursing() -> Iterator[ForkServer]:
    nursery = ForkServer()
    try:
        yield nursery
    finally:
        nursery.close()


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """Other work on the machine."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def progress(outcomes: list[Outcome], count: int, began: float) -> None:
    o, done = outcomes[-1], len(outcomes)
    spent = time.monotonic() - began
    left = int(spent / done * (count - done))
    bad = [f"{name} {value}" for name in COUNTS if (value := getattr(o, name))]
    print(
        f"{done}/{count}  {o.configuration}: {o.kind} after step {o.step}: ended in {o.seconds} s, "
        f"code {o.code}; {', '.join(bad + o.problems) or 'fine'}; {o.said[:200]}  "
        f"[{int(spent)} s, left {left // 60}:{left % 60:02}]",
        flush=True,
    )


def table(outcomes: list[Outcome], configurations: list[Configuration]) -> str:
    lines = [f"{'configuration':36} kills " + " ".join(f"{name:>8}" for name in COUNTS)]
    for configuration in configurations:
        mine = [o for o in outcomes if o.configuration == configuration.name]
        cells = " ".join(f"{sum(int(getattr(o, name)) for o in mine):8}" for name in COUNTS)
        lines.append(f"{configuration.name:36} {len(mine):5} {cells}")
    return "\n".join(lines)


def report(args: argparse.Namespace, outcomes: list[Outcome], began: float) -> str:
    totals = {name: sum(int(getattr(o, name)) for o in outcomes) for name in COUNTS}
    found = {"seed": args.seed, "load": args.load, "kills": len(outcomes), **totals}
    found |= {"seconds": round(time.monotonic() - began), "each": [asdict(o) for o in outcomes]}
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
