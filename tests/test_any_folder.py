"""Whose code it is does not depend on the name of the folder that a clone lies in."""

import errno
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import megasink
from megasink import plugins
from megasink.plan import collectives
from megasink.training import exit_reasons
from tests.plan.hollow.events import Event, _stack

# A folder that every search for a name in a path would take for one of them.
FOLDER = "/home/megasink/balance/hollow/plan/megatron/tensorboard/site-packages"


def call_from(module, function):
    """Call a function from a module of that name in FOLDER."""
    scope = {"__name__": module}
    exec(compile("def call(function): return function()", f"{FOLDER}/x.py", "exec"), scope)
    return scope["call"](function)


@pytest.mark.parametrize(
    ("module", "purpose"),
    [
        ("megasink.balance.reduce", collectives.BALANCE),
        ("megasink.megatron.multi_head_addition", "megasink"),
        ("megasink.plan.rank_step", "other"),
        ("megatron.core.utils", "Megatron"),
        ("tests.plan.tasks", "other"),
        ("megasink_plugin.balance", "other"),
    ],
)
def test_collectives_belong_to_the_module_that_calls_them(module, purpose):
    def count():
        return collectives._purpose()

    assert call_from(module, lambda: count()) == purpose


def test_an_event_is_of_the_innermost_module_of_a_package():
    stack = call_from(
        "megatron.core", lambda: call_from("tests.x", lambda: _stack(sys._getframe()))
    )
    event = Event("sync", "", 0, 0, stack)
    assert event.line_in("megasink") is None
    assert event.line_in("megasink", "megatron").module == "megatron.core"


def test_a_full_disk_is_laid_to_tensorboard_where_its_writer_met_it(tmp_path):
    def full():
        raise OSError(errno.ENOSPC, "full")

    args = Namespace(run_dir=str(tmp_path), save=str(tmp_path), tensorboard_dir="the-board")
    for module, named in (("megatron.training", False), ("tensorboard.summary", True)):
        with pytest.raises(OSError, match="full") as caught:
            call_from(module, full)
        assert ("the-board" in str(exit_reasons._not_written(caught.value, args))) is named


def test_a_file_beside_the_package_is_the_users():
    package = Path(megasink.__file__).parent
    assert str(package / "cli.py").startswith(plugins._PACKAGE)
    assert not f"{package}_plugin.py".startswith(plugins._PACKAGE)
