"""What the head-balance loss costs in a training step of a model of transformers.

Forward, backward and optimizer of one model with attention "megasink"; steps with the loss (Eq. 8)
and without take turns, and a ratio is the median over turns of the CPU seconds of one turn.

    python benchmarks/transformers_balance.py                # full fine-tuning, vanilla and sinks
    python benchmarks/transformers_balance.py --lora         # rank 16 on all linear layers
"""

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GraniteSWAConfig, LlamaConfig

from megasink.transformers import HeadBalance

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
CONFIGS: dict[str, Any] = {"vanilla": LlamaConfig, "sink": GraniteSWAConfig}


def build(variant: str, lora: bool, dtype: torch.dtype) -> Any:
    """A random model in training mode."""
    torch.manual_seed(0)
    options = {"layer_types": ["full_attention"] * 4} if variant == "sink" else {}
    config = CONFIGS[variant](**SHAPE, max_position_embeddings=8192, **options)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="megasink")
    model = model.to(dtype)
    if lora:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    return model.train()


def compare(variant: str, args: argparse.Namespace) -> None:
    """Print one line."""
    model = build(variant, args.lora, getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    ids = torch.randint(SHAPE["vocab_size"], (args.rows, args.tokens))
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(args.turns + 1):
        for balances in (False, True):
            balance = HeadBalance(model, 1e-2, shared_heads=2) if balances else None
            start = time.process_time()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if balance is not None:
                balance.finish_step()
            if turn:  # the first turn warms up
                times[balances].append(time.process_time() - start)
            if balance is not None:
                balance.remove()
    ratios = [with_it / without for without, with_it in zip(*times.values(), strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    kind = "LoRA" if args.lora else "full"
    print(
        f"{variant:8} {kind}  S {args.tokens}  {args.dtype}: "
        f"{1e3 * statistics.median(times[False]):.0f} ms without, {middle:.3f} of it with the loss "
        f"({low:.3f} to {high:.3f}, {args.turns} turns)",
        flush=True,
    )


def main() -> None:
    """Print a line per variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for variant in CONFIGS:
        compare(variant, args)


if __name__ == "__main__":
    main()
