"""Tasks: Muon of Megatron and emerging-optimizers against its definition, on a tiny GPT.

Shapes: M rows and N columns of a weight.
"""

from typing import Any

import torch
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.utils import unwrap_model
from torch import Tensor

from megasink.megatron.checkpoint_parts import named_parts
from tests.distributed import tiny_gpt

MOMENTUM, DECAY, RATE = 0.95, 0.1, 0.02
OPTIONS = {
    "optimizer": "muon",
    "lr": RATE,
    "weight_decay": DECAY,
    "clip_grad": 0.0,
    "muon_momentum": MOMENTUM,
    "muon_nesterov": True,
    "muon_fp32_matmul_prec": "high",
    "muon_tp_mode": "duplicated",
}
# Jordan et al., "Muon: an optimizer for hidden layers" (2024); coefficients of modded-nanogpt.
COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalized(update_MN: Tensor) -> Tensor:
    """Newton-Schulz: an odd polynomial moves every singular value towards 1."""
    x_MN = update_MN.double() / update_MN.double().norm()
    for a, b, c in COEFFICIENTS:
        gram_MM = x_MN @ x_MN.T
        x_MN = a * x_MN + b * gram_MM @ x_MN + c * gram_MM @ gram_MM @ x_MN
    return x_MN


def scale(rows: int, columns: int, mode: str) -> float:
    """Factor on the orthogonalized update."""
    if mode == "spectral":
        return float(max(rows, columns) ** 0.5)
    if mode == "shape_scaling":
        return float(max(1.0, rows / columns) ** 0.5)
    assert mode == "unit_rms_norm"
    return float((rows / columns) ** 0.5)


def muon_step(
    weight_MN: Tensor, momentum_MN: Tensor, grad_MN: Tensor, parts: list[Tensor], mode: str
) -> tuple[Tensor, Tensor]:
    """Return the new weight and momentum: each of `parts`, indices of rows, is a matrix."""
    momentum_MN = MOMENTUM * momentum_MN + (1 - MOMENTUM) * grad_MN
    update_MN = MOMENTUM * momentum_MN + (1 - MOMENTUM) * grad_MN  # Nesterov
    new_MN = weight_MN * (1 - RATE * DECAY)
    for rows in parts:
        size = scale(len(rows), weight_MN.shape[1], mode)
        new_MN[rows] -= RATE * size * orthogonalized(update_MN[rows])
    return new_MN, momentum_MN


def adamw_step(
    weight: Tensor,
    state: tuple[Tensor, Tensor],
    grad: Tensor,
    step: int,
    decay: float,
    rate: float = RATE,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the new weight and moments."""
    first, second = 0.9 * state[0] + 0.1 * grad, 0.999 * state[1] + 0.001 * grad**2
    update = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-5)
    return weight * (1 - rate * decay) - rate * update, (first, second)


def matrices(name: str, rows: int, config: Any) -> list[Tensor]:
    """Rows of each matrix stored in a weight; one for all query heads, keys, values, gates."""
    if "linear_qkv" not in name:
        return [torch.arange(rows)]
    width, queries = config.kv_channels, config.num_attention_heads // config.num_query_groups
    sizes = [queries * width, width, width]
    if rows == config.num_query_groups * (sum(sizes) + queries * width):
        sizes.insert(1, queries * width)  # Megatron's own elementwise gate
    kinds: list[list[int]] = [[] for _ in sizes]
    row = 0
    while row < rows:
        for kind, size in zip(kinds, sizes, strict=True):
            kind += range(row, row + size)
            row += size
    assert row == rows
    return [torch.tensor(kind) for kind in kinds]


def against_definition(
    steps: int = 3, mode: str = "spectral", rates: dict[str, float] | None = None, **options: Any
) -> dict[str, Any]:
    """Train; return relative errors of every tensor, and which ones Muon updates."""
    rates = rates or {}
    config = tiny_gpt.model_config(**options)
    transformer = config.transformer
    models = tiny_gpt.build(config)
    optimizer, _ = tiny_gpt.optimizer_of(
        config, models, False, **OPTIONS | {"muon_scale_mode": mode} | rates
    )
    init_num_microbatches_calculator(
        0, None, tiny_gpt.MICROBATCH * tiny_gpt.MICROBATCHES, tiny_gpt.MICROBATCH, 1
    )
    transformer.grad_scale_func = optimizer.scale_loss
    wanted = {name: part.double().clone() for name, _, part in _parts(models, "main")}
    states: dict[str, Any] = {}
    muon = []
    for step in range(1, steps + 1):
        tiny_gpt.run_step(models, optimizer, step)
        for name, parameter, grad in _parts(models, "main_grad"):
            grad, weight = grad.double(), wanted[name]
            if weight.ndim == 2 and not any(
                word in name for word in ("embedding", "output_layer", "core_attention")
            ):
                state = states.get(name, torch.zeros_like(weight))
                parts = matrices(name, len(weight), transformer)
                wanted[name], states[name] = muon_step(weight, state, grad, parts, mode)
                muon.append(name)
            else:
                state = states.get(name, (torch.zeros_like(weight),) * 2)
                # Vectors, and what a head learns beside its weights, do not decay.
                is_exempt = parameter.ndim == 1 or "core_attention" in name
                decay = 0.0 if is_exempt else DECAY
                rate = RATE * (
                    options.get("sink_lr_mult", 1.0) if "core_attention" in name else 1.0
                )
                rate = rates.get("embedding_lr", rate) if "word_embeddings" in name else rate
                rate = rates.get("output_lr", rate) if "output_layer" in name else rate
                wanted[name], states[name] = adamw_step(weight, state, grad, step, decay, rate)
        optimizer.step()
    errors = {
        name: float((part.double() - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-9))
        for name, _, part in _parts(models, "main")
    }
    padding = [
        float(parameter.data[sum(parameter.row_split[:2]) :].abs().sum())
        for model in unwrap_model(models)
        for parameter in model.parameters()
        if getattr(parameter, "row_split", None)
    ]
    return {"errors": errors, "muon": sorted(set(muon)), "padding": padding}


def _parts(models: list[Any], attribute: str) -> Any:
    """Yield (name, parameter, tensor); "main" is the float32 copy where the weight is bf16."""
    for model in unwrap_model(models):
        for name, parameter in model.named_parameters():
            tensor = getattr(parameter, "main_param", parameter).data
            tensor = tensor if attribute == "main" else getattr(parameter, attribute)
            for part_name, part in named_parts(name, parameter, tensor):
                yield part_name, parameter, part
