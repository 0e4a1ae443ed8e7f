"""What results.json says about a model of Megatron, and how far it was trained."""

from argparse import Namespace
from typing import Any

from megatron.core.models.gpt import GPTModel

from megasink.checkpoint.vocabulary import counted_rows

_PADDED = ("word_embeddings.weight", "output_layer.weight")


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
        "parameters": _parameters(args, model),
        "step": iteration,
        "trained_tokens": iteration * args.global_batch_size * args.seq_length,
    }


def _parameters(args: Namespace, model: GPTModel) -> int:
    """As a model of transformers counts them: rows that pad the vocabulary are none."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    padding = args.padded_vocab_size - counted_rows(vars(args))
    padded = sum(name.endswith(_PADDED) for name in sizes)
    return sum(sizes.values()) - padded * padding * args.hidden_size


def _attention_name(args: Namespace) -> str:
    """Whose weights are no softmax is said: their scores are proxies (P2.37)."""
    similarity = getattr(args, "attention_similarity", "softmax")
    variant: str = args.attention_variant
    return variant if similarity == "softmax" else f"{similarity} (proxy weights)"
