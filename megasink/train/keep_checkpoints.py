"""No whole checkpoint is written a second time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megasink.checkpoint.intact import checkpoint_path, damage
from megasink.upstream.training import WHOLE_CHECKPOINTS


@contextmanager
def keeping_whole_checkpoints() -> Iterator[None]:
    """Let Megatron's training loop leave the checkpoint of an iteration alone where it is whole.

    It saves an iteration twice where the step after it gave NaN or Inf
    (core/rerun_state_machine.py:411), over the files of the first time: a kill while it does so,
    or a full disk, would take the newest good checkpoint away.
    """
    import torch
    from megatron.training import get_args, training
    from megatron.training.async_utils import maybe_finalize_async_save

    save = training.save_checkpoint

    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        options = get_args()
        path = checkpoint_path(Path(options.save), iteration)
        # The same on every rank: the file system may show rank 0's folder to others later.
        found = torch.tensor([path.is_dir()], dtype=torch.int32, device=torch.cuda.current_device())
        torch.distributed.broadcast(found, 0)
        if found.item() and not kwargs.get("non_persistent_ckpt"):
            maybe_finalize_async_save(blocking=True)
            if options.rank == 0:
                found.fill_(damage(path) is None)
            torch.distributed.broadcast(found, 0)
            if found.item():
                if options.rank == 0:
                    print(
                        f"megasink: the checkpoint of step {iteration} is whole: kept", flush=True
                    )
                return None
        return save(iteration, *args, **kwargs)

    with WHOLE_CHECKPOINTS.replacing(save_checkpoint=save_checkpoint):
        yield
