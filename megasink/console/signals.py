"""Signals that end a command: it unwinds, leaves nothing half-written, and says so in one line.

The signal is raised in the main thread, for the blocks that clean up. What stays in native code, or
catches everything, is ended from a thread. `megasink train` has other handlers (training/stop.py).
"""

import _thread
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from megasink.console.printable import one_line
from megasink.console.stdout import escape_output
from megasink.errors import Signalled, Stopped, UserError
from megasink.files.atomic import PARTIAL, is_utf8, remove
from megasink.files.system_errors import OUTPUT, explained

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Grace period, for example to finish a shard and join processes.
_SECONDS = 10.0


class _Heard:
    """The signal that this process received, if any."""

    raised: Signalled | None = None
    again: threading.Timer | None = None
    """Sends the signal again after a destructor has swallowed its exception."""
    holds: bool = False
    """Whether a process is being started; a signal that arrives meanwhile is raised afterwards."""
    held: int | None = None

    def settle(self) -> None:
        """Ignore the signal that `again` sends, which would later meet other handlers."""
        again, self.again = self.again, None
        if again is not None:
            again.cancel()
            again.join()


def name_of(number: int) -> str:
    """Return a signal's name: Ctrl-C is SIGINT."""
    return signal.Signals(number).name


def handle(handler: Any, numbers: Collection[int] = SIGNALS) -> dict[int, Any]:
    """Return the handlers that this one replaces. Ignored signals stay ignored (``nohup``)."""
    handled = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in handled}


@contextlib.contextmanager
def handling(handler: Any, numbers: Collection[int] = SIGNALS) -> Iterator[None]:
    """Handle signals in the body."""
    before = handle(handler, numbers)
    try:
        yield
    finally:
        for number, previous in before.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, previous)


def hear(look: Callable[[int], None]) -> tuple[int, int]:
    """Start a thread that gets every signal at once, whatever the main thread does."""
    # It runs `look` with the descriptor to read the numbers from. Returns the descriptor that ends
    # them when it is closed, and the previous wakeup descriptor.
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    # Not threading's, whose start waits forever for a thread that has no memory to begin.
    _thread.start_new_thread(look, (receiving,))
    return sending, signal.set_wakeup_fd(sending, warn_on_full_buffer=False)


_heard: _Heard | None = None


