"""The options of `megasink finetune`, with what is wrong with them before anything is loaded."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megasink.errors import ConfigError, UserError, missing_folder
from megasink.json_file import read_object


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Options of a fine-tuning.

    Raises:
        ConfigError: One message with every problem.
    """

    model: Path
    """a Hugging Face folder with safetensors and a tokenizer"""

    data: tuple[Path, ...] = field(metadata={"argparse_meta": {"metavar": "FILE"}})
    """conversations: JSON Lines or parquet; messages with role and content"""

    lora_rank: int = 16
    """rank r of the adapters of all linear layers; default: 16 (P0.23)"""

    lora_alpha: float | None = None
    """alpha of the adapters' factor alpha / r; default: the rank"""

    adapter: bool = False
    """export the adapter for peft, not a merged model"""

    head_balance_coeff: float = 1e-2
    """lambda of Eq. 7 or 8; default: %(default)s"""

    shared_heads: int | None = None
    """m of Eq. 8; 0: Eq. 7; None: chosen by head importance"""

    seq_length: int = 2048
    """tokens of a packed sample; longer conversations are cut; default: %(default)s"""

    epochs: float = 1.0
    """passes over the conversations; default: 1"""

    lr: float | None = None
    """peak learning rate of a cosine to 0; default: 1e-4 with LoRA, else 1e-5"""

    micro_batch_size: int = 1
    """packed samples per process and forward pass; default: %(default)s"""

    global_batch_size: int = 16
    """packed samples per step; default: %(default)s"""

    bf16: bool = False
    """compute in bfloat16, and keep the frozen weights under adapters in it"""

    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""

    seed: int = 1234
    """seed of the order of samples and of the adapters' weights; default: %(default)s"""

    def __post_init__(self) -> None:
        problems = [*self._of_model(), *self._of_numbers(), *self._of_processes()]
        if problems:
            raise ConfigError(problems)

    @property
    def rate(self) -> float:
        """The peak learning rate; the paper states none (P0.23)."""
        return self.lr if self.lr is not None else 1e-4 if self.lora_rank else 1e-5

    def _of_model(self) -> Iterator[str]:
        yield from (f"--data {path}: no such file" for path in self.data if not path.is_file())
        config = self.model / "config.json"
        if not self.model.is_dir():
            yield missing_folder(self.model, "--allow-download")
            return
        if not config.is_file():
            yield (
                f"{self.model} is not a transformers folder (no config.json; nothing is downloaded)"
            )
            return
        try:
            model = read_object(config)
        except UserError as error:
            yield str(error)
            return
        if "arguments" in model:
            yield f"{self.model} is a megasink run: megasink convert-to-hf exports it"
        text = model.get("text_config", model)
        heads, positions = (text.get(n) for n in ("num_attention_heads", "max_position_embeddings"))
        if isinstance(heads, int) and (self.shared_heads or 0) > max(0, heads - 2):
            yield (
                f"--shared-heads {self.shared_heads}: the layers have {heads} heads, and at "
                "least two must remain to be balanced"
            )
        if isinstance(positions, int) and self.seq_length > positions:
            yield f"--seq-length {self.seq_length}: the model has {positions} positions"

    def _of_numbers(self) -> Iterator[str]:
        if self.lora_rank < 0:
            yield f"--lora-rank {self.lora_rank}: use 1 or more"
        if self.adapter and not self.lora_rank:
            yield "--adapter exports LoRA adapters, which --full does not train: drop one"
        for flag in ("seq_length", "micro_batch_size", "global_batch_size"):
            if getattr(self, flag) < 1:
                yield f"--{flag.replace('_', '-')} {getattr(self, flag)}: use 1 or more"
        for flag in ("epochs", "lr", "lora_alpha"):
            value = getattr(self, flag)
            if value is not None and not 0 < value < math.inf:
                yield f"--{flag.replace('_', '-')} {value:g}: use a number above 0"
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
        for kind in ("FSDP", "DEEPSPEED"):
            if os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() in ("1", "true"):
                yield (
                    f"accelerate is set up for {kind}: the head-balance loss needs whole models on "
                    "every process, use data parallelism"
                )


def processes() -> int:
    """Return the number of processes that accelerate or torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))
