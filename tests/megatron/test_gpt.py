"""The trainer's HybridModel equals Megatron's GPTModel to the bit, in every layout and option."""

import pytest

from tests.distributed import merging
from tests.distributed.cases import FULL, SELECTIVE, SP, TRAIN, name_of
from tests.distributed.layout import SINGLE, Layout

DISTRIBUTED = {"distributed_optimizer": True}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
GATED = {"attention_variant": "gated", "qk_layernorm": True}
FOUR = {"num_layers": 4}
DROPOUT = {"hidden_dropout": 0.1}
LOSS_OF_EXPERTS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
SINUSOID = {"position_embedding_type": "learned_absolute", "sinusoidal_position_embedding": True}
T5 = {"post_norm": True, "attention_bias_type": "t5", "position_embedding_type": "none"}
WINDOWS = FOUR | {"window_size": (8, 0)}
LAYOUT = {"pipeline_model_parallel_layout": [["embedding"], [*["decoder"] * 4, "loss"]]}
ENDS = {
    "account_for_embedding_in_pipeline_split": True,
    "account_for_loss_in_pipeline_split": True,
}
PP, VPP = Layout(pp=2), Layout(pp=2, vpp=2)
CASES = [
    (SINGLE, {}),
    (SINGLE, GATED | {"tied": True}),
    (SINGLE, {"sandwich_norm": True, "ffn_activation": "geglu"}),
    (SINGLE, T5),
    (SINGLE, {"attention_variant": "k-bias", "norm_without_gain": True, "zero_init_outputs": True}),
    (SINGLE, SINUSOID | {"embedding_norm": True, "logit_softcap": 15.0}),
    (SINGLE, WINDOWS | {"attention_variant_layers": [1, 0, 0, 1]}),
    (SINGLE, WINDOWS | {"window_attn_skip_freq": [1, 0, 1, 0]}),
    (SINGLE, FOUR | GATED | {"attention_variant_layers": [0, 1, 0, 1]}),
    (SINGLE, FOUR | {"no_rope_freq": [0, 1, 0, 1], "rotary_interleaved": True}),
    (SINGLE, SELECTIVE | {"recompute_modules": ["core_attn", "mlp"]}),
    (SINGLE, {"bf16": True}),
    (SINGLE, {"mtp_num_layers": 2}),
    (SINGLE, MOE | FOUR | {"moe_layer_freq": 2, "mtp_num_layers": 1} | LOSS_OF_EXPERTS),
    (Layout(tp=2, sp=True), SP | DROPOUT | GATED),
    (Layout(tp=2, sp=True), SP | FULL | {"mtp_num_layers": 1}),
    (PP, FULL | DISTRIBUTED | DROPOUT),
    (PP, FOUR | LAYOUT),
    (PP, {"tied": True}),
    (PP, {"mtp_num_layers": 1}),
    (PP, FOUR | {"num_layers_in_first_pipeline_stage": 1}),
    (VPP, FOUR | GATED | SELECTIVE),
    (VPP, ENDS),
    (Layout(cp=2), {"head_balance_scope": "microbatch"}),
    (Layout(dp=2, ep=2), MOE | DISTRIBUTED | LOSS_OF_EXPERTS),
]


@pytest.mark.parametrize(("layout", "options"), CASES, ids=name_of)
def test_the_model_equals_a_gpt_model_to_the_bit(pool, layout, options):
    """Initial weights, loss, statistics, gradients, their norm, and weights after three steps."""
    found = pool.run(TRAIN, layout, **options)
    wanted = pool.run(TRAIN, layout, gpt=True, **options)
    merging.assert_same_training(found, wanted, 0.0)
    if options.get("recompute_granularity") != "full":
        assert [r["forward_calls"] for r in found] == [r["forward_calls"] for r in wanted]
