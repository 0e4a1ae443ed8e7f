"""Checks for missing flags, removed flags, and invalid numbers."""

import math
from argparse import Namespace
from collections.abc import Iterator

from megasink.flags import flag_of

_ALWAYS = (
    ("num_layers", "encoder_num_layers"),
    ("hidden_size",),
    ("num_attention_heads",),
    ("seq_length", "encoder_seq_length"),
    ("max_position_embeddings",),
    ("micro_batch_size",),
)
_OF_TRAINING = (("train_iters", "train_samples"), ("lr",))
_POSITIVE = """
    num_layers hidden_size num_attention_heads seq_length max_position_embeddings ffn_hidden_size
    kv_channels num_query_groups micro_batch_size global_batch_size train_samples
    tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size
    train_iters log_interval eval_interval save_interval save_retain_interval exit_interval
    gpu_sniff_test_interval num_dataset_builder_threads make_vocab_size_divisible_by vocab_size
    padded_vocab_size eval_micro_batch_size eval_global_batch_size num_experts mtp_num_layers
""".split()
_NOT_NEGATIVE = """
    lr min_lr weight_decay clip_grad eval_iters num_workers lr_warmup_iters lr_warmup_samples
    lr_warmup_init lr_wsd_decay_iters lr_wsd_decay_samples init_method_std seed
""".split()
_FRACTIONS = ("attention_dropout", "hidden_dropout")
# Flags that Megatron has removed, and their replacements.
_GONE = {
    "batch_size": "--micro-batch-size",
    "warmup": "--lr-warmup-fraction",
    "model_parallel_size": "--tensor-model-parallel-size",
    "checkpoint_activations": "--recompute-activations",
}
_TWICE = (
    ("num_layers", "encoder_num_layers"),
    ("seq_length", "encoder_seq_length"),
    ("data_path", "data_args_path"),
)


def problems(args: Namespace) -> Iterator[str]:
    wanted = _ALWAYS if args.skip_train else (*_ALWAYS, *_OF_TRAINING)
    missing = [
        " or ".join(flag_of(name) for name in names if not name.startswith("encoder_"))
        for names in wanted
        if all(getattr(args, name) is None for name in names)
        and not args.refused_flags.intersection(names)
    ]
    if missing:
        yield f"missing: {', '.join(missing)}"
    for name, instead in _GONE.items():
        if getattr(args, name):
            yield f"{flag_of(name)} is no longer valid: use {instead}"
    if not args.add_position_embedding and args.position_embedding_type != "rope":
        yield "--no-position-embedding is no longer valid: use --position-embedding-type"
    for name in ("recipe", "config"):
        if getattr(args, name):  # what starts a run has replaced it by its flags
            yield f"--{name}: give it to megasink train or plan, or in the flags of a grid"
    for name, old in _TWICE:
        if getattr(args, name) is not None and getattr(args, old) is not None:
            yield f"{flag_of(name)} and {flag_of(old)}: choose one"
    for name, value in vars(args).items():
        if value is None or (name == "num_experts" and value == 0):  # a dense model in Megatron
            continue
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{flag_of(name)} {value}: give a finite number"
        elif name in _POSITIVE and value < 1:
            yield f"{flag_of(name)} {value}: use 1 or more"
        elif name in _NOT_NEGATIVE and value < 0:
            yield f"{flag_of(name)} {value} is negative: use 0 or more"
        elif name in _FRACTIONS and not 0 <= value < 1:
            yield f"{flag_of(name)} {value}: use 0 or more, and less than 1"
