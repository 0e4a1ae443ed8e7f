"""Compare any attention with the definition, case by case: output, LSE and every gradient.

An error may be twice that of the definition itself in the same dtype, both against float64, or a
rounding of the largest value (in float32, of the sums: 4e-6).

Shapes: B rows, H query heads, G key/value groups, T tokens, D head dim, V head dim of the values.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasink.attention.reference import reference_attention
from megasink.errors import reason_of

HEADS, TOKENS = 8, 48
DTYPES = (torch.float32, torch.bfloat16)
RIGHT, WRONG, DROPPED, REFUSED = "right", "wrong", "dropped", "refused"
_GRADIENTS = ("dq", "dk", "dv", "dsink")
# Of the largest value: other orders of float32 operations came to 1.6e-6.
_ROUNDING = 4e-6


@dataclass(frozen=True)
class Case:
    """One kind of call."""

    name: str
    sinks: tuple[float, ...] | None = None  # logits, repeated over the heads
    window: int | None = None  # tokens visible to a token, including itself
    groups: int = HEADS  # G
    narrow: bool = False  # whether V is D / 2, else D
    scale: float | None = None  # factor of the scores; None for D ** -0.5
    softcap: float | None = None  # c of c * tanh(score / c)
    dropout: float = 0.0  # probability with which a weight is dropped
    kept_BHTT: Tensor | None = None  # the weights that an attention did not drop
    tokens: int = TOKENS  # T
    # (start, stop) of the documents of each row. Tokens outside are padding.
    documents: tuple[tuple[tuple[int, int], ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "documents", self.documents or self.whole)

    @property
    def whole(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """One document in each of as many rows; two by default."""
        return (((0, self.tokens),),) * (len(self.documents) or 2)

    @property
    def rows(self) -> int:
        """B."""
        return len(self.documents)

    @property
    def packed(self) -> bool:
        """Whether a row has several documents."""
        return any(len(row) > 1 for row in self.documents)

    @property
    def real_BT(self) -> Tensor | None:
        """Return the mask of real tokens, or None without padding."""
        real_BT = torch.zeros(self.rows, self.tokens, dtype=torch.bool)
        for row, documents in zip(real_BT, self.documents, strict=True):
            for start, stop in documents:
                row[start:stop] = True
        return None if real_BT.all() else real_BT

    @property
    def positions_BT(self) -> Tensor:
        """Return positions, which restart in every document of packed rows."""
        if not self.packed:
            return torch.arange(self.tokens).expand(self.rows, -1)
        rows = [torch.cat([torch.arange(b - a) for a, b in row]) for row in self.documents]
        return torch.stack(rows)

    @property
    def boundaries(self) -> list[int]:
        """Return the boundaries 0, .., B * T of documents, one row after the other."""
        rows = enumerate(self.documents)
        return [0, *(self.tokens * row + stop for row, spans in rows for _, stop in spans)]

    def without(self) -> Iterator[tuple[str, "Case"]]:
        """Yield the cases that an attention computes if it drops a feature, or several."""
        documents = "documents" if self.packed else "padding"
        features: tuple[tuple[str, str, Any], ...] = (
            ("sinks", "sinks", None),
            ("window", "window", None),
            (documents, "documents", self.whole),
            ("the scale", "scale", None),
            ("the cap", "softcap", None),
            ("dropout", "dropout", 0.0),
        )
        plain = {n: (f, value) for n, f, value in features if getattr(self, f) != value}
        for count in range(1, len(plain) + 1):
            for names in combinations(plain, count):
                yield " and ".join(names), replace(self, **dict(plain[name] for name in names))


_MIXED = (0.0, 2.0, -20.0, 20.0, 1.0, -3.0, 4.0, 0.5)
_WHOLE = ((0, TOKENS),)
_LEFT, _RIGHT = (((11, TOKENS),), _WHOLE), (((0, 37),), _WHOLE)
_PACKED = (((0, 17), (17, 30), (30, TOKENS)), ((0, 5), (5, TOKENS)))
CASES = (
    Case("no sinks"),
    Case("sinks of 0", (0.0,)),
    Case("sinks of +20", (20.0,)),
    Case("sinks of -20", (-20.0,)),
    Case("window", window=9),
    Case("window, sinks", _MIXED, 9),
    Case("GQA", groups=2),
    Case("GQA, sinks", _MIXED, groups=2),
    Case("padding on the left", documents=_LEFT),
    Case("padding on the left, sinks", _MIXED, documents=_LEFT),
    Case("padding on the left, window", window=9, documents=_LEFT),
    Case("padding on the right", documents=_RIGHT),
    Case("packed, one row", documents=_PACKED[:1]),
    Case("packed, two rows", documents=_PACKED),
    Case("packed, two rows, sinks", _MIXED, documents=_PACKED),
    Case("narrow values", narrow=True),
    Case("narrow values, sinks", _MIXED, narrow=True),
    Case("scale, sinks", _MIXED, scale=0.2),
    Case("137 tokens, GQA, window, sinks", _MIXED, 70, groups=2, tokens=137),
    Case("packed, GQA, window, sinks", _MIXED, 9, groups=2, documents=_PACKED),
    Case("packed, narrow values", narrow=True, documents=_PACKED),
    Case("MQA, padding on the right, window, sinks", _MIXED, 9, groups=1, documents=_RIGHT),
    Case("GQA, padding on the left, narrow values", groups=2, narrow=True, documents=_LEFT),
    Case("GQA, narrow values, window", window=9, groups=2, narrow=True),
    Case("softcap", softcap=1.5),
    Case("GQA, softcap", groups=2, softcap=1.5),
    Case("dropout", dropout=0.25, tokens=8),
    Case("GQA, dropout, sinks", (0.0, 1.0), groups=2, dropout=0.25, tokens=8),
)

Attend = Callable[[Case, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""(case, query_BHTD, key_BGTD, value_BGTV, sink_H) -> (out_BHTV, lse_BHT or None)."""


