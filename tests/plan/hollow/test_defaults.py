"""Megatron's fused defaults on a CUDA machine without TransformerEngine and apex."""

import shlex

import pytest

from megasink.upstream.fused_kernels import APEX, TRANSFORMER_ENGINE
from tests.plan.hollow.test_trainer import MODEL


@pytest.fixture(autouse=True)
def _without_packages():
    for package in (TRANSFORMER_ENGINE, APEX):
        if package.missing() is None:
            pytest.skip(f"{package.name} is installed")


def test_defaults_that_cannot_be_used_are_off_and_named(gpu):
    found = gpu.run("defaults_tasks:parsed", flags=shlex.split(MODEL))
    assert found["args"] == {
        "transformer_impl": "local",
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    assert found["line"].startswith(
        "fused kernels: no TransformerEngine's layers and no fused RoPE"
    )
    assert "the package transformer-engine is not installed" in found["line"]
    assert "the package apex is not installed" in found["line"]


def test_flags_that_ask_for_them_are_refused_together(gpu):
    flags = "--transformer-impl transformer_engine --te-rng-tracker --defer-embedding-wgrad-compute"
    found = gpu.run("defaults_tasks:parsed", flags=shlex.split(f"{MODEL} {flags}"))
    first, second, third = found["problems"]
    assert first.startswith("--transformer-impl transformer_engine: the package transformer-engine")
    assert second.startswith("--te-rng-tracker: the package transformer-engine")
    for problem in (first, second):
        assert "pip install 'megasink[gpu]', or drop the flag" in problem
    assert third.startswith("--defer-embedding-wgrad-compute: the package apex is not installed")


def test_a_norm_that_torch_does_not_have_is_refused(gpu):
    found = gpu.run("defaults_tasks:parsed", flags=shlex.split(f"{MODEL} --apply-layernorm-1p"))
    (problem,) = found["problems"]
    assert "torch's norms have no zero-centered weight" in problem
