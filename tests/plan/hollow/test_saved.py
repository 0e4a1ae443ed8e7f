"""What a plan says of tensors saved for backward, against a step that computes on the CPU, and
against fused kernels by their stand-ins."""

import pytest

from tests.distributed.pool import free_port
from tests.plan.hollow.test_plan import ELEMENTWISE, GROUPS, MOE, UNTIED, flags_of

TOKENS, HIDDEN, HEADS = 256, 256, 8
CORE = ("self_attention.core_attention", "CoreAttention")
# Without Megatron's fused SwiGLU, which the CPU does not have, and with the CPU's gate kernels.
AS_ON_THE_CPU = ["--no-bias-swiglu-fusion", "--attention-kernel", "auto+torch"]
# The batch is copied to the GPU, where it is kept; on the CPU it is the data loader's.
BATCH = {"embedding.word_embeddings", ""}


def by_module(rows):
    """{(module, class): (layers, bytes)} of all but the batch, and of RMSNorms bytes alone."""
    found = {(row["module"], row["kind"]): (row["layers"], row["bytes"]) for row in rows}
    assert len(found) == len(rows)
    norms = {what: found.pop(what) for what in list(found) if what[1] == "RMSNorm"}
    outside = {what for what in found if what[0] in BATCH and what[1] != "TransformerLayer"}
    return {what: found[what] for what in found if what not in outside}, norms


@pytest.mark.parametrize(
    "text",
    [f"{GROUPS} {UNTIED}", f"{ELEMENTWISE} {GROUPS}", MOE],
    ids=["sink", "elementwise", "experts"],
)
def test_saved_bytes_are_those_of_a_step_that_computes(gpu, pool, text):
    flags = flags_of(text, 4, 1)
    few = [*flags, "--num-workers", "0", "--eval-iters", "0"]
    task = "tests.plan.tasks:saved_by_a_step"
    computed, norms = by_module(pool.run(task, flags=few, ranks=1, port=free_port())[0])
    plan = gpu.run("plan_tasks:step", flags=[*flags, *AS_ON_THE_CPU])
    told, norms_told = by_module(plan["saved"])
    if text == MOE:
        # With experts, its output and LSE are still referenced on the CPU when the step is over,
        # and so count as tensors that stay.
        assert told.pop(CORE)[1] - computed.pop(CORE)[1] == 4 * TOKENS * (2 * HIDDEN + 4 * HEADS)
    assert told == computed
    # A norm saves its input and 1 / rms. On the CPU torch composes it of operations in float32,
    # which save two tensors of them.
    assert norms_told.keys() == norms.keys()
    for what, (layers, size) in norms_told.items():
        tokens = TOKENS * max(1, layers)
        assert size == tokens * (2 * HIDDEN + 4), what
        assert norms[what] == (layers, tokens * (8 * HIDDEN + 4)), what
    # And the allocator holds no more: the loss, and its parts.
    for step in plan["steps"]:
        assert 0 <= step["held"] - sum(row["bytes"] for row in step["saved"]) < 2048


@pytest.mark.parametrize("package", ["flash-attn-2", "apex"])
def test_packages_that_save_the_same(gpu, package):
    """Stepped with a stand-in of the package's host side."""
    flags = flags_of("", 4, 2)
    without = gpu.run("plan_tasks:step", flags=flags)
    plan = gpu.run("plan_tasks:step", flags=flags, package=package)
    if package == "apex":
        assert "apex" in without["job"]["fused"]
        assert "apex" not in plan["job"]["fused"]
    else:
        assert plan["job"]["attention_kernel"] == package
    assert plan["saved"] == without["saved"]
    assert [s["held"] for s in plan["steps"]] == [s["held"] for s in without["steps"]]
