"""Track what a rank is doing in Megatron's training loop."""

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megasink.training import stop
from megasink.training.metric_records import HostCopy
from megasink.upstream.training_patches import PHASES, SIGNALS

# Functions of megatron/training/training.py.
_WORDS = {
    "initialize_megatron": "starting the process groups",
    "setup_model_and_optimizer": "building and loading the model",
    "build_train_valid_test_data_iterators": "building the datasets",
    "train": "training",
    "evaluate_and_print_results": "evaluating",
    "save_checkpoint_and_time": "saving a checkpoint",
}


@contextmanager
def following_phases(args: Namespace) -> Iterator[None]:
    """Keep `stop.RankState.phase` and `stop.RankState.step` up to date."""
    from megatron.training import training

    during = {name: _during(words, getattr(training, name)) for name, words in _WORDS.items()}
    log = training.training_log
    trained = False

    def train(*positional: Any, **named: Any) -> Any:
        nonlocal trained
        stop.training_begins(args.exit_signal)
        result = during["train"](*positional, **named)
        trained = True
        return result

    def evaluate_and_print_results(*positional: Any, **named: Any) -> Any:
        if trained:  # and saved
            stop.training_ended()
        return during["evaluate_and_print_results"](*positional, **named)

    def training_log(*positional: Any, **named: Any) -> Any:
        stop.RankState.step = args.curr_iteration + 1
        return log(*positional, **named)

    followed = during | {"train": train, "evaluate_and_print_results": evaluate_and_print_results}
    with PHASES.replacing(**followed, training_log=training_log):
        yield
        stop.training_ended()


def _during(words: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before, stop.RankState.phase = stop.RankState.phase, words
        try:
            return function(*args, **kwargs)
        finally:
            stop.RankState.phase = before

    return wrapper


@contextmanager
def agreeing_on_signals(
    received: Callable[[], int], announce: Callable[[int], None], waits: Callable[[], bool]
) -> Iterator[None]:
    """Agree on the signal that any rank `received`, or 0, with one all-reduce a step."""
    # Upstream reads each rank's value from the device. Here the host reads one number a step later,
    # unless all ranks `wait` for it: a signal ends the run after the next step.
    sent: HostCopy | None = None

    def signals_received(self: Any) -> list[int]:
        nonlocal sent
        here = max(received(), int(self.sig) if self._signal_received else 0)
        # Filled on the device: a copy from unpinned memory would wait for it.
        any_rank = torch.full((1,), here, dtype=torch.int32, device=torch.cuda.current_device())
        torch.distributed.all_reduce(any_rank, op=torch.distributed.ReduceOp.MAX)
        before, sent = sent, HostCopy(any_rank)
        copies = [copy for copy in (before, sent if waits() else None) if copy is not None]
        number = max((int(copy.read()) for copy in copies), default=0)
        if number:
            announce(number)
        return [number]

    with SIGNALS.replacing(signals_received=signals_received):
        yield
