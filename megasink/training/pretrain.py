"""The entry point of each rank: arguments, model configuration, Megatron's ``pretrain``."""

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.process
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

from megasink import cpu, plugins
from megasink.console.stopping import escape_output
from megasink.cpu import broken
from megasink.cpu.process import prepare_process
from megasink.errors import ConfigError, Stopped, UserError
from megasink.files.atomic import lock_folder, remove_dead
from megasink.files.system_errors import explained as explained_by_system
from megasink.megatron.hybrid_pattern import recurrent
from megasink.training import arguments, heartbeat, hosts, network, recipes, stop
from megasink.training.arguments import refusals_of_megatron
from megasink.training.checkpoint_writer import checkpoint_helpers, keeping_whole_checkpoints
from megasink.training.checks import memory
from megasink.training.endings import explained, named, reports, tell, wait_for_first
from megasink.training.flag_file import given_device, named_values
from megasink.training.guard import guard
from megasink.training.metrics_file import weak_loss
from megasink.training.start import starting
from megasink.training.stop import RankState
from megasink.upstream import fused
from megasink.upstream.training import FAULT_TOLERANCE, HYBRID_COUNTS

# Limit for a rank's shutdown.
_END_SECONDS = 60.0
_PREFIX = "msocks-"  # short: the path of a socket has at most 107 bytes


def pretrain(argv: Sequence[str]) -> None:
    """Train by these flags. Call on every rank, with torchrun's environment variables."""
    prepare_process(given_device(argv))
    network.choose_gloo_interface(os.environ)
    heartbeat.record()
    if guard.is_looking:
        heartbeat.start()
    args, identity = arguments.parse(argv)
    if problems := list(memory.problems(args)):
        raise ConfigError(problems)
    guard.timeout = 60.0 * args.distributed_timeout_minutes
    if args.rank == 0:
        print(cpu.describe(), flush=True)
        for line in broken.describe():
            print(f"not used: {line}", flush=True)
    with shared_folder(), starting(args, identity) as store:
        train(args, store)


def train(args: Namespace, store: Any) -> None:
    """Train with validated arguments, and close the process groups."""
    import torch
    from megatron.training.global_vars import set_global_variables

    try:
        set_global_variables(args)
        _run(args, store)
    except BaseException as error:
        explanation = explained(error, args)
        if explanation is error:
            raise
        raise explanation from error
    finally:
        with guard.bounded("the end of the process", _END_SECONDS):
            _end_loader_workers()
            # Otherwise gloo sometimes aborts a process at exit.
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def _end_loader_workers() -> None:
    """Kill data loader workers, which ignore SIGTERM, and for which Python's exit would wait."""
    # torch's own handler raises an error if a worker was killed.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    signal.signal(signal.SIGCHLD, before)


def _run(args: Namespace, store: Any) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain as megatron_pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megasink.checkpoints.without_code import loading_without_code
    from megasink.megatron.model_of_arguments import model_config
    from megasink.training.checkpoint_layout import choosing_by_size
    from megasink.training.checks.attention import kernel_choices
    from megasink.training.dataset import datasets_provider
    from megasink.training.evaluation import comparable_evaluations
    from megasink.training.foreign import accepting_megatrons_checkpoints
    from megasink.training.forward import forward_step
    from megasink.training.metrics_writer import MetricsWriter, writing_metrics
    from megasink.training.optimizer import grouping_sink_parameters, laying_out_matrices
    from megasink.training.phases import agreeing_on_signals, following_phases
    from megasink.training.series import is_observed

    if args.rank == 0 and not cpu.is_active():
        print(fused.describe(), flush=True)
    if args.rank == 0 and args.attention_similarity != "softmax":
        print(f"attention: {args.attention_similarity} similarity, in chunks of rows", flush=True)
    elif args.rank == 0:
        choices = kernel_choices(args)
        for title, choice in choices.items():
            print(f"attention: {title} on {choice}", flush=True)
        for line in dict.fromkeys(filter(None, map(fused.faster, choices.values()))):
            print(f"attention: {line}", flush=True)
    with refusals_of_megatron():
        model = model_config(args)
        model.pre_wrap_hooks.append(choosing_by_size(args))
        container = pretrain_cfg_container_from_args(args, model)
    # Megatron distinguishes checkpoints of GPT models by it.
    args.hybrid_layer_pattern = model.hybrid_layer_pattern
    if args.rank == 0:
        print(f"layers: --hybrid-layer-pattern '{args.hybrid_layer_pattern}'", flush=True)
    metrics = Path(args.run_dir, "metrics.jsonl") if args.run_dir else None
    seams = (
        FAULT_TOLERANCE.replacing(setup=lambda: None),
        _counting_blocks(),
        loading_without_code(),
        writing_metrics(MetricsWriter(model.transformer.statistics, metrics)),
        comparable_evaluations(),
        grouping_sink_parameters(),
        laying_out_matrices(args),
        accepting_megatrons_checkpoints(),
        checkpoint_helpers(args),
        keeping_whole_checkpoints(checksums=args.verify_checkpoint),
        following_phases(args),
        # A logged step waits for the device anyway, as does the last one.
        agreeing_on_signals(
            lambda: RankState.signal,
            functools.partial(setattr, RankState, "signal"),
            waits=lambda: is_observed(args, args.curr_iteration + 1),
        ),
    )
    with contextlib.ExitStack() as stack:
        for seam in seams:
            stack.enter_context(seam)
        kind = ModelType.encoder_or_decoder
        megatron_pretrain(container, datasets_provider, kind, forward_step, store=store)
    # The rank that wrote the metrics has all of them.
    if metrics and args.rank == args.world_size - 1:
        from megasink.figures.curves import draw_run

        print(f"picture: {draw_run(Path(args.run_dir))}", flush=True)
        if note := weak_loss(metrics, args.head_balance_coeff):
            print(f"megasink: {note}", flush=True)


