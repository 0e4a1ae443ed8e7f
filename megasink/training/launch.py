"""``megasink train``: start the ranks of this node through torchrun and show their progress."""

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasink import plugins
from megasink.checkpoints.damage import newest_intact
from megasink.console.printable import say, say_next
from megasink.console.progress import progress
from megasink.console.signals import name_of
from megasink.errors import ConfigError, Stopped, UserError, unknown_name
from megasink.files.json_file import objects_in, read_text
from megasink.files.system_errors import writing
from megasink.options.command_parser import CommandParser, without
from megasink.options.run_options import RESUME, add_options
from megasink.training import parse_arguments, preflight, recipes
from megasink.training.flag_file import named_values
from megasink.training.lease import clear, wait_until_expired, writer_of
from megasink.training.metrics_file import NewLines, weak_loss
from megasink.training.resume_flags import replayed
from megasink.training.run_dir import folder_problem, has_finished_step
from megasink.training.stop import FAILURES, FOR_TORCHRUN, SIGNALS, first_error, left, raised

if TYPE_CHECKING:  # imported only where ranks are started: they are most of the start-up
    from rich.console import Console

    from megasink.training.torchrun_processes import Ranks

_OF_THE_LAUNCHER = ("--ranks", "--run-dir", "--resume")
_SMALL = 1 << 16  # bytes; a disk without room for them is full
# Keys of metrics.jsonl on the progress line, and their names there.
_SHOWN = {
    "lm_loss": "loss",
    "imbalance": "imbalance",
    "valid_lm_loss": "validation loss",
    "valid_bits_per_byte": "bits per byte",
    "test_lm_loss": "test loss",
    "test_bits_per_byte": "bits per byte",
}

