"""Tasks for the workers: command lines, and training that shows what losses are computed from."""

from typing import Any
from unittest import mock

from tests.distributed import launch_task


def without_figures(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """(exit code, output, error stream) of each command line, none of which draws."""
    from megasink.analysis.pages import analysis_page as pages
    from tests.training.generate_tasks import megasink

    with mock.patch.object(pages, "figures", return_value=[]):
        return megasink(commands)


def train_and_show(flags: list[str], port: int) -> list[dict[str, Any]]:
    """Train on two replicas; tokens, targets and nats [B, S] of the microbatches of this one."""
    from megasink.cpu.prepare_process import prepare_process

    prepare_process()  # before the first import of megatron
    from megasink.training import forward_step

    batches: list[dict[str, Any]] = []
    get_batch, loss_func = forward_step.get_batch, forward_step.loss_func

    def showing_batch(*args: Any) -> dict[str, Any]:
        batch = get_batch(*args)
        batches.append({key: batch[key].clone() for key in ("tokens", "labels")})
        return batch

    def showing_loss(*args: Any) -> Any:
        *_, training, token_losses = args
        batches[-1] |= {"training": training, "nats": token_losses.detach().clone()}
        return loss_func(*args)

    forward_step.get_batch, forward_step.loss_func = showing_batch, showing_loss
    try:
        launch_task.train(flags, 2, port)
    finally:
        forward_step.get_batch, forward_step.loss_func = get_batch, loss_func
        forward_step._byte_table.cache_clear()  # of this tokenizer
    return batches
