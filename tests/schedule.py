"""In which order the files run, which tests are quick, and which only `make test-all` runs:
``python -m tests.schedule`` prints the files that quick tests are in.

xdist's workers take whole files (a file's fixtures are made once), in this order: those that take
longest begin first, so that no worker ends minutes after the other.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import pytest

# Seconds of the files that take longest in `make test`. What is not here runs last.
LONG = {
    "tests/megatron/test_bare_loop.py": 60,
    "tests/data/test_going_on.py": 40,
    "tests/plan/hollow/test_plan.py": 40,
    "tests/plan/hollow/test_saved.py": 20,
    "tests/distributed/test_muon.py": 25,
    "tests/plan/test_plan.py": 20,
    "tests/training/test_recipes.py": 15,
    "tests/training/test_end_to_end.py": 65,
    "tests/attention/test_gate_kernels.py": 60,
    "tests/distributed/test_packed_context.py": 60,
    "tests/replicate/grid/test_grid.py": 55,
    "tests/training/test_survival.py": 55,
    "tests/convert/test_round_trip.py": 50,
    "tests/finetune/test_finetune.py": 50,
    "tests/plan/hollow/test_trainer.py": 50,
    "tests/distributed/test_layouts.py": 45,
    "tests/distributed/test_resume.py": 35,
    "tests/plan/hollow/test_attention.py": 30,
    "tests/distributed/test_invariance.py": 30,
    "tests/attention/test_memory.py": 30,
    "tests/distributed/test_observing.py": 30,
    "tests/test_start_to_end.py": 30,
    "tests/transformers/test_balance_trainer.py": 25,
    "tests/megatron/test_decoding.py": 25,
    "tests/balance/test_communication.py": 25,
    "tests/test_readme.py": 25,
    "tests/distributed/test_oracle.py": 25,
    "tests/analysis/capture/test_cli.py": 25,
    "tests/megatron/test_observed_bits.py": 20,
    "tests/analysis/capture/test_resuming.py": 25,
    "tests/distributed/test_checkpoint.py": 25,
    "tests/convert/test_own_model.py": 20,
    "tests/distributed/test_data_path.py": 20,
    "tests/distributed/test_masks.py": 20,
    "tests/training/test_evaluation.py": 20,
    "tests/megatron/test_gated_attention.py": 20,
    "tests/lora/test_runs.py": 20,
    "tests/distributed/test_features.py": 20,
    "tests/convert/test_commands.py": 20,
    "tests/training/test_run_dir.py": 20,
    "tests/cpu/test_platform.py": 15,
    "tests/training/test_checks.py": 15,
    "tests/training/test_dead_rank.py": 15,
    "tests/distributed/test_context_parallel.py": 15,
    "tests/distributed/test_moe.py": 15,
    "tests/training/test_live_analysis.py": 15,
    "tests/cpu/test_patches.py": 15,
    "tests/security/test_checkpoints.py": 15,
    "tests/lora/test_layouts.py": 15,
    "tests/light/test_light.py": 20,
    "tests/data/test_data_cli.py": 15,
    "tests/lora/test_other_models.py": 15,
    "tests/training/test_observing.py": 15,
    "tests/convert/test_carried.py": 15,
    "tests/training/test_recipe_models.py": 15,
}

# `make quick`: the op against its definition, the balance loss, layouts, what is refused, and a
# model from training to its analysis. Beginnings of node ids.
QUICK = (
    "tests/attention/test_attention_exact.py",
    "tests/attention/test_gates.py",
    "tests/balance/test_loss.py",
    "tests/analysis/metrics/test_metrics.py",
    "tests/analysis/metrics/test_scores.py",
    "tests/distributed/test_layouts.py::test_layout_changes_nothing[sink-",
    "tests/distributed/test_oracle.py::test_training_equals_autograd_of_eq_7",
    "tests/megatron/test_slots.py",
    "tests/test_cli.py",
    "tests/test_docs.py",
    "tests/test_files.py",
    "tests/test_imports.py",
    "tests/test_start_to_end.py",
    "tests/training/test_checks.py",
)

# Tests of many cases that resemble each other: `make test` runs every so many of them, `make
# test-all` all. Where the cases are a product, the number has no factor of an axis.
SAMPLED = {
    "tests/attention/interpreted_gate_kernels.py::test_explicit_gates_against_float64": 5,
    "tests/attention/interpreted_gate_kernels.py::test_injected_rows_are_pytorchs_to_the_bit": 2,
    "tests/attention/interpreted_gate_kernels.py::test_slot_against_float64": 2,
    "tests/convert/test_damage.py::test_a_disk_that_takes_no_more_ends_in_one_line": 2,
    "tests/convert/test_round_trip.py::test_an_import_loads_under_another_layout": 3,
    "tests/convert/test_round_trip.py::test_tensor_and_pipeline_parallelism_at_once": 3,
    "tests/convert/test_round_trip.py::test_the_layout_of_a_run_does_not_matter": 3,
    "tests/distributed/test_muon.py::test_three_steps_are_the_definition": 3,
    "tests/plan/hollow/test_plan.py::test_parameters_are_exact_in_every_layout": 3,
    "tests/training/test_survival.py::test_resume_auto_starts_again_where_no_checkpoint_is_whole": 2,  # noqa: E501
    "tests/convert/test_own_model.py::test_every_option_there_and_back": 3,
    "tests/convert/test_round_trip.py::test_every_target": 3,
    "tests/distributed/test_checkpoint.py::test_a_checkpoint_loads_under_another_layout": 3,
    "tests/distributed/test_context_parallel.py::test_two_ranks_equal_one_process": 3,
    "tests/distributed/test_data_path.py::test_every_rank_has_its_tokens_and_every_stage_its_documents_and_targets": 3,  # noqa: E501
    "tests/distributed/test_invariance.py::test_four_ranks_equal_the_oracle": 2,
    "tests/distributed/test_invariance.py::test_two_ranks_equal_the_oracle": 2,
    "tests/distributed/test_layouts.py::test_layout_changes_nothing": 5,
    "tests/distributed/test_masks.py::test_layout_changes_nothing": 3,
    "tests/distributed/test_moe.py::test_layout_changes_nothing": 3,
    "tests/distributed/test_observing.py::test_both_gradients_add_up_to_that_of_the_parameter": 5,
    "tests/distributed/test_oracle.py::test_biases_and_similarities_equal_autograd": 2,
    "tests/distributed/test_oracle.py::test_every_scope_has_its_oracle": 5,
    "tests/distributed/test_oracle.py::test_training_equals_autograd_of_eq_7": 4,
    "tests/distributed/test_packed_context.py::test_runs_of_four_ranks_equal_one_process": 2,
    "tests/distributed/test_packed_context.py::test_two_ranks_equal_one_process": 3,
    "tests/plan/hollow/test_trainer.py::test_a_step": 3,
    "tests/plan/hollow/test_trainer.py::test_what_a_layer_costs": 3,
    "tests/megatron/test_decoding.py::test_cached_decoding_is_recomputing": 5,
    "tests/megatron/test_decoding.py::test_cached_decoding_of_other_mechanisms_is_recomputing": 3,
    "tests/lora/test_layouts.py::test_two_ranks_equal_one": 2,
    "tests/training/test_cures.py::test_a_message_about_the_schedule_names_its_cure": 3,
    "tests/training/test_cures.py::test_another_learning_rate_keeps_the_moments": 4,
    "tests/training/test_example.py::test_the_example_starts_in_every_way": 2,
    "tests/training/test_recipe_models.py::test_a_recipe_from_training_to_its_export": 99,
    "tests/training/test_sample_order.py::test_a_longer_run_sees_what_one_of_that_length_sees": 2,
    "tests/attention/variants/test_every_variant.py::test_analysis_generation_and_export_are_those_of_the_model_that_trained": 3,  # noqa: E501
}
# Tests that take long and have a shorter sister in `make test`. Beginnings of node ids.
LATER = (
    "tests/contributing/test_contributing.py::test_a_target_of_ones_own_makes_the_round_trip",
    "tests/contributing/test_contributing.py::test_a_variant_of_ones_own_trains_and_resumes",
    "tests/contributing/test_contributing.py::test_analyses_and_reports_know_the_variant",
    "tests/contributing/test_contributing.py::test_the_same_code_works_inside_of_the_package",
    "tests/contributing/test_contributing.py::test_what_is_not_said_is_refused_by_name",
    "tests/convert/test_commands.py::test_memory_is_that_of_the_largest_tensor",
    "tests/distributed/test_resume.py::test_another_layout_resumes_within_rounding",
    "tests/replicate/grid/test_grid.py::test_a_forked_run_has_the_losses_of_a_launched_one",
    "tests/megatron/test_compile.py::test_one_graph_that_counts_every_call",
    "tests/lora/test_other_models.py::test_what_is_trained_beside_the_adapter",
    "tests/training/test_checkpoint_layout.py::test_shards_load_under_another_layout",
    "tests/training/test_dead_rank.py::test_a_closed_terminal_saves_the_step",
    "tests/training/test_dead_rank.py::test_ctrl_c_in_a_start_ends_it_at_once",
    "tests/training/test_dead_rank.py::test_sigterm_then_a_killed_rank_then_the_end",
    "tests/training/test_hosts_that_differ.py",
    "tests/training/test_hosts.py",
    "tests/training/test_sample_order.py::test_a_shuffle_of_the_whole_run",
    "tests/training/test_recipe_models.py::test_what_trains_nothing_has_nothing_to_export",
    "tests/training/test_survival.py::test_a_dead_writer_ends_the_rank_in_one_line",
    "tests/training/test_survival.py::test_a_signal_ends_every_phase_in_one_line",
    "tests/training/test_survival.py::test_torchrun_starts_the_ranks_again_and_they_go_on",
    "tests/training/test_survival.py::test_sigterm_in_a_checkpoint_saves_one_more",
    "tests/transformers/test_compiled.py::test_a_step_is_one_graph",
    "tests/light/test_light.py::test_the_wheel_is_whole",
    "tests/light/test_light.py::test_the_wheel_trains_looks_and_exports",
    "tests/test_doctor.py::test_a_whole_installation_passes",
)
# What other versions of torch, transformers and Megatron are tried with (tests/versions.py): the
# lines that patches rest on, the modules, a layout of each kind, checkpoints, conversion, and what
# reads a model. Beginnings of node ids.
OTHER_VERSIONS = (
    "tests/analysis/api/",
    "tests/attention/test_attention_op.py",
    "tests/convert/test_round_trip.py",
    "tests/convert/test_targets.py",
    "tests/transformers/",
    "tests/analysis/capture/test_transformers.py",
    "tests/upstream/",
    "tests/cpu/",
    "tests/megatron/test_core_attention.py",
    "tests/megatron/test_gated_attention.py",
    "tests/megatron/test_hybrid.py",
    "tests/megatron/test_init.py",
    "tests/megatron/test_softmax_offset.py",
    "tests/distributed/test_checkpoint.py",
    "tests/distributed/test_invariance.py",
    "tests/megatron/test_decoding.py",
    "tests/analysis/capture/test_megatron.py",
    "tests/training/test_end_to_end.py",
)


def in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The same items, the longest files first."""
    return sorted(items, key=lambda item: -LONG.get(item.nodeid.split("::")[0], 0))


def is_quick(nodeid: str) -> bool:
    """Whether a test is part of `make quick`."""
    return nodeid.startswith(QUICK)


def later(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the tests that only `make test-all` runs."""
    cases: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if item.nodeid.startswith(LATER) or cases[test] % SAMPLED.get(test, 1):
            yield item
        cases[test] += 1


def is_for_other_versions(nodeid: str) -> bool:
    """Whether a test is in the sample that other versions of packages are tried with."""
    return nodeid.startswith(OTHER_VERSIONS)


if __name__ == "__main__":
    print(*sorted({nodeid.split("::")[0] for nodeid in QUICK}))
