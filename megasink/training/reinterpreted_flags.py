"""Flags of Megatron-LM with another effect here, each with a line that says so.

megasink answers some by its own flags. Others have no effect without a flag that makes Megatron
read them: the same model is trained without them. A flag that was meant to change the model, and
for which there is another one, is refused.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megasink.attention.variants import Variant, variants
from megasink.megatron.hybrid_pattern import ATTENTION, DELTA_NET, STAGE, gpt_blocks
from megasink.options.dataclass_flags import flag_of
from megasink.options.megatron_flags import FLAGS

_STACK_SPECS = ("hybrid_stack_spec", "mamba_stack_spec")


def translate(args: Namespace) -> Iterator[str]:
    """Replace flags by those of megasink with the same meaning; yield a line for each."""
    yield from _attention(args)
    yield from _documents(args)
    if args.spec and args.spec[-1] in _STACK_SPECS:
        args.spec = None
        yield "--spec: no effect, because megasink builds the layers of --hybrid-layer-pattern"
    if args.apply_query_key_layer_scaling:
        args.apply_query_key_layer_scaling = False
        yield (
            "--apply-query-key-layer-scaling is not applied: it divides and multiplies by the same "
            "number, and the logits are in float32"
        )
    if args.rampup_batch_size is not None:
        yield "--rampup-batch-size: no effect in Megatron-Core 0.19: use --step-batch-size-schedule"
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
        yield f"--softmax-type {args.softmax_type}: replaced by --attention-variant {record.name}"
        args.attention_variant, args.softmax_type = record.name, Variant.softmax_type
    elif args.attention_output_gate and not chosen:
        args.attention_variant, args.gate_granularity = "gated", "elementwise"
        args.attention_output_gate = False
        same = "--attention-variant gated --gate-granularity elementwise"
        yield f"--attention-output-gate: replaced by {same}"


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
    args.hybrid_layer_pattern = in_stages(layers, stages)
    args.linear_attention_freq = args.experimental_attention_variant = None
    args.num_virtual_stages_per_pipeline_rank, args.moe_layer_freq = None, 1
    yield f"{flag_of('linear_attention_freq')}: --hybrid-layer-pattern {args.hybrid_layer_pattern}"


def in_stages(layers: Sequence[str], stages: int) -> str:
    """Return the pattern of layers that are divided equally among stages."""
    size = len(layers) // stages
    return STAGE.join("".join(layers[n : n + size]) for n in range(0, len(layers), size))


class Reader(NamedTuple):
    """Flags (names of arguments), what has them read, and whether it is given."""

    needs: str
    given: Callable[[Namespace], object]
    flags: list[str]


# A flag, or one with one of some values or symbols, and those that only it has Megatron read.
_READ = """
use_rope_scaling: rope_scaling_factor
multi_latent_attention: q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
num_experts: moe_router_topk moe_layer_freq moe_aux_loss_coeff moe_z_loss_coeff moe_router_dtype
num_experts: moe_token_dispatcher_type moe_router_load_balancing_type moe_router_score_function
num_experts: moe_grouped_gemm moe_permute_fusion moe_router_pre_softmax moe_per_layer_logging
num_experts: moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_num_groups
num_experts: moe_router_bias_update_rate moe_router_group_topk moe_expert_capacity_factor
num_experts: moe_pad_expert_input_to_capacity moe_token_drop_policy moe_input_jitter_eps
num_experts: moe_router_force_load_balancing moe_router_force_biased moe_shared_expert_gate
window_size: window_attn_skip_freq
mtp_num_layers: mtp_loss_scaling_factor
fp8: fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_param_gather
fp16: loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
use_distributed_optimizer: overlap_param_gather num_distributed_optimizer_instances
optimizer_cpu_offload: optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d
use_precision_aware_optimizer: main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
tp_comm_overlap: tp_comm_overlap_cfg
manual_gc: manual_gc_interval
profile: profile_step_start profile_step_end profile_ranks use_pytorch_profiler
position_embedding_type rope yarn: rotary_base rotary_percent rotary_interleaved use_rope_scaling
position_embedding_type rope yarn: rotary_seq_len_interpolation_factor no_rope_freq mrope_section
position_embedding_type yarn: yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
position_embedding_type yarn: mscale mscale_all_dim
lr_decay_style WSD: lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples
lr_decay_style WSD: lr_wsd_decay_fraction
attention_bias_type t5 bucket: relative_attention_num_buckets relative_attention_max_distance
attention_variant sink: softmax_offset_init
optimizer adam muon: adam_beta1 adam_beta2 adam_eps
optimizer sgd: sgd_momentum
optimizer muon: muon_momentum muon_num_ns_steps muon_scale_mode muon_extra_scale_factor
hybrid_layer_pattern M: mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
hybrid_layer_pattern G: linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
hybrid_layer_pattern G: linear_value_head_dim linear_num_key_heads linear_num_value_heads
"""


def _readers() -> Iterator[Reader]:
    for line in _READ.strip().splitlines():
        needed, _, flags = line.partition(": ")
        name, *values = needed.split()

        def given(args: Namespace, name: str = name, values: list[str] = values) -> bool:
            found = getattr(args, name)
            return any(value in str(found or "") for value in values) if values else bool(found)

        yield Reader(f"{_flag(name)} {' or '.join(values)}".rstrip(), given, flags.split())


def _flag(name: str) -> str:
    return flag_of(FLAGS.get(name, name))


READERS = tuple(_readers())


def unread(args: Namespace) -> Iterator[str]:
    """Yield a line for the given flags that nothing reads."""
    found: dict[str, list[str]] = {}
    for reader in READERS:
        names = [name for name in reader.flags if name in args.given_flags]
        needs, read = reader.needs, reader.given(args)
        if args.multi_latent_attention and "yarn" in needs and "rope" not in needs:
            needs, read = "--rope-type yarn", args.rope_type != "rope"  # it has YaRN of its own
        if names and not read:
            found.setdefault(needs, []).extend(map(_flag, names))
    for needs, flags in found.items():
        yield f"no effect without {needs}: {', '.join(flags)}"