def run(command: Callable[[], int]) -> int:
    """Return the exit code of a command; errors of the user and the machine are one line."""
    # After a signal it is 128 + its number. Only the outermost call in the main thread does
    # anything.
    if _heard is not None or threading.current_thread() is not threading.main_thread():
        return command()
    escape_output()
    try:
        return _run(command)
    except BrokenPipeError:  # a reader of the output left, such as head
        _drop_output()
        return 128 + signal.SIGPIPE
    except Exception as error:
        line = _line_of(error, None if _drop_output() else OUTPUT)
        if line is None:
            raise
        with contextlib.suppress(OSError):  # the terminal was closed
            print(f"megasink: {line}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, Stopped) else 2


def _line_of(error: Exception, what: str | None) -> str | None:
    """Return the line for an error of the user or the machine; None for any other error."""
    if isinstance(error, Stopped):
        return str(error)
    line = str(error) if isinstance(error, UserError) else explained(error, what)
    if isinstance(error, UnicodeEncodeError) and not is_utf8(error.object):
        line = one_line(f"{error.object[:200]} is not UTF-8: rename it")
    if line is None and isinstance(error, OSError) and error.filename is not None:
        line = one_line(f"{error.filename}: {error.strerror}")
    return line and f"error: {line}"


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _drop_output() -> bool:
    """Flush the output, or drop it; return whether it was written."""
    try:
        _flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _run(command: Callable[[], int]) -> int:
    """Run a command with handlers of signals; see `run`."""
    try:
        with _handlers() as heard:
            try:
                code = command()
                _flush()
            except SystemExit as ended:  # of --help, or of rich when a reader of the output left
                if isinstance(ended.__context__, BrokenPipeError):
                    raise ended.__context__ from None
                _flush()
                raise
            except KeyboardInterrupt:
                if heard.raised is None:  # raised by the code that ran, not by a signal
                    return _say_stopped(Signalled(signal.SIGINT))
            except BaseException:
                if heard.raised is None:
                    raise
            heard.settle()
            # A module may have turned the exception into anything.
            return code if heard.raised is None else _say_stopped(heard.raised)
    except Signalled as raised:  # before or after the command
        return _say_stopped(raised)


@contextlib.contextmanager
def _handlers() -> Iterator[_Heard]:
    """Raise `Signalled` in the body when a signal arrives, once."""
    global _heard
    heard = _heard = _Heard()

    def end(number: int, frame: FrameType | None) -> None:
        if heard.holds:
            heard.held = number
        elif heard.raised is None or heard.again is not None:
            heard.raised, heard.again = Signalled(number), None
            raise heard.raised

    def unraisable(report: "sys.UnraisableHookArgs") -> None:
        """Hide a signal's effect on destructors, which swallow its exception."""
        if heard.raised is None:
            outer_hook(report)
        elif report.exc_value is heard.raised:
            number = heard.raised.number
            heard.again = threading.Timer(0.01, os.kill, (os.getpid(), number))
            heard.again.start()

    outer_hook, sys.unraisablehook = sys.unraisablehook, unraisable
    sending, outer = hear(lambda receiving: _watch(receiving, end))
    try:
        with handling(end):
            try:
                yield heard
            finally:
                heard.settle()
    finally:
        sys.unraisablehook = outer_hook
        if (current := signal.set_wakeup_fd(outer)) != sending:
            signal.set_wakeup_fd(current)  # of a handler that replaced this one
        os.close(sending)
        _heard = None


@contextlib.contextmanager
def starting_processes(numbers: Collection[int] = SIGNALS) -> Iterator[None]:
    """Block signals in processes that are started in the body, until they unblock them (`follow`).

    A Python that starts would end in a traceback at Ctrl-C, also if this one stopped meanwhile.
    """
    heard = _heard or _Heard()
    outer, heard.holds = heard.holds, True
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        heard.holds = outer
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        held, heard.held = heard.held, None
        if held is not None:
            signal.raise_signal(held)


def follow() -> None:
    """Leave Ctrl-C to the process that started this one; call this first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _forget() -> None:
    """Undo the set-up in a forked process, which shares the pipe; its parent ends it."""
    global _heard
    if _heard is not None:
        _heard = None
        signal.set_wakeup_fd(-1)
        handle(signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)


def _say_stopped(raised: Signalled) -> int:
    """Write the one line about a signal, and return the exit code."""
    with contextlib.suppress(OSError):  # the terminal was closed
        if os.environ.get("RANK", "0") == "0":
            stop = Stopped(raised.number, raised.kept)
            print(f"megasink: {stop}", file=sys.stderr, flush=True)
    return Stopped.code_of(raised.number)


def _watch(receiving: int, handler: object) -> None:
    """End the process if it has not unwound some seconds after a signal; ends with the pipe."""
    with os.fdopen(receiving, "rb", buffering=0) as pipe:
        while numbers := pipe.read(64):
            for number in numbers:
                if number in SIGNALS and signal.getsignal(number) is handler:
                    _leave_after(number, receiving)


def _leave_after(number: int, receiving: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while (left := deadline - time.monotonic()) > 0:
        if select.select([receiving], [], [], left)[0] and not os.read(receiving, 64):
            return  # the block has ended
    folders = [*PARTIAL]
    # Not imported: an import may be the code that does not unwind. Without the module, no children
    # exist.
    if processes := sys.modules.get("multiprocessing.process"):
        for child in processes.active_children():
            child.terminate()
        temporary = getattr(processes.current_process(), "_config", {}).get("tempdir")
        folders += [Path(temporary)] if temporary else []
    for folder in folders:
        remove(folder)
    os._exit(_say_stopped(Signalled(number)))
