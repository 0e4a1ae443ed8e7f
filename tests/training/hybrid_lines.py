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
  ! 'EE' has no attention layer (*): add one
hybrid-latent: --hybrid-override-pattern +-D- --num-experts 4 --moe-layer-freq 2
  ! sinks in latent attention (+D) are not supported
  ! --num-experts 4, but --hybrid-layer-pattern +-D- has no layer E
  ! --hybrid-layer-pattern or --moe-layer-freq: layers with experts are those marked E
hybrid-experts: --hybrid-layer-pattern *E|*E --disable-bias-linear
  ! has layers with experts (E): add --num-experts
  ! has 2 pipeline stages: give --pipeline-model-parallel-size, or drop |
hybrid-stages: --hybrid-layer-pattern *-*- --pipeline-model-parallel-size 2
    --num-virtual-stages-per-pipeline-rank 2
  ! has 1 stage between |, but --pipeline-model-parallel-size is 2
  ! or --num-virtual-stages-per-pipeline-rank: give more stages between |
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
hybrid-moe: --hybrid-layer-pattern *E --num-experts 4 --disable-bias-linear
hybrid-delta-net: --hybrid-layer-pattern G-*- --device cpu --deterministic-mode
""",
)
