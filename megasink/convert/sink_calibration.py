"""Set the sink logits of a model that had no sinks, to a chosen mean attention weight per head.

A sink takes sigmoid(s_h - LSE) of a query's attention, so s_h follows from the log-sum-exp of the
scores on real text. This changes the model's outputs; the change of its loss is reported.

Shapes: L layers, H heads, B texts, S tokens, V vocabulary.
"""

import io
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megasink.attention import attention
from megasink.checkpoints.find import Checkpoint
from megasink.checkpoints.torch_metadata import read_metadata
from megasink.console.printable import say as say_printable
from megasink.convert.architecture import Architecture
from megasink.convert.attention_change import SOFTMAX_OFFSET
from megasink.convert.verify_logits import megatron_logits, sample_tokens
from megasink.convert.weight_table import LAYERS

_BISECTIONS = 60


def sink_logits(lse_HN: Tensor, weight: float) -> Tensor:
    """Find s_h such that the mean over N of sigmoid(s_h - LSE) is `weight`, by bisection."""
    lse_HN = lse_HN.double()
    logit = math.log(weight / (1 - weight))
    low_H = lse_HN.amin(dim=1) + logit
    high_H = lse_HN.amax(dim=1) + logit
    for _ in range(_BISECTIONS):
        middle_H = (low_H + high_H) / 2
        more = torch.sigmoid(middle_H[:, None] - lse_HN).mean(dim=1) > weight
        high_H, low_H = torch.where(more, middle_H, high_H), torch.where(more, low_H, middle_H)
    return ((low_H + high_H) / 2).float()


@torch.no_grad()
def set_sinks(
    checkpoint: Checkpoint,
    model: Architecture,
    weight: float,
    tokenizer: Any,
    say: Callable[[str], None] = say_printable,
) -> tuple[float, float]:
    """Set the sink logits of a checkpoint, from the first layer up: later scores depend on them."""
    from megasink.checkpoints.load import load_without_tokenizer
    from megasink.megatron.model_blocks import blocks_in

    loaded, _ = load_without_tokenizer(checkpoint, torch.float32, model.vocabulary)
    tokens_BS = sample_tokens(model, tokenizer)
    before = _loss(loaded, tokens_BS, model.vocabulary)

    def set_offset(core: Any, inputs: tuple[Tensor, ...]) -> None:
        core.softmax_offset.copy_(sink_logits(_log_sum_exp(core, *inputs[:3]), weight))

    cores = [block.attention.core_attention for block in blocks_in(loaded)]
    handles = [core.register_forward_pre_hook(set_offset) for core in cores]
    try:
        after = _loss(loaded, tokens_BS, model.vocabulary)
    finally:
        for handle in handles:
            handle.remove()
    rows = [core.softmax_offset.cpu() for core in cores]
    _rewrite(checkpoint, torch.stack(rows))
    say(
        f"sinks: each gets {weight:.3g} of its head's attention on average; loss "
        f"{before:.4f} -> {after:.4f} nats per token ({after - before:+.4f}) on "
        f"{tokens_BS.numel()} tokens"
    )
    return before, after


def _loss(model: Any, tokens_BS: Tensor, vocabulary: int) -> float:
    logits_BSV = megatron_logits(model, tokens_BS, vocabulary).cpu()
    wanted = tokens_BS[:, 1:].flatten()
    return float(torch.nn.functional.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), wanted))


def _log_sum_exp(core: Any, *tensors: Tensor) -> Tensor:
    """Return [H, B * S] of a layer, without its sink, from query, key, value [S, B, heads, D]."""
    lse_BHS = attention(
        *(x.permute(1, 2, 0, 3) for x in tensors),
        window=core.window,
        scale=core.softmax_scale,
        with_gate=False,
    ).lse_BHT
    return lse_BHS.transpose(0, 1).flatten(1)


def _rewrite(checkpoint: Checkpoint, offsets_LH: Tensor) -> None:
    """Write the logits in place: their size does not change."""
    key = LAYERS + SOFTMAX_OFFSET
    for index, where in read_metadata(checkpoint.folder).storage_data.items():
        if index.fqn != key:
            continue
        content = io.BytesIO()
        layer = index.offset[0]
        torch.save(offsets_LH[layer : layer + 1].clone(), content)
        if len(content.getvalue()) != where.length:
            raise RuntimeError(f"{key} has {where.length} bytes, not {len(content.getvalue())}")
        with (checkpoint.folder / where.relative_path).open("r+b") as file:
            file.seek(where.offset)
            file.write(content.getvalue())
