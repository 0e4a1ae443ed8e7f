"""Command lines about what is watched while a run trains: tables of test_checks.py."""

from tests.training.command_lines import MOCK, accepted, refused

REFUSED = refused(
    MOCK,
    """
negative-heatmap-interval: --head-heatmap-interval -5
  ! --head-heatmap-interval -5 is negative: use 0 for never
divergence-of-nothing: --stop-on-divergence 0
  ! --stop-on-divergence 0: use a number of nats above 0
divergence-nan: --stop-on-divergence nan
  ! --stop-on-divergence nan: use
sink-rate-of-a-sink-token: --log-sink-rate --sink-token --seq-length 32
  ! --log-sink-rate with --sink-token: the first token is not part of the text
  ! --log-sink-rate with --seq-length 32: the rate is measured over 64 tokens
sink-rate-of-a-long-prefix: --log-sink-rate --seq-length 128 --prefix-lm-tokens 65
  ! --log-sink-rate with --prefix-lm-tokens 65: the first 64 tokens see later ones
sink-rate-of-documents: --log-sink-rate --dataloader-inter-document-masking
  ! --log-sink-rate with --dataloader-inter-document-masking: documents vary in length
analysis-of-nothing: --analyze-interval 3 --eval-interval 2 --analyze-samples 0
  ! --analyze-interval without --run-dir: name a folder
  ! --analyze-interval 3 is not a multiple of --eval-interval 2
  ! --analyze-samples 0: use 1 or more
watched-without-validation: --log-sink-rate --split 100,0,0
  ! --log-sink-rate without validation data: give it some, such as --split 99,1,0
analysis-before-the-first-step: --analyze-interval -1
  ! --analyze-interval -1 is negative: use 0 for never
analysis-of-a-part: --analyze-interval 4 --eval-interval 2 --run-dir nothing-here/run
    --reset-position-ids --dataloader-inter-document-masking --tensor-model-parallel-size 2
    --eval-iters 0
  ! --analyze-interval without evaluations: use --eval-iters 1 or more
  ! --analyze-interval and --reset-position-ids: drop one of the two
  ! --analyze-interval with --tensor-model-parallel-size 2: no rank has the whole model
analysis-of-a-stage: --analyze-interval 4 --eval-interval 2 --run-dir nothing-here/run
    --pipeline-model-parallel-size 2 --context-parallel-size 2
  ! --analyze-interval with --pipeline-model-parallel-size 2: no rank has the whole
  ! --analyze-interval with --context-parallel-size 2: no rank has the whole model
""",
)
ACCEPTED = accepted(
    MOCK,
    """
analysis: --analyze-interval 4 --eval-interval 2 --run-dir nothing-here/run
observing: --log-sink-rate --stop-on-divergence 1
no-heatmap: --head-heatmap-interval 0
""",
)
