"""The drawings of docs/concepts.md are those of their script, and show what megasink computes."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from megasink.attention import attention

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "tools" / "drawings.py"))


@pytest.mark.parametrize("name", SCRIPT["DRAWINGS"])
def test_a_drawing_is_that_of_the_script(name):
    drawn = SCRIPT["DRAWINGS"][name]()
    assert (ROOT / "docs" / "figures" / name).read_text(encoding="utf-8") == drawn
    assert f"figures/{name})" in (ROOT / "docs" / "concepts.md").read_text()
    width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', drawn).groups())
    placed = re.findall(r'<(?:text|rect) x="(-?[\d.]+)" y="(-?[\d.]+)"', drawn)
    assert placed
    for x, y in placed:
        assert 0 <= float(x) <= width
        assert 0 <= float(y) <= height


@pytest.mark.parametrize("variant", ["vanilla", "sink"])
def test_the_head_is_one_of_megasink(variant):
    plain, learnt = SCRIPT["attention_of_a_head"]()
    weight, gate = plain if variant == "vanilla" else learnt
    tokens, match, sink = (SCRIPT[name] for name in ("TOKENS", "MATCH", "SINK_LOGIT"))
    count = len(tokens)
    score = torch.zeros(count, count)
    for i in range(count):
        for j in range(1, i + 1):
            score[i, j] = match * (tokens[j - 1] == tokens[i])
    if variant == "vanilla":
        score[:, 0] = sink
    eye = torch.eye(count)[None, None]  # keys and values: the weights are the output
    options = {"sink_H": torch.tensor([sink])} if variant == "sink" else {}
    result = attention(score[None, None], eye, eye, variant=variant, scale=1.0, **options)
    seen = weight if variant == "vanilla" else weight[:, 1:]
    np.testing.assert_allclose(result.out_BHTD[0, 0], np.nan_to_num(seen), atol=1e-6)
    np.testing.assert_allclose(result.gate_BHT[0, 0], gate, atol=1e-6)
