"""Ranks without a GPU are compared with the memory of their machine, before anything is built."""

import os
from argparse import Namespace
from types import SimpleNamespace

import pytest

from megasink.training.checks import host_memory
from tests.forkserver import server
from tests.training.command_lines import MOCK
from tests.training.six_steps import only_line


def test_what_does_not_fit_is_refused_before_anything_is_built(tmp_path):
    large = "--hidden-size 32768 --ffn-hidden-size 131072 --num-layers 96".split()
    numbers = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = server().run(
        ["megasink.training", *MOCK, *large, "--run-dir", str(tmp_path / "run")],
        env=os.environ | numbers,
    )
    assert done.returncode == 2
    line = only_line(done.stderr)
    assert "GB of free memory, but training takes at least" in line
    assert "GB in 2 ranks (weights, gradients and optimizer " in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("left", [9.9, 10.4])
def test_what_needs_more_than_is_left_is_refused(monkeypatch, left):
    monkeypatch.setattr(host_memory.cpu, "is_active", lambda: True)
    monkeypatch.setattr(host_memory, "bytes_of_rank", lambda _: (8e9, 2e9))
    monkeypatch.setattr(host_memory, "available", lambda: left * 1e9)
    args = Namespace(hybrid_layer_pattern=None, fake_process_group=False)
    problems = list(host_memory.problems(args))
    assert len(problems) == (left < 10.3)
    assert all("training takes at least 10.3 GB" in problem for problem in problems)


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("0::/", {}, 8e9),
        ("0::/a/b", {"a/memory.max": "3000", "a/memory.current": "2000"}, 1000),
        (
            "0::/a",
            {
                "memory.max": "max",
                "a/memory.max": "3000",
                "a/memory.current": "2900",
                "a/memory.stat": "anon 1\ninactive_file 500",
            },
            600,
        ),
        (
            "5:cpu,memory:/job",
            {"memory/memory.limit_in_bytes": "4000", "memory/memory.usage_in_bytes": "1000"},
            3000,
        ),
    ],
    ids=["none", "parent", "cache", "version-1"],
)
def test_a_container_has_less_than_its_machine(tmp_path, monkeypatch, groups, files, left):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    read = host_memory._read
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "_read", lambda p: groups if p.parts[1] == "proc" else read(p))
    machine = SimpleNamespace(available=8e9)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: machine)
    assert host_memory.available() == left
