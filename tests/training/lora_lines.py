"""Command lines about LoRA: tables of test_checks.py."""

from tests.training.command_lines import MOCK, refused

LORA = [*MOCK, "--lora-rank", "4", "--transformer-impl", "local"]

REFUSED = (
    refused(
        MOCK,
        """
lora-without-a-rank: --lora-alpha 8 --lora-dropout 0.1 --lora-targets q_proj --lora-train sinks
  ! --lora-alpha without --lora-rank: add it
  ! --lora-dropout without --lora-rank: add it
  ! --lora-targets without --lora-rank: add it
  ! --lora-train without --lora-rank: add it
lora-of-negative-rank: --lora-rank -2 --pretrained-checkpoint nowhere
  ! --lora-rank -2: use 1 or more
  ! --pretrained-checkpoint: nowhere: no such folder
""",
    )
    | refused(
        LORA,
        """
lora-without-a-base: --load somewhere
  ! --lora-rank without --pretrained-checkpoint: give the folder of the base (--load somewhere
lora-numbers: --lora-alpha 0 --lora-dropout 1.0 --pretrained-checkpoint nowhere
  ! --lora-alpha 0.0: use a positive number
  ! --lora-dropout 1.0: use 0 or more, and less than 1
lora-names: --lora-targets q_prj qkv o_proj o_proj --lora-train sink
    --pretrained-checkpoint nowhere
  ! --lora-targets 'q_prj' is unknown: choose q_proj, k_proj
  ! --lora-targets 'qkv' is unknown
  ! --lora-targets: o_proj given twice
  ! --lora-train 'sink' is unknown: choose sinks, gates (did you mean sinks?)
lora-of-nothing: --attention-variant vanilla --lora-train sinks gates
    --pretrained-checkpoint nowhere
  ! --lora-train sinks with --attention-variant vanilla, which has no parameters
  ! --lora-train gates with --attention-variant vanilla, which has no explicit gate
lora-of-part-of-a-group: --tensor-model-parallel-size 2 --group-query-attention
    --num-query-groups 1 --pretrained-checkpoint nowhere
  ! LoRA on query, key and value with 1 key/value groups on --tensor-model-parallel-size 2
lora-not-supported: --num-experts 4 --disable-bias-linear --multi-head-addition --optimizer muon
    --ckpt-format torch --transformer-impl transformer_engine --pretrained-checkpoint nowhere
  ! adapters of MoE models are not supported
  ! --lora-rank with --multi-head-addition
  ! use --transformer-impl local
  ! --lora-rank with --ckpt-format torch: use torch_dist
  ! --lora-rank with --optimizer muon: use adam
""",
    )
    | refused(
        [flag for flag in LORA if flag != "--swiglu"],
        """
lora-of-no-gate-projection: --lora-targets gate_proj --pretrained-checkpoint nowhere
  ! --lora-targets gate_proj: this FFN has no gate projection
""",
    )
)
ACCEPTED: dict[str, list[str]] = {}
