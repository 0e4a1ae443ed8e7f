"""The one progress helper, on a terminal and in a log file."""

import io

import pytest
from rich.console import Console

from megasink.console import progress as module
from megasink.console.progress import progress, tracked


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when a test says so, for the helper and for rich."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "_FIRST_SECONDS", 2.0)
    return now


def log() -> Console:
    return Console(file=io.StringIO())


def lines(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()


def test_a_log_gets_a_line_now_and_then_with_the_time_left(clock):
    console = log()
    with progress("analyzing", 100, "samples", before=40, console=console) as tell:
        for done in (42, 44, 46, 48):  # two samples in ten seconds
            clock[0] += 10
            tell(done)
        clock[0] += 100
        tell(100)  # whoever is done says so
    assert lines(console) == [
        "analyzing: 42 of 100 samples",  # soon, when no rate is known yet
        "analyzing: 48 of 100 samples, 0:04:20 left",
    ]


def test_what_takes_a_second_says_nothing(clock):
    console = log()
    for _ in tracked("abc", "drawing", 3, "figures", console=console):
        clock[0] += 0.3
    assert lines(console) == []


@pytest.mark.parametrize(("before", "shown"), [(0, ["0 of 9"]), (4, ["4 of 9"]), (9, [])])
def test_what_is_slow_says_at_once_how_far_it_is(before, shown):
    """A log has a line before the first unit is done; what is complete has none."""
    console = log()
    with progress("analyzing", 9, "samples", before=before, console=console, slow=True):
        assert lines(console) == [f"analyzing: {text} samples" for text in shown]


def test_a_line_can_be_asked_for_and_holds_the_state(clock):
    console = log()
    with progress("training", None, "steps", console=console) as tell:
        tell(7, "[bold] loss 5.1", now=True)
    assert lines(console) == ["training: 7 steps  [bold] loss 5.1"]


def test_bytes_come_with_their_rate(clock):
    console = log()
    with progress("reading", 4e9, "bytes", console=console, every=15) as tell:
        for done in (1e9, 2e9, 3e9):
            clock[0] += 10
            tell(done)
    assert lines(console) == [
        "reading: 1.0 GB of 4.0 GB",
        "reading: 3.0 GB of 4.0 GB, 100.0 MB/s, 0:00:10 left",
    ]


def test_every_item_has_a_line_where_asked_for(clock):
    for console in (log(), Console(file=io.StringIO(), force_terminal=True)):
        assert list(tracked("abc", "drawing", 3, "figures", console=console, every=0)) == [*"abc"]
        assert lines(console)[0] == "drawing: 1 of 3 figures"
        assert len(lines(console)) == 3


def test_a_terminal_gets_a_bar_that_goes_away(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=90)
    with progress("analyzing", 10, "samples", console=console) as tell:
        tell(3)
        tell(5, now=True)
    shown = console.file.getvalue()
    assert "━" in shown
    assert "analyzing: 5 of 10 samples" in shown
    assert shown.endswith("\x1b[2K")  # the line of the bar, erased


def test_a_closed_end_is_an_error_and_no_exit(clock):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with (
        pytest.raises(BrokenPipeError),
        progress("training", 2, "steps", console=Console(file=Closed())) as tell,
    ):
        tell(1, now=True)


def test_a_quiet_console_stays_quiet(clock):
    console = Console(file=io.StringIO(), quiet=True)
    with progress("training", 2, "steps", console=console, every=0) as tell:
        tell(1, now=True)
    assert not lines(console)
