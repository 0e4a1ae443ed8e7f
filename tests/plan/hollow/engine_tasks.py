"""Tasks for the server: states of TransformerEngine's own modules."""

import itertools
import os
from typing import Any

import torch

from megasink.attention import VARIANTS, attention
from megasink.plan.hollow.compile_libraries import Device
from tests.plan.hollow.attention_tasks import call, leaf
from tests.plan.hollow.events import Recording


def state_of_delayed_scaling() -> list[Any]:
    """Its bytes, what upstream says when it is loaded, and whether our loader loads it."""
    os.environ |= Device(capability=90).variables()
    import transformer_engine.pytorch as engine
    from megatron.core.extensions.transformer_engine import TEDelayedScaling
    from transformer_engine.common.recipe import Format

    from megasink.checkpoints.code_free_loading import loading_without_code
    from megasink.megatron.config import MegasinkTransformerConfig

    config = MegasinkTransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    recipe = TEDelayedScaling(config=config, fp8_format=Format.HYBRID)
    with engine.autocast(enabled=True, recipe=recipe):
        linear = engine.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")
        linear(torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")).sum().backward()
    state = linear.get_extra_state()
    try:
        linear.set_extra_state(state)
        said = ""
    except RuntimeError as error:
        said = str(error)
    del linear.fp8_meta["recipe"]
    with loading_without_code():
        linear.set_extra_state(state)
    return [state.numel(), said, type(linear.fp8_meta["recipe"]).__name__]


def wrong_call(defect: str) -> None:
    """One call of fused attention with a sink, in which one thing is wrong."""
    os.environ |= Device(capability=90).variables()
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    given, forward, backward = {}, fused_attn.fused_attn_fwd, fused_attn.fused_attn_bwd
    if defect == "offset":
        given = {"softmax_offset": torch.zeros(4, device="cuda")}
    elif defect == "layout":
        given = {"qkv_layout": "bshd_bshd_bshd", "o_format": "bshd"}
    fused_attn.fused_attn_fwd = lambda **options: forward(**options | given)

    def wrong_backward(**options: Any) -> Any:
        stats, state, sink = options["aux_ctx_tensors"]
        if defect == "statistics":
            options["aux_ctx_tensors"] = [stats.bfloat16(), state, sink]
        elif defect == "gradient":
            options["aux_ctx_tensors"] = [stats, state]
        return backward(**options)

    fused_attn.fused_attn_bwd = wrong_backward
    query, key, value = (
        torch.empty(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    sink = torch.zeros(4, device="cuda", requires_grad=True)
    results = attention(
        query, key, value, variant="sink", sink_H=sink, backend="transformer-engine"
    )
    results.out_BHTD.sum().backward()


def packed_calls(of_kernel: str) -> dict[str, list[str]]:
    """Launches whose name begins so, by variant, window and queries of 256 packed keys."""
    os.environ |= Device(capability=90).variables()
    found = {}
    for variant, window, queries in itertools.product(VARIANTS, (None, 16), (256, 100)):
        sizes = ((4, queries), (2, 256), (2, 256))
        tensors = [leaf("sbhd", 1, heads, n, 64, torch.bfloat16) for heads, n in sizes]
        options = {
            "window": window,
            "cu_seqlens": (0, 1, 60, 190, 256),
            "backend": "transformer-engine",
        }
        with Recording() as recording:
            results = [t for t in call(variant, *tensors, **options) if t is not None]
            torch.autograd.backward(results, [torch.ones_like(t) for t in results])
        names = [event.name for event in recording.events if event.name.startswith(of_kernel)]
        found[f"{variant}, window {window}, {queries} queries"] = names
    return found
