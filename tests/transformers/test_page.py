"""The lines of docs/transformers.md, as they stand there, but for the model."""

import re
from pathlib import Path

import torch

from tests.analysis.capture.tiny_models import tiny_model
from tests.transformers.oracle import batch, distance

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"


def test_the_example_trains_a_sink_model(tmp_path):
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    eager = tiny_model("gpt-oss", "eager")
    eager.save_pretrained(tmp_path)
    given = '"openai/gpt-oss-20b"'
    assert given in example
    names: dict[str, object] = {}
    exec(example.replace(given, repr(str(tmp_path))), names)
    model, inputs = names["model"], batch("right")
    assert model.config._attn_implementation == "megasink"
    labels = inputs.ids_BT.masked_fill(~inputs.real_BT, -100)
    arguments = {"attention_mask": inputs.mask_BT, "labels": labels}
    losses = [each.train()(inputs.ids_BT, **arguments).loss for each in (model, eager)]
    for loss in losses:
        loss.backward()
    assert distance(losses[0], losses[1]) < 1e-4
    sinks = [each.model.layers[0].self_attn.sinks.grad for each in (model, eager)]
    assert torch.count_nonzero(sinks[0]) == 4
    assert distance(sinks[0], sinks[1]) < 1e-4