_EXAMPLE = (
    "megasink train --recipe tiny --run-dir runs/mine/sink --data-path runs/mine/text "
    "--tokenizer-model runs/mine/text-tokenizer"
)
# Megatron's flags that every run needs, on the first screen of the help.
_OF_MEGATRON = {
    "data-path": (
        "PREFIX",
        "the --output of megasink data; for the example above: megasink data README.md docs "
        "--output runs/mine/text --train-tokenizer 2000",
    ),
    "tokenizer-model": ("FOLDER", "Hugging Face folder of that data's tokenizer"),
    "lr": ("RATE", "peak learning rate; the schedule ends at --min-lr"),
    "train-iters": ("STEPS", "training steps"),
    "global-batch-size": ("N", "sequences per step, of --seq-length tokens each"),
}
# Those of megasink.
_FIRST = (
    *("--ranks", "--recipe", "--run-dir", "--resume", "--device"),
    *("--attention-variant", "--head-balance-coeff"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train on this machine: one rank per CUDA device, or gloo ranks on the CPU.

    Accepts all of Megatron's pre-training flags and those of megasink (docs/options.md); --help-all
    lists every flag. --resume reuses the flags of the run's last start. For several nodes use
    torchrun, as examples/pretrain_gpt_sink.sh does.
    """
    words = recipes.expanded(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        parser = own_parser()
        group = parser.add_argument_group("Megatron's")
        for name, (metavar, text) in _OF_MEGATRON.items():
            group.add_argument(f"--{name}", metavar=metavar, help=text)
        add_options(parser)
        parser.first_screen(_EXAMPLE, *_FIRST, *map("--{}".format, _OF_MEGATRON)).print_help()
        parser.exit()
    if "--help-all" in words:
        return subprocess.run(
            [sys.executable, "-m", "megasink.training", *plugins.flags(words), "--help"],
            check=False,
        ).returncode
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            "megasink train starts its ranks itself: run it without torchrun and pass --ranks, or "
            "give torchrun -m megasink.training"
        )
    # Flags that a resume replays come before the given ones, so these are parsed again.
    resume, given = _resume(words), dict(named_values(words))
    if resume and not given.get("run-dir"):
        raise UserError("--resume needs --run-dir")
    run_dir = Path(*(given.get("run-dir") or [time.strftime("runs/%Y%m%d-%H%M%S")])[:1])
    # Also checked here, so that a refused start leaves nothing in the folder.
    if problem := folder_problem(run_dir, resume=resume):
        raise UserError(problem)
    flags, again = without(words, _OF_THE_LAUNCHER), list[str]()
    if resume:
        again = replayed(flags_of_last_start(run_dir, flags), flags, run_dir)
        flags = [*again, *flags, "--resume", resume]
    words = ["--run-dir", str(run_dir), *again, *words]
    ranks = parse_arguments.look(words, own_parser()).ranks
    if ranks is not None and ranks < 1:
        raise UserError(f"--ranks {ranks}: use 1 or more")
    before = ranks_of_last_start(run_dir) if resume else None
    start = preflight.Line(["--run-dir", str(run_dir), *flags], ranks, before)
    (options,) = preflight.check([start])
    if isinstance(options, ConfigError):
        if writer_of(run_dir):  # what it has not finished is not damaged
            wait_until_expired(run_dir, say)
        raise options
    wait_until_expired(run_dir, say)
    if resume and (done := finished(run_dir, options)):
        say(done)
        more = ["--train-iters", 2 * options.train_iters, "--override-opt-param-scheduler"]
        line = ["train", "--run-dir", run_dir, "--resume", *more, *plugins.flags(words)]
        say_next("train for more steps, with the learning-rate schedule stretched to fit", *line)
        return 0
    if resume and not options.verify_checkpoint:
        where = from_where(run_dir)
        if where or resume == "auto":
            say(f"run {run_dir}: {where or 'no intact checkpoint, starting at step 0'}")
    try:
        launch(flags, run_dir, options.world_size, options.train_iters)
    finally:
        clear(run_dir)  # left by a killed rank
    if note := weak_loss(run_dir / "metrics.jsonl", options.head_balance_coeff):
        say(note)
    if "--mock-data" not in flags:  # its tokens have no meaning
        say_next("generate some text", "generate", run_dir, "--prompt", "Once upon a time")
    say_next("export it for transformers", "convert-to-hf", run_dir, "--output", f"{run_dir}-hf")
    return 0


def _resume(words: Sequence[str]) -> str | None:
    """Return the value of --resume; None without the flag, an error for an unknown value."""
    values = dict(named_values(words)).get("resume")
    if values is None or values == []:
        return None if values is None else RESUME[0]
    if values[0] not in RESUME:
        raise UserError(unknown_name("--resume", values[0], RESUME))
    return values[0]


def own_parser() -> CommandParser:
    """Return the parser of the launcher's own flags."""
    parser = CommandParser(
        prog="megasink train", description=inspect.cleandoc(main.__doc__ or ""), add_help=False
    )
    text = (
        "number of processes; default: as before with --resume, else one per CUDA device, "
        "else one per tensor x pipeline x context rank"
    )
    parser.add_argument("--ranks", type=int, help=text)
    parser.add_argument("--help-all", action="store_true", help="list every flag and exit")
    return parser


def launch(flags: Sequence[str], run_dir: Path, ranks: int, steps: int | None) -> int:
    """Run `ranks` processes to completion, with a progress bar, or lines without a terminal."""
    # Raises Stopped after a signal, or an error with a rank's message or the location of its log.
    from rich.console import Console

    from megasink.training.torchrun_processes import Ranks

    logs = run_dir / "logs" / time.strftime("%Y%m%d-%H%M%S")
    console = Console()
    say(f"run {run_dir}: {ranks} rank{'s' * (ranks != 1)}, logs in {logs}")
    of_torchrun = ["--standalone", "--local-addr=127.0.0.1", FOR_TORCHRUN]
    of_torchrun += [f"--nproc-per-node={ranks}", f"--log-dir={logs}", "--redirects=3"]
    words = ["--run-dir", str(run_dir), *flags]
    of_torchrun += ["-m", "megasink.training", *words]
    checked = {parse_arguments.CHECKED: parse_arguments.digest(words)}
    new_lines = NewLines(run_dir / "metrics.jsonl")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} cannot be written: {error.strerror}") from error
    with Ranks(of_torchrun, logs, console, checked) as running:
        code = _follow(running, new_lines, steps, console)
    if code:
        failure = _failure(running, logs, run_dir, code)
        if not (run_dir / "config.json").is_file() and str(logs) not in str(failure):
            # Refused before the run began: restore the folder, but for logs that are named.
            shutil.rmtree(logs)
            for folder in (logs.parent, run_dir):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
        raise failure
    return 0


def _failure(running: "Ranks", logs: Path, run_dir: Path, code: int) -> UserError:
    """Explain the end of the ranks: a signal to us, a signal to one of them, or an error."""
    if running.signals:
        # A rank's own message takes precedence: it may have failed to save.
        number, message = running.signals[0], first_error(logs)
        twice = " twice" if running.pressed_again else ""
        return Stopped(number, f"{twice}; {message or left(run_dir)}")
    if code < 0:
        return UserError(f"torchrun was killed by {name_of(-code)}; {left(run_dir)}")
    if killed := _killed(logs):
        return UserError(f"{killed}; {left(run_dir)}")
    if message := first_error(logs):
        return UserError(message)
    if failed := raised(logs):
        # Takes precedence over signals that torchrun then sent to the others.
        path, line = failed
        where = f"rank {path.parent.name} failed"
        return UserError(f"{where}: {line} (log: {path}); {left(run_dir)}")
    for log in sorted(logs.rglob("stderr.log")):
        for number in SIGNALS:
            if f"megasink: stopped by {name_of(number)}" in log.read_text(errors="replace"):
                return Stopped(number, f" (sent to a rank); {left(run_dir)}")
    try:
        with writing(f"--run-dir {run_dir}", "free some space and use --resume"):
            # There may have been no space for the ranks' messages either.
            (logs / "trial").write_bytes(bytes(_SMALL))
            (logs / "trial").unlink()
    except UserError as error:
        return error
    return UserError(f"the ranks ended with exit code {code}; logs in {logs}; {left(run_dir)}")


def _killed(logs: Path) -> str | None:
    """Describe the first rank that a signal ended; torchrun then ended the others."""
    try:
        failures = json.loads((logs / FAILURES).read_text())
    except (OSError, ValueError):  # no failure, or no room for the file
        return None
    log = (logs / "torchrun.log").read_text(errors="replace")
    for rank, code, pid in failures:
        # Others may be sent by torchrun itself.
        if code < 0 and code != -signal.SIGTERM and f"shutdown process {pid} " not in log:
            name = name_of(-code)
            why = " (out of memory? see dmesg)" if name == "SIGKILL" else ""
            return f"rank {rank} was killed by {name}{why}"
    return None


def _follow(running: "Ranks", new_lines: NewLines, total: int | None, console: "Console") -> int:
    """Show new lines of metrics.jsonl until the ranks end; return torchrun's exit code."""
    with progress("training", total, "steps", console=console, every=10.0) as tell:
        tell(0, "starting")
        while True:
            code = running.poll()
            for line in new_lines():
                step = line["iteration"]
                try:
                    tell(step, _shown(line), now="valid_lm_loss" in line or step == total)
                except OSError:
                    running.closed_terminal()
            if code is not None:
                return code
            time.sleep(0.2)


def _shown(line: dict[str, Any]) -> str:
    """Return the values of a line of metrics.jsonl that the progress line shows."""
    given = {key: label for key, label in _SHOWN.items() if line.get(key) is not None}
    return "  ".join(f"{label} {line[key]:.4f}" for key, label in given.items())


def from_where(run_dir: Path) -> str | None:
    """Describe the checkpoint from which ranks resume; None without an intact one."""
    try:
        step, damaged = newest_intact(run_dir / "checkpoints", quick=True)
    except UserError:
        return None
    skipped = [f"; the checkpoint of step {at} is damaged: {why}" for at, why in damaged.items()]
    return f"continuing from step {step}{''.join(skipped)}"


def finished(run_dir: Path, args: Namespace) -> str | None:
    """Return a sentence if a run has no step left to train or evaluate; else None."""
    if args.skip_train or not args.train_iters:
        return None
    try:
        step, _ = newest_intact(run_dir / "checkpoints", quick=True)
    except UserError:
        return None
    if step < args.train_iters:
        return None
    at = f"step {step} of {args.train_iters}"
    return f"run {run_dir} has finished: {at}; to evaluate it, add --skip-train"


def last_start(run_dir: Path) -> dict[str, Any]:
    """Return the last record of starts.jsonl; empty if there is none."""
    starts = run_dir / "starts.jsonl"
    lines = read_text(starts, errors="replace").splitlines() if starts.exists() else []
    for start in objects_in(reversed(lines)):
        words, ranks = start.get("command", []), start.get("world_size", 0)
        if isinstance(words, list) and {*map(type, words)} <= {str} and type(ranks) is int:
            return start
    return {}  # the ranks report that the run is missing


def flags_of_last_start(run_dir: Path, given: Sequence[str] = ()) -> list[str]:
    """Return the flags of the last start, to prepend to `given` on resume."""
    words = last_start(run_dir).get("command", [])[1:]
    kept = [flag for flag in named_values(words) if flag[0] not in ("run-dir", "resume")]
    repeated = list(named_values(given))
    if repeated and kept[-len(repeated) :] == repeated:
        kept = kept[: -len(repeated)]  # the same command line again, as schedulers do
    elif repeated and not has_finished_step(run_dir):
        kept = []  # a corrected command line after a failed start
    return [word for name, values in kept for word in (f"--{name}", *values)]


def ranks_of_last_start(run_dir: Path) -> int | None:
    """Return the last start's rank count, if it was one machine."""
    last = last_start(run_dir)
    ranks: int = last.get("world_size", 0)
    return ranks if ranks and last.get("local_world_size", ranks) == ranks else None
