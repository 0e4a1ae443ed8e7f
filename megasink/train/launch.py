"""``megasink train``: start the ranks of this node through torchrun and show how they get on."""

import argparse
import inspect
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megasink.command_line import Reading
from megasink.errors import ConfigError, UserError
from megasink.flags import add_options
from megasink.train import early
from megasink.train.run_dir import folder_problem, newest_checkpoint
from megasink.train.tail import NewLines

_ERROR = "megasink: error: "
# What ranks that are told to end have for the step that they are in and a checkpoint.
_SAVE_SECONDS = "600"


def main(argv: Sequence[str] | None = None) -> int:
    """Train on this machine: one rank per CUDA device, or gloo ranks on the CPU.

    Any flag of Megatron's pre-training is accepted, and those of megasink, which are below;
    --full-help lists them all. With --resume the flags of the run's last start need not be
    repeated. For several nodes use torchrun, as examples/pretrain_gpt_sink.sh does.
    """
    parser = _parser()
    parser.add_argument("--run-dir")
    read = Reading(parser, sys.argv[1:] if argv is None else argv)
    args, flags = read.namespace, read.unknown
    if read.problems:
        raise ConfigError(read.problems)
    if {"-h", "--help"} & set(flags):
        parser = _parser()
        add_options(parser)
        parser.print_help()
        parser.exit()
    if args.full_help:
        return subprocess.run(
            [sys.executable, "-m", "megasink.train", "--help"], check=False
        ).returncode
    run_dir = Path(args.run_dir or time.strftime("runs/%Y%m%d-%H%M%S"))
    resume = "--resume" in flags
    # Asked here too, so that a refused start leaves nothing in the folder.
    if problem := folder_problem(run_dir, resume=resume):
        raise UserError(problem)
    if resume:
        flags = [*_flags_of_last_start(run_dir), *flags]
    if args.ranks is not None and args.ranks < 1:
        raise UserError(f"--ranks {args.ranks}: start at least one process")
    # Here too: the ranks need seconds until they can say it.
    early.check(["--run-dir", str(run_dir), *flags], args.ranks)
    ranks = args.ranks if args.ranks is not None else _default_ranks(flags)
    return launch(flags, run_dir, ranks)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megasink train",
        usage="megasink train [--ranks N] [--run-dir FOLDER] FLAGS",
        description=inspect.cleandoc(main.__doc__ or ""),
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="processes to start; default: one per CUDA device, else tensor x pipeline ranks",
    )
    parser.add_argument("--full-help", action="store_true", help="list every flag and exit")
    return parser


def launch(flags: Sequence[str], run_dir: Path, ranks: int) -> int:
    """Run the ranks to their end, with a progress bar (or lines, where there is no terminal).

    Args:
        flags: Megatron's and megasink's, without ``--run-dir``.
        run_dir: folder of the run.
        ranks: processes on this machine.

    Returns:
        0.

    Raises:
        UserError: a rank failed; the message is the rank's own, and where its log is.
    """
    logs = run_dir / "logs" / time.strftime("%Y%m%d-%H%M%S")
    console = Console()
    console.print(f"run {run_dir}: {ranks} ranks, logs in {logs}", highlight=False, soft_wrap=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
    ]
    command += [f"--nproc-per-node={ranks}", f"--log-dir={logs}", "--redirects=3"]
    command += ["-m", "megasink.train", "--run-dir", str(run_dir), *flags]
    new_lines = NewLines(run_dir / "metrics.jsonl")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} cannot be written: {error.strerror}") from error
    with (logs / "torchrun.log").open("w") as own:
        environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _SAVE_SECONDS} | os.environ
        starting = subprocess.Popen(command, stdout=own, stderr=own, env=environment)
        with _terminated_with_us(starting, run_dir) as process:
            _follow(process, new_lines, _train_iters(flags), console)
    if process.returncode:
        message = _what_failed(logs, process.returncode)
        if killed := _killed(logs):
            message = f"{killed}; {_left(run_dir)}"
        if not (run_dir / "config.json").is_file():
            # Refused before it began: the folder is as it was.
            shutil.rmtree(logs)
            for folder in (logs.parent, run_dir):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
        raise UserError(message)
    return 0


def _flags_of_last_start(run_dir: Path) -> list[str]:
    """What the run was started with, so that a resume need not repeat it."""
    starts = run_dir / "starts.jsonl"
    if not starts.is_file():
        return []  # the ranks will say that there is no run
    command: list[str] = json.loads(starts.read_text().splitlines()[-1])["command"][1:]
    flags = [flag for flag in command if flag != "--resume"]
    if "--run-dir" in flags:
        at = flags.index("--run-dir")
        del flags[at : at + 2]
    return flags


