"""The language of the demo, its flags, and its picture."""

from megasink.cli import demo_runs as demo
from tests.parsing import read


def test_the_trainer_takes_the_flags():
    for coeff in demo.RUNS.values():
        flags = [*demo.FLAGS.split(), "--head-balance-coeff", coeff, "--train-iters", "10"]
        assert read(flags).flag_problems == []
