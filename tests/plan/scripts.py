"""``python -m tests.plan.scripts FOLDER``: check every launch script below a folder as plan does.

A script is a shell or YAML file with --num-layers. Each is read, parsed and checked as rank 0 on
the hollow GPU; models are configured and not built. Prints the outcome by repository (the folders
in FOLDER), and the refused flags by the number of scripts. ``--json FILE`` writes every outcome,
and a repeated command checks what is not in FILE.
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from megasink.errors import ConfigError, UserError
from megasink.plan import hollow, run_plan
from megasink.plan.stand_in_flags import with_stand_ins

_ON_GPU = "MEGASINK_TEST_ON_HOLLOW_GPU"


def scripts_of(folder: Path) -> list[Path]:
    """The files that may be launch scripts."""
    files = (path for path in sorted(folder.rglob("*")) if path.suffix in (".sh", ".yaml", ".yml"))
    return [path for path in files if "--num-layers" in path.read_text(errors="replace")]


def outcome(path: Path, values: list[str]) -> dict[str, Any]:
    """The problems of a script: `open` if it does not say all of its values."""
    words = ["--script", str(path), *(word for value in values for word in ("--set", value))]
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            args, flags = run_plan.read_line(words)
            flags = with_stand_ins(words, flags)
    except UserError as error:
        kind = "open" if "no value for" in str(error) else "unread"
        return {"kind": kind, "problems": getattr(error, "problems", [str(error)])}
    problems, notes = checked(flags, args.ranks)
    kind = "refused" if problems else "passes"
    return {"kind": kind, "problems": problems, "notes": [*said.getvalue().splitlines(), *notes]}


def checked(flags: list[str], ranks: int | None) -> tuple[list[str], list[str]]:
    """What a rank says of a line in a fork of this process: (its problems, its notes)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "w") as answer:
            json.dump(_answer(flags, ranks), answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    problems, notes = json.loads(text or '[["the check crashed"], []]')
    return problems, notes


def _answer(flags: list[str], ranks: int | None) -> tuple[list[str], list[str]]:
    from megasink.megatron.model_of_arguments import model_config
    from megasink.plan.hollow.lone_rank import be_rank
    from megasink.training import parse_arguments

    notes = list[str]()
    try:
        args = parse_arguments.read(flags)
        notes = args.flag_notes
        args.rank, args.world_size = 0, ranks or parse_arguments.replica_ranks(args)
        be_rank(0, args.world_size)
        parse_arguments.validate(args)
        with parse_arguments.refusals_of_megatron():
            model_config(args).finalize()
    except ConfigError as error:
        return error.problems, notes
    except Exception as error:
        return [f"TRACEBACK {type(error).__name__}: {error}"], notes
    return [], notes


def _key(problem: str) -> str:
    """What a problem is counted under: its first flag, or its first words."""
    found = re.search(r"--[\w-]+", problem)
    start = "unknown " * problem.startswith("unknown")
    return f"{start}{found[0]}" if found else problem[:60]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.plan.scripts")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="write every outcome")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    if _ON_GPU not in os.environ:
        command = [sys.executable, "-W", "ignore", "-m", "tests.plan.scripts", *sys.argv[1:]]
        os.execve(command[0], command, os.environ | hollow.environment() | {_ON_GPU: "1"})
    from megasink.plan.helper import import_everything

    import_everything()
    known = args.json is not None and args.json.exists()
    found: dict[str, dict[str, Any]] = json.loads(args.json.read_text()) if known else {}
    for path in map(str, scripts_of(args.folder)):
        if path not in found:
            found[path] = outcome(Path(path), args.set)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    kinds: dict[str, Counter[str]] = {}
    flags: Counter[str] = Counter()
    for path, answer in found.items():
        repository = Path(path).relative_to(args.folder).parts[0]
        kinds.setdefault(repository, Counter())[answer["kind"]] += 1
        if answer["kind"] == "refused":
            flags.update({_key(problem) for problem in answer["problems"]})
    for repository, counts in kinds.items():
        print(repository, dict(counts))
    print(f"{len(found)} scripts:", dict(sum(kinds.values(), Counter())))
    for name, count in flags.most_common():
        print(f"{count:5} {name}")


if __name__ == "__main__":
    main()
