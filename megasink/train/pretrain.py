"""What every rank runs: arguments, model configuration, Megatron's ``pretrain``."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megasink import platform
from megasink.errors import UserError
from megasink.process import prepare_process
from megasink.train import early


def pretrain(argv: Sequence[str]) -> None:
    """Train. Called on every rank, with torchrun's variables in the environment.

    Args:
        argv: Megatron's and our flags.

    Raises:
        UserError: the configuration, the data or the checkpoint is wrong.
    """
    prepare_process(argv)
    import torch
    from megatron.training.global_vars import set_global_variables
    from torch.distributed.checkpoint import CheckpointException

    from megasink.train import arguments, run_dir

    args, identity = arguments.parse(argv)
    if args.rank == 0:
        print(platform.describe(), flush=True)
        run_dir.write_start(args, identity)
    set_global_variables(args)
    try:
        _run(args)
    except (SystemExit, AssertionError, CheckpointException) as stop:
        raise _explained(stop, args) from stop
    finally:
        _end_loader_workers()
        # Without it gloo aborts a process now and then while it exits.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _end_loader_workers() -> None:
    """Let Python end, however training did.

    Workers of data loaders pass over a SIGTERM, which is meant for their rank
    (megatron/training/datasets/data_samplers.py:94). It is also by a SIGTERM that multiprocessing
    ends them when Python exits, and then it waits for them: a rank that failed would never be gone.
    """
    # torch's own handler raises an error where a worker was killed.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    signal.signal(signal.SIGCHLD, before)


def _explained(stop: BaseException, args: Namespace) -> BaseException:
    """What the user can mend, for the ways in which Megatron ends a run by itself."""
    # torch's exception for a checkpoint; while one is loaded no step has run.
    if type(stop).__name__ == "CheckpointException" and args.save and args.curr_iteration:
        return _not_saved(stop, args)
    if "OptimizerParamScheduler" in str(stop):
        return UserError(
            f"the checkpoint was trained with another schedule ({stop}): add "
            "--override-opt-param-scheduler for the new one, "
            "--use-checkpoint-opt-param-scheduler for the old one"
        )
    if isinstance(stop, AssertionError) and "value from checkpoint" in str(stop):
        return UserError(f"--load {args.load} is a checkpoint of another model: {stop}")
    # core/rerun_state_machine.py:37,40: a result was NaN or Inf.
    if not isinstance(stop, SystemExit) or stop.code not in (16, 17):
        return stop
    saved = f"; the weights before it are saved in {args.save}" if args.save else ""
    return UserError(
        f"step {args.curr_iteration + 1}: NaN or Inf in the loss or in a gradient, and again when "
        f"the step was run a second time{saved}. Lower --lr, or look at the data of that step"
    )


def _not_saved(stop: BaseException, args: Namespace) -> UserError:
    """A checkpoint that could not be written: the disk is full, a quota is reached."""
    from megasink.checkpoint.intact import newest_intact

    reason = [line for line in str(stop).splitlines() if line.strip()][-1]
    free = shutil.disk_usage(args.save).free / 1e9
    left = "there is no whole checkpoint yet"
    with contextlib.suppress(UserError):
        iteration = newest_intact(Path(args.save))[0]
        left = f"the checkpoint of step {iteration} is whole: make room and use --resume"
    return UserError(
        f"a checkpoint could not be written to {args.save} ({free:.1f} GB free there): {reason}; "
        f"{left}"
    )


def _run(args: Namespace) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain as megatron_pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megasink.attention import choose_backend
    from megasink.checkpoint.model import model_config
    from megasink.compat import mend_signal_handler
    from megasink.report.curves import draw_run
    from megasink.train.arguments import refusals_of_megatron
    from megasink.train.checkpoint_writer import checkpoint_helpers
    from megasink.train.checks.attention import attention_request
    from megasink.train.dataset import datasets_provider
    from megasink.train.foreign import accepting_megatrons_checkpoints
    from megasink.train.forward import forward_step
    from megasink.train.keep_checkpoints import keeping_whole_checkpoints
    from megasink.train.live_analysis import LiveAnalysis
    from megasink.train.observer import Observer, observing
    from megasink.train.optimizer import grouping_sink_parameters

    if args.rank == 0 and args.attention_similarity != "softmax":
        print(f"attention: {args.attention_similarity} similarity, by chunks of rows", flush=True)
    elif args.rank == 0:
        choice = choose_backend(attention_request(args), args.attention_kernel)
        others = "; ".join(f"not {name}: {why}" for name, why in choice.reasons.items())
        print(f"attention: {args.attention_variant} on {choice.name} ({others})", flush=True)
    mend_signal_handler()
    with refusals_of_megatron():
        container = pretrain_cfg_container_from_args(args, model_config(args))
    metrics = Path(args.run_dir, "metrics.jsonl") if args.run_dir else None
    live = LiveAnalysis(args) if args.analyze_interval else None
    provider = datasets_provider if live is None else live.listening(datasets_provider)
    seams = (
        observing(Observer(metrics, live)),
        grouping_sink_parameters(),
        accepting_megatrons_checkpoints(),
        checkpoint_helpers(args),
        keeping_whole_checkpoints(),
    )
    with contextlib.ExitStack() as stack:
        for seam in seams:
            stack.enter_context(seam)
        megatron_pretrain(container, provider, ModelType.encoder_or_decoder, forward_step)
    # The rank that wrote the metrics has all of them.
    if args.run_dir and args.rank == args.world_size - 1:
        print(f"picture: {draw_run(Path(args.run_dir))}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of one rank: one line on the error stream for what the user can mend."""
    argv = sys.argv[1:] if argv is None else argv
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        warnings.simplefilter("ignore")
    try:
        early.check(argv, int(os.environ.get("WORLD_SIZE", "1")))
        pretrain(argv)
    except UserError as error:
        if rank == 0:
            print(f"megasink: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0
