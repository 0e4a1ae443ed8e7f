"""``megasink doctor --attention NAME``: compare an attention with its definition."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megasink import cpu, plugins
from megasink.attention.conformance import (
    CASES,
    DROPPED,
    DTYPES,
    REFUSED,
    WRONG,
    Attend,
    Verdict,
    check,
    kernel,
)
from megasink.attention.kernels import backend_names
from megasink.cli.hub import stay_offline
from megasink.console.printable import printable
from megasink.errors import UserError, nearest, reason_of
from megasink.options.extras import have_megatron

FLAG = "--attention"
# Classes that need no module.
_CLASSES = {
    "CoreAttention": "megasink.megatron.core_attention",
    "DotProductAttention": "megatron.core.transformer.dot_product_attention",
    "TEDotProductAttention": "megatron.core.extensions.transformer_engine",
}


def report(name: str, head_dim: int, console: Console) -> tuple[dict[str, Any], int]:
    """Print and return the table of every attention of this name, and the exit code."""
    # It is 1 if a case is wrong, or an attention drops a feature or runs no case at all.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found, code = {}, 0
    with contextlib.ExitStack() as groups:
        for kind, attend in _named(name, groups):
            every = [check(attend, c, dtype, device, head_dim) for c in CASES for dtype in DTYPES]
            found[kind] = [verdict._asdict() for verdict in every]
            given = {verdict.verdict for verdict in every}
            code = max(code, int(bool(given & {WRONG, DROPPED}) or given == {REFUSED}))
            console.print(_table(f"{kind} {name} on {device}, head dim {head_dim}", every))
    return found, code


def _table(title: str, verdicts: list[Verdict]) -> Table:
    dtypes = list(dict.fromkeys(verdict.dtype for verdict in verdicts))
    table = Table(title=title)
    for column in ("case", *dtypes, "why"):
        table.add_column(column)
    alike = len({verdict[2:] for verdict in verdicts}) == 1
    for case in ["every case"] if alike else [case.name for case in CASES]:
        of_case = verdicts[: len(dtypes)] if alike else [v for v in verdicts if v.case == case]
        why: dict[str, list[str]] = {}
        for verdict in of_case:
            if verdict.detail:
                why.setdefault(verdict.detail, []).append(verdict.dtype)
        lines = (d if len(of) > 1 else f"{of[0]}: {d}" for d, of in why.items())
        words = (verdict.verdict for verdict in of_case)
        table.add_row(case, *words, escape(printable("\n".join(lines))))
    return table


def _named(name: str, groups: contextlib.ExitStack) -> Iterator[tuple[str, Attend]]:
    """Yield the attentions of this name, with their kind."""
    if "/" not in name and (":" in name or name in _CLASSES):
        yield "core attention", _core_attention(name, groups)
        return
    stay_offline()
    from megasink.transformers import conformance_attention

    is_kernel = name in backend_names()
    if (attend := conformance_attention.implementation(name)) is not None:
        yield "attn_implementation", attend
    elif not is_kernel:
        known = (conformance_attention.names(), backend_names(), [*_CLASSES])
        meant = nearest(name, [*known[0], *known[1], *known[2]])
        hint = f" (did you mean {meant}?)" if meant else ""
        raise UserError(
            f"{FLAG} {name} is unknown{hint}: give an attn_implementation of transformers "
            f"({', '.join(known[0])}), a kernel of megasink ({', '.join(known[1])}), or a core "
            f"attention of Megatron ({', '.join(known[2])}, MODULE:CLASS); {plugins.advice()}"
        )
    if is_kernel:
        yield "kernel", kernel(name)


def _core_attention(name: str, groups: contextlib.ExitStack) -> Attend:
    """Import a class of Megatron, or of the user, and make the groups of one process."""
    module, _, cls = name.rpartition(":")
    if not have_megatron():
        raise UserError(f"{FLAG} {name}: Megatron is not installed: pip install 'megasink[train]'")
    if not cpu.cuda_present():
        cpu.activate()
    from megasink.checkpoints.load import make_parallel_state, single_process
    from megasink.megatron.conformance_call import core_attention

    try:
        kind = getattr(importlib.import_module(module or _CLASSES[name]), cls)
    except Exception as error:
        raise UserError(f"{FLAG} {name}: {reason_of(error)}") from error
    if not isinstance(kind, type):
        raise UserError(f"{FLAG} {name} is not a class, or its package is not installed")
    groups.enter_context(single_process())
    make_parallel_state()
    return core_attention(kind)
