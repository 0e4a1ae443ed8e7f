"""`python -m tests.faults [COMMAND[/FAULT]...]`: every command under every fault, and a table."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from tests.distributed.pool import free_port


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="COMMAND[:FAULT], or the beginnings of both")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="faults"))
    try:
        if "failing.so" not in os.environ.get("LD_PRELOAD", ""):
            return _with_failing_calls(root, sys.argv[1:])
        return _run(root, args.names)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _with_failing_calls(root: Path, words: list[str]) -> int:
    """Start again with the library that fails calls of the C library where it is asked to."""
    library, source = root / "failing.so", Path(__file__).with_name("failing.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        **dict.fromkeys(("OMP_NUM_THREADS",), "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
    }
    line = [sys.executable, "-W", "ignore", "-m", "tests.faults", *words]
    return subprocess.run(line, env=environment).returncode


def _run(root: Path, names: list[str]) -> int:
    warnings.simplefilter("ignore")
    from megasink.cpu.prepare_process import prepare_process

    prepare_process("cpu")
    # What every forked process would import again.
    import megatron.training  # noqa: F401
    import transformers  # noqa: F401

    from megasink.analysis.pages import drawing
    from megasink.cli import COMMANDS, main_of
    from megasink.figures import style
    from tests.damage.harness import Sound, show
    from tests.damage.sound import make_sound
    from tests.faults.commands import lines
    from tests.faults.harness import FAULTS, Fault, attempt

    for command in COMMANDS:
        main_of(command)
    # Most of the time of a page; what is drawn is not what fails.
    drawing.rendered = style.rendered = lambda *_, **__: b"\x89PNG" + bytes(9000)
    os.environ["MASTER_PORT"] = str(free_port())
    place = Path(os.environ.get("FAULTS_SOUND") or root / "sound")  # kept by who names it
    sound = Sound(place) if place.is_dir() else make_sound(place, unfinished=False)
    for made, copy in ((sound.analysis, sound.other), (sound.run, sound.run2)):
        if not copy.is_dir():
            shutil.copytree(made, copy)
    pairs = [f"{name}:".split(":")[:2] for name in names] or [["", ""]]
    counts: Counter[tuple[str, str]] = Counter()
    start = time.monotonic()
    for command, line in lines(sound).items():
        chosen = [
            fault
            for fault in FAULTS.values()
            if any(command.startswith(c) and fault.name.startswith(f) for c, f in pairs)
        ]
        if not chosen:
            continue
        needs = 0
        whole = [Fault("none", volume=64 << 20)] if any(fault.volume for fault in chosen) else []
        for fault in (*whole, *chosen):
            os.environ["MASTER_PORT"] = str(free_port())
            folder = root / "cases" / command.replace("/", "-") / fault.name
            if fault.name == "none":
                needs = _needs(line, folder, sound, fault)
                continue
            end = attempt(
                *(line.words, fault, folder, sound.root),
                needs=needs,
                kept=line.kept,
                prepare=line.prepare,
            )
            kind = fault.name.rpartition("-")[0] if fault.name[-1].isdigit() else fault.name
            counts[kind, "ran"] += 1
            counts[kind, "WRONG" if end.wrong else f"ended with {end.code}"] += 1
            show(
                f"{command:22} {fault.name:18} {end.seconds:5.1f} s {end.code:4} "
                f"{end.message[:230]!r}",
                end.wrong,
            )
            shutil.rmtree(folder, ignore_errors=True)
    wrong = sum(n for (_, what), n in counts.items() if what == "WRONG")
    ran = sum(n for (_, what), n in counts.items() if what == "ran")
    for kind in dict.fromkeys(kind for kind, _ in counts):
        told = ", ".join(f"{n} {what}" for (k, what), n in sorted(counts.items()) if k == kind)
        print(f"{kind:14} {told}")
    print(f"{ran} faults: {wrong} wrong, {time.monotonic() - start:.0f} s in all")
    return 1 if wrong else 0


def _needs(line: object, folder: Path, sound: object, fault: object) -> int:
    """Return the bytes that a command writes where nothing fails."""
    from tests.faults import harness

    sizes = []

    real = harness._names

    def noted(place: Path) -> set[str]:
        sizes.append(harness.used(place))
        return real(place)

    harness._names = noted
    try:
        end = harness.attempt(
            *(line.words, fault, folder, sound.root), kept=line.kept, prepare=line.prepare
        )
    finally:
        harness._names = real
    assert end.code == 0, end
    return sizes[-1] - sizes[0]


if __name__ == "__main__":
    sys.exit(main())
