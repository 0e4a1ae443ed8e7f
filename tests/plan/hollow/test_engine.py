"""TransformerEngine's layers around megasink's attention: the host side of a step.

The package is real, with its library and its extension for torch; engine.py builds it. Its fused
attention is not tested: cuDNN has a CUDA runtime inside, which the hollow GPU cannot replace.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plan.hollow import engine
from tests.plan.hollow.allowed import unexpected
from tests.plan.hollow.client import Server
from tests.plan.hollow.test_trainer import ELEMENTWISE, FULL, GATED, GROUPS, MODEL, PP, SP, TP

pytestmark = pytest.mark.skipif(engine.missing() is not None, reason=str(engine.missing()))

DELAYED = "--fp8-format hybrid --fp8-recipe delayed"
# name: (flags, rank, ranks)
CASES = {
    "sink": ("--attention-variant sink", 0, 1),
    "vanilla": ("--attention-variant vanilla", 0, 1),
    "headwise": (GATED, 0, 1),
    "elementwise-groups": (f"{GATED} {ELEMENTWISE} {GROUPS}", 0, 1),
    "recompute": (f"{FULL} {GATED}", 0, 1),
    "tensor-sequence": (f"{TP} {SP} {GATED}", 1, 2),
    "pipeline-last": (f"{PP} 2 --attention-variant sink", 1, 2),
    "fp8-delayed": (f"--attention-variant sink {DELAYED}", 0, 1),
    "fp8-delayed-gated": (f"{GATED} {DELAYED}", 0, 1),
    "fp8-tensorwise": ("--fp8-format hybrid --fp8-recipe tensorwise", 0, 1),
}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Server]:
    with Server(Path(engine.FOLDER or "", "site"), **engine.variables()) as server:
        yield server


@pytest.mark.parametrize("name", CASES)
def test_a_step(gpu, name):
    """It starts and steps, and attention gets whole vectors; megasink never makes the host wait."""
    flags, rank, ranks = CASES[name]
    flags = shlex.split(f"{MODEL} --transformer-impl transformer_engine {flags}")
    device = {"capability": 90}
    found = gpu.run("trainer_tasks:step", flags=flags, rank=rank, ranks=ranks, device=device)
    assert unexpected(found, flags) == []
    assert found["misplaced"] == []
    engines = [name for name in found["kernels"] if "transformer_engine" in name]
    assert any("rmsnorm_fwd" in name for name in engines), engines
    assert any("scaling" in name for name in engines) == ("--fp8-format" in flags)


def test_a_recipe_that_the_device_lacks_is_refused(gpu):
    flags = shlex.split(f"{MODEL} --transformer-impl transformer_engine {DELAYED}")
    (problem,) = gpu.run("defaults_tasks:parsed", flags=flags)["problems"]
    assert "--fp8-recipe delayed: Device compute capability 8.9" in problem


def test_a_state_of_delayed_scaling_is_loaded_without_code(gpu):
    """Upstream refuses it, and a run could not be resumed."""
    size, said, recipe = gpu.run("engine_tasks:state_of_delayed_scaling")
    assert size > 0
    assert said.startswith("Refusing to load pickled Transformer Engine extra state")
    assert recipe == "TEDelayedScaling"
