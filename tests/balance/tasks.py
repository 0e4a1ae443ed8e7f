"""Tasks for the workers."""

from typing import Any

from megatron.core import parallel_state

from megasink.balance.tracker import HeadTracker


def finish_without_records() -> dict[str, Any]:
    """The statistics of a step in which nothing was recorded."""
    statistics = HeadTracker.finish_step(
        2,
        4,
        parallel_state.get_data_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    nan = bool(statistics.importance_LH.isnan().all())
    return {"nan": nan, "balance_loss": statistics.balance_loss}
