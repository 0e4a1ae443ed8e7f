"""What probing costs: against a plain forward with the same kernel, and against S x S weights.

    python benchmarks/probe.py            # S = 2048, a 60M-parameter Llama shape, and one layer at
                                          # S = 32768
    python benchmarks/probe.py --no-long  # without the latter, which takes minutes
    python benchmarks/probe.py --model FOLDER  # every metric and the loss of a model on disk, four
                                          # rows of 512 tokens, in turns with its plain forward,
                                          # and the gradient of its heads (`--metrics gradient`)

The eager route computes P3's scores, head importance and sink rates from the weights that
transformers returns with output_attentions=True. Each measurement runs in a process of its own, so
that its peak of resident memory is its own; times are the least of several, CPU seconds of one
thread (--threads), so that what else the machine does counts little.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
ROUTES = {
    "plain": "plain forward",
    "scores": "scores, importance, sinks",
    "everything": "every metric",
    "eager": "the same from S x S weights",
    "long": f"one layer's heads, S = {LONG}",
}
# P3's scores, P0's importance, P2's sinks; the rest are norms, angles and activations.
NAMES = ("awft", "aeqd", "ftvvn", "avvn", "lthon", "ahon", "circuit_ahon", "importance", "alpha")


def model(implementation: str) -> Any:
    """A random Llama of the shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE)
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()


def seconds_of(run: Callable[[], object]) -> float:
    """CPU seconds of one run."""
    start = time.process_time()
    run()
    return time.process_time() - start


def least(run: Callable[[], object], repeats: int) -> float:
    """CPU seconds of the fastest of some runs after one to warm up."""
    run()
    return min(seconds_of(run) for _ in range(repeats))


