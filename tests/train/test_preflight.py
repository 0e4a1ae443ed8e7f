"""The preflight times every rank and link, and names the slow ones."""

import math

import pytest
import torch

from megasink.train.preflight import Load, Times, report, rounds
from tests.distributed.layout import Layout
from tests.distributed.pool import free_port
from tests.runs import MOCK, TINY

TIMES = "tests.train.preflight_tasks:times"
LOAD = Load(1 << 30, 1000, torch.float32)


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_every_link_of_the_ring_has_its_round_and_no_rank_two(world):
    by_rank = [rounds(world, rank) for rank in range(world)]
    assert len({len(found) for found in by_rank}) == 1
    links = set()
    for at in zip(*by_rank, strict=True):
        for rank, link in enumerate(at):
            if link != (-1, -1):
                assert rank in link
                assert at[link[0]] == at[link[1]] == link
        links |= set(at) - {(-1, -1)}
    assert links == {(rank, (rank + 1) % world) for rank in range(world)}


def test_every_rank_knows_the_times_of_all(pool):
    first, second = pool.run(TIMES, Layout(tp=2))
    assert first == second
    assert len(first.hosts) == len(first.links) == len(first.products) == 2
    assert all(0 < x < math.inf for x in (*first.links, *first.products, first.all_reduce))


def test_the_slow_rank_and_the_slow_link_are_named(four):
    found = four.run(TIMES, Layout(dp=4), slow_product=2, slow_link=3)[0]
    text = "\n".join(report(found, 1.0))
    host = found.hosts[0]
    assert f"straggler: rank 2 on {host}: matrix products" in text
    assert f"slow link: 3 -> 0 ({host} -> {host}): " in text
    assert found.links[0] > 0.25 > max(found.links[1:])


def test_links_are_compared_with_their_kind():
    times = Times(["a", "a", "b", "b"], [1.0, 0.1, 1.0, 0.1], [1.0] * 4, 2.0, LOAD)
    assert report(times, 0.5) == [
        "4 ranks on 2 hosts answered in 0.5 s; matrix products 0.002 TFLOP/s (median)",
        "links within a host: 10.7 GB/s (median), slowest 0 -> 1 (a -> a) 10.7 GB/s",
        "links between hosts: 1.07 GB/s (median), slowest 3 -> 0 (b -> a) 1.07 GB/s",
        "all-reduce of 1024 MiB over all ranks: 2e+03 ms, 0.805 GB/s",
    ]


def test_a_single_rank_has_no_links():
    assert report(Times(["a"], [], [1.0], None, LOAD), 0.1) == [
        "1 rank on 1 host answered in 0.1 s; matrix products 0.002 TFLOP/s (median)"
    ]


def test_the_trainer_says_it_before_the_first_step(pool, tmp_path):
    flags = [*TINY, *MOCK, "--train-iters", "1", "--tensor-model-parallel-size", "2", "--preflight"]
    task = "tests.train.preflight_tasks:said"
    flags += ["--run-dir", str(tmp_path / "run")]
    first, second = pool.run(task, flags=flags, ranks=2, port=free_port())
    assert "preflight: 2 ranks on 1 host answered in " in first
    assert "preflight: all-reduce of 1 MiB over all ranks: " in first
    assert first.index("preflight: ") < first.index("training ...")
    assert "preflight" not in second
