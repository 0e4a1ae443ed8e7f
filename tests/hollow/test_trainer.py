"""Three steps of the trainer as a rank of each layout: what the host does to the device in one.

Every mechanism and every layout is here, not every pair of them. Values are 0 where a kernel would
have written them, so no number is tested.
"""

import shlex

import pytest

from tests.hollow.allowed import unexpected

MODEL = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --bf16 --head-balance-coeff 1e-3 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--num-workers 0 --eval-iters 0 --eval-interval 100"
)
GROUPS = "--group-query-attention --num-query-groups 2"
GATED, ELEMENTWISE = "--attention-variant gated", "--gate-granularity elementwise"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type allgather"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LEARNED = "--position-embedding-type learned_absolute"  # Megatron's unfused RoPE reads documents
TP, SP = "--tensor-model-parallel-size 2", "--sequence-parallel"
PP, CP = "--pipeline-model-parallel-size", "--context-parallel-size 2"
VPP = "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2"

# name: (flags, rank, ranks)
CASES = {
    "vanilla": ("--attention-variant vanilla", 0, 1),
    "sink-groups": (f"--attention-variant sink {GROUPS}", 0, 1),
    "off-by-one-window": ("--attention-variant off-by-one --window-size 63,0", 0, 1),
    "k-bias": ("--attention-variant k-bias", 0, 1),
    "kv-bias-window": ("--attention-variant kv-bias --window-size 63,0", 0, 1),
    "v-bias": ("--attention-variant v-bias", 0, 1),
    "headwise": (GATED, 0, 1),
    "headwise-bias": (f"{GATED} --add-qkv-bias --qk-layernorm {GROUPS}", 0, 1),
    "elementwise": (f"{GATED} {ELEMENTWISE}", 0, 1),
    "elementwise-shared": (f"{GATED} {ELEMENTWISE} --gate-shared-heads", 0, 1),
    "value-gate": (f"{GATED} --gate-position value", 0, 1),
    "output-gate": (f"{GATED} {ELEMENTWISE} --gate-position output", 0, 1),
    "gate-parameter-norm": (f"{GATED} --gate-input none --sdpa-output-norm rmsnorm", 0, 1),
    "no-balance-loss": ("--attention-variant sink --head-balance-coeff 0", 0, 1),
    "shared-heads": ("--head-balance-shared-heads 1", 0, 1),
    "microbatch-scope": ("--head-balance-scope microbatch", 0, 1),
    "packed": (f"--dataloader-inter-document-masking {LEARNED}", 0, 1),
    "observed": ("--log-interval 1", 0, 1),
    "recompute": (f"{FULL} {GATED}", 0, 1),
    "tensor": (f"{TP} {GATED}", 0, 2),
    "tensor-sequence": (f"{TP} {SP} {GATED} {GROUPS}", 1, 2),
    "pipeline-first": (f"{PP} 2 --attention-variant vanilla", 0, 2),
    "pipeline-last": (f"{PP} 2 {GATED}", 1, 2),
    "pipeline-middle": (f"{PP} 4 --num-layers 4", 1, 4),
    "interleaved-first": (f"{PP} 2 {VPP} --global-batch-size 8", 0, 2),
    "interleaved-last": (f"{PP} 2 {VPP} {GATED} {ELEMENTWISE}", 1, 2),
    "context": (f"{CP} {GATED}", 0, 2),
    "context-heads": (f"{CP} --cp-comm-type a2a", 1, 2),
    "data": ("--head-balance-scope data-parallel --global-batch-size 16", 2, 4),
    "experts": (f"{EXPERTS} --expert-model-parallel-size 2", 1, 2),
    "all-first": (f"{TP} {SP} {PP} 2 {CP} {FULL} --global-batch-size 16", 0, 32),
    "all-last": (f"{TP} {SP} {PP} 2 {CP} {GATED} --global-batch-size 16", 31, 32),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step(gpu, name):
    flags, rank, ranks = CASES[name]
    flags = shlex.split(f"{MODEL} {flags}")
    found = gpu.run("trainer_tasks:step", flags=flags, rank=rank, ranks=ranks)
    assert unexpected(found, logged="--log-interval" in flags) == []
    assert found["misplaced"] == []
