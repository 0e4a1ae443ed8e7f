"""What a rank is doing, followed through Megatron's training loop, which does not tell."""

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megasink.train import stop
from megasink.train.heartbeat import progress

# Functions of megatron/training/training.py.
PHASES = {
    "initialize_megatron": "starting the process groups",
    "setup_model_and_optimizer": "building and loading the model",
    "build_train_valid_test_data_iterators": "building the data sets",
    "train": "training",
    "evaluate_and_print_results": "evaluating",
    "save_checkpoint_and_time": "saving a checkpoint",
}


@contextmanager
def following_phases(args: Namespace) -> Iterator[None]:
    """Keep `stop.Told.phase` and the step of the heartbeat up to date."""
    from megatron.training import training

    originals = {name: getattr(training, name) for name in (*PHASES, "training_log")}
    for name, words in PHASES.items():
        setattr(training, name, _during(words, originals[name]))
    train, evaluate = training.train, training.evaluate_and_print_results
    log = originals["training_log"]
    trained = False

    def train_and_say(*positional: Any, **named: Any) -> Any:
        nonlocal trained
        stop.training_begins(args.exit_signal)
        result = train(*positional, **named)
        trained = True
        return result

    def evaluate_at_the_end(*positional: Any, **named: Any) -> Any:
        if trained:  # and saved
            stop.training_ended()
        return evaluate(*positional, **named)

    def training_log(*positional: Any, **named: Any) -> Any:
        progress.step = args.curr_iteration + 1
        return log(*positional, **named)

    training.train = train_and_say
    training.evaluate_and_print_results = evaluate_at_the_end
    training.training_log = training_log
    try:
        yield
        stop.training_ended()
    finally:
        for name, original in originals.items():
            setattr(training, name, original)


def _during(words: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before, stop.Told.phase = stop.Told.phase, words
        try:
            return function(*args, **kwargs)
        finally:
            stop.Told.phase = before

    return wrapper
