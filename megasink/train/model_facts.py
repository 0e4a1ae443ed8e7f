"""What results.json says about a model of Megatron, and how far it was trained."""

from argparse import Namespace
from typing import Any

from megatron.core.models.gpt import GPTModel


def model_facts(args: Namespace, model: GPTModel, iteration: int, name: str) -> dict[str, Any]:
    """The key "model" of results.json.

    Args:
        args: of the run.
        iteration: the step after which the model is what it is.
    """
    return {
        "name": name,
        "kind": f"{_attention_name(args)} attention, step {iteration}",
        "attention": model.config.attention_kernel,
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
        "step": iteration,
        "trained_tokens": iteration * args.global_batch_size * args.seq_length,
    }


def _attention_name(args: Namespace) -> str:
    """Whose weights are no softmax is said: their scores are proxies (P2.37)."""
    similarity = getattr(args, "attention_similarity", "softmax")
    variant: str = args.attention_variant
    return variant if similarity == "softmax" else f"{similarity} (proxy weights)"
