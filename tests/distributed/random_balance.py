"""The head-balance loss in random models and layouts, against the oracle in float64.

    python -m tests.distributed.random_balance RECORD.jsonl [--seeds A B]

Two steps of each case in Megatron's schedules, DDP and optimizer are compared with one process of
plain autograd (oracle.py): losses, gradients of the second step, gradient norms, head importances,
balance losses and weights. A seed draws the case. The record gets a line for each seed, and seeds
that it has are not run again. The program ends with 1 if a case is wrong.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.distributed import merging
from tests.distributed.cases import DISTRIBUTED, FULL, SELECTIVE
from tests.distributed.layout import SINGLE, Layout
from tests.distributed.pool import Pool, TaskFailed

TRAIN, ORACLE = "tests.distributed.masked_gpt:train", "tests.distributed.oracle:train"
STEPS, LENGTH, KINDS = 2, 32, ("loss", "grad_norm", "importance", "balance", "gradients", "weights")
# Relative errors that rounding explains. In bfloat16 those of one process are as large.
EXACT = dict.fromkeys(KINDS, 1e-4)
HALF = {"loss": 0.02, "grad_norm": 0.05, "importance": 0.05}
HALF |= {"balance": 0.1, "gradients": 0.1, "weights": 0.02}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {"attention_variant": "vanilla"},
    {"attention_variant": "sink"},
    {"attention_variant": "off-by-one"},
    {"attention_variant": "k-bias"},
    {"attention_variant": "kv-bias", "bias_shared_heads": True},
    {"attention_variant": "v-bias"},
    {"attention_variant": "gated"},
    {"attention_variant": "gated", "gate_granularity": "elementwise"},
)


class Case(NamedTuple):
    """A layout, options of the model and its text, and options of the layout or the loss alone."""

    layout: Layout
    model: dict[str, Any]
    training: dict[str, Any]
    scope: str
    shared: dict[str, int]


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)

    def of(share: float) -> bool:
        return rng.random() < share

    world = rng.choice((1, 2, 2, 4, 4))
    tp, pp, cp, dp = rng.choice(
        [sizes for sizes in np.ndindex(5, 5, 5, 5) if np.prod(sizes) == world]
    )
    half, moe = of(0.12), of(0.25)
    half &= not moe  # a token that is rounded to another expert is another model
    sp, vpp = tp > 1 and (moe or of(0.5)), 2 if pp == 2 and of(0.4) else None
    ep, etp = 1, None
    if moe and world // pp > 1 and of(0.7):
        ep = 2
        etp = 1 if tp > 1 and (cp * dp == 1 or of(0.5)) else None
    layout = Layout(tp, pp, cp, dp, vpp, sp, ep, etp)

    heads = rng.choice([n for n in (4, 6, 8) if n % tp == 0])
    scattered = cp > 1 and heads // tp % cp == 0 and of(0.5)
    groups = [n for n in range(1, heads + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]
    if scattered:
        groups = [n for n in groups if n % (tp * cp) == 0]
    model = dict(rng.choice(VARIANTS), num_attention_heads=heads, kv_channels=16, tied=of(0.3))
    model |= {"num_query_groups": rng.choice(groups), "qk_layernorm": of(0.2)}
    model["position_embedding_type"] = rng.choice(("rope", "rope", "learned_absolute", "none"))
    if of(0.2):
        model |= {"window_size": (7, 0), "window_attn_skip_freq": 2}
    if of(0.4):
        starts = [sorted(rng.sample(range(1, LENGTH), rng.randrange(4))) for _ in range(2)]
        model["ends"] = tuple([*row, LENGTH] for row in starts)
    if of(0.4):
        model["real"] = tuple((rng.randint(8, LENGTH), rng.randint(1, LENGTH)) for _ in range(4))
    model |= {"masked": of(0.4), "calculate_per_token_loss": of(0.3), "bf16": half}

    ffn = "-E" if moe else "-"
    blocks = ["*" + rng.choice(ffn) for _ in range(rng.randint(1, 3))]
    if of(0.4):
        blocks += rng.sample(["*", *ffn], 1)
        rng.shuffle(blocks)
    stages = pp * (vpp or 1)
    while len("".join(blocks)) < stages:
        blocks.append("*-")
    layers = "".join(blocks)
    model["pattern"] = layers
    if "E" in layers:
        model |= MOE
    else:
        layout = Layout(tp, pp, cp, dp, vpp, sp)
    cuts = sorted(rng.sample(range(1, len(layers)), stages - 1))
    parts = zip([0, *cuts], [*cuts, len(layers)], strict=True)
    training = {"pattern": "|".join(layers[a:b] for a, b in parts), "sequence_parallel": sp}
    if "E" in layers:
        kind = rng.choice(("allgather", "alltoall"))
        # gloo gathers no tensors of unequal sizes, as NCCL does where tensor-parallel experts are
        # spread over ranks.
        uneven = layout.ep > 1 and tp > 1 and layout.etp is None
        training["moe_token_dispatcher_type"] = "allgather" if uneven else kind
    if cp > 1:
        training["cp_comm_type"] = "a2a" if scattered else "all_gather"
    training |= rng.choice(({}, {}, FULL, SELECTIVE))
    if of(0.3):
        training |= DISTRIBUTED | {"overlap": of(0.5)}
    shared = {}
    if of(0.25) and not half:
        shared = {"shared": rng.randint(1, 2), "refresh": rng.choice((0, 1))}
    return Case(
        layout, model, training, rng.choice(("global", "data-parallel", "microbatch")), shared
    )


def errors(pool: Pool, case: Case, coeff: float = 1.0) -> dict[str, float]:
    """The relative error of each kind; `coeff` is that of the run, and the oracle's is 1."""
    loss = {"head_balance_coeff": coeff, "head_balance_scope": case.scope}
    loss |= {
        f"head_balance_shared_{n.replace('shared', 'heads')}": v for n, v in case.shared.items()
    }
    found = pool.run(TRAIN, case.layout, steps=STEPS, **case.model | case.training | loss)
    replicas = case.layout.dp if case.scope == "data-parallel" else 1
    options = {"scope": case.scope, "replicas": replicas} | case.shared
    (wanted,) = pool.run(ORACLE, SINGLE, coeff=1.0, steps=STEPS, **options, **case.model)
    merging.assert_same_weights(found, [wanted], 0.0, "initial")
    result = {"loss": _error(merging.loss(found), merging.loss([wanted]))}
    result["grad_norm"] = max(_error(r["grad_norm"], wanted["grad_norm"]) for r in found)
    for name, key in (("importance", "importance_LH"), ("balance", "balance_loss")):
        one, *others = ([s[key] for s in r["statistics"]] for r in (wanted, *found))
        result[name] = max(_error(other, one) for other in others)
    for name, kind in (("gradients", "gradients"), ("weights", "final")):
        ours, theirs = (merging.whole([r[kind] for r in reports]) for reports in (found, [wanted]))
        assert ours.keys() == theirs.keys()
        # Where sums nearly cancel, rounding is large beside a tensor, and small beside the others.
        size = np.sqrt(sum(np.sum(np.square(t, dtype=np.float64)) for t in theirs.values()))
        result[name] = max(
            float(np.linalg.norm(ours[n].astype(np.float64) - t))
            / max(float(np.linalg.norm(t)), 0.01 * float(size))
            for n, t in theirs.items()
        )
    return result


