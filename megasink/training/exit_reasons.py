"""Explain in one line how Megatron, torch or the system ended a run."""

import contextlib
import os
import re
import shutil
import time
import traceback
from argparse import Namespace
from pathlib import Path

from megasink.checkpoints.damage import newest_intact
from megasink.errors import Stopped, UserError
from megasink.files.system_errors import explained as explained_by_system
from megasink.files.system_errors import writes
from megasink.training import heartbeat
from megasink.training.checks.schedule import of_another_schedule
from megasink.training.stop import NOT_FINITE, RankState, again, left, stopped
from megasink.training.waiting import here, is_first_here, on_several_hosts

_EVENTS = ("tensorboard.", "torch.utils.tensorboard.")
# The optimizer's state and the model in checkpoints; Megatron's own sentences have both values.
_OTHER_SHARDS = re.compile(r"shape mismatch .* key optimizer\.distributed\.dp_group_idx_")
_OTHER_MODEL = re.compile(r"[Hh]ybrid (layer pattern|model).*GPT checkpoint|GPT checkpoint.*hybrid")
_LITTLE = 1 << 20  # free bytes of a full file system
_first: bool | None = None


def reports() -> bool:
    """Return whether this rank prints the line: the first with an error, or of its host."""
    return is_first_here() if _first is None else _first


def wait_for_first(seconds: float = 30.0) -> None:
    """Let the first rank of this host report an error that every rank meets."""
    # torchrun stops that rank as soon as another one ends, and this one once that rank has spoken.
    global _first
    if _first is None and not reports():
        time.sleep(seconds)
        _first = True


def tell(error: BaseException) -> None:
    """Report to the other hosts why this rank ends, unless it ends because of another one."""
    if not heartbeat.is_lost_connection(error):
        heartbeat.tell(named(error))


def named(error: BaseException) -> str:
    """Return an error in one line, with its type unless it is one of ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def explained(error: BaseException, args: Namespace) -> BaseException:
    """Replace an error with one that the user can act on, or return it unchanged."""
    # Call before the process groups are closed: after that, other ranks fail too.
    global _first
    if isinstance(error, SystemExit) and not error.code and RankState.signal:
        _first = os.environ.get("RANK", "0") == "0"
        done = f" after step {RankState.step}, which is saved" if args.save else ""
        return Stopped(RankState.signal, f"{done}; {left(RankState.run_dir)}")
    if isinstance(error, SystemExit) and not error.code:
        return error
    _first = heartbeat.first_to_speak()
    if heartbeat.is_lost_connection(error):
        if RankState.signal:  # another rank got it, too, and has left
            return stopped(RankState.signal)
        return _lost(error)
    explanation = _of_megatron(error, args)
    if explanation is error and (line := explained_by_system(error)):
        if isinstance(error, OSError) and writes(error):
            line = _not_written(error, args)
        explanation = UserError(line)
    tell(explanation)
    return explanation


def _lost(error: BaseException) -> BaseException:
    """Explain which rank could not be reached, and why."""
    if not _first:
        return UserError("another rank has reported the error")
    if words := heartbeat.words():
        return UserError(f"{words}; {left(RankState.run_dir)}")
    if missing := heartbeat.missing_ranks():
        return UserError(f"{missing}; {left(RankState.run_dir)}")
    if (where := heartbeat.where()) and on_several_hosts():
        return UserError(
            f"rank {os.environ['RANK']} on {here()} lost a connection, although every rank "
            f"responds ({where}): open all TCP ports between the hosts and give all hosts and "
            f"switches the same MTU ({named(error)})"
        )
    if where:
        error.add_note(f"megasink: every rank responds: {where}")
    return error


def _not_written(error: OSError, args: Namespace) -> str:
    """Explain a failed write: the file, the free space, and the newest intact checkpoint."""
    path, folder = error.filename, Path(args.run_dir or args.save or ".")
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [frame.f_globals.get("__name__", "") for frame in frames]
    if path is None and any(module.startswith(_EVENTS) for module in modules):
        path, folder = args.tensorboard_dir, Path(args.tensorboard_dir)
    free, shm = "", Path("/dev/shm")
    if path is None and shm.is_dir() and shutil.disk_usage(shm).free < _LITTLE:
        path = folder = shm  # semaphores and the data loader's batches
    with contextlib.suppress(OSError):
        free = f" ({shutil.disk_usage(folder).free / 1e9:.1f} GB free there)"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{path or 'a file of the run'} could not be written{free}: {reason}; {_intact(args)}"


def _intact(args: Namespace) -> str:
    with contextlib.suppress(UserError, TypeError):
        iteration = newest_intact(Path(args.save))[0]
        then = again("use --resume")
        return f"the checkpoint of step {iteration} is intact: free some space and {then}"
    return "there is no intact checkpoint yet: free some space and start again"


def _of_megatron(stop: BaseException, args: Namespace) -> BaseException:
    # torch's checkpoint exception; during loading no step has run yet.
    if type(stop).__name__ == "CheckpointException" and args.save and RankState.step is not None:
        reason = [line for line in str(stop).splitlines() if line.strip()][-1]
        free = shutil.disk_usage(args.save).free / 1e9
        return UserError(
            f"a checkpoint could not be written to {args.save} ({free:.1f} GB free there): "
            f"{reason}; {_intact(args)}"
        )
    if isinstance(stop, SystemExit | AssertionError) and "OptimizerParamScheduler" in str(stop):
        return UserError(of_another_schedule(str(stop)))
    if of_layout := _of_layout(stop):
        return of_layout
    if isinstance(stop, ValueError) and "('optimizer', 'param_groups')" in str(stop):
        return UserError(
            f"the optimizer of the checkpoint groups the parameters differently ({stop}): pass "
            "--sink-lr-mult, --sink-weight-decay, --decay-all-parameters, --embedding-lr and "
            "--output-lr as before, or drop the optimizer's moments with --no-load-optim"
        )
    if isinstance(stop, AssertionError) and "value from checkpoint" in str(stop):
        return UserError(f"--load {args.load} is a checkpoint of a different model: {stop}")
    # core/rerun_state_machine.py:37,40: a result was NaN or Inf.
    if not isinstance(stop, SystemExit) or stop.code not in (16, 17):
        return stop
    saved = f"; the weights before that step are saved in {args.save}" if args.save else ""
    return UserError(
        f"step {args.curr_iteration + 1}: {NOT_FINITE}, and again when the step was "
        f"repeated{saved}. Resume with a lower --lr, or check the data of that step"
    )


def _of_layout(error: BaseException) -> UserError | None:
    """Return the advice for a checkpoint of shards that do not fit, if that is the error."""
    if _OTHER_SHARDS.search(str(error)):
        return UserError(
            "the optimizer's shards in the checkpoint belong to other parameters, because megasink "
            "0.2 and earlier kept sinks in float32 in a bf16 model. Save one more checkpoint with "
            "that version and --dist-ckpt-optim-fully-reshardable, or pass --no-load-optim to "
            "continue without the optimizer state"
        )
    if _OTHER_MODEL.search(str(error)):
        return UserError(str(error))
    if "sharding type dp_reshardable" not in str(error):
        return None
    return UserError(
        "the checkpoint has the optimizer's state in shards, so only the data-parallel size may "
        "change: use the previous --tensor-model-parallel-size and --pipeline-model-parallel-size "
        "(and --dist-ckpt-optim-fully-reshardable, to save the next checkpoint for any layout), "
        "or pass --no-load-optim to drop the optimizer state"
    )
