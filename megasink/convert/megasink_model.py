"""What megasink's own modelling file has and no architecture of transformers does.

The files beside the weights of such a model are megasink/convert/modeling/*_megasink.py.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from megasink.config import (
    AttentionBias,
    FixedValue,
    GateActivation,
    GateInput,
    GateOperation,
    GatePosition,
    OutputNorm,
)
from megasink.variants import foreign_options, variant

FILES = tuple(sorted((Path(__file__).parent / "modeling").glob("*_megasink.py")))
AUTO_MAP = {
    "AutoConfig": "configuration_megasink.MegasinkConfig",
    "AutoModel": "modeling_megasink.MegasinkModel",
    "AutoModelForCausalLM": "modeling_megasink.MegasinkForCausalLM",
}
# The values that the modelling file has, of options with more.
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
}


@dataclass(frozen=True, kw_only=True)
class MegasinkOptions:
    """Options of a run, by name; the defaults are what every architecture of transformers has.

    `gated_unit` alone is no option: False where --ffn-activation is relu, gelu or silu.
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
    position_embedding_type: str = "rope"
    sinusoidal_position_embedding: bool = False
    rotary_percent: float = 1.0
    attention_bias_type: str = "none"
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    gated_unit: bool = True

    @property
    def learned_positions(self) -> bool:
        """Whether positions have a learned embedding."""
        learned = self.position_embedding_type == "learned_absolute"
        return learned and not self.sinusoidal_position_embedding

    def said(self) -> dict[str, Any]:
        """The options that are not at their defaults."""
        fields = dataclasses.fields(self)
        values = {field.name: getattr(self, field.name) for field in fields}
        return {f.name: values[f.name] for f in fields if values[f.name] != f.default}

    def flags(self) -> list[str]:
        """Those options as megasink train takes them, without the FFN's."""
        found = []
        for name, value in self.said().items():
            if name != "gated_unit":
                flag = f"--{name.replace('_', '-')}"
                found.append(flag if value is True else f"{flag} {value}")
        return found


NAMES = frozenset(field.name for field in dataclasses.fields(MegasinkOptions))


def options_from(given: Mapping[str, Any], *, gated_unit: bool = True) -> MegasinkOptions:
    """The options that a run's arguments, or a config.json, say.

    Options that belong to some variants, and those of buckets, count where there are those alone.

    Raises:
        UserError: an attention variant that is not registered.
    """
    foreign = foreign_options(variant(given.get("attention_variant", "vanilla")))
    has_buckets = given.get("attention_bias_type", "none") in ("t5", "bucket")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(MegasinkOptions):
        unused = field.name in foreign
        unused |= field.name.startswith("relative_") and not has_buckets
        values[field.name] = field.default if unused else given.get(field.name, field.default)
    return MegasinkOptions(**values | {"gated_unit": gated_unit})


def unknown_values(options: MegasinkOptions) -> list[str]:
    """Options with a value that the modelling file has not."""
    said = options.said()
    return [
        f"--{name.replace('_', '-')} {said[name]}"
        for name, known in CHOICES.items()
        if name in said and said[name] not in known
    ]


def model_class(folder: Path) -> Any:
    """The class of transformers that loads a Hugging Face folder without running code from it.

    megasink's own is taken from the package, whatever file lies in the folder.
    """
    import transformers

    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") != "megasink":
        return transformers.AutoModelForCausalLM
    from megasink.convert.modeling.modeling_megasink import MegasinkForCausalLM

    return MegasinkForCausalLM


def changed_files(folder: Path) -> list[str]:
    """The modelling files that are not in a folder to the byte as in the package."""
    return [
        path.name
        for path in FILES
        if not (folder / path.name).is_file()
        or (folder / path.name).read_bytes() != path.read_bytes()
    ]
