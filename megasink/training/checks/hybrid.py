"""Checks of hybrid models (--hybrid-layer-pattern)."""

import importlib.util
from argparse import Namespace
from collections.abc import Iterator

from megasink.megatron.hybrid_pattern import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    FFN,
    LATENT,
    MAMBA,
    PREDICTION,
    RECURRENT,
    SPARSE,
    STAGE,
    SUPPORTED,
    blocks_of,
    heads_apart,
    layers_of,
    recurrent,
)

_FLAG = "--hybrid-layer-pattern"


def problems(args: Namespace) -> Iterator[str]:
    pattern = args.hybrid_layer_pattern
    if pattern is None:
        return
    if args.hybrid_override_pattern is not None:
        yield f"--hybrid-override-pattern is the old name of {_FLAG}: drop it"
    layers = layers_of(pattern)
    yield from _prediction(args, pattern)
    if SPARSE in layers:
        yield f"{_FLAG} {pattern}: sinks in sparse latent attention ({SPARSE}) are not supported"
    if unknown := set(layers) - {*SUPPORTED, SPARSE}:
        yield (
            f"{_FLAG} {pattern}: unknown layer {' or '.join(sorted(unknown))}; use * (attention), "
            "+ (latent attention), - (FFN), E (experts), M (Mamba), G (gated delta-net)"
        )
    elif not {ATTENTION, LATENT} & {*layers}:
        yield f"{_FLAG} {pattern!r} has no attention layer (* or +): add one"
    if ATTENTION in layers and args.multi_latent_attention:
        yield f"{_FLAG} {pattern}: + (latent attention) and * cannot be combined: use + everywhere"
    blocks = len(blocks_of(pattern))
    if args.num_layers not in (None, blocks, len(layers)):
        yield (
            f"--num-layers {args.num_layers}, but {_FLAG} {pattern} has {blocks} blocks with "
            f"{len(layers)} layers in all: drop --num-layers"
        )
    if bool(args.num_experts) != (EXPERTS in layers):
        yield (
            f"{_FLAG} {pattern} has layers with experts (E): add --num-experts"
            if EXPERTS in layers
            else f"--num-experts {args.num_experts}, but {_FLAG} {pattern} has no E layer: add one"
        )
    if args.match_ffn_width and layers.count(ATTENTION) != layers.count(FFN):
        yield (
            f"--match-ffn-width with {_FLAG} {pattern}: one width for every FFN needs as many "
            "attention layers (*) as FFNs (-): set --ffn-hidden-size instead"
        )
    yield from _stages(args, pattern)
    yield from _recurrent(args, layers)


def _prediction(args: Namespace, pattern: str) -> Iterator[str]:
    _, *predicted = pattern.split(PREDICTION)
    block = ATTENTION + (EXPERTS if args.num_experts else FFN)
    if wrong := [layers for layers in predicted if layers != block]:
        yield (
            f"{_FLAG} {pattern}: a layer of multi-token prediction must be {block}, not "
            f"{' or '.join(dict.fromkeys(wrong))}"
        )
    if predicted and args.mtp_num_layers != len(predicted):
        yield (
            f"--mtp-num-layers {args.mtp_num_layers}, but {_FLAG} {pattern} has {len(predicted)} "
            "prediction layers after /: drop --mtp-num-layers"
        )


def _stages(args: Namespace, pattern: str) -> Iterator[str]:
    stages, ranks = pattern.count(STAGE) + 1, args.pipeline_model_parallel_size
    if ranks < 1:
        return  # reported elsewhere
    if stages == 1 < ranks or stages % ranks or stages > ranks == 1:
        yield (
            f"{_FLAG} {pattern} has {stages} stage{'s' * (stages > 1)} (separated by |), but "
            f"--pipeline-model-parallel-size is {ranks}: write {ranks} stages, or a multiple for "
            "virtual stages"
            if ranks > 1
            else f"{_FLAG} {pattern} has {stages} pipeline stages: give "
            f"--pipeline-model-parallel-size, or drop {STAGE}"
        )
        return
    least = 2 if args.overlap_p2p_comm else 3
    if stages > ranks and ranks < least:
        yield (
            f"{_FLAG} {pattern} has virtual stages, which need --pipeline-model-parallel-size "
            f"{least} or more, not {ranks}"
        )


def _recurrent(args: Namespace, layers: str) -> Iterator[str]:
    found = recurrent(layers)
    if found and args.dataloader_inter_document_masking:
        yield (
            f"{' and '.join(found)} layers with packed documents "
            "(--dataloader-inter-document-masking): the state of the layers would carry over from "
            "one document to the next: drop one of the two"
        )
    if MAMBA in layers and args.device == "cpu":
        yield f"{RECURRENT[MAMBA]} layers (M) need CUDA: drop --device cpu or use other layers"
    elif MAMBA in layers and not _installed("mamba_ssm", "causal_conv1d", "einops"):
        yield (
            f"{RECURRENT[MAMBA]} layers (M) need packages that are not installed: "
            "pip install mamba-ssm causal-conv1d einops"
        )
    if DELTA_NET in layers and (
        problem := heads_apart(
            args.linear_num_key_heads,
            args.linear_num_value_heads,
            args.tensor_model_parallel_size,
            args.context_parallel_size,
        )
    ):
        yield problem
    if DELTA_NET in layers and args.device != "cpu" and not _installed("fla"):
        yield (
            f"{RECURRENT[DELTA_NET]} layers (G) need a package that is not installed: "
            "pip install flash-linear-attention"
        )


def _installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in packages)
