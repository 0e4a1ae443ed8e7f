"""The README.md of a fine-tuned model, with which its folder can be uploaded as it is."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import megasink
from megasink.convert.model_card import OF_SINKS
from megasink.finetune_options import FinetuneOptions

_LICENSE = ("license", "license_name", "license_link")


def card(
    options: FinetuneOptions,
    base: Path,
    shared_heads: int,
    log: Sequence[Mapping[str, Any]],
    imbalance: Sequence[float],
) -> str:
    """Return Markdown with the front matter that the Hugging Face hub reads."""
    from huggingface_hub import ModelCardData

    licensed: dict[str, Any] = _license(options.model)
    # A name of the hub was fetched into its cache.
    named = str(base) if options.model.parent.name == "snapshots" else None
    data = ModelCardData(
        base_model=named,
        library_name="peft" if options.adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["megasink"],
        **licensed,
    )
    lora = f"rank {options.lora_rank}, alpha {options.lora_alpha or options.lora_rank:g}"
    losses = [entry["loss"] for entry in log if "loss" in entry]
    equation = f"Eq. 8, the {shared_heads} most important of each layer left out"
    rows = {
        "base model": named or base.name,
        "license of the base": licensed.get("license", "not stated in its folder"),
        "conversations": ", ".join(path.name for path in options.data),
        "weights trained": "all" if options.full else f"LoRA ({lora})",
        "head-balance coefficient": f"{options.head_balance_coeff:g}",
        "heads balanced": equation if shared_heads else "Eq. 7, all",
        "steps, epochs": f"{len(losses)}, {options.epochs:g}",
        "samples per step, tokens per sample": f"{options.global_batch_size}, {options.seq_length}",
        "peak learning rate, schedule": f"{options.rate:g}, cosine to 0",
        "computed in": "bfloat16" if options.bf16 else "float32",
        "seed": options.seed,
        "training loss, first and last step": f"{losses[0]:.4f}, {losses[-1]:.4f}",
        "loss of held-out conversations, after": f"{log[-1]['eval_loss']:.4f} nats per token",
        "head imbalance, before and after": f"{imbalance[0]:.4f}, {imbalance[1]:.4f}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
{data.to_yaml()}
---

# {base.name}, fine-tuned with the head-balance loss

Made by `megasink finetune` {megasink.__version__} with TRL, on the assistant's turns alone.

| | |
|---|---|
{table}

The head-balance loss is that of {OF_SINKS}, https://arxiv.org/abs/2602.01203.
"""


def _license(folder: Path) -> dict[str, str]:
    """Return the license that the card of a model's folder states; nothing without a card."""
    from huggingface_hub import repocard

    with contextlib.suppress(OSError, ValueError):
        found = repocard.metadata_load(folder / "README.md") or {}
        return {name: found[name] for name in _LICENSE if isinstance(found.get(name), str)}
    return {}
