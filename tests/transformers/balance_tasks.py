"""Trainings on several ranks, for the workers of the pool."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch


def trained_on_ranks(name: str, rows: int, port: int, **options: Any) -> dict[str, Any]:
    """Train in DDP by accelerate; the weights and the logs of this rank."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    import megasink.transformers  # noqa: F401  registers the attention
    from tests.analysis.capture.tiny_models import tiny_model
    from tests.transformers import balance_runs

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    before = dict(os.environ)
    os.environ.update({key: str(value) for key, value in environment.items()})
    states: list[Any] = [AcceleratorState, GradientState, PartialState]
    try:
        model: Any = tiny_model(name, "megasink").double().train()
        callback = balance_runs.callback(**options)
        with tempfile.TemporaryDirectory() as folder:
            trainer = balance_runs.trainer_of(
                Path(folder),
                model,
                [callback],
                balance_runs.dataset(rows, masked=True),
                ddp_backend="gloo",
                per_device_train_batch_size=1,
            )
            trainer.train()
            written = sorted(path.name for path in Path(folder).iterdir())
    finally:
        for state in states:
            state._reset_state()
        os.environ.clear()
        os.environ.update(before)
    losses = [log["balance_loss"] for log in trainer.state.log_history if "balance_loss" in log]
    return {
        "wrapped": type(trainer.model_wrapped).__name__,
        "weights": balance_runs.weights(model),
        "losses": losses,
        "written": written,
    }
