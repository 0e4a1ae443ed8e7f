"""What interventions cost: CPU time of a forward pass with each, over that of a plain one.

    python benchmarks/interventions.py            # prints the cost of each intervention

The plain pass and those of every intervention alternate in one process with the same attention
kernel; the least of each is compared, as what else the machine does only adds to it. `--peak` also
prints how much the peak of resident memory grows.
"""

import argparse
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megasink import intervening
from megasink.analysis.interventions import DrainFirstValue, DynamicZeroing, ZeroHeads

CASES: dict[str, list[Any]] = {
    "empty": [],
    "zero-heads, every second": [],
    "awft": [DynamicZeroing("awft", 0.9)],
    "awft_ln": [DynamicZeroing("awft_ln", 2.0)],
    "ahon": [DynamicZeroing("ahon", 0.1)],
    "ahon_ln": [DynamicZeroing("ahon_ln", 0.5)],
    "lthon_ln": [DynamicZeroing("lthon_ln", 0.5)],
    "avvn_ln": [DynamicZeroing("avvn_ln", 0.5)],
    "circuit_ahon_ln": [DynamicZeroing("circuit_ahon_ln", 0.5)],
    "aeqd": [DynamicZeroing("aeqd", 1.0)],
    "random": [DynamicZeroing("random", 0.1)],
    "drain-first-value": [DrainFirstValue()],
    "drain-first-value, 0.75": [DrainFirstValue(0.75)],
}


def seconds(run: Callable[[], Any]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


@torch.no_grad()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peak", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        max_position_embeddings=args.tokens,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    layers, heads = range(args.layers), range(0, config.num_attention_heads, 2)
    CASES["zero-heads, every second"] = [ZeroHeads([(la, h) for la in layers for h in heads])]
    ids = torch.randint(0, 1024, (1, args.tokens))

    def run(interventions: list[Any] | None) -> float:
        context = nullcontext() if interventions is None else intervening(model, interventions)
        with context:
            return seconds(lambda: model(ids, use_cache=False))

    run(None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in args.cases:
        plain, changed = [], []
        for _ in range(args.repeats):
            plain.append(run(None))
            changed.append(run(CASES[name]))
        ratio = min(changed) / min(plain)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        peak = f" | {grown / 1024:.0f} MiB" if args.peak else ""
        print(f"| {name} | {ratio:.3f} | {min(plain):.2f} s{peak} |", flush=True)


if __name__ == "__main__":
    main()
