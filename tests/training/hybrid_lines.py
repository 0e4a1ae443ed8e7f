"""Command lines of hybrid models: the tables of test_checks.py."""

from tests.training.command_lines import MOCK, accepted, refused

LAYERS = MOCK[2:]  # their number is that of the pattern
PACKED = "--dataloader-inter-document-masking"
DELTA_NET = f"{PACKED} --device cpu --hybrid-layer-pattern GM*"

REFUSED = refused(
    LAYERS,
    f"""
hybrid-symbols: --hybrid-layer-pattern M-x/MM --num-layers 5 --mtp-num-layers 2
  ! unknown layer x; use * (attention)
  ! a layer of multi-token prediction is *-, not MM
  ! --mtp-num-layers 2, but --hybrid-layer-pattern M-x/MM has 1 after /
  ! --num-layers 5, but --hybrid-layer-pattern M-x/MM has 2 blocks of 3 layers
hybrid-without-attention: --hybrid-layer-pattern=EE --num-experts 4
  ! 'EE' has no attention layer (* or +): add one
hybrid-latent: --hybrid-override-pattern +-D- --num-experts 4 --moe-layer-freq 2
  ! sinks in sparse latent attention (D) are not supported
  ! --num-experts 4, but --hybrid-layer-pattern +-D- has no layer E
  ! --hybrid-layer-pattern or --moe-layer-freq: layers with experts are those marked E
hybrid-experts: --hybrid-layer-pattern *E|*E --disable-bias-linear
  ! has layers with experts (E): add --num-experts
  ! has 2 pipeline stages: give --pipeline-model-parallel-size, or drop |
hybrid-stages: --hybrid-layer-pattern *-*- --pipeline-model-parallel-size 2
    --num-virtual-stages-per-pipeline-rank 2
  ! has 1 stage between |, but --pipeline-model-parallel-size is 2
  ! or --num-virtual-stages-per-pipeline-rank: give more stages between |
hybrid-both: --hybrid-layer-pattern +-*- --attention-variant k-bias --q-lora-rank 0
    --qk-head-dim 16 --qk-pos-emb-head-dim 7 --v-head-dim 24 --window-size 4,0 --cache-mla-latents
    --context-parallel-size 2 --cp-comm-type a2a --position-embedding-type rope
  ! with latent attention (+) it has no *: use + in every block
  ! --attention-variant k-bias: its biases do not fit the heads of latent attention
  ! --q-lora-rank 0: give 1 or more
  ! --qk-pos-emb-head-dim 7: rotation needs an even number
  ! --v-head-dim 24 is wider than keys (23
  ! --cp-comm-type a2a: latent attention is split over ranks by all_gather alone
  ! choose either --multi-latent-attention or --window-size: never run together
  ! --cache-mla-latents: absorbed decoding has no sinks or gates here
latent-ranks: --multi-latent-attention --num-layers 2 --position-embedding-type learned_absolute
    --tensor-model-parallel-size 2 --q-lora-rank 25 --kv-lora-rank 31 --device cpu
  ! --position-embedding-type learned_absolute: latent attention rotates a part of each head
  ! --q-lora-rank (25) is not divisible by --tensor-model-parallel-size 2
  ! --kv-lora-rank plus --qk-pos-emb-head-dim (95) is not divisible by
hybrid-recurrent: {DELTA_NET}
  ! Mamba and gated delta-net layers with packed documents
  ! Mamba layers (M) need CUDA: drop --device cpu
  ! gated delta-net layers (G) run on a CPU only with --deterministic-mode
""",
)
ACCEPTED = accepted(
    LAYERS,
    """
hybrid: --hybrid-layer-pattern *-*-
hybrid-blocks: --hybrid-layer-pattern *-*- --num-layers 2 --use-rope-scaling
hybrid-prediction: --hybrid-layer-pattern *-/*- --position-embedding-type rope
hybrid-old-name: --hybrid-override-pattern *-*- --num-layers 4
hybrid-virtual-stages: --hybrid-layer-pattern *-|*-|*-|*- --pipeline-model-parallel-size 2
latent-pattern: --hybrid-layer-pattern +-+- --position-embedding-type rope --q-lora-rank 24
latent: --multi-latent-attention --num-layers 2 --position-embedding-type rope --qk-layernorm
hybrid-moe: --hybrid-layer-pattern *E --num-experts 4 --disable-bias-linear
hybrid-delta-net: --hybrid-layer-pattern G-*- --device cpu --deterministic-mode
""",
)
