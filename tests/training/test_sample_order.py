"""A run that is made longer goes on in the epoch that it is in: no sample twice, none left out."""

import itertools
from collections import Counter

import pytest

from tests.distributed.layout import SINGLE
from tests.distributed.pool import free_port
from tests.runs import TINY

TASKS = "tests.distributed.data_tasks"
FLAGS = [*TINY]
FLAGS += """
    --num-layers 1 --hidden-size 32 --num-attention-heads 2 --global-batch-size 8
    --tokenizer-type NullTokenizer --vocab-size 5000 --split 1,0,0 --num-workers 0
    --eval-interval 1000 --eval-iters 0 --override-opt-param-scheduler
""".split()
SAMPLE = 32
# Documents of three data sets, whose tokens begin at these ids. The first has 66 samples and 7
# tokens more, the second 9, the third less than one.
DOCUMENTS = {0: [7, 300, 45, 1000, 1, 760, 7], 2500: [99, 1, 190, 9], 3000: [20]}
DATA = {"one": [0], "weights": [0.6, 0, 0.3, 2500, 0.1, 3000], "sizes": [0, 2500]}


@pytest.fixture(scope="module")
def prefixes(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for first, documents in DOCUMENTS.items():
        given = {"prefix": str(folder / str(first)), "documents": documents, "first": first}
        pool.run(f"{TASKS}:write_numbered", SINGLE, **given)
    return folder


def flags_of(prefixes, data):
    words = [str(prefixes / str(w)) if w in DOCUMENTS and w != 0.6 else str(w) for w in DATA[data]]
    return [*FLAGS, "--data-path", *words]


@pytest.mark.parametrize("data", DATA)
def test_more_samples_only_append(pool, prefixes, data):
    sizes = [32, 66, 67] if data == "sizes" else [32, 66, 96, 150, 400]
    argv = [*flags_of(prefixes, data), "--train-iters", "9"]
    (found,) = pool.run(f"{TASKS}:orders", SINGLE, argv=argv, sizes=sizes)
    for shorter, longer in itertools.pairwise(found):
        assert longer[: len(shorter)] == shorter
    for first in {0, 2500} & set(DATA[data]):
        tokens = sum(DOCUMENTS[first])
        own = [sample for sample in found[-1] if sample[0] // 2500 == first // 2500]
        own = [sample for sample in own if sample[0] < 3000]
        ends = [(epoch * tokens - 1) // SAMPLE for epoch in range(1, 8)]
        epochs = [
            own[start:stop] for start, stop in itertools.pairwise([0, *ends]) if start < len(own)
        ]
        for epoch in epochs:
            counts = Counter(token for sample in epoch for token in sample)
            # Twice at most in the sample in which it begins, which has tokens of the one before.
            twice = {token for token, count in counts.items() if count > 1}
            assert len(twice) <= SAMPLE
            assert any(twice <= set(sample) for sample in epoch)
        orders = {tuple(sample[0] for sample in epoch) for epoch in epochs}
        assert len(orders) == len(epochs) > (data != "sizes")


@pytest.mark.parametrize(("data", "unit"), [("one", "iters"), ("weights", "samples")])
def test_a_longer_run_sees_what_one_of_that_length_sees(pool, prefixes, tmp_path, data, unit):
    """66 samples of 4 steps, then of 12 on two ranks, then of 20 on one again."""
    argv = flags_of(prefixes, data)
    seen = []
    for steps, ranks in ((4, 1), (12, 2), (20, 1)):
        length = str(steps if unit == "iters" else steps * 8)
        flags = [*argv, f"--train-{unit}", length, "--run-dir", str(tmp_path / "run")]
        flags += ["--resume", "auto", "--save-interval", "4"]
        task = {"flags": flags, "ranks": ranks, "port": free_port()}
        parts = pool.run("tests.training.tasks:train_and_list", **task)[:ranks]
        seen += [s for batches in zip(*parts, strict=True) for batch in batches for s in batch]
    argv += ["--train-iters", "9"]
    ((found,),) = pool.run(f"{TASKS}:orders", SINGLE, argv=argv, sizes=[160])
    assert seen == [sample[0] for sample in found]
    if data == "one":
        assert len(set(seen[:66])) == 66
