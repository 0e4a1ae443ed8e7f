"""Signals that end training: immediately if there is nothing to save, else after a checkpoint.

A rank may wait in a collective, or for another rank to build datasets, where Python runs no signal
handler. A thread receives every signal instead.
"""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megasink.console.signals import SIGNALS as OF_COMMANDS
from megasink.console.signals import handle, handling, hear, name_of
from megasink.errors import Stopped, UserError
from megasink.files.json_file import read_text
from megasink.training.waiting import on_several_hosts

# End of a job, Ctrl-C, closed terminal, a scheduler's warning (sbatch --signal USR1).
SIGNALS = (*OF_COMMANDS, signal.SIGUSR1)
# A step that takes longer than this after a signal is given up where nothing is lost with it.
STEP_SECONDS = 10.0
# torchrun dies of a signal that it does not know, and Slurm sends to every process of a step.
FOR_TORCHRUN = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


class RankState:
    """The signal that this rank received, and its progress."""

    signal = 0  # the first that any rank received
    saves = False  # whether the training loop checks for it after each step, and saves
    phase = "starting"  # the rank's current activity, in words
    step: int | None = None  # the last one that this rank finished
    run_dir: Path | None = None
    by: Sequence[int] = SIGNALS  # after these the loop saves; others end the rank at once
    release: Callable[[], None] | None = None
    begun = False  # whether rank 0 has decided that the run begins; before, it reports why not
    attempt = ""  # the prefix of this attempt's keys in the ranks' store, once agreed on


def left(run_dir: Path | None) -> str:
    """Describe the saved state of a run, and how to resume it."""
    if run_dir is None:
        return "there is no --run-dir to resume from"
    if (newest := _newest(run_dir)) is None:
        how = again("restart with --resume auto")
        return f"no checkpoint was saved yet (--save-interval): {how}"
    with_what = f": megasink train --run-dir {run_dir} --resume"
    if on_several_hosts():
        with_what = " the same command on every host"
    return f"resume from step {newest} with{with_what}"


def again(advice: str) -> str:
    """Return how to start again: as advised on one host, else the same command on each."""
    return "start the same command on every host" if on_several_hosts() else advice


def _newest(run_dir: Path | None) -> int | None:
    """Return the step of the newest checkpoint of a run, or None."""
    if run_dir is None:
        return None
    tracker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    try:
        return int(read_text(tracker, 64))
    except (UserError, ValueError):
        return None


def listen() -> None:
    """Start handling the signals that end a rank; call once, early, in the main thread."""
    handle(lambda *_: None, SIGNALS)  # without one the process would end
    hear(_hear)
    # Forked processes share the pipe.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def training_begins(exit_signal: int) -> None:
    """Save on signals from now on."""
    RankState.by = tuple({*SIGNALS, exit_signal} - ({signal.SIGTERM} - {exit_signal}))
    RankState.saves = True


def training_ended() -> None:
    """End immediately on signals from now on: everything is saved."""
    RankState.saves, RankState.phase = False, "ending"
    if RankState.signal:
        leave(RankState.signal)


def stopped(number: int) -> Stopped:
    """Return the error of a rank that a signal ends at once."""
    return Stopped(number, f" while {RankState.phase}; {left(RankState.run_dir)}")


def leave(number: int) -> NoReturn:
    """End this process immediately."""
    if os.environ.get("RANK", "0") == "0":
        write_to_stderr(f"megasink: {stopped(number)}")
    if RankState.release is not None:
        # In a thread: an unavailable file server must not block the exit.
        giving_back = threading.Thread(target=RankState.release, daemon=True)
        giving_back.start()
        giving_back.join(5.0)
    os._exit(Stopped.code_of(number))


def write_to_torchrun(error: str) -> None:
    """Give torchrun the reason why this rank ends, which it knows only for signals."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            # As ProcessFailure reads it (distributed/elastic/multiprocessing/errors/__init__.py).
            Path(path).write_text(json.dumps({"message": error, "timestamp": int(time.time())}))


def write_to_stderr(line: str) -> None:
    """Write a line to stderr from any thread, even if stderr is closed."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """End the launcher with one line on a signal, before it has started anything."""

    def end(number: int, frame: Any) -> None:
        write_to_stderr(f"megasink: stopped by {name_of(number)} before any rank was started")
        os._exit(Stopped.code_of(number))

    with handling(end, SIGNALS):
        yield


def _give_up_step(number: int) -> None:
    """End a rank that is still in its first step, or in the first since a checkpoint."""
    if RankState.saves and (RankState.step is None or RankState.step == _newest(RankState.run_dir)):
        leave(number)


def _hear(receiving: int) -> None:
    while True:
        for number in os.read(receiving, 64):
            if RankState.saves and number in RankState.by:
                if not RankState.signal:
                    RankState.signal = number
                    waiting = threading.Timer(STEP_SECONDS, _give_up_step, (number,))
                    waiting.daemon = True
                    waiting.start()
            elif number in SIGNALS and not sys.is_finalizing():
                leave(number)


# Name in the folder of logs: torchrun_agent.py's list of failed ranks.
FAILURES = "failures.json"
_ERROR = "megasink: error: "
# In the messages of runs that ended because of their loss.
DIVERGES = "the training loss diverges"
NOT_FINITE = "NaN or Inf in the loss or a gradient"


def first_error(logs: Path) -> str | None:
    """Return the error message of the first process in a folder that has one, or None."""
    for path in sorted(logs.rglob("stderr.log")):
        text = path.read_text(errors="replace")
        if _ERROR in text:
            # Include a ConfigError's list, but not later output of others.
            message = text.rpartition(_ERROR)[2]
            return message[: re.match(r".*(\n  \d+\. .*)*", message).end()].strip()  # type: ignore[union-attr]
    return None


def raised(logs: Path) -> tuple[Path, str] | None:
    """Return the first traceback's log and its last line, or None."""
    line = r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception|Interrupt)\b.*)$"
    for path in sorted(logs.rglob("stderr.log")):
        if lines := re.findall(line, path.read_text(errors="replace"), re.M):
            return path, lines[-1]
    return None
