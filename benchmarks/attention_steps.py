"""What benchmarks/attention.py compares: one forward and backward of each implementation.

Shapes: B batch (1), H heads, S tokens, D head dim; X the heads side by side, H * D.
"""

import argparse
import warnings
from collections.abc import Callable
from importlib import util

import torch
import torch.nn.functional as F
from torch import Tensor

from megasink.attention import AttentionRequest, attention, backend_names, choose_backend
from megasink.attention.kernels.cuda import at_runtime
from megasink.errors import ConfigError

FLOOR = "plain kernel, no gate"  # which PyTorch chooses: on Hopper it is cuDNN
PLAIN = "plain"  # ours without a gate
UPSTREAM = {"cpu": "Megatron's own sinks", "cuda": "TransformerEngine's own sinks"}
FLEX = "FlexAttention, sink"  # its LSE is differentiable on CUDA; it has no backward on a CPU
Step = Callable[[], None]


def implementations(arguments: argparse.Namespace) -> list[str]:
    """Names of what runs here, the floor first; ours are "variant (backend)"."""
    dtype = getattr(torch, arguments.dtype)
    ours = []
    for backend in backend_names():
        request = AttentionRequest(arguments.device, dtype, arguments.head_dim)
        request = at_runtime(request, None)
        try:
            choose_backend(request, backend)
        except ConfigError:
            continue
        variants = ["sink"] if backend == "eager" else ["vanilla", "sink", "gated"]
        if backend not in ("eager", "flash-cpu"):  # the floor on a CPU is flash-cpu
            variants = [PLAIN, *variants]
        ours += [f"{variant} ({backend})" for variant in variants]
    names = [FLOOR, *ours]
    if arguments.device == "cuda":
        names.append(FLEX)
    if arguments.device == "cpu" or util.find_spec("transformer_engine"):
        names.append(UPSTREAM[arguments.device])
    return names


def own_floor(name: str) -> str:
    """Return the name of the plain attention of the same backend."""
    return f"{PLAIN} ({name.partition(' (')[2]}"


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message, for a cell of a table."""
    return f"{type(error).__name__}: {str(error).partition('\n')[0]}".replace("|", "/")


def step(name: str, length: int, arguments: argparse.Namespace) -> Step:
    """One forward and backward on tensors that lie as Megatron's: [s, b, h, d]."""
    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    heads, head_dim = arguments.heads, arguments.head_dim

    def normal() -> Tensor:
        return torch.randn(length, 1, heads, head_dim, device=device).to(dtype)

    query, key, value = leaves = [normal().permute(1, 2, 0, 3).requires_grad_() for _ in range(3)]
    grad_out = normal().permute(1, 2, 0, 3)
    grad_gate = torch.randn(1, heads, length, device=device)
    if name == FLOOR:
        return _backward(
            lambda: [F.scaled_dot_product_attention(query, key, value, is_causal=True)],
            leaves,
            [grad_out],
        )
    if name in UPSTREAM.values():
        build = _megatron if device == "cpu" else _transformer_engine
        forward, offset = build(leaves, arguments)
        grad_BSX = grad_out.permute(2, 0, 1, 3).flatten(2)
        return _backward(forward, [*leaves, offset], [grad_BSX])

    if name == FLEX:
        offset = torch.zeros(heads, device=device, requires_grad=True)
        return _backward(_flex(leaves, offset), [*leaves, offset], [grad_out, grad_gate])

    variant, backend = name.removesuffix(")").split(" (")
    if variant == PLAIN:
        return _backward(
            lambda: [attention(query, key, value, backend=backend, with_gate=False).out_BHTD],
            leaves,
            [grad_out],
        )
    if variant == "gated":
        logits = torch.zeros(1, heads, length, device=device, dtype=dtype, requires_grad=True)

        def gated() -> list[Tensor]:
            out = attention(query, key, value, backend=backend, with_gate=False).out_BHTD
            gate = logits.sigmoid()
            return [out * gate[..., None], gate]

        return _backward(gated, [*leaves, logits], [grad_out, grad_gate.to(dtype)])
    sink = torch.zeros(heads, device=device, requires_grad=True) if variant == "sink" else None

    def ours() -> list[Tensor]:
        result = attention(query, key, value, variant=variant, sink_H=sink, backend=backend)
        assert result.gate_BHT is not None
        return [result.out_BHTD, result.gate_BHT]

    return _backward(ours, [*leaves, *([] if sink is None else [sink])], [grad_out, grad_gate])


def _backward(forward: Callable[[], list[Tensor]], leaves: list[Tensor], grads: list[Tensor]):
    def run() -> None:
        torch.autograd.grad(forward(), leaves, grads)

    return run


def _megatron(
    leaves: list[Tensor], arguments: argparse.Namespace
) -> tuple[Callable[[], list[Tensor]], Tensor]:
    """Upstream's only attention with a sink on a CPU: S x S scores."""
    from megasink import cpu

    warnings.filterwarnings("ignore", module="megatron")
    cpu.activate()
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    dtype = getattr(torch, arguments.dtype)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=arguments.heads * arguments.head_dim,
        num_attention_heads=arguments.heads,
        attention_dropout=0.0,
        softmax_type="learnable",
        masked_softmax_fusion=False,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_cpu_initialization=True,
    )
    module = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    query, key, value = (leaf.permute(2, 0, 1, 3) for leaf in leaves)
    length = query.shape[0]
    mask = torch.ones(length, length, dtype=torch.bool).triu_(1)[None, None]
    return lambda: [module(query, key, value, mask)], module.softmax_offset


def _flex(leaves: list[Tensor], offset_H: Tensor) -> Callable[[], list[Tensor]]:
    """Gate times FlexAttention, through its own gradient of the LSE."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    length = leaves[0].shape[2]
    mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, length, length, device=leaves[0].device
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward() -> list[Tensor]:
        out, aux = compiled(*leaves, block_mask=mask, return_aux=AuxRequest(lse=True))
        gate = (aux.lse - offset_H[:, None]).sigmoid()
        return [(out * gate[..., None]).to(out.dtype), gate]

    return forward


def _transformer_engine(
    leaves: list[Tensor], arguments: argparse.Namespace
) -> tuple[Callable[[], list[Tensor]], Tensor]:
    from transformer_engine.pytorch import DotProductAttention

    module = DotProductAttention(
        arguments.heads,
        arguments.head_dim,
        qkv_format="sbhd",
        attn_mask_type="causal",
        attention_dropout=0.0,
        softmax_type="learnable",
    ).cuda()
    query, key, value = (leaf.permute(2, 0, 1, 3) for leaf in leaves)
    return lambda: [module(query, key, value)], module.softmax_offset
