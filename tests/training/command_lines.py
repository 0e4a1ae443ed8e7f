"""Command lines, and what is wrong with them: the tables of test_checks.py.

A case is its name and flags, and under it a line for each problem, of which the message must hold
that phrase; deeper lines go on with the one above.
"""

import re
import shlex

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 4 --lr 1e-3 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope"
).split()
MOCK = [*MODEL, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"]
GATED = [*MOCK, "--attention-variant", "gated"]
UNGATED = [flag for flag in MOCK if flag != "--swiglu"]


def accepted(start: list[str], text: str) -> dict[str, list[str]]:
    """{name: flags} of cases whose flags come after others."""
    return {name: flags for name, (flags, _) in refused(start, text).items()}


def refused(start: list[str], text: str) -> dict[str, tuple[list[str], list[str]]]:
    """{name: (flags, one phrase per problem)} of cases whose flags come after others."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for line in re.sub(r"\n {4}", " ", text.strip()).splitlines():
        if line.startswith("  ! "):
            list(found.values())[-1][1].append(line.removeprefix("  ! "))
        else:
            name, _, flags = line.partition(":")
            found[name] = ([*start, *shlex.split(flags)], [])
    return found


REFUSED = refused(
    MOCK,
    """
heads-tp: --num-attention-heads 6 --tensor-model-parallel-size 4
  ! --num-attention-heads 6 is not divisible by --tensor-model-parallel-size 4
unknown-variant: --attention-variant sunk
  ! --attention-variant 'sunk' is unknown: choose vanilla, sink, off-by-one, gated
negative-coefficient: --head-balance-coeff -0.5
  ! --head-balance-coeff -0.5 is negative
warm-up-without-an-end: --lr-warmup-iters 4
  ! --lr-warmup-iters 4 is not less than the length of the schedule, 4
warm-up-of-everything: --lr-warmup-fraction 1.0
  ! --lr-warmup-fraction 1.0: use 0 or more, and less than 1
shared-heads: --head-balance-shared-heads 3
  ! --head-balance-shared-heads 3 of 4 heads
  ! at most 2
refresh-of-nothing: --head-balance-shared-refresh 3
  ! without --head-balance-shared-heads
unknown-scope: --head-balance-scope world
  ! 'world' is unknown: choose global, data-parallel, microbatch
kernel-of-another-device: --attention-kernel cudnn
  ! --attention-kernel cudnn needs CUDA, but no CUDA device is present: use auto
kernel-of-inference: --flash-decode
  ! --flash-decode: it bypasses
unknown-kernel: --attention-kernel flush
  ! 'flush'
inference-only-spec: --transformer-impl inference_optimized
  ! inference_optimized has no backward pass
  ! --head-balance-coeff 0
no-cuda: --distributed-backend nccl --transformer-impl transformer_engine
  ! --distributed-backend nccl needs CUDA
  ! transformer_engine needs CUDA
parts-that-need-cuda: --profile --record-memory-history --log-straggler
    --gpu-sniff-test-interval 5
  ! --profile needs CUDA
  ! --record-memory-history needs CUDA
  ! --log-straggler needs CUDA
  ! --gpu-sniff-test-interval needs CUDA
async-nothing: --async-save
  ! --async-save needs --run-dir or --save
async-checkpoints: --save somewhere --async-save --async-strategy nvrx --ckpt-format torch_dcp
    --async-ckpt-use-cpu-shm
  ! --async-save or --async-strategy: its writer may outlive a rank
  ! --async-save or --ckpt-format: only torch_dist
  ! --async-save or --async-ckpt-use-cpu-shm: it works only with --async-strategy nvrx
exit-without-checkpoint: --exit-signal-handler-for-training
  ! --exit-signal-handler-for-training: the run would end without
dropout: --attention-dropout 0.1
  ! dropout 0.1 breaks the identity
softmax-type: --softmax-type learnable --attention-variant gated
  ! use --attention-variant sink
experts: --num-experts 3 --expert-model-parallel-size 2 --moe-router-topk 4
    --tensor-model-parallel-size 2 --moe-token-dispatcher-type flex --moe-grouped-gemm
    --moe-permute-fusion --moe-router-fusion
  ! --num-experts 3 is not divisible by --expert-model-parallel-size 2
  ! --moe-router-topk 4 is more than --num-experts 3
  ! --num-experts with --tensor-model-parallel-size 2 needs --sequence-parallel
  ! --num-experts 3 with biases and --tensor-model-parallel-size 2
  ! --moe-token-dispatcher-type flex needs CUDA
  ! --moe-grouped-gemm needs TransformerEngine
  ! --moe-permute-fusion needs TransformerEngine
  ! --moe-router-fusion needs TransformerEngine
tensor-parallel-experts-over-gloo: --num-experts 4 --expert-model-parallel-size 2
    --tensor-model-parallel-size 2 --sequence-parallel --disable-bias-linear
    --moe-token-dispatcher-type alltoall
  ! alltoall with 2 expert- x 2 tensor-parallel ranks
parameters-in-fp8: --fp8-format hybrid --fp8-param-gather
  ! --fp8-format or --fp8-param-gather: initial weights are drawn in bf16
recompute: --recompute-granularity selective --recompute-modules layernorm mlp
  ! --recompute-modules layernorm needs TransformerEngine
  ! --recompute-modules mlp needs --disable-bias-linear
block: --sandwich-norm --post-norm --residual-clip -1 --fp32-residual-connection --bf16
    --ffn-activation tanh --multi-head-addition --delay-wgrad-compute
    --use-transformer-engine-op-fuser
  ! --residual-clip -1.0: use more than 0
  ! --sandwich-norm or --post-norm: a layer has one of them
  ! --sandwich-norm or --residual-clip
  ! --post-norm or --fp32-residual-connection
  ! --fp32-residual-connection with --transformer-impl local
  ! --post-norm or --use-transformer-engine-op-fuser
  ! --ffn-activation 'tanh' is unknown: choose relu, gelu, silu, reglu, geglu, swiglu
  ! --multi-head-addition or --delay-wgrad-compute
activations: --ffn-activation relu --squared-relu --use-te-activation-func
    --use-transformer-engine-op-fuser
  ! --ffn-activation relu and --swiglu: choose one
  ! --ffn-activation relu and --squared-relu: choose one
  ! --ffn-activation or --use-te-activation-func
  ! --ffn-activation or --use-transformer-engine-op-fuser
context-parallel: --context-parallel-size 3 --cp-comm-type p2p all_gather a2a+p2p p2p
    --prefix-lm-tokens 3 --hybrid-context-parallel --hierarchical-context-parallel-sizes 3
  ! --hybrid-context-parallel: its groups change with every batch
  ! --hierarchical-context-parallel-sizes: of --cp-comm-type a2a+p2p
  ! --seq-length 64 is not divisible by 2 * --context-parallel-size 3
  ! --cp-comm-type a2a+p2p is not supported: use all_gather, a2a, p2p
  ! --cp-comm-type has 4 values for 2 layers
  ! --cp-comm-type p2p with --prefix-lm-tokens: use --cp-comm-type all_gather
  ! --prefix-lm-tokens with --cp-comm-type all_gather
ring: --context-parallel-size 2 --cp-comm-type p2p --window-size 15,0
    --dataloader-inter-document-masking --attention-bias-type alibi
    --position-embedding-type none --attention-variant v-bias
  ! --cp-comm-type p2p with --window-size: use
  ! --cp-comm-type p2p with --attention-bias-type alibi: use
  ! --cp-comm-type p2p with --attention-variant v-bias: use
  ! --cp-comm-type p2p with --dataloader-inter-document-masking: use
heads-of-context-parallel-ranks: --context-parallel-size 2 --cp-comm-type a2a
    --num-attention-heads 4 --group-query-attention --num-query-groups 1
    --tensor-model-parallel-size 4
  ! --cp-comm-type a2a: --num-attention-heads 4 is not divisible by --tensor-model-parallel-size
    4 * --context-parallel-size 2: use --cp-comm-type all_g
  ! --cp-comm-type a2a: --num-query-groups 4 is not divisible by
unknown-flag: --head-balance-coef 1 --attention-variant y
  ! unknown: --head-balance-coef 1
  ! 'y' is unknown
no-steps: --train-iters 0
  ! --train-iters 0: use 1 or more
hidden-by-heads: --num-attention-heads 5
  ! --hidden-size 64 is not divisible by --num-attention-heads 5
two-sided-window: --window-size 15,3
  ! --window-size 15,3: use LEFT,0
vocabulary-by-tp: --make-vocab-size-divisible-by 1 --tensor-model-parallel-size 4 --vocab-size
    257
  ! rows of the embedding are not divisible by --tensor-model-parallel-size 4
resume-nothing: --resume
  ! --resume needs --run-dir
load-nothing: --load nowhere
  ! --load nowhere: no finished checkpoint
unknown-names: --attention-similarity cosine --attention-normalization l2 --attention-variant
    k-bias --bias-fixed-value two
  ! --attention-similarity 'cosine' is unknown: choose softmax, sigmoid
  ! --attention-normalization 'l2' is unknown: choose row-sum, none
  ! --bias-fixed-value 'two' is unknown: choose none, unit, uniform
biases-without-their-variant: --bias-shared-heads --bias-fixed-value unit
  ! --bias-shared-heads: not for --attention-variant sink: use k-bias, kv-bias or v-bias
  ! --bias-fixed-value: not for --attention-variant sink: use k-bias, or drop the flag
two-values: --attention-variant kv-bias --bias-fixed-value uniform
  ! --bias-fixed-value: not for --attention-variant kv-bias: use k-bias
norm-without-value: --attention-variant k-bias --bias-fixed-value-norm -5
  ! --bias-fixed-value-norm -5.0 without a value
  ! norm -5.0: use more than 0
sink-group-without-sinks: --attention-variant vanilla --sink-lr-mult 2
  ! --sink-lr-mult 2.0: --attention-variant vanilla has no sink parameters: use sink,
negative-sink-group: --sink-lr-mult -1 --sink-weight-decay -0.1
  ! --sink-lr-mult -1.0 is negative
  ! --sink-weight-decay -0.1 is negative
sink-token-without-a-row: --sink-token --padded-vocab-size 256
  ! --padded-vocab-size 256 leaves no row for --sink-token after the 256 tokens
similarity-of-a-sink: --attention-similarity sigmoid --fp16 --attention-kernel flash-cpu
  ! replaces the softmax that --attention-variant sink needs: use --attention-variant vanilla
  ! similarity sigmoid has no gradient (importance is a proxy, P2.37): use 0
  ! --attention-kernel flash-cpu computes softmax attention, not --attention-similarity
  ! float16 overflows at 65504: use --bf16
softmax-without-its-sum: --attention-normalization none --attention-scale-alpha 0
  ! exponentials of softmax overflow
  ! --attention-scale-alpha 0.0: use more than 0
dropout-of-a-similarity: --attention-similarity identity --attention-variant vanilla
    --head-balance-coeff 0 --attention-dropout 0.1
  ! dropout 0.1
""",
) | refused(
    MODEL,
    """
no-data:
  ! no training data
  ! no tokenizer
missing-data: --data-path nowhere/text --tokenizer-model nowhere/tokenizer
  ! nowhere/text.bin and nowhere/text.idx not found
  ! nowhere/tokenizer: no such folder
everything: --attention-variant x --head-balance-coeff -1 --resume
  ! 'x' is unknown
  ! -1.0 is negative
  ! no training data
  ! no tokenizer
  ! --run-dir
""",
)
ACCEPTED = accepted(
    MOCK,
    """
tp1:
tp2: --tensor-model-parallel-size 2 --vocab-size 300
tp1-same-vocabulary: --vocab-size 300
off-by-one: --attention-variant off-by-one --bf16
k-bias: --attention-variant k-bias --bias-shared-heads --sink-lr-mult 2 --bias-fixed-value unit
    --bias-fixed-value-norm 5 --sink-weight-decay .1
v-bias-fp16: --attention-variant v-bias --fp16
sink-token: --sink-token --vocab-size 383
sigmoid: --attention-variant vanilla --head-balance-coeff 0 --bf16 --attention-similarity
    sigmoid --attention-normalization none
swiglu: --ffn-activation swiglu --residual-clip 300
experts-of-two-ranks: --disable-bias-linear --num-experts 4 --expert-model-parallel-size 2
    --moe-token-dispatcher-type alltoall
deterministic: --deterministic-mode
context-parallel-documents: --context-parallel-size 2 --dataloader-inter-document-masking
    --cp-comm-type a2a all_gather --calculate-per-token-loss
context-parallel-ring: --context-parallel-size 2 --cp-comm-type p2p
context-parallel-window: --context-parallel-size 2 --window-size 15,0
context-parallel-a2a: --context-parallel-size 2 --cp-comm-type a2a all_gather
    --group-query-attention --num-query-groups 2 --attention-bias-type alibi
    --position-embedding-type none
context-parallel-prefix: --context-parallel-size 2 --cp-comm-type a2a --prefix-lm-tokens 5
masked-per-token-loss: --calculate-per-token-loss --eod-mask-loss
""",
) | accepted(
    UNGATED,
    """
reglu: --ffn-activation reglu --post-norm
relu: --ffn-activation relu
""",
)
