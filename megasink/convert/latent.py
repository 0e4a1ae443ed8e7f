"""What models with latent attention add to an architecture, from the arguments of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megasink.megatron.hybrid_pattern import EXPERTS, FFN, pattern_of


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The widths of latent attention; `queries` is None without a latent of the queries."""

    queries: int | None
    keys: int
    plain: int
    rotated: int
    values: int


def latent_fields(saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return fields of Architecture from the arguments of a run, and what no target supports."""
    dense, groups = _dense_layers(saved), saved.get("moe_router_num_groups")
    problems: list[str] = []
    if dense is None:
        problems.append(
            f"--moe-layer-freq {saved.get('moe_layer_freq')}: targets only support experts in "
            "every layer after the first ones"
        )
    grouped = groups and saved.get("num_experts")
    fields = {
        "latent": _latent(saved),
        "dense_layers": dense or 0,
        "dense_ffn": saved["ffn_hidden_size"] if dense else 0,
        "expert_groups": (groups, saved["moe_router_group_topk"]) if grouped else None,
    }
    return fields, problems


def _latent(saved: Mapping[str, Any]) -> Latent | None:
    if not saved.get("multi_latent_attention"):
        return None
    names = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    keys, plain, rotated, values = (saved[name] for name in names)
    queries = saved.get("q_lora_rank")
    return Latent(queries=queries, keys=keys, plain=plain, rotated=rotated, values=values)


def _dense_layers(saved: Mapping[str, Any]) -> int | None:
    """Return the number of first blocks without experts; None if others have none, too."""
    if not saved.get("num_experts"):
        return 0
    ffns = [symbol for symbol in pattern_of(saved) if symbol in FFN + EXPERTS]
    dense = (*ffns, EXPERTS).index(EXPERTS)
    return None if FFN in ffns[dense:] else dense


def latent_has_yarn(saved: Mapping[str, Any]) -> bool:
    """Return whether a run has latent attention with YaRN."""
    scaled = saved.get("rotary_scaling_factor") not in (None, 1.0)
    yarn = saved.get("rope_type") != "rope"  # Megatron's default for latent attention
    return bool(saved.get("multi_latent_attention")) and yarn and scaled
