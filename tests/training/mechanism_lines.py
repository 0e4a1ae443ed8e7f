"""Command lines about gates, masks and positions: tables of test_checks.py."""

from tests.training.command_lines import GATED, MOCK, accepted, refused

REFUSED = refused(
    GATED,
    """
unknown-gate: --gate-position g1 --gate-granularity x --sdpa-output-norm y
  ! --gate-position 'g1' is unknown: choose sdpa, value, key, query, output
  ! --gate-granularity 'x' is unknown: choose headwise, elementwise
  ! --sdpa-output-norm 'y' is unknown: choose none, rmsnorm, silu
gate-of-the-output: --gate-position output --gate-shared-heads
  ! add --gate-granularity elementwise
  ! --gate-shared-heads with --gate-position output
gate-inside-transformer-engine: --gate-position output --gate-granularity elementwise
    --transformer-impl transformer_engine
  ! --gate-position output needs the normed hidden state
gate-of-part-of-a-group: --gate-position key --tensor-model-parallel-size 2
    --group-query-attention --num-query-groups 1
  ! --gate-position key with 1 key/value groups on --tensor-model-parallel-size 2
gate-under-a-norm: --gate-position query --qk-layernorm
  ! --gate-position query with a headwise gate and --qk-layernorm
muon: --optimizer muon --fp16 --use-distributed-optimizer --muon-scalar-optimizer lion
    --tensor-model-parallel-size 2 --group-query-attention --num-query-groups 1
  ! --optimizer muon with --fp16: use --bf16
  ! --optimizer muon with --use-distributed-optimizer fails in Megatron without --bf16
  ! --optimizer muon with 1 key/value groups on --tensor-model-parallel-size 2
rates-of-both-ends: --embedding-lr 0.2 --output-lr -1 --decoupled-lr 0.1 --use-mup
  ! --output-lr -1.0: use more than 0
  ! --embedding-lr or --decoupled-lr
  ! --output-lr or --use-mup
  ! --embedding-lr and --output-lr: embedding and output layer are one matrix
muon-with-ranks-for-each-replica: --optimizer dist_muon
  ! --optimizer dist_muon is Megatron's old name: use --optimizer muon
gates-in-some-layers: --gate-granularity elementwise --attention-variant-layers [1,0]
    --optimizer muon --match-ffn-width
  ! --attention-variant-layers with --optimizer muon and elementwise gates
  ! --match-ffn-width or --attention-variant-layers
no-width-left: --gate-granularity elementwise --match-ffn-width --ffn-hidden-size 64
  ! the gate adds 4,160 parameters per layer
  ! less than 128 would be left
""",
) | refused(
    MOCK,
    """
sinks-nowhere: --attention-variant-layers full --window-size 15,0
  ! --attention-variant-layers full: no layer is chosen (--window-size, --window-attn-skip-freq)
sinks-of-more-layers: --attention-variant-layers [1,0]*2
  ! --attention-variant-layers [1,0,1,0]: 4 entries for 2 layers
sinks-in-all-layers: --attention-variant-layers [1,1] --attention-variant vanilla
  ! --attention-variant-layers [1,1]: all layers are chosen
  ! --attention-variant-layers has no effect with --attention-variant vanilla
sinks-in-some-layers-of-a-hybrid: --attention-variant-layers [1,0,0,0]
    --hybrid-layer-pattern *-*-
  ! --attention-variant-layers or --hybrid-layer-pattern
no-pattern-of-layers: --attention-variant-layers [1]+open
  ! --attention-variant-layers '[1]+open'
prediction: --mtp-num-layers 1 --dataloader-inter-document-masking --post-norm
    --norm-without-gain --embedding-norm --pipeline-model-parallel-size 2
  ! --mtp-num-layers with --pipeline-model-parallel-size 2 and one weight
  ! --mtp-num-layers or --dataloader-inter-document-masking
  ! --mtp-num-layers or --post-norm
  ! --mtp-num-layers or --norm-without-gain
  ! --mtp-num-layers or --embedding-norm
gate-without-a-gate: --gate-position value --gate-shared-heads
  ! --gate-position, --gate-shared-heads: not for --attention-variant sink: use gated
megatrons-own-gate: --attention-output-gate --attention-variant sink
  ! --attention-variant gated --gate-granularity elementwise
norm-of-a-sink: --sdpa-output-norm rmsnorm
  ! --sdpa-output-norm rmsnorm with --attention-variant sink
  ! use vanilla, gated, kv-bias
norm-of-a-key-of-no-value: --sdpa-output-norm rmsnorm --attention-variant k-bias
  ! --sdpa-output-norm rmsnorm with --attention-variant k-bias
nothing-to-match: --match-ffn-width
  ! --match-ffn-width without a gate has nothing to match
s-by-s-masks: --reset-attention-mask --position-embedding-type learned_absolute
  ! --reset-attention-mask: S x S masks: use --dataloader-inter-document-masking
similarity-under-a-mask: --attention-variant vanilla --head-balance-coeff 0
    --attention-similarity sigmoid --prefix-lm-tokens 3
  ! --attention-similarity sigmoid with --prefix-lm-tokens
sink-token-of-a-prefix: --sink-token --vocab-size 383 --prefix-lm-tokens 3
  ! --sink-token or --prefix-lm-tokens
negative-prefix: --prefix-lm-tokens -1
  ! --prefix-lm-tokens -1 is negative
prefix-without-targets: --prefix-lm-tokens 64
  ! --prefix-lm-tokens 64 leaves no target in --seq-length 64: use less than 64
prefix-with-everything: --prefix-lm-tokens 3 --dataloader-inter-document-masking --window-size
    15,0 --attention-bias-type alibi --position-embedding-type none
  ! --prefix-lm-tokens or --window-size
  ! --prefix-lm-tokens or --dataloader-inter-document-masking
  ! --prefix-lm-tokens or --attention-bias-type
replaced-tokens: --replace-tokens-at 0 64 0 -1 --replace-tokens-with x
  ! --replace-tokens-at -1 is negative: positions count from 0
  ! --replace-tokens-at 0 64 0 -1: a position is repeated
  ! --replace-tokens-with x: use random, or the id of a token
  ! --replace-tokens-at 64: --seq-length 64 has the positions 0 to 63
  ! --replace-tokens-at needs text, and --mock-data
replaced-by-nothing: --replace-tokens-at 0
  ! --replace-tokens-at without --replace-tokens-with: give one of random, ID
replaced-nowhere: --replace-tokens-with 5
  ! --replace-tokens-with 5 without --replace-tokens-at: name the positions
unknown-bias: --attention-bias-type t6
  ! --attention-bias-type 't6' is unknown: choose none, alibi, t5, bucket
positions-twice: --attention-bias-type alibi
  ! would encode positions twice: use --position-embedding-type none
kernel-without-a-bias: --attention-bias-type alibi --position-embedding-type none
    --attention-kernel flash-cpu
  ! 'flash-cpu' cannot run
  ! with a distance bias
  ! it adds no bias to the scores
buckets: --attention-bias-type t5 --position-embedding-type none
    --relative-attention-num-buckets 31 --relative-attention-max-distance 12
  ! --relative-attention-num-buckets 31
  ! --relative-attention-max-distance 12 is in
relative-of-transformer-engine: --position-embedding-type relative
  ! relative: it needs TransformerEngine's attention
  ! --attention-bias-type t5
factor-of-yarn: --use-rope-scaling --rotary-scaling-factor 32
  ! --rotary-scaling-factor 32.0 has no effect with --position-embedding-type rope: give
positions-of-pictures: --position-embedding-type mrope
  ! mrope: text has one position per token: use rope
sinusoids-without-a-table: --sinusoidal-position-embedding --hidden-size 65 --kv-channels 16
  ! --sinusoidal-position-embedding with --position-embedding-type rope
  ! 65 is odd
""",
)
ACCEPTED = accepted(
    GATED,
    """
gated:
gated-output: --gate-position output --gate-granularity elementwise --transformer-impl local
matched: --gate-granularity elementwise --gate-activation silu --match-ffn-width --hidden-size
    512 --ffn-hidden-size 1536
""",
) | accepted(
    MOCK,
    """
silu: --sdpa-output-norm silu
megatrons-gate: --attention-output-gate --attention-backend fused --use-flash-attn
megatrons-sinks: --softmax-type learnable --apply-query-key-layer-scaling
documents-by-resets: --reset-attention-mask --reset-position-ids
prediction-of-two: --mtp-num-layers 1 --pipeline-model-parallel-size 2
    --untie-embeddings-and-output-weights
sinks-in-windows: --attention-variant-layers windowed --window-size 15,0 --window-attn-skip-freq 2
prefix: --prefix-lm-tokens 5
documents: --dataloader-inter-document-masking --reset-position-ids
documents-t5-window: --dataloader-inter-document-masking --window-size 15,0
    --attention-bias-type t5 --position-embedding-type none
sinusoids: --sinusoidal-position-embedding --reset-position-ids --position-embedding-type
    learned_absolute
""",
)
