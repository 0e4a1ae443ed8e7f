"""The options of `megasink finetune`, checked before anything is loaded."""

import argparse
import contextlib
import functools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasink.errors import ConfigError, UserError
from megasink.files.json_file import read_object
from megasink.options.dataclass_flags import flag_of

NO_TEMPLATE = (
    "the tokenizer in {} has no chat template: put a chat_template.jinja there, such as that of a "
    "chat model with the same tokenizer"
)


def _number_or_auto(text: str) -> int | None:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto")
    return None if text == "auto" else int(text)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Options of a fine-tuning; a ConfigError names every problem."""

    model: Path
    """a Hugging Face folder with safetensors and a tokenizer"""

    data: tuple[Path, ...] = field(metadata={"argparse_meta": {"metavar": "FILE"}})
    """conversations in JSON Lines or parquet; each message has a role and content"""

    full: bool = False
    """train all weights, not LoRA adapters"""

    lora_rank: int = 16
    """rank r of the adapters of all linear layers; default: 16 (P0.23)"""

    lora_alpha: float | None = None
    """alpha of LoRA, which scales the adapters by alpha / r; default: the rank"""

    adapter: bool = False
    """export the adapter for peft, not a merged model"""

    head_balance_coeff: float = 1e-2
    """lambda of Eq. 7 or 8; default: %(default)s"""

    shared_heads: int | None = field(
        default=None, metadata={"argparse_meta": {"metavar": "M", "type": _number_or_auto}}
    )
    """m of Eq. 8: number of heads of each layer excluded from the loss; 0 balances all heads
    (Eq. 7); default: auto, chosen by head importance"""

    seq_length: int | None = None
    """tokens of a packed sample; longer conversations are cut; default: 2048, or the model's
    positions if fewer"""

    epochs: float = 1.0
    """passes over the conversations; default: 1"""

    lr: float | None = None
    """peak learning rate of a cosine decay to 0; default: 1e-4 with LoRA, else 1e-5"""

    micro_batch_size: int = 1
    """packed samples per process and forward pass; default: %(default)s"""

    global_batch_size: int = 16
    """packed samples per step; default: %(default)s"""

    bf16: bool = False
    """compute in bfloat16, and also keep the frozen weights under adapters in bfloat16"""

    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""

    seed: int = 1234
    """seed of the order of samples and of the adapters' weights; default: %(default)s"""

    def __post_init__(self) -> None:
        kinds = {True: "a folder: give its files", False: "no such file"}
        missing = (f"--data {p}: {kinds[p.is_dir()]}" for p in self.data if not p.is_file())
        numbers, model = self._of_numbers(), self._of_model()
        if problems := [*missing, *model, *numbers, *self._of_processes()]:
            raise ConfigError(problems)

    @property
    def rate(self) -> float:
        """The peak learning rate; the paper states none (P0.23)."""
        return self.lr if self.lr is not None else 1e-5 if self.full else 1e-4

    @functools.cached_property
    def length(self) -> int:
        """`seq_length`, or its default."""
        positions = self.model_config.get("max_position_embeddings")
        most = positions if isinstance(positions, int) and positions > 0 else 2048
        return self.seq_length if self.seq_length is not None else min(2048, most)

    @functools.cached_property
    def model_config(self) -> dict[str, Any]:
        """The model's config.json, or its part of text."""
        with contextlib.suppress(UserError):  # loading the model reports the error
            config = read_object(self.model / "config.json")
            inner = config.get("text_config")
            return inner if isinstance(inner, dict) else config
        return {}

    def _of_model(self) -> Iterator[str]:
        if (self.model / "config.json").is_file() and not has_template(self.model):
            yield NO_TEMPLATE.format(self.model)
        names = ("num_attention_heads", "max_position_embeddings")
        heads, positions = map(self.model_config.get, names)
        if isinstance(heads, int) and (self.shared_heads or 0) > max(0, heads - 2):
            yield (
                f"--shared-heads {self.shared_heads}: the layers have {heads} heads, and at "
                "least two must remain to be balanced"
            )
        if isinstance(positions, int) and self.length > positions > 0:
            yield f"--seq-length {self.length}: give at most {positions}, the model's positions"

    def _of_numbers(self) -> Iterator[str]:
        if self.adapter and self.full:
            yield "--adapter exports LoRA adapters, which --full does not train: drop one"
        if self.length < 1:
            yield f"--seq-length {self.length}: use 1 or more"
        for name in ("lora_rank", "micro_batch_size", "global_batch_size"):
            if getattr(self, name) < 1:
                yield f"{flag_of(name)} {getattr(self, name)}: use 1 or more"
        for name in ("epochs", "lr", "lora_alpha"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                yield f"{flag_of(name)} {value:g}: use a number above 0"
        if not 0 <= self.head_balance_coeff < math.inf:
            yield f"--head-balance-coeff {self.head_balance_coeff:g}: use 0 or more"

    def _of_processes(self) -> Iterator[str]:
        count = processes()
        each = self.micro_batch_size * count
        if min(each, self.global_batch_size) > 0 and self.global_batch_size % each:
            times = f" times {count} processes" if count > 1 else ""
            yield (
                f"--global-batch-size {self.global_batch_size} is not divisible by "
                f"--micro-batch-size {self.micro_batch_size}{times}"
            )
        if uses("DEEPSPEED"):
            yield "accelerate is set up for DEEPSPEED, which is untested: use FSDP2 or DDP"
        if uses("FSDP") and (number := os.environ.get("FSDP_VERSION", "1")) != "2":
            yield f"accelerate is set up for FSDP {number}: set fsdp_version to 2"


def uses(kind: str) -> bool:
    """Return whether accelerate is set up for FSDP or DEEPSPEED."""
    return os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() in ("1", "true")


def has_template(folder: Path) -> bool:
    """Return whether the files of a tokenizer hold a chat template."""
    if any(folder.glob("*chat_template*")):
        return True
    with contextlib.suppress(UserError):  # loading the tokenizer reports the error
        return bool(read_object(folder / "tokenizer_config.json").get("chat_template"))
    return True


def processes() -> int:
    """Return the number of processes that accelerate or torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))
