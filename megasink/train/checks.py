"""What a command line gets wrong, found before anything is built."""

from argparse import Namespace
from dataclasses import replace
from typing import Any, get_args

import torch

from megasink import platform
from megasink.attention import AttentionRequest, choose_backend
from megasink.compat import have_transformer_engine
from megasink.config import Scope, Variant, visible_tokens
from megasink.errors import ConfigError
from megasink.train import data_checks, run_dir

# Options of Megatron that change attention, the loss or the weights in ways that are not covered
# by a test here: (attribute, value that is fine, flag, what to do).
_UNSUPPORTED: tuple[tuple[str, Any, str, str], ...] = (
    ("multi_latent_attention", False, "--multi-latent-attention", "MLA has no sink here"),
    ("num_experts", None, "--num-experts", "MoE layers are not supported yet"),
    ("mtp_num_layers", None, "--mtp-num-layers", "its blocks ignore the layer spec"),
    ("context_parallel_size", 1, "--context-parallel-size", "not supported yet: use 1"),
    ("attention_output_gate", False, "--attention-output-gate", "not supported yet"),
    ("hybrid_layer_pattern", None, "--hybrid-layer-pattern", "GPT models only"),
    ("heterogeneous_layers_config_path", None, "--heterogeneous-layers-config-path", "GPT only"),
    ("experimental_attention_variant", None, "--experimental-attention-variant", "GPT only"),
    ("reset_attention_mask", False, "--reset-attention-mask", "packed masks are not supported"),
    (
        "dataloader_inter_document_masking",
        False,
        "--dataloader-inter-document-masking",
        "packed masks are not supported",
    ),
    ("sft", False, "--sft", "packed batches are not supported"),
    ("fim_data", False, "--fim-data", "not supported"),
    ("apply_query_key_layer_scaling", False, "--apply-query-key-layer-scaling", "not supported"),
    ("qk_clip", False, "--qk-clip", "the kernels do not return the maximum logit"),
    ("log_max_attention_logit", False, "--log-max-attention-logit", "kernels do not return it"),
    ("use_torch_fsdp2", False, "--use-torch-fsdp2", "use the distributed optimizer"),
    ("use_megatron_fsdp", False, "--use-megatron-fsdp", "use the distributed optimizer"),
    ("cuda_graph_impl", "none", "--cuda-graph-impl", "not supported yet"),
    ("init_model_with_meta_device", False, "--init-model-with-meta-device", "not supported"),
    ("spec", None, "--spec", "megasink brings its own layer spec"),
    ("yaml_cfg", None, "--yaml-cfg", "give flags instead"),
)

# Parts of the trainer that ask the CUDA driver themselves.
_NEED_CUDA = {
    "async_save": "--async-save",
    "profile": "--profile",
    "record_memory_history": "--record-memory-history",
    "log_straggler": "--log-straggler",
}


def problems(args: Namespace) -> list[str]:
    """Everything wrong with parsed arguments, a sentence each. Reads files, builds nothing."""
    found: list[str] = []
    if args.unknown_flags:
        found.append(
            f"unknown: {' '.join(args.unknown_flags)} (megasink train --full-help lists every flag)"
        )
    found += _attention(args)
    found += _unsupported(args)
    found += _balance(args)
    found += _device(args)
    found += data_checks.problems(args)
    # The others would see what rank 0 has just written; torchrun ends them when rank 0 refuses.
    if args.rank == 0:
        found += run_dir.problems(args)
    return found


