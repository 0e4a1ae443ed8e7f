"""Never overwrite an intact checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megasink.checkpoint.intact import checkpoint_path, damage
from megasink.printable import say
from megasink.upstream.training import WHOLE_CHECKPOINTS


@contextmanager
def keeping_whole_checkpoints() -> Iterator[None]:
    """Make Megatron's training loop skip saving an iteration whose checkpoint is intact.

    Megatron saves an iteration again if the next step gives NaN or Inf
    (core/rerun_state_machine.py:411), over the first files: a kill or a full disk during that save
    would destroy the newest good checkpoint.
    """
    import torch
    from megatron.training import get_args, training
    from megatron.training.async_utils import maybe_finalize_async_save

    save = training.save_checkpoint

    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        options = get_args()
        path = checkpoint_path(Path(options.save), iteration)
        # Broadcast, because the file system may show rank 0's folder to other ranks later.
        device = torch.cuda.current_device()
        is_intact = torch.tensor([path.is_dir()], dtype=torch.int32, device=device)
        torch.distributed.broadcast(is_intact, 0)
        if is_intact.item() and not kwargs.get("non_persistent_ckpt"):
            maybe_finalize_async_save(blocking=True)
            if options.rank == 0:
                is_intact.fill_(damage(path) is None)
            torch.distributed.broadcast(is_intact, 0)
            if is_intact.item():
                if options.rank == 0:
                    say(f"megasink: keeping the intact checkpoint of step {iteration}")
                return None
        return save(iteration, *args, **kwargs)

    with WHOLE_CHECKPOINTS.replacing(save_checkpoint=save_checkpoint):
        yield