class Verdict(NamedTuple):
    """The result of a case: right, wrong, dropped or refused, and why."""

    case: str
    dtype: str
    verdict: str
    detail: str


def definition(
    case: Case, query_BHTD: Tensor, key_BGTD: Tensor, value_BGTV: Tensor, sink_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute a case document by document; padding is 0."""
    if case.softcap is not None or case.dropout:
        return _capped(case, query_BHTD, key_BGTD, value_BGTV, sink_H)
    out_BHTV = query_BHTD.new_zeros(*query_BHTD.shape[:3], value_BGTV.shape[-1])
    lse_BHT = query_BHTD.new_zeros(query_BHTD.shape[:3])
    if case.sinks is None:
        sink_H = None
    for row, documents in enumerate(case.documents):
        for start, stop in documents:
            place = (slice(row, row + 1), slice(None), slice(start, stop))
            out_BHTV[place], lse_BHT[place], _ = reference_attention(
                query_BHTD[place],
                key_BGTD[place],
                value_BGTV[place],
                variant="vanilla" if sink_H is None else "sink",
                sink_H=sink_H,
                scale=case.scale,
                window=case.window,
            )
    return out_BHTV, lse_BHT


def _capped(
    case: Case, query: Tensor, key: Tensor, value: Tensor, sink_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cap the scores of whole rows, and drop weights."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores_BHTT = query @ key.mT * (case.scale or query.shape[-1] ** -0.5)
    if case.softcap is not None:
        scores_BHTT = case.softcap * (scores_BHTT / case.softcap).tanh()
    hidden_TT = torch.ones(case.tokens, case.tokens, dtype=torch.bool).triu(1)
    scores = scores_BHTT.masked_fill(hidden_TT, -torch.inf)
    if sink_H is not None and case.sinks is not None:
        scores = torch.cat([scores, sink_H[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights_BHTT = scores.softmax(-1)[..., : case.tokens]
    if case.dropout and case.kept_BHTT is not None:
        weights_BHTT = weights_BHTT * case.kept_BHTT / (1 - case.dropout)
    return weights_BHTT @ value, scores.logsumexp(-1)


def kernel(name: str) -> Attend:
    """Return megasink's attention on one of its kernels."""
    from megasink.attention.functional import attention

    def attend(
        case: Case, query: Tensor, key: Tensor, value: Tensor, sink_H: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if case.real_BT is not None:
            raise ValueError('attn_implementation "megasink" handles padding')
        if case.softcap is not None or case.dropout:
            raise ValueError("megasink has no softcap and no dropout of attention weights")
        tensors = [query, key, value]
        if case.packed:
            tensors = [tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in tensors]
        out, lse_BHT, _ = attention(
            *tensors,
            variant="vanilla" if sink_H is None else "sink",
            sink_H=None if sink_H is None else sink_H.float(),
            scale=case.scale,
            window=case.window,
            cu_seqlens=case.boundaries if case.packed else None,
            backend=name,
            with_gate=sink_H is not None,
        )
        if not case.packed:
            return out, lse_BHT
        out, lse_BHT = (each[0].unflatten(1, (case.rows, -1)) for each in (out, lse_BHT))
        return out.transpose(0, 1), lse_BHT.transpose(0, 1)

    return attend


def check(attend: Attend, case: Case, dtype: torch.dtype, device: str, head_dim: int) -> Verdict:
    """Compare an attention with the definition in one case; one that raises has refused it."""
    if case.dropout and head_dim < case.tokens:  # the outputs show the weights
        verdict, detail = REFUSED, f"this case needs a head dim of {case.tokens} or more"
    else:
        verdict, detail = _compared(attend, _Inputs(case, dtype, head_dim), device)
    return Verdict(case.name, str(dtype).removeprefix("torch."), verdict, detail)


def _compared(attend: Attend, inputs: "_Inputs", device: str) -> tuple[str, str]:
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # of dropout
            out, lse, leaves = inputs.call(attend, inputs.case, inputs.dtype, device)
        if out.shape != inputs.arriving.shape:
            return WRONG, f"the output is {list(out.shape)}, not {list(inputs.arriving.shape)}"
        if not out.requires_grad:
            return WRONG, "the output has no gradient"
        follows_lse = lse is not None and lse.requires_grad
        found = inputs.results(out, lse, leaves, follows_lse=follows_lse)
    except Exception as error:
        return REFUSED, reason_of(error)
    # Of values that are one-hot.
    meant = replace(inputs.case, kept_BHTT=found["output"][..., : inputs.case.tokens] != 0)
    verdict, detail = WRONG, ""
    for dropped, case in (("", meant), *meant.without()):
        # The host computes the definition: the device under test may be wrong.
        exact, plain = (
            inputs.results(*inputs.call(definition, case, dtype, "cpu"), follows_lse=follows_lse)
            for dtype in (torch.float64, inputs.dtype)
        )
        beyond = {}
        for name, values in found.items():
            largest = float(exact[name].abs().max())
            rounding = max(torch.finfo(inputs.dtype).eps / 2, _ROUNDING) * largest
            allowed = max(2 * float((plain[name] - exact[name]).abs().max()), rounding)
            off = float((values - exact[name]).abs().max())
            if not off <= allowed:  # NaN, too
                beyond[name] = f"{name} is off by {off:.1e}, but only {allowed:.1e} is allowed"
        if not beyond and case.dropout and (problem := _dropout_problem(case)):
            return WRONG, problem
        if not beyond:
            return (DROPPED, f"{dropped} had no effect") if dropped else (RIGHT, "")
        detail = detail or "; ".join(beyond.values())
    return verdict, detail


def _dropout_problem(case: Case) -> str:
    """Return what is wrong with the choice of the dropped weights: "" if it looks random."""
    assert case.kept_BHTT is not None
    kept = case.kept_BHTT[..., torch.ones(case.tokens, case.tokens).tril() > 0].flatten(0, 1)
    share = 1 - float(kept.double().mean())
    if abs(share - case.dropout) > 5 * (case.dropout * (1 - case.dropout) / kept.numel()) ** 0.5:
        return f"{share:.2f} of the weights dropped out, not {case.dropout}"
    return "" if len(kept.unique(dim=0)) == len(kept) else "heads or rows drop the same weights"


class _Inputs:
    """Random inputs of a case and arriving gradients, exact in a dtype; no gradient of padding."""

    def __init__(self, case: Case, dtype: torch.dtype, head_dim: int):
        generator = torch.Generator().manual_seed(0)

        def drawn(heads: int, width: int) -> Tensor:
            return torch.randn(case.rows, heads, case.tokens, width, generator=generator).to(dtype)

        self.case, self.dtype = case, dtype
        width = head_dim // 2 if case.narrow else head_dim
        self.tensors = [2 * drawn(HEADS, head_dim)]
        self.tensors += [drawn(case.groups, head_dim), drawn(case.groups, width)]
        if case.dropout:  # the first outputs are the weights
            self.tensors[2][..., : case.tokens] = torch.eye(case.tokens)
        if case.sinks is not None:
            sinks = torch.tensor(case.sinks).repeat(HEADS // len(case.sinks))
            self.tensors.append(sinks.to(dtype))
        real_BT = case.real_BT
        self.padding_B1T = None if real_BT is None else ~real_BT[:, None]
        self.arriving = self._without_padding(drawn(HEADS, width).double())
        self.arriving_lse = self._without_padding(drawn(HEADS, 1)[..., 0].double())

    def _without_padding(self, values: Tensor) -> Tensor:
        if self.padding_B1T is None:
            return values
        mask = self.padding_B1T if values.dim() == 3 else self.padding_B1T[..., None]
        return values.masked_fill(mask.to(values.device), 0)

    def call(
        self, attend: Attend, case: Case, dtype: torch.dtype, device: str
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Return the output, the LSE and the leaves of a call."""
        leaves = [t.to(device, dtype, copy=True).requires_grad_() for t in self.tensors]
        sink_H = leaves[3] if len(leaves) > 3 else None
        return *attend(case, leaves[0], leaves[1], leaves[2], sink_H), leaves

    def results(
        self, out: Tensor, lse: Tensor | None, leaves: list[Tensor], *, follows_lse: bool
    ) -> dict[str, Tensor]:
        """Return output, LSE and gradients, which follow the LSE too if asked, in float64."""
        loss = (out.double() * self.arriving.to(out.device)).sum()
        if lse is not None and follows_lse:
            loss = loss + (lse.double() * self.arriving_lse.to(out.device)).sum()
        found = {"output": self._without_padding(out)}
        if lse is not None:
            found["LSE"] = self._without_padding(lse)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        for name, leaf, gradient in zip(_GRADIENTS, leaves, gradients, strict=False):
            found[name] = torch.zeros_like(leaf) if gradient is None else gradient
        return {name: value.detach().cpu().double() for name, value in found.items()}
