"""Tasks for workers that may be fresh: nothing of megatron is imported before the platform."""

from collections.abc import Callable


def loaded_without_a_process_group(run: str) -> tuple[int, bool, bool]:
    """The iteration, whether a process group was there meanwhile, and whether one is left."""
    from megasink.cpu.prepare_process import prepare_process

    prepare_process()
    import torch
    from megatron.core import parallel_state

    from megasink.checkpoints.load import load_model, single_process

    with single_process():
        iteration = load_model(run).iteration
        during = torch.distributed.is_initialized()
    left = torch.distributed.is_initialized() or parallel_state.model_parallel_is_initialized()
    return iteration, during, left


def threads_after_loads(run: str) -> dict[str, int]:
    """Native threads after each of three turns: commands, loads beside a process group of the
    caller, loads whose models stay."""
    import gc

    import megasink
    from megasink.cli import main
    from tests.distributed.thread_tasks import threads
    from tests.waiting import until

    def command() -> None:
        line = ["generate", run, "--prompt", "def", "--max-new-tokens", "2", "--device", "cpu"]
        assert main(line) == 0

    def load() -> None:
        megasink.load_run(run, device="cpu")

    def beside() -> None:
        with single_process():
            command()

    def total() -> int:
        return sum(threads().values())

    def counted(turn: Callable[[], None]) -> int:
        """The threads after three turns, none more than after the first; ended ones may linger."""
        turn()
        gc.collect()
        most = total()
        for _ in range(2):
            turn()
            gc.collect()
            until(lambda: total() <= most, lambda: f"{total()} threads, {most} after the first")
        return total()

    found = {"command": counted(command)}
    import torch
    from torch.distributed import HashStore

    from megasink.checkpoints.load import single_process
    from megasink.megatron.process_groups import destroy_groups

    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    found["beside"] = counted(beside)
    assert list(torch.distributed.distributed_c10d._world.pg_map) == [torch.distributed.group.WORLD]
    destroy_groups()
    found["loaded"] = counted(load)
    destroy_groups()
    gc.collect()
    until(lambda: total() <= found["command"], lambda: f"{total()} threads, {found}")
    found["end"] = total()
    return found
