"""Train in Megatron's loop, with what megasink changes in it for the time of a run.

Imported after the process is prepared for Megatron (`pretrain.py`).
"""

import contextlib
import functools
import inspect
import multiprocessing
import signal
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.utils import Split
from megatron.core.enums import ModelType
from megatron.training import get_args, theoretical_memory_usage, training
from megatron.training import pretrain as megatron_pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.global_vars import set_global_variables

from megasink import cpu
from megasink.checkpoints.code_free_loading import loading_without_code
from megasink.figures import run_figure
from megasink.megatron import model_of_arguments
from megasink.megatron.hybrid_pattern import recurrent
from megasink.training import forward_step
from megasink.training.build_datasets import datasets_provider
from megasink.training.checkpoint_writer import (
    checkpoint_helpers,
    choosing_by_size,
    keeping_whole_checkpoints,
)
from megasink.training.checks.kernels import kernel_choices
from megasink.training.dataset_blends import parts
from megasink.training.exit_reasons import explained
from megasink.training.load_other_models import accepting_megatrons_checkpoints
from megasink.training.metric_records import is_observed
from megasink.training.metrics_file import weak_loss
from megasink.training.metrics_writer import MetricsWriter, writing_metrics
from megasink.training.optimizer_groups import grouping_sink_parameters, laying_out_matrices
from megasink.training.parse_arguments import refusals_of_megatron
from megasink.training.rank_phases import agreeing_on_signals, following_phases
from megasink.training.start_run import starting
from megasink.training.stop import RankState
from megasink.training.watchdog import guard
from megasink.upstream import fused_kernels
from megasink.upstream.training_patches import EVALUATION, FAULT_TOLERANCE, HYBRID_COUNTS


def run(args: Namespace, identity: dict[str, Any]) -> None:
    """Train with validated arguments, and close the process groups."""
    with starting(args, identity) as store:
        try:
            set_global_variables(args)
            _train(args, store)
        except BaseException as error:
            explanation = explained(error, args)
            if explanation is error:
                raise
            raise explanation from error
        finally:
            with guard.bounded("the end of the process", guard.end_seconds):
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


def _train(args: Namespace, store: Any) -> None:
    if args.rank == 0 and not cpu.is_active():
        print(fused_kernels.describe(), flush=True)
    if args.rank == 0 and args.attention_similarity != "softmax":
        print(f"attention: {args.attention_similarity} similarity, in chunks of rows", flush=True)
    elif args.rank == 0:
        choices = kernel_choices(args)
        for title, choice in choices.items():
            print(f"attention: {title} on {choice}", flush=True)
        for line in dict.fromkeys(filter(None, map(fused_kernels.faster, choices.values()))):
            print(f"attention: {line}", flush=True)
    with refusals_of_megatron():
        model = model_of_arguments.model_config(args)
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
        step = forward_step.forward_step
        megatron_pretrain(container, datasets_provider, kind, step, store=store)
    # The rank that wrote the metrics has all of them.
    if metrics and args.rank == args.world_size - 1:
        print(f"picture: {run_figure.draw_run(Path(args.run_dir))}", flush=True)
        if note := weak_loss(metrics, args.head_balance_coeff):
            print(f"megasink: {note}", flush=True)


@contextlib.contextmanager
def _counting_blocks() -> Iterator[None]:
    """Let Megatron's logs count blocks, as for a GPT model, if all have attention."""

    def is_hybrid_model(args: Namespace) -> bool:
        return bool(recurrent(args.hybrid_layer_pattern or ""))

    with (
        HYBRID_COUNTS.replacing(is_hybrid_model=is_hybrid_model),
        HYBRID_COUNTS.replacing(theoretical_memory_usage, is_hybrid_model=is_hybrid_model),
    ):
        yield


class FixedBatches:
    """A restartable iterator over the batches of a data loader with a fixed order."""

    def __init__(self, loader: Any):
        self._loader = loader
        self._batches: Iterator[Any] = iter(())
        self._begun = True

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> "FixedBatches":
        self.restart()
        return self

    def __next__(self) -> Any:
        self._begun = True
        return next(self._batches)

    def restart(self) -> None:
        """Return to the first batch."""
        if self._begun:  # otherwise workers would read it twice
            self._batches, self._begun = iter(self._loader), False


@contextlib.contextmanager
def comparable_evaluations() -> Iterator[None]:
    """Evaluate always on the same samples, and once per step; not at all without validation data.

    Megatron continues through the validation set, in an order that depends on --train-iters. Here
    every evaluation uses the first --eval-iters global batches.
    """
    original = EVALUATION.originals()
    evaluation_call = inspect.signature(original["evaluate_and_print_results"])
    fixed: list[FixedBatches] = []
    evaluated: int | None = None
    validates: bool | None = None

    def get_train_valid_test_num_samples() -> tuple[int, int | None, int]:
        train, valid, test = original["get_train_valid_test_num_samples"]()
        # The test set's number covers one evaluation.
        return train, None if valid is None else test, test

    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
        build = original["build_pretraining_data_loader"]
        if dataset is None:
            return build(dataset, consumed_samples)
        # Blends and single datasets name their split differently.
        split = getattr(dataset, "split", None) or getattr(dataset, "index_split", None)
        evaluates = split in (Split.valid, Split.test)
        loader = build(dataset, 0 if evaluates else consumed_samples)
        # Each pass draws a seed for the workers. On a CPU this would use dropout's generator, whose
        # state a resumed run must reproduce.
        loader.generator = torch.Generator()
        if not evaluates:
            return loader
        fixed.append(FixedBatches(loader))
        return fixed[-1]

    @functools.wraps(training.evaluate_and_print_results)
    def evaluate_and_print_results(prefix: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal evaluated, validates
        if not prefix.endswith("on test set"):
            if validates is None:
                _, validates, _ = parts(get_args())
            if not validates:  # Megatron would evaluate on the data loader None (training.py:4584)
                return None
            iteration = evaluation_call.bind(prefix, *args, **kwargs).arguments["iteration"]
            if iteration == evaluated:
                return None
            evaluated = iteration
        for batches in fixed:
            batches.restart()
        return original["evaluate_and_print_results"](prefix, *args, **kwargs)

    with EVALUATION.replacing(
        get_train_valid_test_num_samples=get_train_valid_test_num_samples,
        build_pretraining_data_loader=build_pretraining_data_loader,
        evaluate_and_print_results=evaluate_and_print_results,
    ):
        yield
