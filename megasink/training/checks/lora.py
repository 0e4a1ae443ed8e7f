"""Checks of LoRA options."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields

from megasink.attention.variants import variant
from megasink.attention.variants.gates import gates_explicitly
from megasink.errors import unknown_name
from megasink.flags import flag_of
from megasink.lora.options import LoraOptions
from megasink.lora.targets import LINEARS, QKV
from megasink.training.checks.transformer_layer import GATED_UNITS


def problems(args: Namespace) -> Iterator[str]:
    yield from _names(args)
    if not args.lora_rank:
        for field in fields(LoraOptions):
            if getattr(args, field.name) != field.default:
                yield f"{flag_of(field.name)} without --lora-rank: add it"
        return
    if args.lora_rank < 1:
        yield f"--lora-rank {args.lora_rank}: use 1 or more, or 0 for no LoRA"
    if args.lora_alpha is not None and args.lora_alpha <= 0:
        yield f"--lora-alpha {args.lora_alpha}: use a positive number"
    if not 0 <= args.lora_dropout < 1:
        yield f"--lora-dropout {args.lora_dropout}: use 0 or more, and less than 1"
    if not args.pretrained_checkpoint:
        load = ""
        if args.load:
            load = f" (--load {args.load} would be an adapter to start from)"
        yield f"--lora-rank without --pretrained-checkpoint: give the folder of the base{load}"
    elif args.load and not args.finetune and not args.resume:
        yield f"--load {args.load}: add --finetune to start from its adapter"
    yield from _nothing_there(args)
    yield from _unsupported(args)


def _names(args: Namespace) -> Iterator[str]:
    for field in fields(LoraOptions):
        known, given = field.metadata.get("names"), getattr(args, field.name)
        if known is None or given is None:
            continue
        flag = flag_of(field.name)
        yield from (unknown_name(flag, name, known) for name in given if name not in known)
        if twice := sorted({name for name in given if given.count(name) > 1}):
            yield f"{flag}: {', '.join(twice)} given twice"


def _nothing_there(args: Namespace) -> Iterator[str]:
    targets = args.lora_targets or ()
    gated = args.swiglu or args.quick_geglu or args.ffn_activation in GATED_UNITS
    if "gate_proj" in targets and not gated:
        yield "--lora-targets gate_proj: this FFN has no gate projection; drop the name"
    train, record = args.lora_train or (), variant(args.attention_variant)
    if "sinks" in train and not record.parameters:
        yield (
            f"--lora-train sinks with --attention-variant {record.name}, which has no parameters: "
            "drop the name"
        )
    if "gates" in train and not gates_explicitly(args):
        yield (
            f"--lora-train gates with --attention-variant {record.name}, which has no explicit "
            "gate: drop the name"
        )


def _unsupported(args: Namespace) -> Iterator[str]:
    ranks = args.tensor_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    of_qkv = not args.lora_targets or set(args.lora_targets) & set(LINEARS[QKV])
    gates = "gates" in (args.lora_train or ())
    if (of_qkv or gates) and groups and groups < ranks:
        yield (
            f"LoRA on query, key and value with {groups} key/value groups on "
            f"--tensor-model-parallel-size {ranks}: each rank has only part of a group; use at "
            f"most {groups} ranks"
        )
    if args.num_experts:
        yield "--lora-rank with --num-experts: adapters of MoE models are not supported"
    if args.multi_head_addition:
        yield "--lora-rank with --multi-head-addition, whose output projection it does not support"
    if args.transformer_impl == "transformer_engine":
        yield (
            "--lora-rank needs the normed hidden state, which TransformerEngine keeps inside its "
            "linear layers: use --transformer-impl local"
        )
    if args.ckpt_format != "torch_dist":
        yield f"--lora-rank with --ckpt-format {args.ckpt_format}: use torch_dist"
    if args.defer_embedding_wgrad_compute:
        yield "--lora-rank with --defer-embedding-wgrad-compute: the embedding is frozen; drop it"
    if args.analyze_interval:
        yield (
            "--analyze-interval with --lora-rank: drop it, and analyze the checkpoints (megasink "
            "analyze, which merges the adapter)"
        )
    if "muon" in (args.optimizer or ""):
        yield f"--lora-rank with --optimizer {args.optimizer}: use adam"
