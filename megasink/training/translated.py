"""Flags of Megatron-LM that megasink answers by its own, each with a line that says so."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.attention.variants import Variant, variants
from megasink.megatron.hybrid_pattern import ATTENTION, DELTA_NET, STAGE, gpt_blocks
from megasink.options.flags import flag_of

_STACK_SPECS = ("hybrid_stack_spec", "mamba_stack_spec")


def translate(args: Namespace) -> Iterator[str]:
    """Replace flags by those of megasink with the same meaning; yield a line for each."""
    yield from _attention(args)
    yield from _documents(args)
    if args.spec and args.spec[-1] in _STACK_SPECS:
        args.spec = None
        yield "--spec: megasink builds the layers of --hybrid-layer-pattern"
    if args.apply_query_key_layer_scaling:
        args.apply_query_key_layer_scaling = False
        yield (
            "--apply-query-key-layer-scaling is not applied: it divides and multiplies by the same "
            "number, and the logits are in float32"
        )
    if args.linear_attention_freq is not None and args.num_layers:
        yield from _linear_attention(args)


def _attention(args: Namespace) -> Iterator[str]:
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    flags = [f"--attention-backend {backend}"] * (backend != "auto")
    flags += ["--use-flash-attn"] * args.use_flash_attn
    flags += ["--flash-attention-version"] * (args.flash_attention_version is not None)
    if flags:
        args.attention_backend, args.use_flash_attn = type(args.attention_backend)["auto"], False
        args.flash_attention_version = None
        yield f"{', '.join(flags)}: no effect, because --attention-kernel chooses the kernel"
    chosen = "attention_variant" in args.given_flags
    if args.softmax_type != Variant.softmax_type and not chosen:
        record = next(r for r in variants() if r.softmax_type == args.softmax_type)
        yield f"--softmax-type {args.softmax_type}: --attention-variant {record.name}"
        args.attention_variant, args.softmax_type = record.name, Variant.softmax_type
    elif args.attention_output_gate and not chosen:
        args.attention_variant, args.gate_granularity = "gated", "elementwise"
        args.attention_output_gate = False
        yield "--attention-output-gate: --attention-variant gated --gate-granularity elementwise"


def _documents(args: Namespace) -> Iterator[str]:
    """Both resets together keep documents apart; with rotary embeddings the mask alone does."""
    relative = args.position_embedding_type in ("rope", "yarn", "none")
    if args.reset_attention_mask and (args.reset_position_ids or relative):
        args.reset_attention_mask = args.reset_position_ids = False
        args.dataloader_inter_document_masking = True
        yield "--reset-attention-mask: --dataloader-inter-document-masking"
    elif args.reset_position_ids and relative and not args.dataloader_inter_document_masking:
        args.reset_position_ids = False
        yield (
            f"--reset-position-ids has no effect with --position-embedding-type "
            f"{args.position_embedding_type}"
        )


def _linear_attention(args: Namespace) -> Iterator[str]:
    """Write gated delta-net by --linear-attention-freq as a layer pattern, with even stages."""
    every, blocks = args.linear_attention_freq, args.num_layers
    if args.experimental_attention_variant != "gated_delta_net" or args.hybrid_layer_pattern:
        return
    if isinstance(every, int):
        every = [int((block + 1) % every != 0) for block in range(blocks)]
    layers = [
        layers.replace(ATTENTION, DELTA_NET) if linear else layers
        for layers, linear in zip(
            gpt_blocks(blocks, args.num_experts, args.moe_layer_freq), every, strict=False
        )
    ]
    stages = args.pipeline_model_parallel_size * (args.num_virtual_stages_per_pipeline_rank or 1)
    if len(layers) != blocks or stages < 1 or blocks % stages:
        return
    size = blocks // stages
    args.hybrid_layer_pattern = STAGE.join(
        "".join(layers[first : first + size]) for first in range(0, blocks, size)
    )
    args.linear_attention_freq = args.experimental_attention_variant = None
    args.num_virtual_stages_per_pipeline_rank, args.moe_layer_freq = None, 1
    yield f"{flag_of('linear_attention_freq')}: --hybrid-layer-pattern {args.hybrid_layer_pattern}"
