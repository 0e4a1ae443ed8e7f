"""A tiny run of six steps that is killed, damaged and resumed: its flags, and what it left."""

from tests import runs

FLAGS = [*runs.TINY, *runs.UNTIED, *runs.MOCK]
FLAGS += "--train-iters 6 --save-interval 2 --head-balance-coeff 0.1".split()


def losses(folder):
    steps = runs.steps(folder)
    assert [line["iteration"] for line in steps] == [1, 2, 3, 4, 5, 6]
    return [(line["lm_loss"], line["balance_loss"], line["grad_norm"]) for line in steps]


def only_line(text):
    (line,) = [line for line in text.splitlines() if line.startswith("megasink: ")]
    return line


def resumed_from(folder):
    return runs.resumed_from(folder)[-1]
