"""The head-balance loss in each scope, by plain autograd in float64: what training must equal.

One process, no schedule, no DDP, no Megatron optimizer. Core attention is the reference with its
S x S matrix, and every document a batch of its own; Eq. 7 of P0 is written out here and added to
the loss, so that nothing of megasink.balance takes part.

Shapes: B microbatch, S sequence, M microbatches, L layers with heads, H query heads, G groups,
D head dim, V vocabulary.
"""

from itertools import pairwise
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from megasink.attention import (
    reference_attention,
    reference_biased_attention,
    reference_gate,
    reference_similarity_attention,
)
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.gated_attention import GatesHeads
from megasink.megatron.hybrid_pattern import with_heads
from megasink.megatron.model import MegasinkModelBuilder
from tests.balance.definition import balance_loss, routed_heads
from tests.distributed import masked_gpt, tiny_gpt
from tests.distributed.skewed_gates import skew_gates


def reference_model(config: Any, gates: list[Tensor]) -> Any:
    """The model with reference attention, which appends the gates [B, H, S] of each layer."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    models = tiny_gpt.skew_sinks([MegasinkModelBuilder(config).build_model(groups)])
    (model,) = skew_gates(models)
    window, skip = config.transformer.window_size, config.transformer.window_attn_skip_freq

    def forward(
        self: CoreAttention, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        tensors = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
        # Every skip-th layer sees everything; the tuple counts the tokens before the token itself.
        sees_all = window is None or self.layer_number % skip == 0
        out_BHSD, gate_BHS = reference_of(self, tensors, None if sees_all else window[0] + 1)
        if self.counts_heads:
            gates.append(gate_BHS)
        out_BHSD = self.config.attention_scale_alpha * out_BHSD
        return out_BHSD.permute(2, 0, 1, 3).flatten(2)

    def gated(self: GatesHeads, out_SBHD: Tensor, score: Tensor) -> Tensor:
        score_SBHC = score.reshape(*out_SBHD.shape[:3], -1)
        out_SBHD, gate_SBHC = reference_gate(out_SBHD, score_SBHC)
        if self.counts_heads:
            gates.append(gate_SBHC.mean(3).permute(1, 2, 0))
        return out_SBHD.flatten(2)

    for module in model.modules():
        if isinstance(module, CoreAttention):
            module.forward = MethodType(forward, module)
        elif isinstance(module, GatesHeads):
            module._gate_heads = MethodType(gated, module)
    return model


def reference_of(
    core: CoreAttention, tensors: list[Tensor], window: int | None
) -> tuple[Tensor, Tensor]:
    """Output and gate of a layer by the definitions."""
    config = core.config
    if config.attention_similarity != "softmax":
        mlp = core.similarity_mlp
        out_BHSD, first_BHS = reference_similarity_attention(
            *tensors,
            similarity=config.attention_similarity,
            normalization=config.attention_normalization,
            mlp=None if mlp is None else (mlp.fc1.weight, mlp.fc2.weight),
            window=window,
        )
        return out_BHSD, 1.0 - first_BHS.detach()
    variant = config.attention_variant.replace("gated", "vanilla")
    if not variant.endswith("bias"):
        bias = core.relative_bias
        out_BHSD, _, gate_BHS = reference_attention(
            *tensors,
            variant=variant,
            sink_H=core.softmax_offset,
            prefix=config.prefix_lm_tokens,
            window=window,
            scale=core.softmax_scale,
            distance_bias_HS=None if bias is None else bias(tensors[0].shape[2], tensors[0].device),
        )
        return out_BHSD, gate_BHS
    key_bias, value_bias = core.key_bias, core.value_bias
    if config.bias_fixed_value == "uniform":
        value_bias = torch.ones(tensors[0].shape[-1])
        value_bias = config.bias_fixed_value_norm * value_bias / value_bias.norm()
    shape = (tensors[0].shape[1], tensors[0].shape[-1])
    out_BHSD, _, gate_BHS = reference_biased_attention(
        *tensors,
        key_bias_HD=None if key_bias is None else key_bias.expand(shape),
        value_bias_HD=None if value_bias is None else value_bias.expand(shape),
        window=window,
    )
    return out_BHSD, gate_BHS


class Balance:
    """The balance loss over the steps of a run.

    Args:
        replicas: data-parallel ranks of the run that is compared: microbatch k of each of them
            counts together in the scope `data-parallel`.
        refresh: choose the shared heads anew every so many steps; 0 for once.
    """

    def __init__(self, coeff: float, scope: str, replicas: int, shared: int, refresh: int):
        self.coeff, self.scope, self.shared, self.refresh = coeff, scope, shared, refresh
        self.together = {"microbatch": 1, "data-parallel": replicas}.get(scope)
        self.last: Tensor | None = None
        self.routed: list[list[int]] | None = None
        self.steps = 0

    def __call__(self, sum_MLH: Tensor, tokens_M: Tensor, weight_M: Tensor) -> tuple[Tensor, float]:
        """The term of a step's loss that is differentiated, and the value that is logged.

        Args:
            sum_MLH, tokens_M: the gates of each microbatch, and its tokens.
            weight_M: of each microbatch in the step's loss; they add up to 1.
        """
        importance_LH = sum_MLH.sum(0) / tokens_M.sum()
        routed = self.routed if self.shared else routed_heads(importance_LH, 0)
        term, logged = importance_LH.sum() * 0.0, 0.0
        if self.scope == "global":
            # One step late: the gradient of Eq. 7 at the importance of the step before.
            if self.last is not None:
                last = self.last.requires_grad_()
                (slope,) = torch.autograd.grad(balance_loss(last, self.coeff, routed), last)
                term = (slope * torch.einsum("m,mlh->lh", weight_M / tokens_M, sum_MLH)).sum()
            if routed is not None:
                logged = balance_loss(importance_LH.detach(), self.coeff, routed).item()
        elif routed is not None:
            sums, tokens, weights = (
                x_M.unflatten(0, (-1, self.together)).sum(1)
                for x_M in (sum_MLH, tokens_M, weight_M)
            )
            parts = sums / tokens[:, None, None]
            terms = torch.stack([balance_loss(part_LH, self.coeff, routed) for part_LH in parts])
            term = (weights * terms).sum()
            logged = terms.mean().item()
        self.last = importance_LH.detach().clone()
        if self.steps == 0 or (self.refresh and self.steps % self.refresh == 0):
            self.routed = routed_heads(self.last, self.shared)
        self.steps += 1
        return term, logged


def is_sink(name: str) -> bool:
    """Parameters of the group of --sink-lr-mult and --sink-weight-decay."""
    return name.endswith(("softmax_offset", "key_bias", "value_bias"))


def exact_losses(labels_BS: Tensor, logits_SBV: Tensor) -> Tensor:
    """The losses [B, S], in place of Megatron's in float32."""
    return F.cross_entropy(logits_SBV.permute(1, 2, 0), labels_BS, reduction="none")


