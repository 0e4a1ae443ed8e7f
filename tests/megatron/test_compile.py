"""torch.compile traces core attention as one graph, and its heads are counted all the same."""

import json
import subprocess
import sys

from tests.megatron.compiled_attention import BATCH, TOKENS


def test_one_graph_that_counts_every_call():
    command = [sys.executable, "-m", "tests.megatron.compiled_attention"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    by_variant = json.loads(done.stdout.splitlines()[-1])
    assert by_variant.keys() == {"sink", "vanilla", "kv-bias"}
    calls = 1 + 3  # eager, compiled; evaluation counts nothing
    for found in by_variant.values():
        assert found["graphs"] == 1
        assert found["difference"] == 0.0
        assert found["counted"] == [calls * BATCH * TOKENS, calls]
