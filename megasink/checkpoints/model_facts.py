"""Describe a Megatron model and its training progress for results.json."""

from argparse import Namespace
from typing import Any

from megatron.core.models.gpt import GPTModel

from megasink.megatron.gate_projection import named_parts
from megasink.megatron.vocabulary import counted_rows

_PADDED = ("word_embeddings.weight", "output_layer.weight")


def model_facts(args: Namespace, model: GPTModel, iteration: int, name: str) -> dict[str, Any]:
    """Return the value of the key "model" in results.json, after `iteration` steps of training."""
    attention = args.attention_variant
    if args.attention_similarity != "softmax":  # the scores of other weights are proxies (P2.37)
        attention = f"{args.attention_similarity} (proxy weights)"
    return {
        "name": name,
        "kind": f"{attention} attention, step {iteration}",
        "attention": model.config.attention_kernel,
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "parameters": _parameters(args, model),
        "step": iteration,
        "trained_tokens": iteration * args.global_batch_size * args.seq_length,
    }


def _parameters(args: Namespace, model: GPTModel) -> int:
    """Count parameters as transformers does, without the padding of vocabulary and gates."""
    parts = (part for pair in model.named_parameters() for part in named_parts(*pair))
    sizes = {name: tensor.numel() for name, tensor in parts}
    padding = args.padded_vocab_size - counted_rows(vars(args))
    padded = sum(name.endswith(_PADDED) for name in sizes)
    return sum(sizes.values()) - padded * padding * args.hidden_size
