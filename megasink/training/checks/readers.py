"""Flags that only another flag makes Megatron read: without it they have no effect.

A line says so, because Megatron trains the same model without them. A flag that was meant to change
the model, and for which there is another one, is refused.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import NamedTuple

from megasink.options.flags import flag_of
from megasink.options.megatron_flags import FLAGS


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
        latent = args.multi_latent_attention and "yarn" in reader.needs  # it has YaRN of its own
        if names and not (reader.given(args) or latent):
            found.setdefault(reader.needs, []).extend(map(_flag, names))
    for needs, flags in found.items():
        yield f"no effect without {needs}: {', '.join(flags)}"
