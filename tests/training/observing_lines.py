"""Command lines about what is watched while a run trains: tables of test_checks.py."""

from tests.training.command_lines import MOCK, accepted, refused

REFUSED = refused(
    MOCK,
    """
negative-heatmap-interval: --head-heatmap-interval -5
  ! --head-heatmap-interval -5 is negative
divergence-of-nothing: --stop-on-divergence 0
  ! --stop-on-divergence 0.0: use more than 0
divergence-nan: --stop-on-divergence nan
  ! --stop-on-divergence nan: give a finite number
sink-rate-of-a-sink-token: --log-sink-rate --sink-token --seq-length 32
  ! --log-sink-rate or --sink-token: the first token is not part of the text
  ! --log-sink-rate with --seq-length 32: the rate is measured over 64 tokens
sink-rate-of-a-long-prefix: --log-sink-rate --seq-length 128 --prefix-lm-tokens 65
  ! --log-sink-rate with --prefix-lm-tokens 65: the first 64 tokens see later ones
sink-rate-of-documents: --log-sink-rate --dataloader-inter-document-masking
  ! --log-sink-rate or --dataloader-inter-document-masking: documents vary in length
watched-without-validation: --log-sink-rate --split 100,0,0
  ! --log-sink-rate needs validation data: add some, such as --split 99,1,0
""",
)
ACCEPTED = accepted(
    MOCK,
    """
observing: --log-sink-rate --stop-on-divergence 1
no-heatmap: --head-heatmap-interval 0
""",
)
