"""Tasks for the workers: one gated attention layer against its definition, written out plainly.

Shapes: S sequence, B batch, M hidden size, H query heads, G groups, N of either, D head dim,
C scores per head.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.utils import unwrap_model
from megatron.training.models import gpt
from megatron.training.models.gpt import GPTModelBuilder, default_layer_spec
from torch import Tensor

from megasink.attention import reference_attention, reference_gate, reference_head_norm
from megasink.attention.variants.gate_options import gate_shape
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.gated_attention import GatedSelfAttention
from tests.distributed import tiny_gpt
from tests.distributed.oracle import balance_loss
from tests.distributed.skewed_gates import skew_gates
from tests.said import said

COEFF = 3e4


def model(**options: Any) -> Any:
    """A model with skewed gates, in training mode."""
    config = tiny_gpt.model_config(**{"attention_variant": "gated", **options})
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (built,) = skew_gates([config.get_builder_cls()(config).build_model(groups)])
    return built


def against_definition(**options: Any) -> dict[str, float]:
    """Relative errors of a layer's output, its gradients and its head importance."""
    balance_options = {"head_balance_coeff": COEFF, "head_balance_scope": "microbatch"}
    attention = model(**balance_options, **options).decoder.layers[0].self_attention
    generator = torch.Generator().manual_seed(3)
    hidden_SBM = torch.randn(23, 2, tiny_gpt.HIDDEN, generator=generator) + 0.4
    grad_SBM = torch.randn(hidden_SBM.shape, generator=generator)
    names, inputs = zip(*attention.named_parameters(), strict=True)
    inputs = (hidden_SBM.requires_grad_(), *inputs)

    def gradients(out_SBM: Tensor, extra: Tensor | float) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out_SBM * grad_SBM).sum() + extra, inputs, retain_graph=True)

    output, bias = attention(hidden_SBM, None)
    found_SBM = output if bias is None else output + bias
    found = dict(zip(("hidden", *names), gradients(found_SBM, 0.0), strict=True))
    sums_H = attention.config.statistics.heads._table[0, : tiny_gpt.HEADS]  # of the backward pass
    found |= {"output": found_SBM, "importance": sums_H / (23 * 2)}
    wanted_SBM, importance_H = definition(attention, hidden_SBM)
    every_head = [list(range(tiny_gpt.HEADS))]
    balance = balance_loss(importance_H[None], COEFF, every_head)
    wanted = {"output": wanted_SBM, "importance": importance_H}
    wanted |= dict(zip(("hidden", *names), gradients(wanted_SBM, balance), strict=True))
    without = dict(zip(("hidden", *names), gradients(wanted_SBM, 0.0), strict=True))
    errors = {name: _error(found[name], wanted[name]) for name in wanted}
    errors["without the balance loss"] = max(_error(without[n], wanted[n]) for n in without)
    errors["spread of the gates"] = float(importance_H.std() / importance_H.mean())
    return errors


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def definition(attention: GatedSelfAttention, hidden_SBM: Tensor) -> tuple[Tensor, Tensor]:
    """Output [S, B, M] of the layer, and the importance of its heads [H]; one process, no RoPE."""
    config = attention.config
    position = config.gate_position if config.attention_variant == "gated" else None
    groups, head_dim = config.num_query_groups, config.kv_channels
    per_group = config.num_attention_heads // groups
    projection = attention.linear_qkv
    mixed = torch.nn.functional.linear(hidden_SBM, projection.weight, projection.bias)
    rows = getattr(projection, "row_split", (mixed.shape[-1], 0, 0))
    mixed, score, _ = mixed.split(rows, dim=-1)
    mixed_SBGND = mixed.reshape(*mixed.shape[:2], groups, -1, head_dim)
    sizes = [per_group] * (2 if attention.megatrons_layout else 1) + [1, 1]
    heads = [part.flatten(2, 3) for part in mixed_SBGND.split(sizes, dim=3)]
    if attention.megatrons_layout:
        score = heads.pop(1)
    elif config.gate_input == "none" and position:
        score = attention.gate.logit
    elif position == "output":
        weight, bias = attention.linear_gate.weight, attention.linear_gate.bias
        score = torch.nn.functional.linear(hidden_SBM, weight, bias)
    gates = {}

    def gated(where: str, x_SBND: Tensor) -> Tensor:
        if where != position:
            return x_SBND
        score_SBNC = score.reshape(
            *(score.shape[:2] if score.dim() > 1 else ()), *gate_shape(config)
        )
        out, gates[where] = reference_gate(
            x_SBND,
            score_SBNC,
            activation=config.gate_activation,
            operation=config.gate_operation,
            shared_heads=config.gate_shared_heads,
        )
        return out

    query, key, value = (
        gated(name, x) for name, x in zip(("query", "key", "value"), heads, strict=True)
    )
    if config.qk_layernorm:
        query, key = attention.q_layernorm(query), attention.k_layernorm(key)
    out_BHSD, _, implicit_BHS = reference_attention(
        *(x.permute(1, 2, 0, 3) for x in (query, key, value))
    )
    out_SBHD = out_BHSD.permute(2, 0, 1, 3)
    if config.sdpa_output_norm != "none":
        weight = attention.output_norm.weight
        weight_HD = None if weight is None else weight.view(-1, head_dim)
        eps = config.layernorm_epsilon
        out_SBHD = reference_head_norm(out_SBHD, weight_HD, eps=eps)
    out_SBHD = gated("sdpa", out_SBHD)
    linear = attention.linear_proj
    out_SBM = torch.nn.functional.linear(out_SBHD.flatten(2), linear.weight, linear.bias)
    out_SBM = gated("output", out_SBM.unsqueeze(2)).squeeze(2)
    if "sdpa" in gates and config.gate_operation == "multiply" and "sig" in config.gate_activation:
        return out_SBM, gates["sdpa"].mean((0, 1, 3))
    return out_SBM, implicit_BHS.mean((0, 2))


