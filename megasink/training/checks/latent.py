"""Checks of latent attention (--multi-latent-attention)."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.attention.variants import is_variant, variant
from megasink.attention.variants.gates import fits_latent

_WIDTHS = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def problems(args: Namespace) -> Iterator[str]:
    if not args.multi_latent_attention:
        return
    name = args.attention_variant
    if is_variant(name) and not fits_latent(variant(name), args):
        yield f"--attention-variant {name} has biases, which latent attention does not support"
    if (positions := args.position_embedding_type) != "rope":
        yield (
            f"--position-embedding-type {positions}: latent attention rotates a part of each head: "
            "use rope (--rope-type yarn extends the context)"
        )
    if args.yarn_correction_range_round_to_int is False:
        yield "--no-yarn-correction-range-round-to-int: latent attention always rounds: drop it"
    if args.q_lora_rank is not None and args.q_lora_rank < 1:
        yield f"--q-lora-rank {args.q_lora_rank}: give 1 or more, or drop the flag"
    for width in _WIDTHS:
        if getattr(args, width) < 1:
            yield f"--{width.replace('_', '-')} {getattr(args, width)}: give 1 or more"
    keys, values = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    if args.qk_pos_emb_head_dim % 2:
        yield f"--qk-pos-emb-head-dim {args.qk_pos_emb_head_dim} is odd: give an even number"
    if values > keys:
        yield (
            f"--v-head-dim {values} is wider than keys ({keys}, --qk-head-dim plus "
            "--qk-pos-emb-head-dim): values may only be narrower"
        )
    if args.context_parallel_size > 1 and {*args.cp_comm_type} != {"all_gather"}:
        yield (
            f"--cp-comm-type {' '.join(args.cp_comm_type)}: latent attention supports only "
            "all_gather: use --cp-comm-type all_gather"
        )
    ranks = args.tensor_model_parallel_size
    if args.transformer_impl != "local" or ranks < 2:
        return
    # Megatron's local layers share the rows of the down-projections among the ranks.
    latents = {"--q-lora-rank": args.q_lora_rank or 0}
    latents["--kv-lora-rank plus --qk-pos-emb-head-dim"] = (
        args.kv_lora_rank + args.qk_pos_emb_head_dim
    )
    for flag, rows in latents.items():
        if rows % ranks:
            yield f"{flag} ({rows}) is not divisible by --tensor-model-parallel-size {ranks}"
