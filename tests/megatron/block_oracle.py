"""The definition of a GPT with each option of the block, in plain torch, and a task against it.

Shapes: B batch, S sequence, X hidden size, H query heads, G groups, D head dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megasink.attention import reference_attention
from megasink.megatron.initial_weights import global_names
from megasink.megatron.model import MegasinkModelBuilder
from tests.distributed import tiny_gpt
from tests.distributed.oracle import balance_loss

ACTIVATIONS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


def norm(x: Tensor, weight: Tensor | float) -> Tensor:
    """RMSNorm."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def rope(x_BHSD: Tensor) -> Tensor:
    """Rotate the pairs (d, d + D/2) by position * 10000^(-2 d / D)."""
    half = x_BHSD.shape[-1] // 2
    turns = 10000.0 ** (-torch.arange(half, dtype=x_BHSD.dtype) / half)
    angle = torch.arange(x_BHSD.shape[2], dtype=x_BHSD.dtype)[:, None] * turns
    a, b = x_BHSD[..., :half], x_BHSD[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Definition:
    """One GPT: its weights by Megatron's names, and the options of its block."""

    def __init__(self, weights: dict[str, Tensor], layers: int, **options: Any):
        self.weights, self.layers, self.options = weights, layers, options
        self.importances: list[Tensor] = []
        self.router_losses: list[Tensor] = []

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Sum over tokens of the cross-entropy."""
        x = self.weights["embedding.word_embeddings.weight"][tokens]
        if self.options.get("embedding_norm"):
            x = norm(x, 1.0)
        for layer in range(self.layers):
            prefix = f"decoder.layers.{layer}."
            w = {k.removeprefix(prefix): v for k, v in self.weights.items() if k.startswith(prefix)}
            x = self.block(x, w)
        if not self.options.get("post_norm"):
            x = self.norm(x, self.weights, "decoder.final_norm.weight")
        logits = x @ self.weights["output_layer.weight"].T
        if cap := self.options.get("logit_softcap"):
            logits = logits.div(cap).tanh().mul(cap)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def block(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        """Attention and FFN with what happens before and after each (P1.24, P1.25, P2.42)."""
        if self.options.get("post_norm"):
            x = norm(x + self.clip(self.attention(x, w)), w["self_attn_bda.layernorm.weight"])
            return norm(x + self.clip(self.ffn(x, w)), w["mlp_bda.layernorm.weight"])
        output = self.clip(self.attention(self.norm(x, w, "input_layernorm.weight"), w))
        if self.options.get("sandwich_norm"):
            output = self.norm(output, w, "self_attn_bda.layernorm.weight")
        x = x + output
        output = self.clip(self.ffn(self.norm(x, w, "pre_mlp_layernorm.weight"), w))
        if self.options.get("sandwich_norm"):
            output = self.norm(output, w, "mlp_bda.layernorm.weight")
        return x + output

    def norm(self, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
        """With a weight, or as nanochat has it without."""
        return norm(x, 1.0 if self.options.get("norm_without_gain") else w[name])

    def clip(self, x: Tensor) -> Tensor:
        """To (-c, c)."""
        c = self.options.get("residual_clip")
        return x if c is None else torch.where(x > c, c, torch.where(x < -c, -c, x))

    def attention(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        """Sink attention; one output matrix for each head, or for their sum (P2.44)."""
        heads, groups = tiny_gpt.HEADS, 2
        qkv = x @ w["self_attention.linear_qkv.weight"].T
        if "self_attention.linear_qkv.bias" in w:
            qkv = qkv + w["self_attention.linear_qkv.bias"]
        # By group: the queries of its heads, its key, its value.
        by_group = qkv.unflatten(-1, (groups, heads // groups + 2, -1)).permute(0, 2, 3, 1, 4)
        query = rope(by_group[:, :, :-2].flatten(1, 2))
        key, value = rope(by_group[:, :, -2]), by_group[:, :, -1]
        if self.options.get("qk_l2_norm"):  # after RoPE, as in nanochat
            query, key = norm(query, 1.0), norm(key, 1.0)
        sink = w["self_attention.core_attention.softmax_offset"].to(x.dtype)
        out_BHSD, _, gate_BHS = reference_attention(query, key, value, variant="sink", sink_H=sink)
        self.importances.append(gate_BHS.mean((0, 2)))
        matrix = w["self_attention.linear_proj.weight"]
        if self.options.get("multi_head_addition"):
            output = sum(out_BHSD[:, head] @ matrix.T for head in range(heads))
        else:
            output = out_BHSD.transpose(1, 2).flatten(2) @ matrix.T
        return output + w.get("self_attention.linear_proj.bias", 0.0)

    def ffn(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        """One FFN, or the experts of each token and the shared one (P1.19)."""
        if "mlp.router.weight" not in w:
            return self.unit(x, w, "mlp.")
        logits = x @ w["mlp.router.weight"].T + w.get("mlp.router.bias", 0.0)
        best, chosen = logits.topk(2)
        output = sum(
            (best.softmax(-1) * (chosen == expert)).sum(-1, keepdim=True)
            * self.unit(x, w, f"mlp.experts.local_experts.{expert}.")
            for expert in range(logits.shape[-1])
        )
        share = F.one_hot(chosen, logits.shape[-1]).to(x.dtype).sum(2).mean((0, 1)) / 2
        balance = logits.shape[-1] * (share * logits.softmax(-1).mean((0, 1))).sum()
        z = (logits.exp().sum(-1).log() ** 2).mean()
        self.router_losses.append(
            self.options["moe_aux_loss_coeff"] * balance + self.options["moe_z_loss_coeff"] * z
        )
        if "mlp.shared_experts.linear_fc1.weight" in w:
            output = output + self.unit(x, w, "mlp.shared_experts.")
        return output

    def unit(self, x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
        """P2.41: f(x W_1) W_2, or (f(x W_g) * x W_u) W_2."""
        w = {f"mlp.{k.removeprefix(prefix)}": v for k, v in w.items() if k.startswith(prefix)}
        name = self.options.get("ffn_activation", "swiglu")
        inner = x @ w["mlp.linear_fc1.weight"].T + w.get("mlp.linear_fc1.bias", 0.0)
        if name in ("reglu", "geglu", "swiglu"):
            function = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}[name]
            gate, up = inner.chunk(2, -1)
            if self.options.get("quick_geglu"):  # GPT-OSS's unit
                limit = self.options["activation_func_clamp_value"]
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                return self.second(gate / (1 + torch.exp(-1.702 * gate)) * (up + 1.0), w)
            inner = ACTIVATIONS[function](gate) * up
        else:
            inner = ACTIVATIONS[name](inner)
        return self.second(inner, w)

    def second(self, inner: Tensor, w: dict[str, Tensor]) -> Tensor:
        """The FFN's second matrix."""
        return inner @ w["mlp.linear_fc2.weight"].T + w.get("mlp.linear_fc2.bias", 0.0)


def errors(
    options: dict[str, Any], biases: bool = False, other: dict[str, Any] | None = None
) -> dict[str, tuple[float, float]]:
    """Loss and gradients against float64: of the model, and of the definition in float32.

    Args:
        options: of the block.
        other: options for the definition in their place, to see that it notices.

    Returns:
        {"loss" or name of a parameter: (error of the model, error of the definition)}, relative.
    """
    config = tiny_gpt.model_config(head_balance_coeff=0.0, add_bias_linear=biases, **options)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = tiny_gpt.skew_sinks([MegasinkModelBuilder(config).build_model(groups)])
    generator = torch.Generator().manual_seed(3)
    for parameter in (p for p in model.parameters() if p.dim() == 1 and p.dtype == torch.float32):
        # Norm weights at 1 and biases at 0 would hide that they are not used.
        parameter.data += torch.empty(parameter.shape).normal_(0, 0.3, generator=generator)
    data = tiny_gpt.batch(0, 0)
    loss = model(data["tokens"], data["position_ids"], None, labels=data["labels"]).sum()
    loss.backward()
    names = global_names(model)
    found = {names[name]: p.grad for name, p in model.named_parameters()} | {"loss": loss}
    defined = options if other is None else other
    plain, exact = (_evaluate(model, data, dtype, defined) for dtype in (torch.float32, None))
    assert other is not None or exact.keys() == found.keys()

    def error(tensor: Tensor, wanted: Tensor) -> float:
        return float((tensor.double() - wanted).norm() / wanted.norm())

    return {
        name: (error(found[name].detach(), wanted), error(plain[name], wanted))
        for name, wanted in exact.items()
    }


def train_once(balance: float, **options: Any) -> dict[str, Any]:
    """Gradients of one global batch, as :func:`tiny_gpt.train` reports them.

    The loss is that of the language model, plus Eq. 7 of P0, plus the load-balancing loss and the
    z-loss of every router, each averaged over the microbatches.
    """
    config = tiny_gpt.model_config(head_balance_coeff=0.0, **options)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = tiny_gpt.skew_sinks([MegasinkModelBuilder(config).build_model(groups)])
    names = global_names(model)
    weights = {names[n]: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    for index in range(tiny_gpt.MICROBATCHES):
        data = tiny_gpt.batch(0, index)
        gpt = Definition(weights, layers=2, **options)
        loss = gpt.loss(data["tokens"], data["labels"]) / data["tokens"].numel()
        importance_LH = torch.stack(gpt.importances)
        every = [list(range(tiny_gpt.HEADS))] * len(importance_LH)
        loss = loss + balance_loss(importance_LH, balance, every) + sum(gpt.router_losses)
        (loss / tiny_gpt.MICROBATCHES).backward()
    for name, parameter in model.named_parameters():
        parameter.grad = weights[names[name]].grad.float()
    return {"gradients": tiny_gpt.shards([model], "grad")}


def _evaluate(
    model: torch.nn.Module, data: dict[str, Tensor], dtype: torch.dtype | None, options: Any
) -> dict[str, Tensor]:
    names = global_names(model)
    weights = {
        names[name]: p.detach().to(dtype or torch.float64).requires_grad_()
        for name, p in model.named_parameters()
    }
    loss = Definition(weights, layers=2, **options).loss(data["tokens"], data["labels"])
    loss.backward()
    used = {name: w.grad for name, w in weights.items() if w.grad is not None}
    return used | {"loss": loss.detach()}