def loss_and_gradients(built: Any) -> dict[str, Any]:
    """Of one microbatch, without the balance loss."""
    data = tiny_gpt.batch(0, 0)
    loss = built(data["tokens"], data["position_ids"], None, labels=data["labels"]).mean()
    built.zero_grad()
    loss.backward()
    return {"loss": loss.item()} | {n: p.grad for n, p in built.named_parameters()}


def upstream(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our elementwise gate, and Megatron's attention_output_gate with its own modules alone."""
    options["gpt"] = True
    ours = model(head_balance_coeff=0.0, gate_granularity="elementwise", **options)
    config = tiny_gpt.model_config(
        attention_variant="vanilla", attention_output_gate=True, head_balance_coeff=0.0, **options
    )
    config.transformer_layer_spec = default_layer_spec
    groups = ProcessGroupCollection.use_mpu_process_groups()
    theirs = GPTModelBuilder(config).build_model(groups)
    assert not any(isinstance(m, GatedSelfAttention | CoreAttention) for m in theirs.modules())
    state = {n: t for n, t in ours.state_dict().items() if "head_counter" not in n}
    theirs.load_state_dict(state, strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return loss_and_gradients(ours), loss_and_gradients(theirs)


class NormAndLinear(ColumnParallelLinear):
    """What TransformerEngine's TELayerNormColumnParallelLinear is, in torch: the norm inside."""

    def __init__(self, input_size: int, *args: Any, **kwargs: Any):
        super().__init__(input_size, *args, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))

    def forward(self, hidden: Tensor) -> Any:
        eps = self.config.layernorm_epsilon
        return super().forward(
            torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], self.layer_norm_weight, eps)
        )


