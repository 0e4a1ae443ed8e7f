"""Command lines, and what is wrong with them: the tables of test_checks.py."""

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 4 --lr 1e-3 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope"
).split()
MOCK = [*MODEL, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"]
GATED = [*MOCK, "--attention-variant", "gated"]
OUTPUT_GATE = ["--gate-position", "output", "--gate-granularity", "elementwise"]

# name -> (flags, one phrase per problem that must be in the message)
REFUSED = {
    "heads-tp": (
        [*MOCK, "--num-attention-heads", "6", "--tensor-model-parallel-size", "4"],
        ["--num-attention-heads 6 is not divisible by --tensor-model-parallel-size 4"],
    ),
    "unknown-variant": (
        [*MOCK, "--attention-variant", "sunk"],
        ["--attention-variant 'sunk' is unknown: choose vanilla, sink, off-by-one, gated"],
    ),
    "negative-coefficient": (
        [*MOCK, "--head-balance-coeff", "-0.5"],
        ["--head-balance-coeff -0.5 is negative"],
    ),
    "negative-decay": (
        [*MOCK, "--head-balance-decay-iters", "-1"],
        ["--head-balance-decay-iters -1 is negative"],
    ),
    "negative-warm-up": (
        [*MOCK, "--head-balance-warmup-iters", "-1"],
        ["--head-balance-warmup-iters -1 is negative"],
    ),
    "warm-up-without-an-end": (
        [*MOCK, "--lr-warmup-iters", "4"],
        ["--lr-warmup-iters 4 does not end before the schedule does, after 4"],
    ),
    "warm-up-of-everything": (
        [*MOCK, "--lr-warmup-fraction", "1.0"],
        ["--lr-warmup-fraction 1.0 is not from 0 up to 1"],
    ),
    "shared-heads": (
        [*MOCK, "--head-balance-shared-heads", "3"],
        ["--head-balance-shared-heads 3 of 4 heads", "at most 2"],
    ),
    "refresh-of-nothing": (
        [*MOCK, "--head-balance-shared-refresh", "3"],
        ["without --head-balance-shared-heads"],
    ),
    "unknown-scope": (
        [*MOCK, "--head-balance-scope", "world"],
        ["'world' is unknown: choose global, data-parallel, microbatch"],
    ),
    "kernel-that-drops-the-sink": (
        [*MOCK, "--attention-backend", "fused"],
        ["--attention-backend fused", "use --attention-kernel"],
    ),
    "kernel-of-another-device": ([*MOCK, "--attention-kernel", "cudnn"], ["'cudnn' cannot run"]),
    "kernel-of-inference": ([*MOCK, "--flash-decode"], ["--flash-decode: it passes by"]),
    "unknown-kernel": ([*MOCK, "--attention-kernel", "flush"], ["'flush'"]),
    "inference-only-spec": (
        [*MOCK, "--transformer-impl", "inference_optimized"],
        ["inference_optimized has no backward pass", "--head-balance-coeff 0"],
    ),
    "no-cuda": (
        [*MOCK, "--distributed-backend", "nccl", "--transformer-impl", "transformer_engine"],
        ["--distributed-backend nccl needs CUDA", "transformer_engine needs CUDA"],
    ),
    "parts-that-need-cuda": (
        [*MOCK, "--profile", "--record-memory-history", "--log-straggler"],
        [
            "--profile needs CUDA",
            "--record-memory-history needs CUDA",
            "--log-straggler needs CUDA",
        ],
    ),
    "async-nothing": ([*MOCK, "--async-save"], ["--async-save without --run-dir or --save"]),
    "async-checkpoints": (
        [
            *[*MOCK, "--save", "somewhere", "--async-save", "--async-strategy", "nvrx"],
            *["--ckpt-format", "torch_dcp", "--async-ckpt-use-cpu-shm"],
        ],
        [
            "--async-strategy nvrx: its writer may outlive a rank",
            "--async-save with --ckpt-format torch_dcp: use torch_dist",
            "--async-ckpt-use-cpu-shm is for --async-strategy nvrx alone",
        ],
    ),
    "exit-without-checkpoint": (
        [*MOCK, "--exit-signal-handler-for-training"],
        ["--exit-signal-handler-for-training ends a run without a checkpoint"],
    ),
    "dropout": ([*MOCK, "--attention-dropout", "0.1"], ["dropout 0.1 breaks the identity"]),
    "no-data": (MODEL, ["no training data", "no tokenizer"]),
    "missing-data": (
        [*MODEL, "--data-path", "nowhere/text", "--tokenizer-model", "nowhere/tokenizer"],
        ["nowhere/text.bin and nowhere/text.idx not found", "nowhere/tokenizer: no such folder"],
    ),
    "softmax-type": ([*MOCK, "--softmax-type", "learnable"], ["say it with --attention-variant"]),
    "experts": (
        MOCK
        + """
        --num-experts 3 --expert-model-parallel-size 2 --moe-router-topk 4
        --tensor-model-parallel-size 2 --moe-token-dispatcher-type flex
        --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion
        """.split(),
        [
            "--num-experts 3 is not divisible by --expert-model-parallel-size 2",
            "--moe-router-topk 4 is more than --num-experts 3",
            "--num-experts with --tensor-model-parallel-size 2 needs --sequence-parallel",
            "--num-experts needs --disable-bias-linear",
            "--moe-token-dispatcher-type flex needs CUDA",
            "--moe-grouped-gemm needs TransformerEngine",
            "--moe-permute-fusion needs TransformerEngine",
            "--moe-router-fusion needs TransformerEngine",
        ],
    ),
    "recompute": (
        [*MOCK, *"--recompute-granularity selective --recompute-modules layernorm mlp".split()],
        [
            "--recompute-modules layernorm needs TransformerEngine",
            "--recompute-modules mlp needs --disable-bias-linear",
        ],
    ),
    "block": (
        MOCK
        + """
        --sandwich-norm --post-norm --residual-clip -1 --fp32-residual-connection --bf16
        --ffn-activation tanh --squared-relu --use-te-activation-func
        --multi-head-addition --delay-wgrad-compute --use-transformer-engine-op-fuser
        """.split(),
        [
            "--residual-clip -1.0: give a positive limit",
            "--sandwich-norm and --post-norm: choose one",
            "--sandwich-norm and --residual-clip: choose one",
            "--post-norm with --fp32-residual-connection",
            "--fp32-residual-connection with --transformer-impl local",
            "--post-norm with --use-transformer-engine-op-fuser",
            "--ffn-activation 'tanh' is unknown: choose relu, gelu, silu, reglu, geglu, swiglu",
            "--ffn-activation tanh and --swiglu: choose one",
            "--ffn-activation tanh and --squared-relu: choose one",
            "--ffn-activation tanh with --use-te-activation-func",
            "--ffn-activation tanh with --use-transformer-engine-op-fuser",
            "--multi-head-addition with --delay-wgrad-compute",
        ],
    ),
    "context-parallel": (
        MOCK
        + """
        --context-parallel-size 3 --cp-comm-type p2p all_gather a2a+p2p p2p --prefix-lm-tokens 3
        --dataloader-inter-document-masking --hybrid-context-parallel
        --hierarchical-context-parallel-sizes 3
        """.split(),
        [
            "--hybrid-context-parallel: its groups change with every batch",
            "--hierarchical-context-parallel-sizes belongs to --cp-comm-type a2a+p2p",
            "--seq-length 64 is not divisible by 2 * --context-parallel-size 3",
            "--dataloader-inter-document-masking with --context-parallel-size 3",
            "--cp-comm-type p2p: a gate needs the log-sum-exp over all keys at once: use all_gat",
            "--cp-comm-type a2a+p2p: a gate needs",
            "--cp-comm-type has 4 values for 2 layers",
            "--prefix-lm-tokens with --cp-comm-type all_gather",
        ],
    ),
    "heads-of-context-parallel-ranks": (
        MOCK
        + """
        --context-parallel-size 2 --cp-comm-type a2a --num-attention-heads 4
        --group-query-attention --num-query-groups 1 --tensor-model-parallel-size 4
        """.split(),
        [
            "--cp-comm-type a2a: --num-attention-heads 4 is not divisible by "
            "--tensor-model-parallel-size 4 * --context-parallel-size 2: use --cp-comm-type all_g",
            "--cp-comm-type a2a: --num-query-groups 4 is not divisible by",
        ],
    ),
    "unknown-flag": (
        [*MOCK, "--head-balance-coef", "1", "--attention-variant", "y"],
        ["unknown: --head-balance-coef 1", "'y' is unknown"],
    ),
    "no-steps": ([*MOCK, "--train-iters", "0"], ["--train-iters 0: use 1 or more"]),
    "hidden-by-heads": (
        [*MOCK, "--num-attention-heads", "5"],
        ["--hidden-size 64 is not divisible by --num-attention-heads 5"],
    ),
    "two-sided-window": ([*MOCK, "--window-size", "15,3"], ["--window-size 15,3: give LEFT,0"]),
    "vocabulary-by-tp": (
        [
            *MOCK,
            "--make-vocab-size-divisible-by",
            "1",
            "--tensor-model-parallel-size",
            "4",
            "--vocab-size",
            "257",
        ],
        ["rows of the embedding are not divisible by --tensor-model-parallel-size 4"],
    ),
    "resume-nothing": ([*MOCK, "--resume"], ["--resume needs --run-dir"]),
    "load-nothing": ([*MOCK, "--load", "nowhere"], ["--load nowhere: no finished checkpoint"]),
    "unknown-names": (
        [
            *MOCK,
            *["--attention-similarity", "cosine", "--attention-normalization", "l2"],
            *["--attention-variant", "k-bias", "--bias-fixed-value", "two"],
        ],
        [
            "--attention-similarity 'cosine' is unknown: choose softmax, sigmoid",
            "--attention-normalization 'l2' is unknown: choose row-sum, none",
            "--bias-fixed-value 'two' is unknown: choose none, unit, uniform",
        ],
    ),
    "biases-without-their-variant": (
        [*MOCK, "--bias-shared-heads", "--bias-fixed-value", "unit"],
        [
            "--bias-shared-heads: not for --attention-variant sink: use k-bias, kv-bias or v-bias",
            "--bias-fixed-value: not for --attention-variant sink: use k-bias, or drop the flag",
        ],
    ),
    "two-values": (
        [*MOCK, "--attention-variant", "kv-bias", "--bias-fixed-value", "uniform"],
        ["--bias-fixed-value: not for --attention-variant kv-bias: use k-bias"],
    ),
    "norm-without-value": (
        [*MOCK, "--attention-variant", "k-bias", "--bias-fixed-value-norm", "-5"],
        ["--bias-fixed-value-norm -5.0 without a value", "norm -5.0: use more than 0"],
    ),
    "sink-group-without-sinks": (
        [*MOCK, "--attention-variant", "vanilla", "--sink-lr-mult", "2"],
        ["--sink-lr-mult 2.0: --attention-variant vanilla has no sink parameters: use sink,"],
    ),
    "negative-sink-group": (
        [*MOCK, "--sink-lr-mult", "-1", "--sink-weight-decay", "-0.1"],
        ["--sink-lr-mult -1.0 is negative", "--sink-weight-decay -0.1 is negative"],
    ),
    "sink-token-without-a-row": (
        [*MOCK, "--sink-token", "--padded-vocab-size", "256"],
        ["--padded-vocab-size 256 has no row for --sink-token beside the 256 tokens"],
    ),
    "similarity-of-a-sink": (
        [*MOCK, "--attention-similarity", "sigmoid", "--fp16", "--attention-kernel", "flash-cpu"],
        [
            "no softmax for --attention-variant sink to add to: use --attention-variant vanilla",
            "has no gate with a gradient (head importance is a proxy, P2.37): set --head-balance-",
            "--attention-kernel flash-cpu computes softmax attention, not --attention-similarity",
            "float16 overflows at 65504: use --bf16",
        ],
    ),
    "softmax-without-its-sum": (
        [*MOCK, "--attention-normalization", "none", "--attention-scale-alpha", "0"],
        ["exponentials of softmax overflow", "--attention-scale-alpha 0.0: use more than 0"],
    ),
    "dropout-of-a-similarity": (
        [
            *[*MOCK, "--attention-similarity", "identity", "--attention-variant", "vanilla"],
            *["--head-balance-coeff", "0", "--attention-dropout", "0.1"],
        ],
        ["dropout 0.1"],
    ),
    "everything": (
        [*MODEL, "--attention-variant", "x", "--head-balance-coeff", "-1", "--resume"],
        ["'x' is unknown", "-1.0 is negative", "no training data", "no tokenizer", "--run-dir"],
    ),
}
ACCEPTED = {
    "tp1": MOCK,
    "tp2": [*MOCK, "--tensor-model-parallel-size", "2", "--vocab-size", "300"],
    "tp1-same-vocabulary": [*MOCK, "--vocab-size", "300"],
    "off-by-one": [*MOCK, "--attention-variant", "off-by-one", "--bf16"],
    "k-bias": [
        *[*MOCK, "--attention-variant", "k-bias", "--bias-shared-heads", "--sink-lr-mult", "2"],
        *[
            "--bias-fixed-value",
            "unit",
            "--bias-fixed-value-norm",
            "5",
            "--sink-weight-decay",
            ".1",
        ],
    ],
    "v-bias-fp16": [*MOCK, "--attention-variant", "v-bias", "--fp16"],
    "sink-token": [*MOCK, "--sink-token", "--vocab-size", "383"],
    "sigmoid": [
        *[*MOCK, "--attention-variant", "vanilla", "--head-balance-coeff", "0", "--bf16"],
        *["--attention-similarity", "sigmoid", "--attention-normalization", "none"],
    ],
    "reglu": [*(f for f in MOCK if f != "--swiglu"), "--ffn-activation", "reglu", "--post-norm"],
    "relu": [*(f for f in MOCK if f != "--swiglu"), "--ffn-activation", "relu"],
    "swiglu": [*MOCK, "--ffn-activation", "swiglu", "--residual-clip", "300"],
    "experts-of-two-ranks": MOCK
    + """
    --disable-bias-linear --num-experts 4 --expert-model-parallel-size 2
    --moe-token-dispatcher-type alltoall
    """.split(),
    "deterministic": [*MOCK, "--deterministic-mode"],
    "context-parallel-window": [*MOCK, "--context-parallel-size", "2", "--window-size", "15,0"],
    "context-parallel-a2a": MOCK
    + """
    --context-parallel-size 2 --cp-comm-type a2a all_gather --group-query-attention
    --num-query-groups 2 --attention-bias-type alibi --position-embedding-type none
    """.split(),
    "context-parallel-prefix": MOCK
    + "--context-parallel-size 2 --cp-comm-type a2a --prefix-lm-tokens 5".split(),
    "masked-per-token-loss": [*MOCK, "--calculate-per-token-loss", "--eod-mask-loss"],
}
