"""Command lines about what is watched while a run trains: tables of test_checks.py."""

from tests.train.command_lines import MOCK

REFUSED = {
    "negative-heatmap-interval": (
        [*MOCK, "--head-heatmap-interval", "-5"],
        ["--head-heatmap-interval -5 is negative: use 0 for never"],
    ),
    "divergence-of-nothing": (
        [*MOCK, "--stop-on-divergence", "0"],
        ["--stop-on-divergence 0: use a rise above 0"],
    ),
    "divergence-nan": ([*MOCK, "--stop-on-divergence", "nan"], ["--stop-on-divergence nan: use"]),
    "sink-rate-of-a-sink-token": (
        [*MOCK, "--log-sink-rate", "--sink-token", "--seq-length", "32"],
        [
            "--log-sink-rate with --sink-token: the first token is not one of the text",
            "--log-sink-rate with --seq-length 32: it is counted over 64 tokens",
        ],
    ),
    "sink-rate-of-a-long-prefix": (
        [*MOCK, "--log-sink-rate", "--seq-length", "128", "--prefix-lm-tokens", "65"],
        ["--log-sink-rate with --prefix-lm-tokens 65: its first 64 tokens see later ones"],
    ),
    "sink-rate-of-documents": (
        [*MOCK, "--log-sink-rate", "--dataloader-inter-document-masking"],
        ["--log-sink-rate with --dataloader-inter-document-masking: documents have other lengths"],
    ),
}
ACCEPTED = {
    "observing": [*MOCK, "--log-sink-rate", "--stop-on-divergence", "1"],
    "no-heatmap": [*MOCK, "--head-heatmap-interval", "0"],
}