def _default_ranks(flags: Sequence[str]) -> int:
    import torch

    if "--cpu" not in flags and torch.cuda.is_available():
        return torch.cuda.device_count()
    kinds = ("tensor-model", "pipeline-model", "context")
    return math.prod(_value(flags, f"--{kind}-parallel-size", 1) for kind in kinds)


def _value(flags: Sequence[str], name: str, default: int) -> int:
    for flag, value in zip(flags, [*flags[1:], ""], strict=True):
        text = flag.removeprefix(f"{name}=") if flag.startswith(f"{name}=") else value
        if (flag == name or flag.startswith(f"{name}=")) and text.isdigit():
            default = int(text)  # the last one counts, as in argparse
    return default


def _train_iters(flags: Sequence[str]) -> int | None:
    return _value(flags, "--train-iters", 0) or None


@contextmanager
def _terminated_with_us(process: "subprocess.Popen[bytes]", run_dir: Path) -> Iterator[Any]:
    """torchrun ends its ranks when it is told to: hand on what ends us, and say what is left."""
    told = []

    def hand_on(number: int, frame: Any) -> None:
        told.append(number)
        process.send_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        yield process
    except KeyboardInterrupt:
        told.append(signal.SIGINT)
        process.terminate()
        process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if told and process.returncode:
        raise UserError(f"stopped by {signal.Signals(told[0]).name}; {_left(run_dir)}")


def _left(run_dir: Path) -> str:
    """What of a run is left, and how to go on."""
    newest = newest_checkpoint(run_dir / "checkpoints")
    if newest is None:
        return "no checkpoint was saved yet (--save-interval)"
    return f"go on from step {newest} with: megasink train --run-dir {run_dir} --resume"


def _killed(logs: Path) -> str | None:
    """Which rank a signal ended first, by torchrun's log; it terminated the others then."""
    text = (logs / "torchrun.log").read_text(errors="replace")
    # Its table of failures; the others may have seen the lost connection before torchrun did.
    row = r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: -(\d+) \(pid: (\d+)\)"
    for rank, number, pid in re.findall(row, text):
        if int(number) == signal.SIGTERM or f"Unable to shutdown process {pid} " in text:
            continue  # torchrun's own doing
        name = signal.Signals(int(number)).name
        why = " (was there no memory left? dmesg says so)" if name == "SIGKILL" else ""
        return f"rank {rank} was killed by {name}{why}"
    return None


def _follow(
    process: "subprocess.Popen[bytes]",
    new_lines: NewLines,
    total: int | None,
    console: Console,
) -> None:
    """Show new lines of metrics.jsonl until the process ends."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}" if total else "{task.completed:.0f}"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("starting", total=total, state="")
        last_line, left = time.monotonic(), ""
        recent: deque[float] = deque(maxlen=10)  # seconds of a step
        while True:
            ended = process.poll() is not None
            for line in new_lines():
                state = _state(line)
                if "seconds" in line and total:
                    recent.append(line["seconds"])
                    left = _time_left(recent, total - line["iteration"])
                progress.update(
                    task, description="training", completed=line["iteration"], state=state
                )
                # Without a terminal: a line every ten seconds, and every evaluation.
                due = time.monotonic() - last_line > 10 or "valid_lm_loss" in line
                if due or line["iteration"] == total:
                    if not console.is_terminal:
                        print(f"step {line['iteration']}/{total or '?'}  {state}{left}", flush=True)
                    elif "valid_lm_loss" in line:
                        progress.console.print(f"step {line['iteration']}  {state}")
                    last_line = time.monotonic()
            if ended:
                return
            time.sleep(0.2)


def _time_left(seconds: Collection[float], steps: int) -> str:
    left = int(sum(seconds) / len(seconds) * steps)
    return f"  left {left // 3600}:{left % 3600 // 60:02}:{left % 60:02}"


def _state(line: dict[str, Any]) -> str:
    names = {
        "lm_loss": "loss",
        "imbalance": "imbalance",
        "valid_lm_loss": "validation loss",
        "valid_bits_per_byte": "bits per byte",
        "test_lm_loss": "test loss",
        "test_bits_per_byte": "bits per byte",
    }
    parts = [f"{text} {line[key]:.4f}" for key, text in names.items() if line.get(key) is not None]
    return "  ".join(parts)


def _what_failed(logs: Path, code: int) -> str:
    """The rank's own message, or the last line of its traceback."""
    errors = sorted(logs.rglob("stderr.log"))
    texts = {path: path.read_text(errors="replace") for path in errors}
    for text in texts.values():
        if _ERROR in text:
            return text.rpartition(_ERROR)[2].strip()
    for path, text in texts.items():
        found = re.findall(
            r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception|Interrupt)\b.*)$", text, re.M
        )
        if found:
            return f"rank {path.parent.name} failed: {found[-1]} (log: {path})"
    return f"the ranks ended with exit code {code}; logs in {logs}"