def eager_scores(eager: Any, ids: Tensor) -> list[dict[str, Tensor]]:
    """The metrics of `NAMES` by layer, [heads] each, from whole matrices of weights."""
    values: list[Tensor] = []
    layers: Any = eager.model.layers
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda _, args, out: values.append(out))
        for layer in layers
    ]
    weights_of_layers = eager(ids, use_cache=False, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    found = []
    for layer, value, weights_BHTT in zip(layers, values, weights_of_layers, strict=True):
        weights_HTT = weights_BHTT[0]
        heads, tokens = weights_HTT.shape[:2]
        value_HTD = value[0].unflatten(-1, (heads, -1)).transpose(0, 1)
        out_HTD = weights_HTT @ value_HTD
        output_HDE = layer.self_attn.o_proj.weight.t().unflatten(0, (heads, -1))
        gram_HDD = output_HDE @ output_HDE.mT
        norm_HT = out_HTD.norm(dim=-1)
        rows_T = torch.arange(tokens, 0, -1)
        found.append(
            {
                "awft": weights_HTT[..., 0].mean(-1),
                "aeqd": torch.special.entr(weights_HTT).sum(-1).mean(-1),
                "ftvvn": value_HTD[:, 0].norm(dim=-1),
                "avvn": value_HTD.norm(dim=-1).mean(-1),
                "lthon": norm_HT[:, -1],
                "ahon": norm_HT.mean(-1),
                "circuit_ahon": ((out_HTD @ gram_HDD) * out_HTD).sum(-1).sqrt().mean(-1),
                "importance": weights_HTT[..., 1:].sum(-1).mean(-1),
                "alpha": (weights_HTT.sum(-2) / rows_T)[:, :8],
            }
        )
    return found


@torch.no_grad()
def measure(what: str, repeats: int) -> float:
    """Seconds of one route."""
    from megasink.analysis.capture.measurements import MeasuredSample
    from megasink.analysis.capture.transformers_model import TransformersProbe
    from megasink.analysis.measure import Recorder

    ids = torch.randint(SHAPE["vocab_size"], (1, TOKENS))
    if what == "plain":
        plain = model("sdpa")
        return least(lambda: plain(ids, use_cache=False), repeats)
    if what == "eager":
        eager = model("eager")
        return least(lambda: eager_scores(eager, ids), repeats)
    probed = model("sdpa")
    recorder = Recorder([8] * 10, NAMES if what == "scores" else None)
    with TransformersProbe(probed, recorder) as probe:

        def run() -> None:
            recorder.begin(1)
            probe.forward(ids)
            recorder.end([MeasuredSample(0, "", "", TOKENS)])
            recorder.take()

        return least(run, repeats)


def long_layer() -> float:
    """CPU seconds for the statistics of one layer's eight heads at S = 32768."""
    from megasink.analysis.metrics.attention_weights import weight_statistics

    query = torch.randn(1, 8, LONG, 96)
    key = torch.randn(1, 8, LONG, 96)
    start = time.process_time()
    weight_statistics(query, key, scale=96**-0.5)
    return time.process_time() - start


def agree() -> None:
    """Refuse to compare two routes that do not give the same numbers."""
    from megasink.analysis.capture.measurements import MeasuredSample
    from megasink.analysis.capture.transformers_model import TransformersProbe
    from megasink.analysis.measure import Recorder

    eager = model("eager")
    ids = torch.randint(SHAPE["vocab_size"], (1, 256))
    recorder = Recorder([8] * 10, NAMES)
    with torch.no_grad(), TransformersProbe(eager, recorder) as probe:
        recorder.begin(1)
        probe.forward(ids)
    recorder.end([MeasuredSample(0, "", "", 256)])
    values = recorder.take()
    with torch.no_grad():
        for layer, found in enumerate(eager_scores(eager, ids)):
            for name, expected in found.items():
                actual = torch.from_numpy(values[f"value/{name}"][0, layer])
                torch.testing.assert_close(
                    actual, expected.double(), rtol=1e-4, atol=1e-6, msg=name
                )


@torch.no_grad()
def in_turns(folder: str, turns: int) -> None:
    """Print the CPU time of every metric and the loss, and of the gradient, over a forward's."""
    from transformers import AutoModelForCausalLM

    from megasink.analysis.capture.measurements import MeasuredSample
    from megasink.analysis.capture.transformers_model import TransformersProbe
    from megasink.analysis.measure import Recorder

    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    rows, config = 4, loaded.config
    ids = torch.randint(config.vocab_size, (rows, 512), generator=torch.manual_seed(0))
    heads = [config.num_attention_heads] * config.num_hidden_layers
    recorder, of_gradient = Recorder(heads), Recorder(heads, ["gradient"])

    def losses(logits: Tensor) -> None:
        for row in range(rows):
            torch.nn.functional.cross_entropy(logits[row, :-1].float(), ids[row, 1:])

    @torch.enable_grad()
    def gradient() -> None:
        with TransformersProbe(loaded, of_gradient) as probe:
            for row_1T in ids.split(1):
                of_gradient.begin(1)
                logits_TV = probe.forward(row_1T).logits[0, :-1]
                probe.backward(torch.nn.functional.cross_entropy(logits_TV.float(), row_1T[0, 1:]))
                of_gradient.end([MeasuredSample(0, "", "", 512)])
            of_gradient.take()

    def probed() -> None:
        with TransformersProbe(loaded, recorder) as probe:
            recorder.begin(rows)
            losses(probe.forward(ids).logits)
            recorder.end([MeasuredSample(row, "", "", 512) for row in range(rows)])
            recorder.take()

    ratios: dict[str, list[float]] = {"every metric": [], "gradient": []}
    for turn in range(turns + 1):
        plain = seconds_of(lambda: losses(loaded(ids, use_cache=False).logits))
        for (what, of), run in zip(ratios.items(), (probed, gradient), strict=True):
            seconds = seconds_of(run)
            if turn:
                of.append(seconds / plain)
                print(f"plain {plain:.2f} s, {what} {seconds:.2f} s: {of[-1]:.3f}", flush=True)
    for what, of in ratios.items():
        print(f"{what}: median {sorted(of)[len(of) // 2]:.3f}, least {min(of):.3f}")


def main() -> None:
    """Measure in processes of their own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-long", dest="long", action="store_false")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", metavar="FOLDER", help="of transformers, to measure instead")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        seconds = long_layer() if args.child == "long" else measure(args.child, args.repeats)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"seconds": seconds, "peak": peak / 2**20}))
        return
    if args.model:
        in_turns(args.model, args.repeats)
        return
    agree()
    print(f"{'':30} {'CPU s':>8} {'x plain':>8} {'peak GiB':>9} {'x plain':>8}")
    base = None
    for route, text in ROUTES.items():
        if route == "long" and not args.long:
            continue
        command = [sys.executable, __file__, "--child", route]
        command += ["--repeats", str(args.repeats), "--threads", str(args.threads)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found = json.loads(output.splitlines()[-1])
        base = base or found
        line = f"{text:30} {found['seconds']:8.2f} "
        times, memory = (f"{found[key] / base[key]:8.2f}" for key in ("seconds", "peak"))
        if route == "long":
            times = memory = ""
        print(f"{line}{times:>8} {found['peak']:9.2f} {memory:>8}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
