"""Neither batch, padding, packing nor a cache changes what an intervention does to a sequence."""

from functools import partial

import pytest
import torch

from megasink import intervening
from megasink.analysis.ablate.settings import measure_scores
from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.analysis.interventions import DrainFirstValue, DynamicZeroing, SteerGates, ZeroHeads
from megasink.errors import UserError
from tests.analysis.capture.tiny_models import VOCABULARY, tiny_model
from tests.analysis.interventions import oracle

LENGTHS = (11, 6, 8, 3)
SEQUENCES = [
    torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS
]
MODELS = ("llama", "mistral", "gpt-oss", "own-gated")
ROUNDING = 1e-5
"""Of a score and a logit, relative: heads whose score is this close to the threshold may differ."""


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    made = tiny_model(request.param, "eager")
    made.name = request.param
    return made


def batch(side):
    """Ids, mask and positions of all sequences, padded on a side."""
    ids = torch.zeros(4, max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(SEQUENCES):
        where = slice(-len(sequence), None) if side == "left" else slice(len(sequence))
        ids[row, where], mask[row, where] = sequence, 1
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def interventions(model):
    """One of each kind; thresholds lie in wide gaps between the scores."""
    found = [ZeroHeads([(0, 1), (1, 2)]), DynamicZeroing("random", 0.4), DrainFirstValue()]
    for score in ("awft", "ahon_ln"):
        scores = measure_scores(
            partial(TransformersProbe, model),
            score,
            [sequence.tolist() for sequence in SEQUENCES],
        )
        found.append(DynamicZeroing(score, oracle.gap(scores.flatten().tolist(), 0.5)))
        if score == "awft":
            found.append(DrainFirstValue(found[-1].threshold))
    if model.name in ("gpt-oss", "own-gated"):
        found.append(SteerGates([(0, 0), (1, 3)], scale=0.5, minimum=0.2))
    return found


def masks(change):
    return [mask.tolist() for _, mask in sorted(getattr(change, "masks", {}).items())]


@torch.no_grad()
def test_padding_and_batch_size_change_nothing(model):
    for intervention in interventions(model):
        alone, masks_alone = [], []
        for sequence in SEQUENCES:
            with intervening(model, [intervention]) as (change,):
                alone.append(model(sequence[None], use_cache=False).logits[0])
            masks_alone.append(masks(change))
        for side in ("left", "right"):
            ids, mask, positions = batch(side)
            with intervening(model, [intervention]) as (change,):
                together = model(
                    ids, attention_mask=mask, position_ids=positions, use_cache=False
                ).logits
            for row, expected in enumerate(alone):
                actual = together[row][mask[row].bool()]
                assert (actual - expected).abs().max() < ROUNDING * expected.abs().max()
                ours = [by_sample[row] for by_sample in masks(change)]
                assert ours == [by_sample[0] for by_sample in masks_alone[row]]


@torch.no_grad()
def test_documents_of_a_pack_have_their_own_masks(model):
    if model.name == "gpt-oss":
        pytest.skip("transformers makes its masks without the positions")
    ids = torch.cat(SEQUENCES)[None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    for intervention in interventions(model):
        with intervening(model, [intervention]) as (change,):
            packed = model(ids, position_ids=positions, use_cache=False).logits[0].split(LENGTHS)
        together = masks(change)
        for i, sequence in enumerate(SEQUENCES):
            with intervening(model, [intervention]) as (change,):
                expected = model(sequence[None], use_cache=False).logits[0]
            assert (packed[i] - expected).abs().max() < ROUNDING * expected.abs().max()
            assert [m[i] for m in together] == [m[0] for m in masks(change)]


@torch.no_grad()
def test_a_cache_changes_nothing(model):
    """Masks are those of the prompt; everything else is as if all tokens ran at once."""
    ids, mask, _ = batch("left")
    generated = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    generated |= {"return_dict_in_generate": True, "output_logits": True}
    for intervention in interventions(model):
        with intervening(model, [intervention]) as (change,):
            cached = model.generate(ids, attention_mask=mask, **generated)
        chosen = [heads.nonzero().tolist() for heads in _by_row(change, intervention)]
        for row, sequence in enumerate(SEQUENCES):
            same = intervention
            if isinstance(intervention, DynamicZeroing):
                same = ZeroHeads(chosen[row])
            elif getattr(intervention, "threshold", None) is not None:
                continue  # below
            new = cached.sequences[row, max(LENGTHS) :]
            with intervening(model, [same]):
                whole = torch.cat([sequence, new])[None]
                expected = model(whole, use_cache=False).logits[0, len(sequence) - 1 : -1]
            actual = torch.stack([step[row] for step in cached.logits])
            assert (actual - expected).abs().max() < ROUNDING * expected.abs().max()


def _by_row(change, intervention):
    if not isinstance(intervention, DynamicZeroing):
        return [torch.zeros(2, 4)] * 4
    return torch.stack([change.masks[layer] for layer in range(2)], 1)


@torch.no_grad()
@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
def test_phases_of_the_drain(phase):
    """With a threshold, by hand: the heads are chosen by the prompt, and drained in its phase."""
    model = tiny_model("llama", "eager")
    prompt, new = SEQUENCES[0][None, :8], SEQUENCES[0][None, 8:]
    plain = oracle.Oracle(model, oracle.nothing)
    plain.logits(prompt)
    awft = [s for rows in plain.seen for x in rows for s in oracle.scores("awft", x)]
    tau = oracle.gap(awft, 0.5)
    chosen = {}

    def define(index, layer):
        out_HTD = layer.gated_HTD.clone()
        for head, weights_TS in enumerate(layer.weights_HTS):
            chosen[index, head] = bool(weights_TS[:8, 0].mean() > tau)
            if chosen[index, head]:
                rows = slice(8 if phase == "decode" else 0, 8 if phase == "prefill" else None)
                drained_TD = weights_TS[:, :1] * layer.value_HTD[head, :1]
                out_HTD[head, rows] -= drained_TD[rows]
        return out_HTD

    expected = oracle.Oracle(model, define).logits(torch.cat([prompt, new], 1))[0]
    assert 0 < sum(chosen.values()) < len(chosen)
    with intervening(model, [DrainFirstValue(tau, phase)]):
        first = model(prompt, use_cache=True)
        steps = [first.logits[0]]
        for token in new[0]:
            one = model(token[None, None], past_key_values=first.past_key_values)
            steps.append(one.logits[0])
        chunk = model(prompt, use_cache=True).past_key_values
        at_once = model(new, past_key_values=chunk).logits[0]
    assert (torch.cat(steps) - expected).abs().max() < ROUNDING * expected.abs().max()
    assert (at_once - expected[8:]).abs().max() < ROUNDING * expected.abs().max()


@torch.no_grad()
def test_a_call_that_continues_another_batch_is_refused():
    model = tiny_model("llama")
    ids = torch.stack([SEQUENCES[0], SEQUENCES[0]])
    outside = model(ids, use_cache=True).past_key_values
    for intervention in (DynamicZeroing("awft", 0.5), DrainFirstValue(0.5)):
        with intervening(model, [intervention]):
            with pytest.raises(UserError, match="continues a cache of 2 rows"):
                model(ids[:, :1], past_key_values=outside)
            model(ids[:1], use_cache=True)
            with pytest.raises(UserError, match=r"cache of 2 rows, but .* from 1 seq"):
                model(ids[:, :1], past_key_values=outside)
        # Older versions of transformers make the mask first, which is refused, too.
        static = "one that grows|from a mask"
        other = tiny_model("llama")  # they also keep the cache of a call that failed
        with intervening(other, [intervention]), pytest.raises(UserError, match=static):
            other.generate(ids, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    with intervening(model, [ZeroHeads([(0, 1)])]):
        static, grown = (
            model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, **options)
            for options in ({"cache_implementation": "static"}, {})
        )
    assert torch.equal(static, grown)
