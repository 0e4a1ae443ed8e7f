"""`python -m tests.damage [--large] [NAME...]`: every damaged input, and the counts."""

import argparse
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from tests.distributed.pool import free_port


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.damage", description=__doc__)
    parser.add_argument("names", nargs="*", help="of cases, or the beginning of their names")
    parser.add_argument("--large", action="store_true", help="bombs of gigabytes")
    args = parser.parse_args()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    warnings.simplefilter("ignore")
    root = Path(tempfile.mkdtemp(prefix="damage"))
    try:
        return _run(root, args.names, large=args.large)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _run(root: Path, names: list[str], *, large: bool) -> int:
    from megasink.cpu.prepare_process import prepare_process

    prepare_process("cpu")
    # What every forked process would import again.
    import megatron.training  # noqa: F401
    import transformers  # noqa: F401

    from tests.damage.harness import Sound, judge, show
    from tests.damage.sound import make_sound
    from tests.damage.tables import CASES

    chosen = {
        name: case
        for name, case in CASES.items()
        if not names or any(name.startswith(wanted) for wanted in names)
    }
    os.environ["MASTER_PORT"] = str(free_port())
    reports = any(name.endswith("/report") or name.startswith("fuzz/") for name in chosen)
    unfinished = any(name.startswith("going-on/") for name in chosen)
    kept = Path(os.environ.get("DAMAGE_SOUND", "/nowhere"))  # made before, for many short runs
    sound = (
        Sound(kept, large)
        if kept.is_dir()
        else make_sound(root / "sound", large=large, analysis=reports, unfinished=unfinished)
    )
    counts: Counter[str] = Counter()
    most, slowest, start = 0, 0.0, time.monotonic()
    for name, case in chosen.items():
        os.environ["MASTER_PORT"] = str(free_port())
        folder = root / "cases" / name.replace("/", "-")
        outcome = judge(name, case, folder, sound)
        counts["wrong" if outcome.wrong else f"ended with {outcome.code}"] += 1
        most, slowest = max(most, outcome.rss_bytes), max(slowest, outcome.seconds)
        show(
            f"{name:32} {outcome.seconds:6.1f} s {outcome.rss_bytes >> 20:5} MiB  "
            f"{outcome.message[:150]!r}",
            outcome.wrong,
        )
        shutil.rmtree(folder, ignore_errors=True)
    told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(
        f"{len(chosen)} damaged inputs: {told}; largest {most / 1e9:.2f} GB, slowest "
        f"{slowest:.1f} s, {time.monotonic() - start:.0f} s in all"
    )
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