def _attention(args: Namespace) -> list[str]:
    found = []
    if args.train_iters is not None and args.train_iters < 1:
        found.append(f"--train-iters {args.train_iters}: train at least one step")
    window = args.window_size
    if window is not None and (len(window) != 2 or window[1] != 0):
        found.append(
            f"--window-size {','.join(map(str, window))}: give LEFT,0, the tokens before the token "
            "itself and none after it"
        )
    variant = args.attention_variant
    if variant not in get_args(Variant):
        found.append(
            f"--attention-variant {variant!r} is unknown: choose {', '.join(get_args(Variant))}"
        )
    if getattr(args, "softmax_type", "vanilla") != "vanilla":
        found.append(
            f"--softmax-type {args.softmax_type}: say it with --attention-variant "
            "(sink is Megatron's 'learnable')"
        )
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    if backend != "auto":
        found.append(
            f"--attention-backend {backend} chooses among Megatron's kernels, which drop the "
            "sink's or the gate's gradient: use --attention-kernel"
        )
    heads, tensor_parallel = args.num_attention_heads, args.tensor_model_parallel_size
    if heads and heads % tensor_parallel:
        found.append(
            f"--num-attention-heads {heads} is not divisible by "
            f"--tensor-model-parallel-size {tensor_parallel}"
        )
    if heads and args.hidden_size and not args.kv_channels and args.hidden_size % heads:
        found.append(
            f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads {heads}: "
            "change one, or give --kv-channels"
        )
    if args.fp16 and args.bf16:
        found.append("--fp16 and --bf16: choose one")
    if heads and args.hidden_size:
        request = attention_request(args)
        if variant not in get_args(Variant):
            request = replace(request, variant="sink")  # what else is wrong is worth knowing
        try:
            choose_backend(request, args.attention_kernel)
        except ConfigError as error:
            found += error.problems
    return found


def attention_request(args: Namespace) -> AttentionRequest:
    """The attention call that the model of these arguments makes."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    return AttentionRequest(
        device_type="cpu" if platform.is_active() else "cuda",
        dtype=dtype,
        head_dim=args.kv_channels or args.hidden_size // args.num_attention_heads,
        variant=args.attention_variant,
        window=visible_tokens(args.window_size),
        needs_gate_gradient=args.attention_variant == "sink" or args.head_balance_coeff > 0,
        dropout=args.attention_dropout,
    )


def _unsupported(args: Namespace) -> list[str]:
    return [
        f"{flag}: {advice}"
        for name, fine, flag, advice in _UNSUPPORTED
        if getattr(args, name, fine) not in (fine, None)
    ]


def _balance(args: Namespace) -> list[str]:
    found = []
    coeff = args.head_balance_coeff
    if coeff < 0:
        found.append(f"--head-balance-coeff {coeff} is negative: use 0 or more")
    if args.head_balance_scope not in get_args(Scope):
        found.append(
            f"--head-balance-scope {args.head_balance_scope!r} is unknown: "
            f"choose {', '.join(get_args(Scope))}"
        )
    if args.transformer_impl == "inference_optimized":
        found.append(
            "--transformer-impl inference_optimized has no backward pass and cannot train: "
            "use local or transformer_engine"
            + (" (or set --head-balance-coeff 0)" if coeff else "")
        )
    if coeff and args.calculate_per_token_loss and args.eod_mask_loss:
        found.append(
            "--head-balance-coeff with --calculate-per-token-loss and --eod-mask-loss: the count "
            "of unmasked tokens is known on the last stage only; drop one of the two flags"
        )
    return found


def _device(args: Namespace) -> list[str]:
    found = []
    if platform.is_active():
        if args.distributed_backend != "gloo":
            found.append(
                f"--distributed-backend {args.distributed_backend} needs CUDA and no CUDA device "
                "is present: drop the flag (gloo is used) or run on a GPU machine"
            )
        if args.transformer_impl == "transformer_engine":
            found.append(
                "--transformer-impl transformer_engine needs CUDA and no CUDA device is present: "
                "use local"
            )
        if args.fp8 or args.fp4:
            found.append("--fp8-format and --fp4-format need CUDA and no CUDA device is present")
        # The writer of an asynchronous save is a process without the platform: it would hang.
        for name, flag in _NEED_CUDA.items():
            if getattr(args, name):
                found.append(f"{flag} needs CUDA and no CUDA device is present: drop the flag")
    elif args.transformer_impl == "transformer_engine" and not have_transformer_engine():
        found.append(
            "--transformer-impl transformer_engine (Megatron's default) but transformer-engine is "
            "not installed: pip install 'megasink[gpu]' or use --transformer-impl local"
        )
    return found
