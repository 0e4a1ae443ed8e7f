"""In which order the files run, and which tests are quick: ``python -m tests.schedule`` prints the
files that those are in.

xdist's workers take whole files (a file's fixtures are made once), in this order: those that take
longest begin first, so that no worker ends minutes after the other.
"""

from collections.abc import Iterable

import pytest

# CPU seconds of the files that take longest. What is not here runs last.
LONG = {
    "tests/train/test_survival.py": 130,
    "tests/contributing/test_contributing.py": 110,
    "tests/distributed/test_layouts.py": 110,
    "tests/attention/test_gate_kernels.py": 100,
    "tests/grid/test_grid.py": 90,
    "tests/train/test_end_to_end.py": 85,
    "tests/train/test_dead_rank.py": 85,
    "tests/platform/test_patches.py": 70,
    "tests/hollow/test_trainer.py": 70,
    "tests/inference/test_decoding.py": 70,
    "tests/finetune/test_finetune.py": 60,
    "tests/distributed/test_checkpoint.py": 55,
    "tests/convert/test_commands.py": 45,
    "tests/convert/test_round_trip.py": 45,
    "tests/convert/test_own_model.py": 40,
    "tests/test_start_to_end.py": 40,
    "tests/distributed/test_resume.py": 40,
    "tests/hollow/test_attention.py": 40,
    "tests/distributed/test_oracle.py": 40,
    "tests/distributed/test_invariance.py": 40,
    "tests/distributed/test_packed_context.py": 40,
    "tests/intervene/test_harness.py": 35,
    "tests/train/test_example.py": 35,
    "tests/train/test_checks.py": 35,
    "tests/distributed/test_data_path.py": 35,
    "tests/damage/test_damage.py": 35,
    "tests/distributed/test_moe.py": 30,
    "tests/distributed/test_masks.py": 30,
    "tests/test_readme.py": 30,
    "tests/distributed/test_features.py": 30,
    "tests/distributed/test_context_parallel.py": 30,
    "tests/distributed/test_observing.py": 30,
    "tests/transformers/test_compiled.py": 25,
    "tests/platform/test_platform.py": 25,
    "tests/convert/test_vocabulary.py": 25,
    "tests/probe/test_resuming.py": 25,
    "tests/probe/test_cli.py": 25,
}

# `make quick`: the op against its definition, the balance loss, layouts, what is refused, and a
# model from training to its analysis. Beginnings of node ids.
QUICK = (
    "tests/attention/test_attention_exact.py",
    "tests/attention/test_gates.py",
    "tests/balance/test_loss.py",
    "tests/diagnostics/test_metrics.py",
    "tests/diagnostics/test_scores.py",
    "tests/distributed/test_layouts.py::test_layout_changes_nothing[sink-",
    "tests/distributed/test_oracle.py::test_training_equals_autograd_of_eq_7",
    "tests/layers/test_slots.py",
    "tests/test_cli.py",
    "tests/test_docs.py",
    "tests/test_files.py",
    "tests/test_imports.py",
    "tests/test_start_to_end.py",
    "tests/train/test_checks.py",
)

# What a new release of Megatron is tried with (CONTRIBUTING.md): the lines that patches rest on,
# the modules, a layout of each kind, checkpoints, and what reads a model. Beginnings of node ids.
NEXT_RELEASE = (
    "tests/upstream/",
    "tests/platform/",
    "tests/layers/test_core_attention.py",
    "tests/layers/test_gated_attention.py",
    "tests/layers/test_hybrid.py",
    "tests/layers/test_init.py",
    "tests/layers/test_softmax_offset.py",
    "tests/distributed/test_checkpoint.py",
    "tests/distributed/test_invariance.py",
    "tests/inference/test_decoding.py",
    "tests/probe/test_megatron.py",
    "tests/train/test_end_to_end.py",
)


def in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The same items, the longest files first."""
    return sorted(items, key=lambda item: -LONG.get(item.nodeid.split("::")[0], 0))


def is_quick(nodeid: str) -> bool:
    """Whether a test is part of `make quick`."""
    return nodeid.startswith(QUICK)


def is_for_next_release(nodeid: str) -> bool:
    """Whether a test is in the sample that a new release of Megatron is tried with."""
    return nodeid.startswith(NEXT_RELEASE)


if __name__ == "__main__":
    print(*sorted({nodeid.split("::")[0] for nodeid in QUICK}))
