"""What the balance loss sends: as the model says, and never where training would wait for it."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.balance.collective_sizes import HEADS, LAYERS, MICROBATCHES
from tests.balance.communication import AllReduces, balance_collectives
from tests.distributed.layout import Layout
from tests.distributed.pool import ROOT, free_port
from tests.runs import MOCK, TINY, UNTIED

COUNTS = "tests.balance.collective_tasks"
TRAINER = "tests.balance.trainer_tasks"
SCOPES = ("global", "data-parallel", "microbatch")
FLAGS = [*TINY, *UNTIED, *MOCK]
FLAGS += "--train-iters 3 --eval-iters 0 --head-balance-coeff 0.1 --num-workers 0".split()


def expected(scope, layout, **sizes):
    """What the model says, as the tasks count it."""
    found = balance_collectives(
        scope,
        **{"layers": LAYERS, "heads": HEADS, "microbatches": MICROBATCHES // layout.dp} | sizes,
        tensor=layout.tp,
        pipeline=layout.pp,
        data=layout.dp,
        context=layout.cp,
    )
    return sorted(("allreduce_", each.bytes_each, each.ranks, each.count) for each in found)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(cp=2, dp=2), {}),
        (Layout(tp=2, pp=2, sp=True), {}),
        (Layout(pp=2, dp=2, vpp=2), {"recompute_granularity": "full"}),
    ],
    ids=["cp2-dp2", "tp2-pp2-sp", "pp2-dp2-vpp2-recompute"],
)
def test_counted_collectives_are_those_of_the_model(four, layout, options):
    if layout.sp:
        options = options | {"sequence_parallel": True}
    if options.get("recompute_granularity"):
        options = options | {"recompute_method": "uniform", "recompute_num_layers": 1}
    observed = layout.cp > 1
    options = {"scopes": list(SCOPES), "observed": observed} | options
    found = four.run(f"{COUNTS}:step_counts", layout, **options)
    for rank, by_scope in enumerate(found):
        for scope in SCOPES:
            wanted = expected(scope, layout, observed=observed)
            assert by_scope[scope] == wanted, (rank, scope, layout)


@pytest.mark.parametrize("sizes", [{}, {"layers": 32}, {"microbatches": 64}, {"pipeline": 4}])
def test_global_is_one_all_reduce_of_one_table(sizes):
    sizes = {"layers": 8, "heads": 10, "microbatches": 4, "data": 2, "pipeline": 2} | sizes
    (only,) = balance_collectives("global", **sizes)
    assert (only.count, only.bytes) == (1, 8 * sizes["layers"] * (2 * 10 + 3))


def test_a_ring_and_a_tree():
    reduces = AllReduces("x", ranks=4, count=3, bytes_each=100, awaited="backward")
    assert reduces.ring_bytes() == 3 * 150
    assert reduces.ring_seconds(bandwidth=10.0, latency=0.5) == 3 * 15 + 3 * 6 * 0.5
    assert reduces.tree_seconds(bandwidth=10.0, latency=0.5) == 3 * 20 + 3 * 4 * 0.5


def test_the_table_of_the_docs_is_what_the_model_says():
    page = (Path(ROOT) / "megasink" / "balance" / "README.md").read_text()
    row = r"\| ([\d,]+) \| TP(\d+) PP(\d+) DP(\d+) \| (\d+) \| `([\w-]+)` \| (.*) \|"
    rows = re.findall(row, page)
    assert len(rows) == 12
    for ranks, *sizes, scope, numbers in rows:
        tensor, pipeline, data, microbatches = map(int, sizes)
        assert int(ranks.replace(",", "")) == tensor * pipeline * data
        found = balance_collectives(
            scope,
            **{"layers": 80, "heads": 64, "microbatches": microbatches},
            **{"tensor": tensor, "pipeline": pipeline, "data": data},
        )
        link = {"bandwidth": 50e9, "latency": 10e-6}
        kib = sum(each.bytes for each in found) / 1024
        ring, tree = (
            1e3 * sum(seconds(each, **link) for each in found)
            for seconds in (AllReduces.ring_seconds, AllReduces.tree_seconds)
        )
        count = sum(each.count for each in found)
        assert numbers == f"{count:,} | {kib:,.1f} | {ring:,.2f} | {tree:,.2f}"


def test_one_process_sends_nothing_and_uneven_stages_are_refused():
    assert balance_collectives("data-parallel", layers=2, heads=4, microbatches=8) == []
    with pytest.raises(ValueError, match="3 layers cannot be shared equally by 2"):
        balance_collectives("global", layers=3, heads=4, microbatches=1, pipeline=2)
    with pytest.raises(ValueError, match="'world' is unknown"):
        balance_collectives("world", layers=2, heads=4, microbatches=1)


def test_nothing_waits_for_the_statistics(pool):
    """They are sent when the last backward has ended and awaited when the weights have moved."""
    flags = [*FLAGS, "--num-layers", "2", "--global-batch-size", "8"]
    flags += ["--pipeline-model-parallel-size", "2"]
    for events in pool.run(f"{TRAINER}:order_of_events", flags=flags, ranks=2, port=free_port()):
        steps = " ".join(e for e in events if "forward" not in e).split("sums awaited")
        assert len(steps) == 4
        assert steps.pop().strip() == ""  # nothing after the third
        for step in steps:
            *backwards, rest = step.strip().partition("sums started")
            assert backwards[0].strip() == " ".join(["backward begins backward ends"] * 4)
            assert rest.strip() == "gradients begins gradients ends optimizer begins optimizer ends"


def test_sums_of_a_microbatch_start_in_forward_and_are_awaited_in_backward(pool):
    flags = [*FLAGS, "--num-layers", "2", "--global-batch-size", "8"]
    flags += ["--head-balance-scope", "data-parallel"]
    for events in pool.run(f"{TRAINER}:order_of_events", flags=flags, ranks=2, port=free_port()):
        forward = ["forward begins", "layer started", "layer started", "forward ends"]
        backward = ["backward begins", "layer awaited", "layer awaited", "backward ends"]
        ours = [e for e in events if e.startswith(("forward", "backward", "layer"))]
        assert ours == (forward + backward) * 2 * 3


@pytest.mark.parametrize("scope", SCOPES)
def test_two_ranks_of_1024(pool, scope):
    """Built and stepped by the trainer; the process group answers for the other 1022."""
    steps, layout = 3, Layout(tp=8, pp=8, dp=16)
    flags = [*FLAGS, "--num-layers", "16", "--num-attention-heads", "16", "--hidden-size", "128"]
    flags += ["--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size", "8"]
    flags += ["--sequence-parallel", "--global-batch-size", "64", "--head-balance-scope", scope]
    flags += ["--log-interval", "100"]  # of the three steps the last is observed
    sizes = {"layers": 16, "heads": 16, "microbatches": 2}
    wanted = Counter()
    for step in range(steps):
        for *what, count in expected(scope, layout, observed=step == steps - 1, **sizes):
            wanted[tuple(what)] += count
    assert len(wanted) == 2 + (scope != "global")
    # The first and the last stage; their tensor-parallel rank is 0, so that they read the data.
    found = pool.run(f"{TRAINER}:one_of_many", flags=flags, ranks=[0, 896], world=layout.world)
    for counts in found:
        for what, count in wanted.items():
            assert (*what, count) in counts
