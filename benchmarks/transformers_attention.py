"""What a training step of a sink model costs in transformers, by its attention implementation.

One GraniteSWA (sinks in every layer), forward and backward; the implementations take turns on the
same model, and a ratio is the median over turns of the CPU seconds of one turn. "without_sinks"
is transformers' sdpa with the sinks left out: what the model would cost without them.

    python benchmarks/transformers_attention.py --lengths 1024
    python benchmarks/transformers_attention.py --lengths 4096 --layers 1
    python benchmarks/transformers_attention.py --window 256 --dtype bfloat16
    python benchmarks/transformers_attention.py --memory         # peak memory of a step, by S
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import megasink.transformers  # noqa: F401

FLOOR = "without_sinks"
IMPLEMENTATIONS = (FLOOR, "megasink", "eager")
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MEMORY_LENGTHS = (1024, 2048, 4096)


def without_sinks(*args: Any, s_aux: Any = None, **kwargs: Any) -> Any:
    """Sdpa without the sinks that the layer passes."""
    return sdpa_attention_forward(*args, **kwargs)


def build(tokens: int, window: int | None, dtype: torch.dtype, layers: int) -> Any:
    """A random model in training mode."""
    from transformers import GraniteSWAConfig, GraniteSWAForCausalLM

    kind = "full_attention" if window is None else "sliding_attention"
    torch.manual_seed(0)
    config = GraniteSWAConfig(
        **SHAPE,
        num_hidden_layers=layers,
        max_position_embeddings=tokens,
        layer_types=[kind] * layers,
        sliding_window=window or tokens,
    )
    return GraniteSWAForCausalLM._from_config(config, attn_implementation="eager").to(dtype).train()


def step(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> float:
    """CPU seconds of a forward and backward."""
    start = time.process_time()
    model.zero_grad()
    model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    return time.process_time() - start


def padded(layout: str, rows: int, tokens: int) -> torch.Tensor | None:
    """A mask with a quarter of the last row as padding; None without padding."""
    if layout == "none":
        return None
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[-1, slice(0, tokens // 4) if layout == "left" else slice(-tokens // 4, None)] = 0
    return mask


def compare(args: argparse.Namespace, tokens: int) -> None:
    """Print one table."""
    dtype = getattr(torch, args.dtype)
    model = build(tokens, args.window, dtype, args.layers)
    ids = torch.randint(SHAPE["vocab_size"], (args.rows, tokens))
    mask = padded(args.padding, args.rows, tokens)
    times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    for turn in range(args.turns + 1):
        for name in IMPLEMENTATIONS:
            model.set_attn_implementation(name)
            seconds = step(model, ids, mask)
            if turn:  # the first turn warms up
                times[name].append(seconds)
    print(
        f"\nS {tokens}, B {args.rows}, {args.layers} layers, {args.dtype}, window {args.window}, ",
        end="",
    )
    print(f"padding {args.padding}, {args.threads} threads, {args.turns} turns")
    for name, values in times.items():
        ratios = [v / f for v, f in zip(values, times[FLOOR], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"  {name:20} {1e3 * statistics.median(values):8.0f} ms   "
            f"{middle:.3f} ({low:.3f} to {high:.3f}) of the step without sinks"
        )
    eager = [e / m for e, m in zip(times["eager"], times["megasink"], strict=True)]
    print(f"  eager / megasink: {statistics.median(eager):.2f}")


def peak(args: argparse.Namespace) -> None:
    """Print the growth of resident memory in a step of this process, as JSON."""
    torch.set_num_threads(args.threads)
    model = build(args.tokens, args.window, getattr(torch, args.dtype), args.layers)
    model.set_attn_implementation(args.implementation)
    short = torch.randint(SHAPE["vocab_size"], (1, 32))
    step(model, short, None)  # gradients, and what libraries keep
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(model, torch.randint(SHAPE["vocab_size"], (1, args.tokens)), None)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"MiB": grown / 1024}))


def memory(args: argparse.Namespace) -> None:
    """Print the peak of a step by length, each in a process of its own."""
    print("| S | " + " | ".join(IMPLEMENTATIONS) + " |  (MiB above the model)")
    for tokens in MEMORY_LENGTHS:
        row = []
        for name in IMPLEMENTATIONS:
            command = [sys.executable, __file__, "--implementation", name, "--tokens", str(tokens)]
            command += ["--threads", str(args.threads), "--dtype", args.dtype]
            command += ["--layers", str(args.layers)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row.append(f"{json.loads(done.stdout.splitlines()[-1])['MiB']:.0f}")
        print(f"| {tokens} | " + " | ".join(row) + " |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4, help="eager at S 4096: 3 GB for each")
    parser.add_argument("--window", type=int)
    parser.add_argument("--padding", choices=("none", "left", "right"), default="none")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--implementation", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    AttentionInterface.register(FLOOR, without_sinks)
    AttentionMaskInterface.register(FLOOR, sdpa_mask)
    if args.implementation:
        peak(args)
    elif args.memory:
        memory(args)
    else:
        torch.set_num_threads(args.threads)
        for tokens in args.lengths:
            compare(args, tokens)


if __name__ == "__main__":
    main()
