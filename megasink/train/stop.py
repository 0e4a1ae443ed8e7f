"""Signals that end training: at once where there is nothing to save, else after a checkpoint.

Python runs a signal's handler when its main thread gets back to Python: a rank that waits in a
collective, or for the data sets that another rank builds, would not hear of it. Here a thread hears
of every signal at once, through the pipe that the interpreter writes their numbers to.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megasink.errors import Stopped

# Ctrl-C, the end of a job, a closed terminal.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Told:
    """What this rank was told, and how far it is.

    Attributes:
        signal: the first signal that this rank, or any other, got; 0: none.
        saves: whether the training loop looks for it after each step, and saves a checkpoint.
        phase: what the rank is doing, in words.
        run_dir: folder of the run, or None.
        by: the signals after which the training loop saves; any other ends the rank at once.
        release: gives the run folder back.
    """

    signal = 0
    saves = False
    phase = "starting"
    run_dir: Path | None = None
    by: Sequence[int] = SIGNALS
    release: Callable[[], None] | None = None


def left(run_dir: Path | None) -> str:
    """What of a run is left, and how to go on."""
    if run_dir is None:
        return "without --run-dir no checkpoint is known"
    tracker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    try:
        newest = int(tracker.read_text())
    except (OSError, ValueError):
        return "no checkpoint was saved yet (--save-interval): start again with --resume auto"
    return f"go on from step {newest} with: megasink train --run-dir {run_dir} --resume"


def name_of(number: int) -> str:
    """Of a signal, as it is written: Ctrl-C is SIGINT."""
    return signal.Signals(number).name


def listen() -> None:
    """From here on the signals that end a rank are its own to decide about.

    A signal that is ignored (``nohup``) stays so. Called once, in the main thread, as early as
    can be: importing Megatron takes seconds.
    """
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _do_nothing)
    signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
    # What is forked shares the pipe.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_hear, args=(receiving,), name="signals", daemon=True).start()


def training_begins(exit_signal: int) -> None:
    """From here on there is something to save."""
    Told.by = tuple({*SIGNALS, exit_signal} - ({signal.SIGTERM} - {exit_signal}))
    Told.saves = True


def training_ended() -> None:
    """From here on everything is saved."""
    Told.saves, Told.phase = False, "ending"
    if Told.signal:
        leave(Told.signal)


def all_told(number: int) -> None:
    """Some rank got a signal: the loop saves and ends."""
    Told.signal = number


def leave(number: int) -> NoReturn:
    """End this process here and now."""
    if os.environ.get("RANK", "0") == "0":
        text = f"stopped by {name_of(number)} while {Told.phase}; {left(Told.run_dir)}"
        write_to_stderr(f"megasink: {text}")
    if Told.release is not None:
        # In a thread: a file server that is away must not keep us.
        giving_back = threading.Thread(target=Told.release, daemon=True)
        giving_back.start()
        giving_back.join(5.0)
    os._exit(Stopped.code_of(number))


def write_to_stderr(line: str) -> None:
    """Write a line of an error, whatever becomes of it: from any thread, and to a closed end."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


@contextlib.contextmanager
def ending_at_once(doing: str) -> Iterator[None]:
    """The launcher before it has started anything: one line, and no way to swallow it.

    A KeyboardInterrupt that falls into an import may be caught by what is imported.
    """

    def end(number: int, frame: Any) -> None:
        write_to_stderr(
            f"megasink: stopped by {name_of(number)} while {doing}: no rank was started"
        )
        os._exit(Stopped.code_of(number))

    before = {
        number: signal.signal(number, end)
        for number in SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _do_nothing(number: int, frame: Any) -> None:
    """A handler must be there, or the system ends the process."""


def _hear(receiving: int) -> None:
    while True:
        for number in os.read(receiving, 64):
            if Told.saves and number in Told.by:
                Told.signal = Told.signal or number
            elif number in SIGNALS and not sys.is_finalizing():
                leave(number)
