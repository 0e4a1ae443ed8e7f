"""What probing costs: against a plain forward with the same kernel, and against S x S weights.

    python benchmarks/probe.py            # time and memory at S = 2048, a 60M-parameter Llama shape
    python benchmarks/probe.py --long     # memory of one layer's heads at S = 32768

The eager route computes P3's scores, head importance and sink rates from the weights that
transformers returns with output_attentions=True. Each measurement runs in a process of its own, so
that its peak of resident memory is its own; times are the least of several.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch

TOKENS, LONG = 2048, 32768
# The shape of P2: 10 layers, 8 heads of 96, SwiGLU of 1536.
SHAPE = {
    "vocab_size": 50432,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": TOKENS,
}
# P3's scores, P0's importance, P2's sinks; the rest are norms, angles and activations.
NAMES = ("awft", "aeqd", "ftvvn", "avvn", "lthon", "ahon", "circuit_ahon", "importance", "alpha")


def model(implementation: str) -> torch.nn.Module:
    """A random Llama of the shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE)
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()


def least(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some runs after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:])


@torch.no_grad()
def measure(what: str, repeats: int) -> float:
    """Seconds of one route."""
    from megasink.probe.recorder import Recorder
    from megasink.probe.transformers_model import TransformersProbe

    ids = torch.randint(SHAPE["vocab_size"], (1, TOKENS))
    if what == "plain":
        plain = model("sdpa")
        return least(lambda: plain(ids, use_cache=False), repeats)
    if what == "eager":
        eager = model("eager")

        def from_weights() -> None:
            for weights in eager(ids, use_cache=False, output_attentions=True).attentions:
                weights[..., 0].mean(-1)
                torch.special.entr(weights).sum(-1).mean(-1)
                weights[..., 1:].sum(-1).mean(-1)
                weights.sum(-2)

        return least(from_weights, repeats)
    probed = model("sdpa")
    recorder = Recorder([8] * 10, NAMES if what == "scores" else None)
    with TransformersProbe(probed, recorder, recorder.needs) as probe:

        def run() -> None:
            recorder.begin(1)
            probe.forward(ids)
            recorder.end([{"source": "", "tokens": TOKENS}])

        return least(run, repeats)


def long_layer() -> float:
    """Seconds for the statistics of one layer's eight heads at S = 32768."""
    from megasink.diagnostics.weights import weight_statistics

    query = torch.randn(1, 8, LONG, 96)
    key = torch.randn(1, 8, LONG, 96)
    start = time.perf_counter()
    weight_statistics(query, key, scale=96**-0.5)
    return time.perf_counter() - start


def main() -> None:
    """Measure in processes of their own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = long_layer() if args.child == "long" else measure(args.child, args.repeats)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"seconds": seconds, "peak": peak / 2**20, "before": start / 2**20}))
        return
    routes = ["long"] if args.long else ["plain", "scores", "everything", "eager"]
    base = None
    for route in routes:
        command = [sys.executable, __file__, "--child", route, "--repeats", str(args.repeats)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = json.loads(output.splitlines()[-1])
        base = base or found["seconds"]
        print(
            f"{route:10} {found['seconds']:8.2f} s  {found['seconds'] / base:5.2f} x  "
            f"peak {found['peak']:.2f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
