"""What fused kernels that are not in use here would save for backward, from shapes.

Each change is the difference between what the kernel's autograd function hands to
``save_for_backward`` in the release named, and what is saved here (`megasink.plan.saved`).
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megasink.upstream.fused import APEX, TRANSFORMER_ENGINE

_ENGINE = "TransformerEngine 2.20 (d0067d0), transformer_engine/pytorch"


@dataclass(frozen=True)
class Kernel:
    """Fused kernels that save other tensors than those in use, or the same.

    Attributes:
        name: Of the kernels.
        install: How to get them: package, flags.
        why: What they save, and whose source says so.
        module: They run in each layer with such a module, or once outside of layers.
        used: Whether a run of these arguments has them.
        change: Bytes that they save more, each time, in one microbatch on a rank.
    """

    name: str
    install: str
    why: str
    module: str
    used: Callable[[Namespace], bool]
    change: Callable[[Namespace], int]


def _tokens(args: Namespace) -> int:
    return int(args.micro_batch_size * args.seq_length // args.context_parallel_size)


def _rope(args: Namespace) -> int:
    if args.position_embedding_type != "rope":
        return 0
    # apply_rotary_pos_emb casts cos and sin to the dtype of q, and once more to that of k. Packed
    # samples have a table each.
    samples = 1 if args.dataloader_inter_document_masking else args.micro_batch_size
    channels = int(args.kv_channels * args.rotary_percent)
    element = 2 if args.bf16 or args.fp16 else 4
    return -4 * _tokens(args) // samples * channels * element


def _nothing(args: Namespace) -> int:
    return 0


KERNELS = (
    Kernel(
        "norm and linear in one",
        TRANSFORMER_ENGINE.cure,
        "the input, the normalized input and 1 / rms in float32, as norm and linear do apart: "
        f"{_ENGINE}/module/layernorm_linear.py",
        "self_attention.linear_qkv",
        lambda args: args.transformer_impl == "transformer_engine",
        _nothing,
    ),
    Kernel(
        "flash-attn-2, -3, -4, cuDNN",
        "docs/gpu.md, --attention-kernel",
        "megasink's op saves q, k, v, output and statistics itself, whichever kernel it calls",
        "self_attention.core_attention",
        lambda args: args.attention_kernel == "eager",
        _nothing,
    ),
    Kernel(
        "fused RoPE",
        TRANSFORMER_ENGINE.cure,
        "the table of angles, which stays, for cos and sin of q and of k: "
        f"{_ENGINE}/attention/rope.py",
        "self_attention",
        lambda args: bool(args.apply_rope_fusion),
        _rope,
    ),
    Kernel(
        "TransformerEngine's cross entropy",
        f"{TRANSFORMER_ENGINE.cure}, --cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
        "gradients of the logits in float32, for probabilities in float32, a mask of 1 byte and a "
        f"target of 8 for each token: {_ENGINE}/triton/cross_entropy.py",
        "output_layer",
        lambda args: args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te",
        lambda args: -9 * _tokens(args),
    ),
    Kernel(
        "weight gradients added by the GEMM",
        APEX.cure,
        "it runs in backward: megatron/core/tensor_parallel/layers.py",
        "self_attention.linear_qkv",
        lambda args: bool(args.gradient_accumulation_fusion),
        _nothing,
    ),
)


def changes(saved: Sequence[Mapping[str, Any]], args: Namespace) -> Iterator[dict[str, Any]]:
    """Yield name, install, why, and bytes: what kernels not in use would save more.

    Bytes are None where nothing is saved that they would change: in layers that are recomputed, or
    on other ranks.

    Args:
        saved: Rows of `SavedTensors.table`.
    """
    for kernel in KERNELS:
        if kernel.used(args):
            continue
        rows = [row for row in saved if row["module"] == kernel.module]
        places = sum(max(1, row["layers"]) for row in rows)
        yield {
            "name": kernel.name,
            "install": kernel.install,
            "why": kernel.why,
            "bytes": places * kernel.change(args) if places else None,
        }
