"""nanochat's additions at the ends of the model: a norm of the embeddings, a cap on the logits.

Both are forward hooks without parameters: they act on each token, or each logit, alone, so tensor,
sequence and context parallelism need nothing more, and checkpoints do not change.

Shapes: S sequence (of this sequence-parallel rank), B batch, X hidden size, V rows of the
vocabulary (of this tensor-parallel rank, or gathered).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def normalize_embeddings(model: Any) -> None:
    """Normalize the input of the first layer if the config has ``embedding_norm``."""
    config: Any = model.config
    if not (config.embedding_norm and model.pre_process):
        return

    def normalized(module: Any, inputs: Any, embedding_SBX: Tensor) -> Tensor:
        return F.rms_norm(embedding_SBX, embedding_SBX.shape[-1:], eps=config.layernorm_epsilon)

    model.embedding.register_forward_hook(normalized)


def cap_logits(model: Any) -> None:
    """Apply ``logit_softcap`` of the config to the output layer, in training and inference."""
    cap: float | None = getattr(model.config, "logit_softcap", None)
    if cap is None or not model.post_process:
        return

    def capped(layer: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits_SBV, bias = output
        return soft_capped(logits_SBV, cap), bias

    model.output_layer.register_forward_hook(capped)


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap) as float32, of any shape."""
    return cap * torch.tanh(logits.float() / cap)
