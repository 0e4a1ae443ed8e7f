"""The head-balance loss of scope `microbatch`, by plain autograd: what training must equal.

One process, no schedule, no DDP, no Megatron optimizer. Core attention is the reference with its
S x S matrix; Eq. 7 of P0 is written out here and added to the loss, so that nothing of
megasink.balance takes part.

Shapes: B microbatch, S sequence, H query heads, G groups, D head dim.
"""

from types import MethodType
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megasink.attention import reference_attention
from megasink.layers.builder import MegasinkGPTBuilder
from megasink.layers.core_attention import CoreAttention
from tests.distributed import tiny_gpt


def reference_model(config: Any, importances: list[Tensor]) -> Any:
    """The model with reference attention, which appends the importance of each layer it runs."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = tiny_gpt.skew_sinks([MegasinkGPTBuilder(config).build_model(groups)])
    variant = config.transformer.attention_variant
    window, skip = config.transformer.window_size, config.transformer.window_attn_skip_freq

    def forward(
        self: CoreAttention, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        query_BHSD, key_BGSD, value_BGSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        # Every skip-th layer sees everything; the tuple counts the tokens before the token itself.
        sees_all = window is None or self.layer_number % skip == 0
        out_BHSD, _, gate_BHS = reference_attention(
            query_BHSD,
            key_BGSD,
            value_BGSD,
            variant=variant,
            sink_H=self.softmax_offset,
            window=None if sees_all else window[0] + 1,
        )
        importances.append(gate_BHS.mean((0, 2)))
        return out_BHSD.permute(2, 0, 1, 3).flatten(2)

    for module in model.modules():
        if isinstance(module, CoreAttention):
            module.forward = MethodType(forward, module)
    return model


def balance_loss(importances: list[Tensor], coeff: float) -> Tensor:
    """coeff * sum over layers of H * CV^2, with the population variance (P0 Eq. 6-7)."""
    terms = []
    for importance_H in importances:
        mean = importance_H.sum() / len(importance_H)
        variance = ((importance_H - mean) ** 2).sum() / len(importance_H)
        terms.append(len(importance_H) * variance / mean**2)
    return coeff * torch.stack(terms).sum()


def train(coeff: float, steps: int = 2, **options: Any) -> dict[str, Any]:
    """What :func:`tiny_gpt.train` reports, from autograd and torch's AdamW alone."""
    importances: list[Tensor] = []
    config = tiny_gpt.model_config(head_balance_coeff=0.0, **options)
    model = reference_model(config, importances)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-5)
    report: dict[str, Any] = {"loss": [], "statistics": [], "grad_norm": []}
    report["initial"] = tiny_gpt.shards([model], "data")
    for step in range(steps):
        optimizer.zero_grad()
        losses, balances, per_microbatch = [], [], []
        for index in range(tiny_gpt.MICROBATCHES):
            data = tiny_gpt.batch(step, index)
            losses_BS = model(data["tokens"], data["position_ids"], None, labels=data["labels"])
            losses.append(losses_BS.mean())
            balances.append(balance_loss(importances, coeff))
            per_microbatch.append(torch.stack(importances))
            importances.clear()
        loss, balance = torch.stack(losses).mean(), torch.stack(balances).mean()
        (loss + balance).backward()
        if step == 0:
            report["gradients"] = tiny_gpt.shards([model], "grad")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        importance_LH = torch.stack(per_microbatch).mean(0).detach()
        report["loss"].append(loss.item())
        report["statistics"].append(
            {"importance_LH": importance_LH, "balance_loss": balance.item()}
        )
        report["grad_norm"].append(norm.item())
    report["final"] = tiny_gpt.shards([model], "data")
    return report