@contextlib.contextmanager
def _counting_blocks() -> Iterator[None]:
    """Let Megatron's logs count blocks, as for a GPT model, if all have attention."""
    from megatron.training import theoretical_memory_usage

    def is_hybrid_model(args: Namespace) -> bool:
        return bool(recurrent(args.hybrid_layer_pattern or ""))

    with (
        HYBRID_COUNTS.replacing(is_hybrid_model=is_hybrid_model),
        HYBRID_COUNTS.replacing(theoretical_memory_usage, is_hybrid_model=is_hybrid_model),
    ):
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; errors are one line on stderr. Does not return after an error."""
    argv = sys.argv[1:] if argv is None else argv
    threading.excepthook = _of_a_thread
    if os.environ.get("RANK", "0") != "0":
        warnings.simplefilter("ignore")
    code = 0
    escape_output()
    try:
        stop.listen()
        guard.start()
        hosts.refuse_another_world()
        plugins.load(argv)
        argv = recipes.expanded(argv)
        run_dir = dict(named_values(argv)).get("run-dir")
        RankState.run_dir = Path(run_dir[-1]) if run_dir else None
        pretrain(argv)
    except Stopped as error:
        code = error.exit_code
        _say(f"megasink: {error}")
    except SystemExit as error:  # from Megatron, for example at --exit-interval
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            _say(error.code)
    except BaseException as error:  # torch's CheckpointException is not an Exception
        line = str(error) if isinstance(error, UserError) else _of_the_machine(error)
        if not line:
            traceback.print_exc()
        code = 2 if line else 1
        left = stop.left(RankState.run_dir)
        _end(UserError(line) if line else error, f"megasink: {f'error: {line}' if line else left}")
    if code or not heartbeat.farewell():
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    atexit.register(guard.bound, "the end of the process", _END_SECONDS)
    return 0


def _of_the_machine(error: BaseException) -> str | None:
    """Return the line for a failure of the machine; None for any other error."""
    if isinstance(error, BrokenPipeError):
        return f"the reader of this rank's output has ended ({error.strerror}): keep it running"
    return explained_by_system(error)


def _of_a_thread(raised: threading.ExceptHookArgs) -> None:
    """Report an error that a package raised in a thread, in one line if the machine caused it."""
    line = raised.exc_value and explained_by_system(raised.exc_value)
    if not line:
        threading.__excepthook__(raised)
    elif reports():
        stop.write_to_stderr(f"megasink: {line}")


def _end(error: BaseException, line: str) -> None:
    """Report once per host why the ranks end, and inform the other hosts."""
    reporting = reports()
    _say(line)
    stop.write_to_torchrun(named(error))
    if not reporting and isinstance(error, UserError):
        wait_for_first()
        _say(line)
    if RankState.begun:
        tell(error)
        heartbeat.linger()


def _say(line: str) -> None:
    if reports():
        stop.write_to_stderr(line)


@contextlib.contextmanager
def shared_folder() -> Iterator[None]:
    """Let this process, and those it starts in the body, share one multiprocessing folder.

    A killed worker would leave its own behind. The next process removes the folder of a killed one.
    """
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is not None:
        yield
        return
    remove_dead(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"))
    folder, lock = _locked_folder()
    config["tempdir"] = str(folder)
    try:
        yield
    finally:
        config["tempdir"] = None
        with contextlib.suppress(OSError):
            resource_sharer.stop()  # it listens in the folder; the next run starts it again
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked_folder() -> tuple[Path, int | None]:
    """Make a folder and lock it; another process may remove it before it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if not lock_folder(lock):  # a file system without locks, or removed at this moment
            os.close(lock)
            if folder.exists():
                return folder, None
        elif folder.exists():
            return folder, lock
        else:
            os.close(lock)
