"""The options of LoRA. Without torch, because the command line reads them."""

from dataclasses import dataclass, field

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Values of --lora-targets, by Hugging Face's names, in the order of Megatron's rows."""
# Values of --lora-train.
ALSO_TRAINED = ("sinks", "gates")


@dataclass(kw_only=True)
class LoraOptions:
    """LoRA (docs/finetuning.md): train low-rank changes of the frozen --pretrained-checkpoint."""

    lora_rank: int = 0
    """Rank r of the matrices A and B of each adapted layer, whose weight becomes W + alpha/r B A;
    0: no LoRA, train all weights. P0 fine-tunes with 16 (P0.23)."""

    lora_alpha: float | None = None
    """Numerator of the factor alpha/r. None: r, so that the factor is 1, as with peft's and
    Megatron-Bridge's defaults."""

    lora_dropout: float = 0.0
    """Dropout on the input of each matrix A."""

    lora_targets: list[str] | None = field(
        default=None,
        metadata={"argparse_meta": {"nargs": "+", "metavar": "NAME"}, "names": TARGETS},
    )
    """Layers to adapt, by Hugging Face's names: q_proj k_proj v_proj o_proj gate_proj up_proj
    down_proj. None: all that the model has (peft's all-linear, and the default of Megatron-Bridge,
    with which P0 trained). The head-balance loss reaches the model through q_proj and k_proj."""

    lora_train: list[str] | None = field(
        default=None,
        metadata={"argparse_meta": {"nargs": "+", "metavar": "NAME"}, "names": ALSO_TRAINED},
    )
    """What else to train, in full: sinks (and key and value biases), gates."""