def _fused_spec(config: Any, vp_stage: int | None) -> Any:
    """Megatron's own layer with the modules where TransformerEngine's spec has them."""
    spec = default_layer_spec(config, vp_stage)
    layer = spec.submodules
    attention = layer.self_attention
    inside = dataclasses.replace(attention.submodules, linear_qkv=NormAndLinear)
    attention = dataclasses.replace(attention, submodules=inside)
    layer = dataclasses.replace(layer, self_attention=attention, input_layernorm=IdentityOp)
    return dataclasses.replace(spec, submodules=layer)


def fused_norm(**options: Any) -> dict[str, Any]:
    """The same model with the norm before linear_qkv, and inside it; modules of the second."""
    options["gpt"] = True
    plain = model(head_balance_coeff=0.0, **options)
    with mock.patch.object(gpt, "default_layer_spec", _fused_spec):
        fused = model(head_balance_coeff=0.0, **options)
    state = {
        name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"): t
        for name, t in plain.state_dict().items()
    }
    fused.load_state_dict(state, strict=True)
    attention = fused.decoder.layers[0].self_attention
    return {
        "plain": loss_and_gradients(plain),
        "fused": loss_and_gradients(fused),
        "attention": type(attention).__name__,
        "linear_qkv": [c.__name__ for c in type(attention.linear_qkv).__mro__],
    }


def facts(**options: Any) -> dict[str, Any]:
    """Parameters of the first layer as Megatron sees them, and its keys in a checkpoint."""
    config = tiny_gpt.model_config(**{"attention_variant": "gated", **options})
    models = tiny_gpt.build(config)
    optimizer, _ = tiny_gpt.optimizer_of(config, models, False)
    (built,) = unwrap_model(models)
    decays = {
        id(p): group["weight_decay"]
        for inner in getattr(optimizer, "chained_optimizers", [optimizer])
        for group in inner.optimizer.param_groups
        for p in group["params"]
    }
    prefix = "decoder.layers.0.self_attention."
    found = {}
    for name, parameter in built.named_parameters():
        if name.startswith(prefix):
            main = getattr(parameter, "main_param", parameter)
            found[name.removeprefix(prefix)] = {
                "shape": tuple(parameter.shape),
                "dtype": str(parameter.dtype),
                "sharded": getattr(parameter, "tensor_model_parallel", False),
                "sequence_parallel": getattr(parameter, "sequence_parallel", None),
                "decay": decays[id(main)],
            }
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    keys = {}
    for value in _built(built.sharded_state_dict(metadata=metadata)):
        if "self_attention" in value.key and hasattr(value, "global_shape"):
            keys[value.key.split("self_attention.")[1]] = tuple(value.global_shape)
    return {"parameters": found, "checkpoint": keys}


def _built(state: Any) -> Iterator[Any]:
    for value in state.values():
        made = value.build() if hasattr(value, "build") else value
        yield from made if isinstance(made, list) else [made]


def counted(**options: Any) -> dict[str, Any]:
    """How core attention is called, and how often the layer is recorded, in training and not."""
    built = model(**options)
    data = tiny_gpt.batch(0, 0)
    found: dict[str, Any] = {}
    for name, training, gradients in (
        ("evaluation", False, True),
        ("no gradients", True, False),
        ("training", True, True),
    ):
        built.train(training)
        with torch.set_grad_enabled(gradients), _calls() as calls:
            loss = built(data["tokens"], data["position_ids"], None, labels=data["labels"])
        if training and gradients:
            loss.mean().backward()  # which counts
        table = tiny_gpt.recorded(built.config)
        found[name] = 0 if table is None else int(table[0, -1])
        found["with gate"] = sorted({call["with_gate"] for call in calls})
    return found


@contextlib.contextmanager
def _calls() -> Iterator[list[dict[str, Any]]]:
    from megasink import attention as op  # where core attention looks it up at a call

    seen: list[dict[str, Any]] = []
    inner = op.attention

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return inner(*args, **kwargs)

    with mock.patch.object(op, "attention", spy):
        yield seen


def refused(**options: Any) -> str:
    """The message of the layer that cannot be built; "" if it can."""
    return said(model, **options)