def _error(found: Any, wanted: Any) -> float:
    """The largest relative error of a number; an error beside a size below 1e-6 is that of 1e-6."""
    found, wanted = (np.asarray(values, np.float64) for values in (found, wanted))
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    return float(np.nanmax(np.abs(found - wanted) / np.maximum(np.abs(wanted), 1e-6)))


def wrong(case: Case, found: dict[str, float]) -> list[str]:
    """The kinds whose error rounding does not explain."""
    limits = HALF if case.model["bf16"] else EXACT
    return [kind for kind in KINDS if not found[kind] <= limits[kind]]


def main() -> int:
    """Run the seeds that the record lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 300), metavar=("A", "B"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none later")
    args = parser.parse_args()
    lines = args.record.read_text().splitlines() if args.record.exists() else []
    known = {line["seed"]: line for line in map(json.loads, lines)}
    began = time.monotonic()
    with Pool(4) as pool, args.record.open("a") as file:
        for seed in range(*args.seeds):
            if seed in known or time.monotonic() - began > args.seconds:
                continue
            case = draw(seed)
            line: dict[str, Any] = {"seed": seed, "layout": str(case.layout)}
            try:
                line["errors"] = errors(pool, case)
                line["wrong"] = wrong(case, line["errors"])
            except (TaskFailed, AssertionError) as error:
                line |= {"failed": str(error), "wrong": ["failed"]}
            known[seed] = line
            print(json.dumps(line), file=file, flush=True)
            print(seed, case.layout, line["wrong"] or "right", flush=True)
    bad = [seed for seed, line in sorted(known.items()) if line["wrong"]]
    print(f"{len(known)} cases, {len(bad)} wrong: {bad}")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
