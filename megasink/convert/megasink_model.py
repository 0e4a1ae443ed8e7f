"""Options that megasink's own modeling files support, but no architecture of transformers.

Such a model is exported with the files megasink/transformers/modeling/*_megasink.py.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from megasink.attention.variants import foreign_options, variant
from megasink.config import (
    AttentionBias,
    FixedValue,
    GateActivation,
    GateInput,
    GateOperation,
    GatePosition,
    OutputNorm,
)
from megasink.files.json_file import read_object
from megasink.options.dataclass_flags import flag_of

FILES = tuple(
    sorted((Path(__file__).parents[1] / "transformers" / "modeling").glob("*_megasink.py"))
)
AUTO_MAP = {
    "AutoConfig": "configuration_megasink.MegasinkConfig",
    "AutoModel": "modeling_megasink.MegasinkModel",
    "AutoModelForCausalLM": "modeling_megasink.MegasinkForCausalLM",
}
# The supported values of options that also have others.
CHOICES: dict[str, tuple[Any, ...]] = {
    "gate_position": get_args(GatePosition),
    "gate_operation": get_args(GateOperation),
    "gate_activation": get_args(GateActivation),
    "gate_input": get_args(GateInput),
    "sdpa_output_norm": get_args(OutputNorm),
    "bias_fixed_value": get_args(FixedValue),
    "normalization": ("RMSNorm", "LayerNorm"),
    "position_embedding_type": ("rope", "learned_absolute", "none"),
    "attention_bias_type": get_args(AttentionBias),
    "moe_router_score_function": ("softmax", "sigmoid"),
}


@dataclass(frozen=True, kw_only=True)
class MegasinkOptions:
    """Options of a run, by name; every architecture of transformers has the defaults.

    Only `gated_unit` is not an option: it is False if --ffn-activation is relu, gelu or silu, and
    with --squared-relu.
    """

    gate_position: str = "sdpa"
    gate_shared_heads: bool = False
    gate_operation: str = "multiply"
    gate_activation: str = "sigmoid"
    gate_input: str = "hidden"
    sdpa_output_norm: str = "none"
    sandwich_norm: bool = False
    post_norm: bool = False
    residual_clip: float | None = None
    multi_head_addition: bool = False
    bias_shared_heads: bool = False
    bias_fixed_value: str = "none"
    bias_fixed_value_norm: float = 1.0
    attention_scale_alpha: float = 1.0
    normalization: str = "RMSNorm"
    norm_without_gain: bool = False
    embedding_norm: bool = False
    qk_l2_norm: bool = False
    logit_softcap: float | None = None
    position_embedding_type: str = "rope"
    sinusoidal_position_embedding: bool = False
    rotary_percent: float = 1.0
    attention_bias_type: str = "none"
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    moe_router_score_function: str = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_topk_scaling_factor: float | None = None
    use_mup: bool = False
    mup_embedding_mult: float = 1.0
    mup_output_mult: float = 1.0
    mup_base_head_dim: float | None = None
    gated_unit: bool = True

    @property
    def sigmoid_router(self) -> bool:
        """Whether experts are scored one by one; Megatron then always renormalizes the chosen."""
        return self.moe_router_score_function == "sigmoid"

    @property
    def learned_positions(self) -> bool:
        """Whether there is a learned position embedding."""
        learned = self.position_embedding_type == "learned_absolute"
        return learned and not self.sinusoidal_position_embedding

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        values = dataclasses.asdict(self)
        return {
            field.name: values[field.name]
            for field in dataclasses.fields(self)
            if values[field.name] != field.default
        }

    def flags(self) -> list[str]:
        """Return those options as flags of megasink train, except `gated_unit`."""
        return [
            flag_of(name) if value is True else f"{flag_of(name)} {value}"
            for name, value in self.changed().items()
            if name != "gated_unit"
        ]


NAMES = frozenset(field.name for field in dataclasses.fields(MegasinkOptions))


def options_from(given: Mapping[str, Any], *, gated_unit: bool = True) -> MegasinkOptions:
    """Read the options of a run or a config.json, except those that have no effect in it."""
    foreign = foreign_options(variant(given.get("attention_variant", "vanilla")))
    has_buckets = given.get("attention_bias_type", "none") in ("t5", "bucket")
    values = {
        name: given[name]
        for name in NAMES & given.keys() - foreign
        if (has_buckets or not name.startswith("relative_"))
        and (given.get("num_experts") or not name.startswith("moe_"))
        and (given.get("use_mup") or not name.startswith("mup_"))
    }
    if values.get("moe_router_topk_scaling_factor") == 1.0:
        values["moe_router_topk_scaling_factor"] = None
    return MegasinkOptions(**values | {"gated_unit": gated_unit})


def unknown_values(options: MegasinkOptions) -> list[str]:
    """Return the options with values that the modeling files do not support."""
    changed = options.changed()
    return [
        f"{flag_of(name)} {changed[name]}"
        for name, known in CHOICES.items()
        if name in changed and changed[name] not in known
    ]


def model_class(folder: Path) -> Any:
    """Return the class that loads a folder without running code from it."""
    import transformers

    config = read_object(folder / "config.json")
    if config.get("model_type") != "megasink":
        return transformers.AutoModelForCausalLM
    from megasink.transformers.modeling.modeling_megasink import MegasinkForCausalLM

    return MegasinkForCausalLM


def changed_files(folder: Path) -> list[str]:
    """Return the modeling files that are missing in a folder or differ from the package's."""
    return [
        path.name
        for path in FILES
        if not (folder / path.name).is_file()
        or (folder / path.name).read_bytes() != path.read_bytes()
    ]
