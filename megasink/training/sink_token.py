"""The learnable sink token (P2.23): every sequence starts with a dedicated token.

Only its embedding row is learned, so it works with every attention variant, position embedding and
layout. Its id is one past the tokenizer's vocabulary.

Shapes: B microbatch, S sequence.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def with_sink_token(batch: Mapping[str, Tensor | None], token: int) -> dict[str, Tensor | None]:
    """Prepend the sink: inputs become [sink, x_0 .. x_S-2], and targets [x_0, x_1 .. x_S-1].

    The sink's own target, x_0, is masked out of the loss (so it counts neither as nats nor as
    bytes), and the sample's last target is dropped. Positions count from the sink. Entries of
    `batch`, [B, S], are None if a pipeline stage lacks them; others are kept.
    """
    result = dict(batch)
    if (tokens_BS := batch.get("tokens")) is not None:
        result["tokens"] = _shifted(tokens_BS, torch.full_like(tokens_BS[:, :1], token))
    if (labels_BS := batch.get("labels")) is not None:
        # A pipeline stage without tokens does not have x_0; any id works under a mask of 0.
        result["labels"] = _shifted(labels_BS, labels_BS[:, :1])
    if (mask_BS := batch.get("loss_mask")) is not None:
        result["loss_mask"] = _shifted(mask_BS, torch.zeros_like(mask_BS[:, :1]))
    if (positions_BS := batch.get("position_ids")) is not None:
        result["position_ids"] = _shifted(positions_BS + 1, torch.zeros_like(positions_BS[:, :1]))
    return result


def _shifted(x_BS: Tensor, first_B1: Tensor) -> Tensor:
    return torch.cat((first_B1, x_BS[:, :-1]), dim=1)
