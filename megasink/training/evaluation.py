"""Comparable evaluations: always on the same samples, and once per step.

Megatron continues through the validation set, in an order that depends on --train-iters. Here every
evaluation uses the first --eval-iters global batches; without validation data there is none.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.datasets.utils import Split
from megatron.training import get_args, training

from megasink.training.checks.blends import parts
from megasink.upstream.training import EVALUATION


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
    """Make Megatron's training loop evaluate on fixed batches."""
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
