"""Each intervention is its definition with whole score matrices, for every kind of attention."""

import pytest
import torch

from megasink import intervening
from megasink.analysis.interventions import (
    DrainFirstValue,
    DynamicZeroing,
    SteerGates,
    ZeroHeads,
)
from megasink.analysis.interventions.dynamic_zeroing import LayerScore, is_of_all_texts, random_of
from megasink.analysis.metrics import metrics
from megasink.attention import constants
from megasink.errors import UserError
from tests.analysis.capture.tiny_models import VOCABULARY, tiny_model
from tests.analysis.interventions import oracle
from tests.analysis.interventions.oracle import Oracle
from tests.distributed.layout import SINGLE

MODELS = ("llama", "qwen3", "gpt-oss", "gpt-2", "own-sink", "own-gated")
SCORES = [n for n in constants.SCORES if n not in ("random", *constants.BACKWARD_SCORES)]
TASKS = "tests.analysis.interventions.megatron_tasks"
RUNS = {
    "vanilla": {"attention_variant": "vanilla"},
    "sink-window": {"window_size": (3, 0), "window_attn_skip_freq": [0, 1]},
    "gated": {"attention_variant": "gated", "gate_granularity": "elementwise"},
}
IDS = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(2))


def test_the_names_that_a_command_line_is_checked_by_are_those_of_the_registry():
    names = [name for name, entry in metrics().items() if entry.inactive]
    assert names == list(constants.SCORES)
    of_layers = [name for name in names if not is_of_all_texts(name)]
    assert [LayerScore(name).name for name in of_layers] == of_layers
    assert set(names) - set(of_layers) == set(constants.BACKWARD_SCORES)
    for name in constants.BACKWARD_SCORES:
        with pytest.raises(ValueError, match=f"megasink ablate --by {name}"):
            LayerScore(name)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    made = tiny_model(request.param, "eager")
    made.name = request.param
    return made


def run(model, *interventions):
    with intervening(model, interventions) as changes, torch.no_grad():
        return model(IDS, use_cache=False).logits, changes


def assert_equal(model, intervention, definition):
    """Within 1e-5 of the largest logit, and not what the model does alone."""
    expected = Oracle(model, definition).logits(IDS)
    actual, changes = run(model, intervention)
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (Oracle(model, oracle.nothing).logits(IDS) - expected).abs().max() > 1e-3
    return changes[0]


def test_static_masks(model):
    heads = [(0, 1), (1, 0), (1, 3)]
    assert_equal(model, ZeroHeads(heads), oracle.zeroed(heads))
    plain = Oracle(model, oracle.nothing)
    assert (plain.logits(IDS) - run(model)[0]).abs().max() < 1e-5 * run(model)[0].abs().max()


@pytest.mark.parametrize("name", SCORES)
def test_dynamic_zeroing(model, name):
    plain = Oracle(model, oracle.nothing)
    plain.logits(IDS)
    values = [s for rows in plain.seen for x in rows for s in oracle.scores(name, x)]
    for share in (0.4, 0.6, 0.2, 0.8):  # until zeroing leaves some heads in the layers above
        tau = oracle.gap(values, share)
        expected = Oracle(model, oracle.dynamic(name, tau))
        logits = expected.logits(IDS)
        masks = [[oracle.inactive(name, tau, layer) for layer in rows] for rows in expected.seen]
        if 0 < torch.tensor(masks, dtype=torch.float64).mean() < 1:
            break
    actual, (change,) = run(model, DynamicZeroing(name, tau))
    assert [change.masks[layer].tolist() for layer in range(2)] == masks
    assert (actual - logits).abs().max() < 1e-5 * logits.abs().max()
    by_hand = torch.tensor(masks, dtype=torch.float64)
    assert 0 < by_hand.mean() < 1
    assert change.share == pytest.approx(by_hand.mean().item())
    torch.testing.assert_close(torch.from_numpy(change.share_LH), by_hand.mean(1))


def test_random_heads(model):
    chosen = torch.stack(
        [torch.stack([random_of(row.tolist(), at, 4, 7) < 0.5 for at in range(2)]) for row in IDS]
    )
    assert 0 < chosen.double().mean() < 1
    actual, (change,) = run(model, DynamicZeroing("random", 0.5, seed=7))
    assert all(torch.equal(change.masks[layer], chosen[:, layer]) for layer in range(2))
    for row in range(2):
        expected = Oracle(model, oracle.zeroed(chosen[row].nonzero().tolist())).logits(IDS)[row]
        assert (actual[row] - expected).abs().max() < 1e-5 * expected.abs().max()


def test_value_drain(model):
    plain = Oracle(model, oracle.nothing)
    plain.logits(IDS)
    awft = [s for rows in plain.seen for x in rows for s in oracle.scores("awft", x)]
    for tau in (None, oracle.gap(awft, 0.5)):
        assert_equal(model, DrainFirstValue(tau), oracle.drained(tau))
    unchanged, _ = run(model, DrainFirstValue(phase="decode"))
    assert torch.equal(unchanged, run(model)[0])


def test_steered_gates(model):
    heads = [(0, 1), (1, 3), (1, 0)]
    settings = [{"scale": 0.3}, {"minimum": 0.6}, {"maximum": 0.3}, {"scale": 2.0, "maximum": 0.9}]
    for setting in settings:
        steering = SteerGates(heads, **setting)
        if model.name not in ("gpt-oss", "own-sink", "own-gated"):
            with pytest.raises(UserError, match="layer 0 has neither a sink logit nor a gate"):
                run(model, steering)
            continue
        low, high = setting.get("minimum", 0.0), setting.get("maximum", 9.0)
        definition = oracle.steered(heads, setting.get("scale", 1.0), low, high)
        assert_equal(model, steering, definition)


def test_one_after_another(model):
    """The second sees what the first left: its scores are those of changed outputs."""
    heads = [(0, 1), (1, 2)]

    def both(index, layer):
        out = oracle.zeroed(heads)(index, layer)
        norms = out.norm(dim=-1).mean(-1)
        out[norms / norms.mean() < 0.9] = 0.0
        return out

    expected = Oracle(model, both).logits(IDS)
    actual, (_, change) = run(model, ZeroHeads(heads), DynamicZeroing("ahon_ln", 0.9))
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()
    assert all(bool(change.masks[layer][:, head].all()) for layer, head in heads)


@pytest.mark.parametrize("kind", RUNS)
def test_runs_in_memory(pool, kind):
    (errors,) = pool.run(f"{TASKS}:errors", SINGLE, **RUNS[kind])
    refused = {"steer"} if kind == "vanilla" else set()
    assert {name for name, error in errors.items() if isinstance(error, str)} == refused
    for name, error in errors.items():
        if name in refused:
            assert "neither a sink logit nor a gate" in error
        else:
            assert error < 1e-5, name
