"""`--maps`: attention maps are the model's own, and what is drawn from them is what was measured.

Shapes: H heads, T tokens, S = T keys, C chosen heads.
"""

from functools import partial

import numpy as np
import pytest
import torch

from megasink.analysis.capture.attention_maps import Head, extreme_heads, geometry, named_heads
from megasink.analysis.capture.input_samples import Sample
from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.analysis.metrics.attention_weights import attention_maps
from megasink.attention.constants import MAP_TOKENS
from megasink.errors import UserError
from tests.analysis.capture.kept import Kept
from tests.analysis.capture.test_transformers import tokens
from tests.analysis.capture.tiny_models import tiny_model


def test_soft_caps_prefixes_biases_and_slots_obey_their_definition():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 9, 8, generator=generator, dtype=torch.float64) * 3
    key = torch.randn(2, 9, 8, generator=generator, dtype=torch.float64) * 3
    bias = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    slot = torch.linspace(-5, 5, 4, dtype=torch.float64)[:, None]
    found = attention_maps(
        query, key, scale=0.3, prefix=3, slot_logit_HT=slot, distance_bias_HT=bias, softcap=2.0
    )
    for h in range(4):
        for i in range(9):
            logits = [float(slot[h])]
            for j in range(9):
                z = 2.0 * torch.tanh(0.3 * query[h, i] @ key[h // 2, j] / 2.0)
                z = z + bias[h, max(i - j, 0)]
                logits.append(float(z) if j <= i or j < 3 else -torch.inf)
            weights = torch.tensor(logits, dtype=torch.float64).softmax(0)[1:]
            torch.testing.assert_close(found[h, i], weights, atol=1e-12, rtol=1e-12)


def test_maps_have_a_bound():
    too_long = torch.zeros(1, MAP_TOKENS + 1, 2)
    with pytest.raises(ValueError, match=f"at most {MAP_TOKENS}"):
        attention_maps(too_long, too_long, scale=1.0)


@pytest.fixture(scope="module")
def drawn():
    """(samples, arrays, weights by sample) of GPT-OSS: sinks, a window, grouped queries."""
    model = tiny_model("gpt-oss", "eager")
    lengths = (6, 12, 12, 9)
    samples = [
        Sample(tuple(tokens(1, n, seed=i)[0].tolist()), "text", f"s{i}")
        for i, n in enumerate(lengths)
    ]
    samples.append(Sample((5,) * 12, "repeated", "repeated:0"))
    found = geometry(
        partial(TransformersProbe, model),
        samples,
        [4, 4],
        [Head(1, 2, "requested"), Head(0, 3, "requested")],
        length=10,
        batch_size=2,
        device="cpu",
        text_of=lambda token: f"<{token}>",
    )
    weights = []
    with torch.no_grad():
        for sample in samples[:4]:
            ids = torch.tensor([sample.tokens[:10]])
            told = model(ids, use_cache=False, output_attentions=True)
            weights.append(torch.cat(told.attentions).double().numpy())
    return model, samples, found, weights


def test_means_are_over_the_texts_that_reach_a_row(drawn):
    _, _, found, weights = drawn
    assert found["samples"] == 4  # without the repeated tokens
    assert found["layer_map_LTS"].shape == (2, 10, 11)
    for row in range(10):
        long_enough = [w for w in weights if w.shape[-1] > row]
        for layer in range(2):
            mean = np.mean([w[layer, :, row, : row + 1].mean(0) for w in long_enough], axis=0)
            actual = found["layer_map_LTS"][layer, row]
            np.testing.assert_allclose(actual[1 : row + 2], mean, atol=1e-5)
            np.testing.assert_allclose(actual[0], 1 - mean.sum(), atol=1e-5)  # the sink
        for head in range(4):
            mean = np.mean([w[0, head, row, : row + 1] for w in long_enough], axis=0)
            actual = found["first_layer_map_HTS"][head, row, 1 : row + 2]
            np.testing.assert_allclose(actual, mean, atol=1e-5)


def test_panels_show_the_chosen_heads_of_the_longest_text(drawn):
    model, samples, found, weights = drawn
    assert found["source"] == "s1"
    assert found["token_T"].tolist() == [f"<{token}>" for token in samples[1].tokens[:10]]
    kept = Kept({"query_HTD", "key_GTD", "value_GTD", "gated_out_HTD", "gate_HT"})
    with TransformersProbe(model, kept) as probe:
        probe.forward(torch.tensor([samples[1].tokens]))
    for index, (layer, head) in enumerate([(1, 2), (0, 3)]):
        whole = kept.layers[0, layer]
        np.testing.assert_allclose(
            found["map_CTS"][index][:, 1:], weights[1][layer, head], atol=1e-5
        )
        group = head // 2
        for name, values in (
            ("value_norm_CT", whole["value_GTD"][group].norm(dim=-1)),
            ("output_norm_CT", whole["gated_out_HTD"][head].norm(dim=-1)),
            ("gate_CT", whole["gate_HT"][head]),
        ):
            np.testing.assert_allclose(found[name][index], values[:10], rtol=1e-5)
        rows = torch.cat([whole["query_HTD"][head], whole["key_GTD"][group]]).double().numpy()
        points = np.concatenate([found["query_CQ2"][index], found["key_CQ2"][index]])
        # Two coordinates keep the explained share of all squared distances to the mean.
        share = np.square(points).sum(0) / np.square(rows - rows.mean(0)).sum()
        np.testing.assert_allclose(share, found["share_C2"][index], rtol=1e-6)
        direction = np.linalg.lstsq(rows - rows.mean(0), points, rcond=None)[0]
        np.testing.assert_allclose((rows - rows.mean(0)) @ direction, points, atol=1e-6)


def test_components_are_of_every_head(drawn):
    _, _, found, weights = drawn
    assert found["component_head_M2"].tolist() == [[i, h] for i in range(2) for h in range(4)]
    rows = weights[1].reshape(8, -1)
    values = np.linalg.svd(rows - rows.mean(0), compute_uv=False) ** 2
    np.testing.assert_allclose(found["component_share_K"], (values / values.sum())[:2], atol=1e-5)
    projected = (rows - rows.mean(0)) @ found["component_KTS"].reshape(2, -1).T
    np.testing.assert_allclose(found["component_point_MK"], projected, atol=1e-5)


def test_heads_that_the_user_names():
    assert named_heads(["0.3", "2.1", "0.3"], [4, 0, 4]) == [
        Head(0, 3, "requested"),
        Head(2, 1, "requested"),
    ]
    with pytest.raises(UserError, match=r"--maps: head 1\.0: layer 1 has no softmax attention"):
        named_heads(["1.0"], [4, 0, 4])


def test_heads_that_tell_most():
    awft = np.array([[np.nan, np.nan], [0.9, 0.1], [0.5, 0.2]])
    assert extreme_heads(awft, 1 - awft) == [
        Head(1, 0, "highest AWFT 0.9, lowest importance 0.1"),
        Head(1, 1, "lowest AWFT 0.1, highest importance 0.9"),
    ]
    gates = np.array([[np.nan, np.nan], [0.3, 0.4], [0.2, 0.8]])
    assert [(h.layer, h.head) for h in extreme_heads(awft, gates)] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
