"""Layouts and options of training by short names, and tables that say which models meet which."""

from collections.abc import Mapping
from typing import Any

from tests.distributed.layout import SINGLE, Layout

TRAIN = "tests.distributed.tiny_gpt:train"
TOLERANCE = 1e-5

TP, TP_SP, PP, DP, CP = (
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(pp=2),
    Layout(dp=2),
    Layout(cp=2),
)
VPP, EP = Layout(pp=2, vpp=2), Layout(dp=2, ep=2)
TP_EP = Layout(tp=2, sp=True, ep=2, etp=1)
SP = {"sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
DISTRIBUTED = {"distributed_optimizer": True}
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
# Of each sample: the ends of its documents. One of a single token, two of one length. The row of
# both samples is split at 16, 32 and 48 over two ranks: inside documents and between two.
DOCUMENTS = {"ends": ([5, 6, 18, 32], [13, 25, 32])}
# Tokens before the padding, of the samples of each microbatch: it begins inside a document, and
# covers whole ones. In the last microbatch the third of four context-parallel ranks has neither
# tokens nor targets.
PADDED = {"real": ((27, 31), (22, 24), (32, 28), (12, 6)), "masked": True}
_LAYOUTS = {
    **{"single": SINGLE, "tp": TP, "sp": TP_SP, "pp": PP, "vpp": VPP, "dp": DP},
    **{"ep": EP, "tp-ep": TP_EP},
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "selective": SELECTIVE,
    "selective-mlp": SELECTIVE | {"recompute_modules": ["core_attn", "mlp"]},
    "selective-moe": SELECTIVE | {"recompute_modules": ["core_attn", "moe"]},
    "distributed": DISTRIBUTED,
    "overlap": {"overlap": True},
    "alltoall": ALLTOALL,
}


def case(text: str) -> tuple[Layout, dict[str, Any]]:
    """The layout of "LAYOUT+OPTION+...", and the options of training that come with it."""
    name, *options = text.split("+")
    layout = _LAYOUTS[name]
    found = dict(SP) if layout.sp else {}
    for option in options:
        found |= _OPTIONS[option]
    return layout, found


def cases(table: Mapping[str, tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    """(model, case) of each case in {model: ("CASE CASE ...", options of the model)}."""
    return [(model, text) for model, (texts, _) in table.items() for text in texts.split()]


def name_of(value: Any) -> str:
    """Of a parameter of a test: options, a layout or a name."""
    if isinstance(value, dict):
        return "+".join(k if v is True else f"{k}={v}" for k, v in value.items()) or "plain"
    return str(value)
