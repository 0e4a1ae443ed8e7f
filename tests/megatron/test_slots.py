"""The parameters of the bias variants and of the MLP similarity, as Megatron sees them."""

import pytest

from megasink.attention.variants import variants
from tests.distributed.layout import SINGLE, Layout

FACTS = "tests.megatron.layer_tasks:bias_facts"
BY_HEADS = {"dtype": "torch.bfloat16", "shape": (2, 16), "by heads": True, "whole": {(4, 16)}}
SHARED = {"dtype": "torch.bfloat16", "shape": (16,), "by heads": False, "whole": {(16,)}}


@pytest.mark.parametrize(
    ("variant", "names"),
    [("k-bias", ["key_bias"]), ("kv-bias", ["key_bias", "value_bias"]), ("v-bias", ["value_bias"])],
)
@pytest.mark.parametrize("shared", [False, True], ids=["heads", "shared"])
def test_biases_are_sharded_by_query_heads(pool, variant, names, shared):
    """One group for four heads: a bias per group would be one, on both ranks."""
    options = {"num_query_groups": 1, "bf16": True, "bias_shared_heads": shared}
    facts = pool.run(FACTS, Layout(tp=2), attention_variant=variant, **options)
    for rank, found in enumerate(facts):
        assert found.pop("softmax_type") == "vanilla"
        assert list(found) == names
        for fact in found.values():
            assert fact.pop("offsets") == ([0, 0] if shared else [2 * rank] * 2)
            assert fact == (SHARED if shared else BY_HEADS)


def test_the_mlp_is_an_ordinary_weight_on_every_rank(pool):
    options = {"attention_similarity": "mlp", "head_balance_coeff": 0.0, "bf16": True}
    for found in pool.run(FACTS, Layout(tp=2), attention_variant="vanilla", **options):
        found.pop("softmax_type")
        assert list(found) == ["similarity_mlp.fc1.weight", "similarity_mlp.fc2.weight"]
        for fact in found.values():
            assert (fact["dtype"], fact["shape"]) == ("torch.bfloat16", (16, 16))
            assert fact["by heads"] is False
            assert fact["whole"] == {(16, 16)}


@pytest.mark.parametrize(
    "options",
    [
        *({"attention_variant": v.name} for v in variants()),
        {"attention_variant": "vanilla", "attention_similarity": "mlp", "head_balance_coeff": 0.0},
        {"attention_variant": "gated", "gate_input": "none"},
        {
            "attention_variant": "gated",
            "gate_position": "output",
            "gate_granularity": "elementwise",
        },
        {"attention_variant": "sink", "sdpa_output_norm": "rmsnorm"},
        {"attention_bias_type": "t5", "position_embedding_type": "none"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_modules_with_parameters_are_called(pool, options):
    """--overlap-param-gather waits for the parameters of a module before that module is called."""
    assert pool.run("tests.megatron.context_tasks:uncalled", SINGLE, **options) == [[]]