def run_microbatch(
    model: Any, gates: list[Tensor], data: dict[str, Any], ends: Any
) -> tuple[Tensor, Tensor]:
    """The summed loss of a microbatch, and the sums [L, H] of the gates of its real tokens."""
    length, loss, sums = tiny_gpt.SEQUENCE, 0.0, 0.0
    pieces = [(slice(None), 0, length)]
    if ends is not None:
        rows = enumerate(ends)
        pieces = [(slice(i, i + 1), a, b) for i, row in rows for a, b in pairwise([0, *row])]
    real_BS = torch.arange(length) < data["real_tokens"][:, None]
    for rows, start, stop in pieces:
        tokens, labels, mask, real = (
            tensor[rows, start:stop]
            for tensor in (data["tokens"], data["labels"], data["loss_mask"], real_BS)
        )
        position = torch.arange(stop - start).expand(tokens.shape)
        loss = loss + (model(tokens, position, None, labels=labels) * mask).sum()
        sums = sums + torch.stack([(gate * real[:, None]).sum((0, 2)) for gate in gates])
        gates.clear()
    return loss, sums


def store(model: Any, dtype: torch.dtype) -> None:
    """Round the weights to the type in which a run stores them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).double()


def train(
    coeff: float,
    steps: int = 3,
    scope: str = "global",
    replicas: int = 1,
    shared: int = 0,
    refresh: int = 0,
    masked: bool = False,
    ends: Any = None,
    real: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """What :func:`masked_gpt.train` reports, from autograd and torch's AdamW alone."""
    gates: list[Tensor] = []
    config = tiny_gpt.model_config(head_balance_coeff=0.0, **options)
    transformer = config.transformer
    model = reference_model(config, gates).double()
    model.compute_language_model_loss = exact_losses
    store(model, transformer.params_dtype)
    balance_of = Balance(coeff, scope, replicas, shared, refresh)
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and not is_sink(n)]
    vectors = [p for n, p in model.named_parameters() if p.dim() == 1 and not is_sink(n)]
    sinks = [p for n, p in model.named_parameters() if is_sink(n)]
    sink_group = {
        "weight_decay": transformer.sink_weight_decay,
        "lr": 1e-3 * transformer.sink_lr_mult,
    }
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
        {"params": sinks, **sink_group},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-5)
    report: dict[str, Any] = {"loss": [], "statistics": [], "grad_norm": []}
    report["initial"] = tiny_gpt.shards([model], "data")
    for step in range(steps):
        optimizer.zero_grad()
        found, counts, tokens = [], [], []
        for index in range(tiny_gpt.MICROBATCHES):
            data = masked_gpt.batch(step, index, masked, ends, real, transformer.prefix_lm_tokens)
            # The losses of multi-token prediction are part of the backward pass alone.
            MTPLossAutoScaler.set_loss_scale(torch.tensor(1 / tiny_gpt.MICROBATCHES))
            found.append(run_microbatch(model, gates, data, ends))
            counts.append(data["loss_mask"].sum())
            tokens.append(data["real_tokens"].sum())
        losses, sum_MLH = (torch.stack(each) for each in zip(*found, strict=True))
        count_M, tokens_M = torch.stack(counts), torch.stack(tokens)
        # Megatron's mean: over the targets of the batch, or over the means of the microbatches.
        weight_M = torch.full_like(losses, 1 / len(losses))
        if transformer.calculate_per_token_loss:
            weight_M = (count_M / count_M.sum()).double()
        balance, logged = balance_of(sum_MLH, tokens_M, weight_M)
        ((weight_M * losses / count_M.clamp(min=1)).sum() + balance).backward()
        if step == min(1, steps - 1):
            report["gradients"] = tiny_gpt.shards([model], "grad")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        store(model, transformer.params_dtype)
        report["loss"].append((losses.sum().item(), count_M.sum().item()))
        importance_LH = torch.full((transformer.num_layers, sum_MLH.shape[2]), torch.nan)
        importance_LH[[*with_heads(config.hybrid_layer_pattern)]] = balance_of.last.float()
        report["statistics"].append({"importance_LH": importance_LH, "balance_loss": logged})
        report["grad_norm"].append(norm.item())
    report["final"] = tiny_gpt.shards([model], "data")
    return report
