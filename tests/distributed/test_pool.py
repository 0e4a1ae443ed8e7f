"""The pool itself: layouts, and that every way to fail is a clear failure, not a hang."""

import pytest

from tests.distributed import pool as pools
from tests.distributed.layout import SINGLE, Layout
from tests.distributed.pool import Pool, TaskFailed
from tests.waiting import until

TASKS = "tests.distributed.failing_tasks"
WHERE = "tests.distributed.worker:layout_of_task"
THREADS = "tests.distributed.thread_tasks:threads"


@pytest.fixture(scope="module")
def bare():
    """A pool for tasks that need no layout."""
    with Pool(2) as workers:
        yield workers


def test_every_layout_runs_in_the_same_processes(pool):
    pids = set()
    for layout, axis in [(Layout(tp=2), "tp"), (Layout(pp=2), "pp"), (Layout(dp=2), "dp")]:
        places = pool.run(WHERE, layout)
        assert [place[axis] for place in places] == [0, 1]
        assert all(p[a] == 0 for p in places for a in {"tp", "pp", "dp"} - {axis})
        pids.add(tuple(place["pid"] for place in places))
    (one,) = pool.run(WHERE, SINGLE)
    assert len(pids) == 1
    assert one["pid"] in next(iter(pids))


def test_process_groups_end_with_their_task():
    """A layout has 20 of them, with three threads each. Other tests use other workers."""
    layouts = [Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(cp=2)]
    with Pool(2) as pool:

        def ended():  # the system lists a thread for a moment after it was joined
            return not any("gloo" in name for found in pool.run(THREADS) for name in found)

        for layout in layouts * 3:
            pool.run(WHERE, layout)
            until(ended, lambda: pool.run(THREADS))
        for layout in layouts[::2] * 2:
            pool.run("tests.distributed.tiny_gpt:train", layout, steps=1)
            until(ended, lambda: pool.run(THREADS))


@pytest.mark.parametrize(
    ("task", "options", "said"),
    [
        ("raise_here", {}, r"(?s)raise_here.*KeyError: 'a message that the test"),
        ("die", {"code": 3}, r"(?s)ended with exit code 3.*last words"),
        ("leave_a_group", {}, r"leave_a_group left 1 process groups and \d+ threads of gloo"),
    ],
)
def test_a_failure_says_why_and_the_next_task_gets_new_workers(bare, task, options, said):
    for marker in ("before", "again"):
        known = bare.run(f"{TASKS}:remember", rank_marker=marker)
    assert known == [["before", "again"]] * 2
    with pytest.raises(TaskFailed, match=said):
        bare.run(f"{TASKS}:{task}", **options)
    assert bare.run(f"{TASKS}:remember", rank_marker="new") == [["new"]] * 2
    bare.close()


def test_a_hang_ends_at_the_timeout_with_the_stack_of_the_worker(bare, tmp_path, monkeypatch):
    def timed_out(*_):
        """The time is over once every worker hangs."""
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        return []

    monkeypatch.setattr(pools, "wait", timed_out)
    with pytest.raises(TaskFailed, match=r"(?s)did not answer.*in hang"):
        bare.run(f"{TASKS}:hang", folder=str(tmp_path))
    monkeypatch.undo()
    assert bare.run(f"{TASKS}:remember", rank_marker="new") == [["new"]] * 2
