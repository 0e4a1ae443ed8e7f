"""The language of the demo, its flags, and its picture."""

from megasink.cli import demo_runs as demo
from megasink.training import early


def test_the_trainer_takes_the_flags():
    for coeff in demo.RUNS.values():
        flags = [*demo.FLAGS.split(), "--head-balance-coeff", coeff, "--train-iters", "10"]
        assert early.read(flags).flag_problems == []
