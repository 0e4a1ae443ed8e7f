"""Muon of megatron-core 0.19 with the gate rows of ``linear_qkv``.

A weight with gate rows is [q, k, v of this rank | gate | padding] (megatron/gate_projection.py).
Upstream splits a weight into query, key and value only if its rows are a multiple of one group's,
and else orthogonalizes it whole, without a word. Here the gate is a matrix of its own, as it is in
a checkpoint.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megasink.upstream.patch_register import patches

_patch = patches("always", "tests/distributed/test_muon.py")
_MODULE = "megatron.core.optimizer.emerging_optimizers"

GATE_ROWS = _patch(
    "Muon on gate rows",
    f"{_MODULE}:TensorParallelMuon",
    "orthogonalize",
    "linear_qkv with gate rows would be orthogonalized as one matrix, or cut at the wrong rows",
    "def orthogonalize(self, p, grad, *_)",
    ":TensorParallelMuon.orthogonalize: "
    "grad = self.scaled_orthogonalize_fn_with_gtp_remat(p, grad, tp_group, partition_dim)",
    "megatron.core.optimizer:_get_megatron_emerging_optimizer: param.is_qkv = True",
)
ROWS_OF_MAIN_PARAMETERS = _patch(
    "gate rows of main parameters",
    "megatron.core.tensor_parallel.layers",
    "_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS",
    "the float32 copy of a bf16 weight gets only the attributes listed there",
    ":copy_tensor_model_parallel_attributes: maybe_copy(attribute)",
    test="tests/distributed/test_muon.py",
)
OTHER_TABLES = _patch(
    "parameters other than matrices",
    f"{_MODULE}:_EMERGING_OPTIMIZERS",
    "default_param_overrides of each Muon entry",
    "head biases [H, D] and position tables have two axes, but are not matrices",
    ":_is_nonlinear_or_embedding: "
    "getattr(param, 'is_embedding_or_output_parameter', False) or len(param.shape) != 2",
    "megatron.core.optimizer:_get_megatron_emerging_optimizer: "
    "config_overrides.update(default_param_overrides)",
)


def apply() -> None:
    """Apply the patches."""
    from megatron.core.optimizer.emerging_optimizers import _EMERGING_OPTIMIZERS
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

    tables = ParamKey(with_name_predicate=ParamWithNamePredicate("tables", is_table))
    for name in ("muon", "adaptive_muon"):
        entry = _EMERGING_OPTIMIZERS[name]
        overrides = entry.default_param_overrides | {tables: {"optimizer": "adam"}}
        OTHER_TABLES.apply(entry, default_param_overrides=overrides)
    (defaults,) = ROWS_OF_MAIN_PARAMETERS.originals().values()
    ROWS_OF_MAIN_PARAMETERS.apply(_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS=defaults | {"row_split": None})
    (orthogonalize,) = GATE_ROWS.originals().values()
    GATE_ROWS.apply(orthogonalize=_by_parts(orthogonalize))


def is_table(parameter: Any, name: str) -> bool:
    """Return whether AdamW updates a parameter with two axes, because it is not a matrix."""
    return "core_attention." in name or name.endswith("position_embeddings.weight")


def _by_parts(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def orthogonalize(self: Any, p: Any, grad: Any, **kwargs: Any) -> Any:
        rows = getattr(p, "row_split", None)
        if rows is None:
            return upstream(self, p, grad, **kwargs)

        mixed, gate, padding = grad.split(rows)
        p.is_qkv = True  # of the rows of query, key and value alone
        mixed = upstream(self, p, mixed, **kwargs)
        p.is_qkv = False
        # Padding has no gradient and is zero: no momentum, so no update.
        return torch.cat([mixed, upstream(self, p, gate, **kwargs), torch.zeros_like(padding)])

    return orthogonalize
