"""Tasks for workers that may be fresh: nothing of megatron is imported before the platform."""


def loaded_without_a_process_group(run: str) -> tuple[int, bool, bool]:
    """The iteration, whether a process group was there meanwhile, and whether one is left."""
    from megasink.upstream.process import prepare_process

    prepare_process([])
    import torch
    from megatron.core import parallel_state

    from megasink.checkpoints.load import load_model, single_process

    with single_process():
        iteration = load_model(run).iteration
        during = torch.distributed.is_initialized()
    left = torch.distributed.is_initialized() or parallel_state.model_parallel_is_initialized()
    return iteration, during, left
