"""Record of the tests of each feature. ``python -m tests.verified`` writes it to docs/verified.md.

tests/test_verified.py compares the record with the page and with the existing tests.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from tests import versions

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "verified.md"
BEGIN, END = "<!-- the {}: python -m tests.verified -->", "<!-- end of the {} -->"
# Reports of `make gpu` (date, device, commit). As long as there is none, nothing ran on a GPU.
GPU_REPORTS: tuple[str, ...] = ()


class Row(NamedTuple):
    """Test files of a feature, without `tests/` and `test_`, by what they run on.

    Attributes:
        one: one process on a CPU.
        gloo: two or more gloo ranks on a CPU.
        hollow: the host's side of the CUDA path, on the hollow GPU.
        gpu: a GPU.
    """

    feature: str
    one: str = ""
    gloo: str = ""
    hollow: str = ""
    gpu: str = ""


ROWS = (
    Row(
        "attention: outputs, log-sum-exp, gates, every gradient",
        "attention/attention_exact attention/attention_op attention/gates",
        "",
        "plan/hollow/attention",
        "gpu/attention_gpu gpu/edges_gpu",
    ),
    Row(
        "kernels of CUDA packages (flash-attn 2 to 4, cuDNN, TransformerEngine)",
        "attention/package_backends attention/attention_backends",
        "",
        "",
        "gpu/attention_gpu gpu/layers_gpu",
    ),
    Row(
        "Triton's gate kernels",
        "attention/gate_kernels",
        "",
        "plan/hollow/trainer",
        "gpu/gate_kernels_gpu",
    ),
    Row(
        "windows, prefixes, packed documents, position biases",
        "attention/attention_masks megatron/positions",
        "distributed/masks",
        "plan/hollow/trainer",
    ),
    Row(
        "switch heads",
        "megatron/switch_heads",
        "distributed/layouts distributed/checkpoint megatron/decoding",
        "plan/hollow/trainer",
    ),
    Row(
        "latent attention, values narrower than keys",
        "attention/attention_exact",
        "distributed/latent megatron/decoding",
    ),
    Row(
        "explicit gates",
        "attention/explicit_gate megatron/gated_attention",
        "distributed/layouts distributed/oracle",
        "plan/hollow/trainer",
        "gpu/layers_gpu",
    ),
    Row(
        "key and value biases, similarity kernels",
        "attention/biases attention/similarity",
        "distributed/oracle",
        "plan/hollow/attention",
    ),
    Row(
        "head-balance loss, in every scope",
        "balance/loss balance/attach",
        "distributed/invariance distributed/oracle distributed/random_balance",
        "plan/hollow/plan",
        "gpu/ranks_gpu",
    ),
    Row(
        "tensor, sequence, pipeline, data parallelism; distributed optimizer; recomputation",
        "",
        "distributed/layouts distributed/features",
        "plan/hollow/trainer",
        "gpu/ranks_gpu",
    ),
    Row(
        "context parallelism, with packed documents too",
        "attention/rectangles",
        "distributed/context_parallel distributed/packed_context",
        "plan/hollow/trainer",
        "gpu/ranks_gpu",
    ),
    Row("mixture of experts", "", "distributed/moe", "plan/hollow/trainer"),
    Row(
        "layers that differ, hybrid models, multi-token prediction",
        "",
        "megatron/variant_layers megatron/gpt megatron/hybrid megatron/prediction",
    ),
    Row("Muon", "", "distributed/muon"),
    Row(
        "from files to batches, sink token, replaced tokens",
        "data/preprocess data/index",
        "distributed/data_path training/sink_token training/replacing",
    ),
    Row(
        "checkpoints under another layout; bit-identical resuming",
        "training/damaged_checkpoints",
        "distributed/checkpoint distributed/resume",
        "",
        "gpu/job_gpu",
    ),
    Row(
        "kills, signals, lost ranks and hosts, full disks",
        "training/heartbeat training/lease",
        "training/survival training/dead_rank training/hosts",
    ),
    Row(
        "records of training",
        "analysis/pages/curves",
        "distributed/observing",
    ),
    Row("planning a run", "plan/plan", "", "plan/hollow/plan"),
    Row(
        "Megatron's defaults without its CUDA packages",
        "training/checks",
        "",
        "plan/hollow/defaults",
    ),
    Row(
        "export and import, against stock transformers",
        "convert/targets convert/transforms convert/own_rope",
        "convert/round_trip convert/own_model convert/published",
    ),
    Row("generation", "megatron/sampling", "megatron/decoding"),
    Row(
        "analysis: metrics against their definitions",
        "analysis/metrics/metrics analysis/capture/transformers",
        "analysis/capture/resuming",
    ),
    Row("interventions", "analysis/interventions/definitions analysis/interventions/batching"),
    Row(
        "attention and head-balance loss in transformers",
        "transformers/exact transformers/balance",
        "transformers/balance_trainer",
    ),
    Row("install without Megatron", "light/light packaging"),
    Row("untrusted files run no code", "security/inventory", "security/checkpoints"),
)


def path(name: str) -> Path:
    """The file that a name of a row stands for."""
    folder, _, base = name.rpartition("/")
    return ROOT / "tests" / folder / f"test_{base}.py"


def table() -> str:
    """The rows as Markdown."""
    ran = "GPU" if GPU_REPORTS else "GPU: written, never run"
    lines = [
        f"| feature | one CPU process | gloo ranks | hollow GPU | {ran} |",
        "|---|---|---|---|---|",
    ]
    for feature, *cells in ROWS:
        files = (
            ", ".join(f"[{name}](../{path(name).relative_to(ROOT)})" for name in cell.split())
            for cell in cells
        )
        lines.append(f"| {feature} | {' | '.join(files)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the tables of the records in place of its own."""
    results = json.loads(versions.RESULTS.read_text())
    for name, rows in (("table", table()), ("versions", versions.table(results))):
        begin, end = BEGIN.format(name), END.format(name)
        before, found, rest = text.partition(begin)
        assert found, f"{PAGE} lacks {begin}"
        text = f"{before}{begin}\n\n{rows}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
