"""Which tests run when, and in which order: one tier for each.

- ``first``: `make test`, a sample of every room: files that take at most `SHORT` seconds, and what
  `FIRST` names of the others;
- ``rest``: `make test-rest`, what a change must pass besides; the CI runs both;
- ``later``: only `make test-all`, which runs everything.

How long a file takes is measured, and stands in durations.json; a new file counts as short until
it is measured again::

    make test test-rest PYTEST_ADDOPTS='--durations 0 --durations-min 0' | tee log
    .venv/bin/python -m tests.schedule < log

xdist's workers take whole files (a file's fixtures are made once), those that take longest first,
so that no worker ends minutes after the other.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import pytest

RECORD = Path(__file__).with_name("durations.json")
# Seconds of the files that take at least one.
SECONDS: dict[str, float] = json.loads(RECORD.read_text())
SHORT = 6.0

# Of files that take longer, what `make test` runs: beginnings of node ids.
FIRST = (
    "tests/analysis/capture/test_cli.py::test_an_analysis_is_whole",
    "tests/attention/test_gate_kernels.py::test_compiled_for",
    "tests/balance/test_communication.py::test_two_ranks_of_1024",
    "tests/convert/test_own_model.py::test_every_gradient_is_that_of_the_definition",
    "tests/convert/test_round_trip.py::test_every_target",
    "tests/cpu/test_patches.py",
    "tests/damage/test_damage.py::test_some_damaged_fields_are_one_line",
    "tests/data/test_going_on.py::test_parts_make_the_whole",
    "tests/distributed/test_checkpoint.py::test_megatrons_own_checkpoint_of_an_output_gate",
    "tests/distributed/test_context_parallel.py::test_two_ranks_equal_one_process",
    "tests/distributed/test_invariance.py::test_two_ranks_equal_the_oracle",
    "tests/distributed/test_layouts.py::test_layout_changes_nothing[sink-",
    "tests/distributed/test_masks.py::test_training_equals_autograd_document_by_document",
    "tests/distributed/test_moe.py::test_gradients_equal_autograd_of_all_losses",
    "tests/distributed/test_oracle.py",
    "tests/analysis/interventions/test_answers.py::test_what_generation_config_says",
    "tests/finetune/test_export.py::test_the_held_out_loss_is",
    "tests/finetune/test_finetune.py::test_bad_input_is_told_before_anything_is_made",
    "tests/finetune/test_finetune.py::test_eq_7_balances_all_heads_of_all_weights",
    "tests/finetune/test_finetune.py::test_packed_conversations_do_not_see_each_other",
    "tests/megatron/test_bare_loop.py::test_the_loss_reaches_the_model",
    "tests/megatron/test_decoding.py::test_cached_decoding_is_recomputing",
    "tests/megatron/test_gated_attention.py",
    "tests/megatron/test_integrations.py::test_a_use_of_the_op_is_the_plain_computation",
    "tests/megatron/test_integrations.py::test_options_come_from_the_first_place_that_has_them",
    "tests/plan/hollow/test_plan.py::test_memory_and_communication_are_those_of_the_trainer",
    "tests/plan/hollow/test_plan.py::test_parameters_are_exact_in_every_layout",
    "tests/security/test_checkpoints.py::test_every_entry_is_read_without_its_code",
    "tests/test_mistakes.py::test_a_mistake_is_answered_in_one_line",
    "tests/test_start_to_end.py",
    "tests/training/test_checks.py",
    "tests/training/test_end_to_end.py",
    "tests/training/test_recipes.py",
    "tests/training/test_run_dir.py",
    "tests/training/test_survival.py::test_a_killed_run_goes_on_to_the_bit",
    "tests/transformers/test_balance_trainer.py::test_trainer_equals_plain_autograd",
    "tests/upstream/test_register.py",
)

# Tests of many cases that resemble each other: the CI runs every so many of them, `make test-all`
# all. Where the cases are a product, the number has no factor of an axis.
SAMPLED = {
    "tests/test_signals.py::test_a_signal_is_one_line": 5,
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
    "tests/training/test_cures.py::test_a_message_about_the_schedule_names_its_cure": 3,
    "tests/training/test_cures.py::test_another_learning_rate_keeps_the_moments": 4,
    "tests/training/test_example.py::test_the_example_starts_in_every_way": 2,
    "tests/training/test_recipe_models.py::test_a_recipe_from_training_to_its_export": 99,
    "tests/training/test_sample_order.py::test_a_longer_run_sees_what_one_of_that_length_sees": 2,
    "tests/transformers/test_every_type.py::test_numbers_are_right_or_refused": 7,
    "tests/attention/variants/test_every_variant.py::test_analysis_generation_and_export_are_those_of_the_model_that_trained": 3,  # noqa: E501
}
# Tests that take long and have a shorter sister in the CI. Beginnings of node ids.
LATER = (
    "tests/damage/test_damage.py::test_every_damaged_field_is_one_line",
    "tests/damage/test_damage.py::test_every_damaged_file_that_a_command_goes_on_from",
    "tests/damage/test_damage.py::test_every_crafted_file",
    "tests/attention/test_gate_kernels.py::test_in_tritons_interpreter[later]",
    "tests/contributing/test_contributing.py::test_a_target_of_ones_own_makes_the_round_trip",
    "tests/contributing/test_contributing.py::test_a_variant_of_ones_own_trains_and_resumes",
    "tests/contributing/test_contributing.py::test_analyses_and_reports_know_the_variant",
    "tests/contributing/test_contributing.py::test_the_same_code_works_inside_of_the_package",
    "tests/contributing/test_contributing.py::test_what_is_not_said_is_refused_by_name",
    "tests/convert/test_export_process.py::test_memory_is_that_of_the_largest_tensor",
    "tests/distributed/test_resume.py::test_another_layout_resumes_within_rounding",
    "tests/finetune/test_finetune.py::test_two_processes_equal_one",
    "tests/finetune/test_finetune.py::test_two_processes_tell_an_error_once",
    "tests/replicate/grid/test_grid.py::test_a_forked_run_has_the_losses_of_a_launched_one",
    "tests/real_models/test_training.py::test_four_arms_begin_alike_and_go_on",
    "tests/real_models/test_training.py::test_three_variants_from_the_start_to_the_page",
    "tests/megatron/test_compile.py::test_one_graph_that_counts_every_call",
    "tests/megatron/test_integrations.py::test_a_script_saves_a_bf16_model_and_resumes_to_the_bit[pretrain_gpt.py-k-bias]",
    "tests/training/test_checkpoint_layout.py::test_shards_load_under_another_layout",
    "tests/training/test_dead_rank.py::test_a_closed_terminal_saves_the_step",
    "tests/training/test_dead_rank.py::test_ctrl_c_in_a_start_ends_it_at_once",
    "tests/training/test_dead_rank.py::test_sigterm_then_a_killed_rank_then_the_end",
    "tests/training/test_hosts.py",
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
    "tests/analysis/interventions/test_batching.py",
    "tests/analysis/interventions/test_contexts.py",
    "tests/attention/test_attention_op.py",
    "tests/convert/test_own_kernels.py",
    "tests/convert/test_own_training.py",
    "tests/convert/test_round_trip.py",
    "tests/convert/test_targets.py",
    "tests/transformers/",
    "tests/analysis/capture/test_transformers.py",
    "tests/upstream/",
    "tests/cpu/",
    "tests/megatron/test_core_attention.py",
    "tests/megatron/test_gated_attention.py",
    "tests/megatron/test_gpt.py",
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
    return sorted(items, key=lambda item: -SECONDS.get(item.nodeid.split("::")[0], 0.0))


def is_first(nodeid: str) -> bool:
    """Whether `make test` runs a test, or some test of a file, unless it is a later one."""
    file = nodeid.partition("::")[0]
    if SECONDS.get(file, 0.0) <= SHORT:
        return True
    return nodeid.startswith(FIRST) or (nodeid == file and any(n.startswith(file) for n in FIRST))


def tiers(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, str]]:
    """Yield every test and its tier."""
    cases: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        left_out = item.nodeid.startswith(LATER) or cases[test] % SAMPLED.get(test, 1)
        if left_out or item.get_closest_marker("later"):
            yield item, "later"
        else:
            yield item, "first" if is_first(item.nodeid) else "rest"
        cases[test] += 1


def is_for_other_versions(nodeid: str) -> bool:
    """Whether a test is in the sample that other versions of packages are tried with."""
    return nodeid.startswith(OTHER_VERSIONS)


def measured(log: Iterable[str]) -> dict[str, float]:
    """Seconds of files, from what pytest prints with ``--durations 0``."""
    seconds: Counter[str] = Counter()
    for line in log:
        if found := re.match(r"([\d.]+)s (?:setup|call|teardown) +(\S+?)::", line):
            seconds[found[2]] += float(found[1])
    return {file: round(s, 1) for file, s in sorted(seconds.items()) if s >= 1.0}


def record(argv: Sequence[str], log: TextIO) -> None:
    """Write durations.json from a log; refuse arguments, a terminal and a log without durations."""
    usage = f"run it as python -m tests.schedule < log; {RECORD.name} is unchanged"
    if argv:
        raise SystemExit(f"unknown: {' '.join(argv)}: {usage}")
    if log.isatty():
        raise SystemExit(f"stdin is a terminal: {usage}")
    if not (seconds := measured(log)):
        cure = "pytest prints them with --durations 0 --durations-min 0"
        raise SystemExit(f"stdin has no durations of 1 s or more: {cure}; {usage}")
    RECORD.write_text(json.dumps(seconds, indent=1) + "\n")


if __name__ == "__main__":
    record(sys.argv[1:], sys.stdin)
