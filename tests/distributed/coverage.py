"""Which layouts the head-balance loss was compared in: the table at the end of the test output."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tests.distributed.layout import Layout

MECHANISMS = ("vanilla", "sink", "headwise", "elementwise")
SCOPES = ("global", "data-parallel", "microbatch")
FEATURES = (
    "TP",
    "SP",
    "PP",
    "VPP",
    "CP all_gather",
    "CP a2a",
    "DP",
    "EP",
    "TP x CP",
    "TP x PP",
    "distributed optimizer, overlapped",
    "full recompute",
    "selective recompute",
    "per-token loss, masked targets",
    "gradient accumulation",
)
# One passed comparison: mechanism, scope, features.
Compared = tuple[str, str, list[str]]


def features(layout: Layout, options: dict[str, Any], microbatches: int) -> list[str]:
    """Those of `FEATURES` that a case has.

    Args:
        microbatches: of the global batch.
    """
    kind = options.get("cp_comm_type", "all_gather")
    recompute = options.get("recompute_granularity")
    has = {
        "TP": layout.tp > 1,
        "SP": layout.sp,
        "PP": layout.pp > 1,
        "VPP": layout.vpp is not None,
        f"CP {kind}": layout.cp > 1,
        "DP": layout.dp > 1,
        "EP": layout.ep > 1,
        "TP x CP": layout.tp > 1 and layout.cp > 1,
        "TP x PP": layout.tp > 1 and layout.pp > 1,
        "distributed optimizer, overlapped": bool(
            options.get("distributed_optimizer") and options.get("overlap")
        ),
        f"{recompute} recompute": recompute is not None,
        "per-token loss, masked targets": bool(
            options.get("calculate_per_token_loss") and options.get("masked")
        ),
        "gradient accumulation": microbatches > layout.dp,
    }
    return [name for name in FEATURES if has.get(name)]


def table(compared: Iterable[Compared]) -> list[str]:
    """A row for each feature, a column for each mechanism, in it the scopes that were compared."""
    cells: dict[tuple[str, str], set[str]] = defaultdict(set)
    for mechanism, scope, names in compared:
        for name in names:
            cells[name, mechanism].add(scope)
    widths = [max(map(len, FEATURES)) + 2, *(len(", ".join(SCOPES)) + 2 for _ in MECHANISMS)]

    def row(*texts: str) -> str:
        return "".join(t.ljust(w) for t, w in zip(texts, widths, strict=True)).rstrip()

    rows = [row("layout", *MECHANISMS)]
    for name in FEATURES:
        scopes = [[s for s in SCOPES if s in cells[name, m]] for m in MECHANISMS]
        rows.append(row(name, *(", ".join(found) or "-" for found in scopes)))
    missing = [name for name in FEATURES if not any(cells[name, m] for m in MECHANISMS)]
    pairs = {(mechanism, scope) for mechanism, scope, _ in compared}
    missing += [f"{m} {s}" for m in MECHANISMS for s in SCOPES if (m, s) not in pairs]
    rows.append(f"not covered: {', '.join(missing) or 'nothing of the above'}")
    return rows
