"""The sinks as Megatron sees them: dtype, tensor parallelism, weight decay, checkpoint key."""

import pytest

from tests.distributed.layout import SINGLE, Layout

TASKS = "tests.megatron.layer_tasks"
BF16 = {"bf16": True}


@pytest.mark.parametrize("distributed_optimizer", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("options", [{}, BF16], ids=["float32", "bf16"])
def test_sinks_are_sharded_by_heads_and_not_decayed_and_their_main_weights_are_float32(
    pool, options, distributed_optimizer
):
    facts = pool.run(
        f"{TASKS}:softmax_offset_facts",
        Layout(tp=2),
        distributed_optimizer=distributed_optimizer,
        **options,
    )
    for rank, fact in enumerate(facts):
        assert fact["grad_dtype"] == "torch.float32"
        assert [fact["dtype"]] == fact["other_dtypes"]
        assert fact["dtype"] == ("torch.bfloat16" if options else "torch.float32")
        assert fact["is_the_main_weight"]
        assert fact["moved"] > 1e-4  # a step of about the learning rate, 1e-3
        assert fact["finer_than_bf16"]
        assert fact["tensor_model_parallel"] is True
        assert (fact["partition_dim"], fact["partition_stride"]) == (0, 1)
        # All vectors of the model, and nothing else, are updated without decay.
        vectors = fact["weight_decays"].pop("elements of vectors")
        assert set(fact["weight_decays"]) == {"0.0", "0.1"}
        assert sum(fact["weight_decays"]["0.0"]) == sum(vectors)
        # Megatron counts the layers of the pattern, so that the FFN of a block is one of them.
        sinks = "self_attention.core_attention.softmax_offset"
        assert fact["keys"] == [f"decoder.layers.{layer}.{sinks}" for layer in (0, 2)]
        assert fact["global_shapes"] == [(4,)] * 2
        assert fact["local_shapes"] == [(2,)] * 2
        assert fact["global_offsets"] == [(2 * rank,)] * 2


def test_padded_vocabulary_does_not_depend_on_the_layout(pool):
    # 130 rows: Megatron would pad them to 256 under TP=1 and TP=2, and to 512 under TP=4.
    assert pool.run(f"{TASKS}:vocabulary_rows", SINGLE, vocabulary=130) == [(130, 130)]
    assert pool.run(f"{TASKS}:vocabulary_rows", Layout(tp=2), vocabulary=130) == [(65, 65)] * 2
