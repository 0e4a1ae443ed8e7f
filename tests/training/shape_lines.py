"""Command lines of a wrong shape, layout or length: the tables of test_checks.py.

What only Megatron asserts stands alone in its line, since it says one thing at a time.
"""

from tests.training.command_lines import MOCK, accepted, refused

TAKEN_OUT = ("--seq-length", "--lr", "--train-iters", "--micro-batch-size", "--hidden-size")


def _without(*flags: str) -> list[str]:
    """MOCK without some flags and their values."""
    left = list(MOCK)
    for flag in flags:
        at = left.index(flag)
        del left[at : at + 2]
    return left


REFUSED = refused(
    MOCK,
    """
flags-that-are-none: --attention_variant sink --num-layers two --lr nan --window-size wide
    --attention-backend flsh --yaml-cfg nowhere.yaml --tokenizer-type Nul
    --clip-grad
  ! unknown: --attention_variant sink: did you mean --attention-variant?
  ! --num-layers 'two': use a whole number
  ! --lr nan: give a finite number
  ! --window-size 'wide'
  ! --attention-backend 'flsh' is unknown: choose flash,
  ! --yaml-cfg nowhere.yaml: give flags instead
  ! --tokenizer-type 'Nul' is unknown: choose
  ! --clip-grad needs a value
numbers: --num-layers 0 --seq-length -5 --weight-decay -1e-2 --eval-interval 0 --hidden-dropout
    1.5 --lr -1 --tensor-model-parallel-size 0
  ! --num-layers 0: use 1 or more
  ! --seq-length -5: use 1 or more
  ! --weight-decay -0.01 is negative: use 0 or more
  ! --eval-interval 0: use 1 or more
  ! --hidden-dropout 1.5: use 0 or more, and less than 1
  ! --lr -1.0 is negative
  ! --tensor-model-parallel-size 0: use 1 or more
old-names: --batch-size 4 --warmup 3 --model-parallel-size 2
  ! --batch-size: use --micro-batch-size
  ! --warmup: use --lr-warmup-fraction
  ! --model-parallel-size: use --tensor-model-parallel-size
ranks: --pipeline-model-parallel-size 3
  ! 4 ranks are not divisible by --pipeline-model-parallel-size 3: start a multiple of 3
  ! --num-layers 2 is not divisible by --pipeline-model-parallel-size 3
batches: --global-batch-size 12 --eval-global-batch-size 2
  ! --global-batch-size 12 is not divisible by --micro-batch-size 2 * 4 data-parallel
  ! --eval-global-batch-size 2 is not divisible by --eval-micro-batch-size 2 * 4 data-p
groups-by-tp: --num-attention-heads 12 --hidden-size 96 --group-query-attention
    --num-query-groups 6 --tensor-model-parallel-size 4
  ! --num-query-groups 6 is neither a multiple nor a divisor of --tensor-model-parallel-siz
rope-of-an-odd-head: --kv-channels 15
  ! --position-embedding-type rope rotates pairs of channels, but a head has 15: give an even
groups-of-nothing: --num-query-groups 2
  ! --num-query-groups 2 needs --group-query-attention
virtual-stages: --num-layers 6 --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 2
  ! num_layers_per_pipeline_stage % args.num_layers_per_virtual_pipeline_stage == 0)
  ! number of layers per pipeline stage must be divisible
overlap-of-tensor-parallel: --tp-comm-overlap
  ! --tp-comm-overlap needs CUDA
offload: --optimizer-cpu-offload --use-precision-aware-optimizer --profile --te-rng-tracker
  ! --optimizer-cpu-offload needs CUDA
  ! --use-precision-aware-optimizer needs CUDA
  ! --profile needs CUDA
  ! --te-rng-tracker needs CUDA
precision-of-the-loss: --fp16-lm-cross-entropy
  ! : lm cross entropy in fp16 only support in fp16 mode. (arguments.py:
  ! : assert args.fp16)
positions-too-few: --max-position-embeddings 32
  ! --seq-length 64 is longer than --max-position-embeddings 32
two-units: --train-samples 100
  ! : assert args.train_samples is None)
  ! expected iteration-based training
ends-of-the-schedule: --min-lr 1 --lr-decay-style WSD
  ! --min-lr 1 is above --lr 0.001
  ! --lr-decay-style WSD needs --lr-wsd-decay-iters
long-decay: --lr-decay-style WSD --lr-wsd-decay-iters 9
  ! --lr-wsd-decay-iters 9 is longer than the schedule, 4
interval-of-checkpoints: --save x --save-interval 4 --save-retain-interval 6
  ! : assert args.save_retain_interval % args.save_interval == 0
save-without-interval: --save x
  ! --save without --save-interval
recompute-everything: --recompute-granularity full
  ! --recompute-granularity full needs --recompute-method
  ! --recompute-granularity full needs --recompute-num-layers
recompute-method-alone: --recompute-method uniform --recompute-num-layers 1
  ! --recompute-method needs --recompute-granularity full
  ! --recompute-num-layers needs --recompute-granularity full
experts-of-none: --moe-ffn-hidden-size 64
  ! --moe-ffn-hidden-size without --num-experts
wandb: --wandb-project sinks
  ! --wandb-project sinks needs --wandb-exp-name
  ! wandb is not installed
wandb-of-nothing: --wandb-entity me
  ! --wandb-entity without --wandb-project logs nothing
two-sources: --data-path nowhere/text
  ! --mock-data and --data-path: choose one
  ! nowhere/text.bin and nowhere/text.idx not
parts-of-their-own: --train-data-path nowhere/a
  ! --train-data-path nowhere/a: nowhere/a.bin and nowhere/a.idx not found
what-only-megatron-knows: --replication
  ! Megatron refuses this configuration:
""",
)
REFUSED |= refused(
    [],
    """
nothing-given:
  ! missing: --num-layers, --hidden-size, --num-attention-heads, --seq-length,
    --max-position-embeddings, --micro-batch-size, --train-iters or --train-samples, --lr
  ! no training data
  ! no tokenizer
""",
)
REFUSED |= refused(
    _without(*TAKEN_OUT),
    """
left-out: --num-query-groups 3 --group-query-attention
  ! missing: --hidden-size, --seq-length, --micro-batch-size, --train-iters or --train-samples, --lr
  ! --num-attention-heads 4 is not divisible by --num-query-groups 3
""",
)
ACCEPTED = accepted(
    MOCK,
    """
no-evaluation-interval:
stages: --pipeline-model-parallel-size 2 --global-batch-size 4
groups: --group-query-attention --num-query-groups 2
wsd: --lr-decay-style WSD --lr-wsd-decay-iters 1
recompute-blocks: --recompute-granularity full --recompute-method block --recompute-num-layers 1
""",
)
ACCEPTED |= accepted(
    _without("--train-iters"),
    """
samples: --train-samples 64 --lr-warmup-samples 8
""",
)
