"""TransformerEngine's layers around megasink's attention: the host side of a step.

The package is real, with its library and its extension for torch; engine.py builds it. Calls of its
fused attention end in engine_attention.cpp, which checks them: cuDNN has a CUDA runtime inside,
which the hollow GPU cannot replace.
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

DELAYED, TENSORWISE, BLOCKWISE, MXFP8 = [
    f"--fp8-format hybrid --fp8-recipe {recipe}"
    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8")
]
VANILLA, SINK = "--attention-variant vanilla", "--attention-variant sink"
# name: (flags, rank, ranks)
CASES = {
    "sink": (SINK, 0, 1),
    "vanilla": (VANILLA, 0, 1),
    "headwise": (GATED, 0, 1),
    "elementwise-groups": (f"{GATED} {ELEMENTWISE} {GROUPS}", 0, 1),
    "recompute": (f"{FULL} {GATED}", 0, 1),
    "tensor-sequence": (f"{TP} {SP} {GATED}", 1, 2),
    "pipeline-last": (f"{PP} 2 {SINK}", 1, 2),
    "fp8-delayed": (f"{SINK} {DELAYED}", 0, 1),
    "fp8-delayed-gated": (f"{GATED} {DELAYED}", 0, 1),
    "fp8-tensorwise": (TENSORWISE, 0, 1),
    "fp8-blockwise-vanilla": (f"{VANILLA} {BLOCKWISE}", 0, 1),
    "fp8-blockwise-tensor": (f"{TP} {SP} {GATED} {BLOCKWISE}", 1, 2),
    "fp8-mxfp8-sink": (f"{SINK} {MXFP8}", 0, 1),
    "fp8-mxfp8-vanilla": (f"{VANILLA} {MXFP8}", 0, 1),
    "fp8-mxfp8-elementwise": (f"{GATED} {ELEMENTWISE} {GROUPS} {MXFP8}", 0, 1),
    "fp8-mxfp8-tensor": (f"{TP} {SP} {GATED} {MXFP8}", 1, 2),
}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Server]:
    with Server(Path(engine.FOLDER or "", "site"), **engine.variables()) as server:
        yield server


@pytest.mark.parametrize("name", CASES)
def test_a_step(gpu, name):
    """It starts and steps, and attention gets whole vectors; megasink never makes the host wait."""
    flags, rank, ranks = CASES[name]
    found = step(gpu, flags, rank, ranks)
    assert unexpected(found, shlex.split(flags)) == []
    assert found["misplaced"] == []
    engines = [name for name in found["kernels"] if "transformer_engine" in name]
    assert any("rmsnorm_fwd" in name for name in engines), engines
    assert any("quantize" in name or "scaling" in name for name in engines) == ("--fp8" in flags)


def step(gpu, flags: str, rank: int = 0, ranks: int = 1, **options):
    given = shlex.split(f"{MODEL} --transformer-impl transformer_engine {flags}")
    device = {"capability": 100 if MXFP8 in flags else 90}
    options |= {"rank": rank, "ranks": ranks, "device": device}
    return gpu.run("trainer_tasks:step", flags=given, **options)


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.later)])
def test_every_call_of_its_fused_attention(gpu, every):
    found = gpu.run(
        "attention_tasks:all_calls", backend="transformer-engine", dtype="bfloat16", every=every
    )
    assert found["problems"] == {}


def test_its_fused_attention_takes_packed_documents_in_one_call(gpu):
    kernel = "transformer_engine fused_attn_"
    found = gpu.run("engine_tasks:packed_calls", of_kernel=kernel)
    for case, names in found.items():
        passes = [name.removeprefix(kernel).split()[0] for name in names]
        assert passes == ["fwd", "bwd"], (case, names)
        assert all("packed causal" in name for name in names)


@pytest.mark.parametrize("extra", [0, 1, 8])
def test_its_fused_attention_is_given_whole_vectors(gpu, extra):
    assert gpu.run("attention_tasks:given_rows", backend="transformer-engine", extra=extra) == []


@pytest.mark.parametrize(
    ("flags", "forward", "backward"),
    [
        (SINK, "sink causal window -1,0", "sink causal window -1,0"),
        (f"{SINK} --window-size 63,0 {TP} {SP}", "sink causal window 63,0", None),
        # A constant sink has no gradient, and the LSE has it already.
        ("--attention-variant off-by-one", "sink causal window -1,0", "causal window -1,0"),
        (f"{GATED} {DELAYED}", "causal window -1,0", None),
    ],
)
def test_a_step_with_its_fused_attention(gpu, flags, forward, backward):
    """Its own sink, in both passes; in FP8 it is given bfloat16 all the same. None: as forward."""
    rank, ranks = (1, 2) if TP in flags else (0, 1)
    found = step(gpu, f"{flags} --attention-kernel transformer-engine", rank, ranks)
    assert unexpected(found, shlex.split(flags)) == []
    fused = {name: n for name, n in found["kernels"].items() if "engine fused_attn" in name}
    calls = 2 * 2  # layers, microbatches
    names = f"fused_attn_fwd {forward}", f"fused_attn_bwd {backward or forward}"
    assert fused == {f"transformer_engine {name}": calls for name in names}


@pytest.mark.parametrize("defect", ["offset", "statistics", "gradient", "layout"])
def test_a_wrong_call_of_its_fused_attention_is_seen(gpu, defect):
    with pytest.raises(AssertionError, match=r"fused attention \(stand-in\)"):
        gpu.run("engine_tasks:wrong_call", defect=defect)


@pytest.mark.parametrize(
    ("variant", "saved", "resumed"),
    [
        (SINK, DELAYED, DELAYED),
        (VANILLA, TENSORWISE, TENSORWISE),
        (GATED, BLOCKWISE, BLOCKWISE),
        (SINK, MXFP8, MXFP8),
        # The rows of the gate are padded to multiples of 8, 16 and 32.
        (GATED, "", MXFP8),
        (GATED, MXFP8, BLOCKWISE),
    ],
)
def test_a_run_is_resumed(gpu, tmp_path, variant, saved, resumed):
    """Alone, and as a rank of two with half of the rows; with another padding than before."""
    step(gpu, f"{variant} {saved} --save {tmp_path} --save-interval 3")
    again = f"{variant} {resumed} --load {tmp_path} --train-iters 6"
    again += " --override-opt-param-scheduler"
    for flags, rank, ranks in ((again, 0, 1), (f"{again} {TP} {SP}", 1, 2)):
        found = step(gpu, flags, rank, ranks)
        assert found["began_at"] == 3
        assert found["misplaced"] == []


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        (DELAYED, "--num-attention-heads 3 --kv-channels 40"),
        (TENSORWISE, "--seq-length 252"),
        (BLOCKWISE, "--seq-length 252"),
        (MXFP8, "--ffn-hidden-size 336"),
        (MXFP8, f"--seq-length 240 {TP} {SP}"),
    ],
)
def test_sizes_that_its_gemms_refuse_are_refused_before(gpu, recipe, flags):
    """Without the check, each ends in an assertion of TransformerEngine in the first step."""
    rank, ranks = (1, 2) if TP in flags else (0, 1)
    with pytest.raises(AssertionError, match="needs multiples of"):
        step(gpu, f"{SINK} {recipe} {flags}", rank, ranks)
    with pytest.raises(AssertionError, match=r"divisible by|Caller must pad"):
        step(gpu, f"{SINK} {recipe} {flags}", rank, ranks, checked=True)


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
