"""Programs that `make gpu` starts reach their end on the host, so that no typo costs GPU time.

Not covered: numbers, and the tests of tests/gpu, whose helpers run here.
"""

import json

import pytest

NO_CUDNN = "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"
# Before 9.26 Hopper cannot take it; later ones are tried, and fail on a hollow GPU.
VERSIONS = pytest.mark.parametrize(("cudnn", "code"), [(91900, 0), (92600, 1)])


@VERSIONS
def test_gradient_errors(gpu, cudnn, code):
    """A row that fails says why, and the others follow."""
    flags = ["--device", "cuda"]
    found, printed = gpu.run(
        "gpu_tasks:benchmark", name="attention_error", flags=flags, cudnn=cudnn
    )
    assert found == code
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if " / " in line]
    kernels = {(cells[0], cells[1]) for cells in rows[1:]}
    halves = {("bfloat16", "eager"), ("float16", "eager"), ("bfloat16", "flash-cuda")}
    assert kernels == {("float32", "eager")} | halves
    assert printed.count(f"| cudnn | sink | {NO_CUDNN} |") == code


@VERSIONS
def test_ratios(gpu, tmp_path, cudnn, code):
    """An implementation that fails is named and left out; ours also have a ratio to themselves."""
    flags = ["--device", "cuda", "--heads", "2", "--head-dim", "64", "--turns", "2"]
    flags += ["--lengths", "64", "128", "--output", str(tmp_path)]
    found, printed = gpu.run("gpu_tasks:benchmark", name="attention", flags=flags, cudnn=cudnn)
    assert found == code
    assert printed.count(f"sink (cudnn), S 64: {NO_CUDNN}") == code
    rows = json.loads((tmp_path / "attention.json").read_text())["rows"]
    names = [row["implementation"] for row in rows]
    ours = [f"{variant} (flash-cuda)" for variant in ("plain", "vanilla", "sink", "gated")]
    one = ["plain kernel, no gate", *ours, "sink (eager)", "FlexAttention, sink"]
    assert names == 2 * one
    assert [row["implementation"] for row in rows if row["own_ratio"]] == 2 * ours
    assert (tmp_path / "attention.png").exists()


def test_steps_of_layers(gpu, tmp_path):
    """Two steps of each kind, the second under `set_sync_debug_mode("error")`."""
    kinds = ["sink", "headwise"]
    found = gpu.run("gpu_tasks:layers", path=str(tmp_path / "steps.pt"), kinds=kinds)
    assert sorted(found) == sorted(kinds)
    assert any(name.endswith("softmax_offset") for name in found["sink"])
    assert all("loss" in names for names in found.values())
