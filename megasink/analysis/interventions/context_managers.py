"""Interventions as context managers, for a notebook: exported by `megasink`.

Each takes a loaded model: of transformers, a Megatron GPTModel, a result of `megasink.load_model`
or `load_run`, or a `ProbedModel` (capture/probe.py). On exit, even by an exception, the model is
restored bit for bit. Contexts on one model do not nest; `intervening` takes several
interventions at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from megasink.analysis.ablate.settings import (
    check_share,
    measure_scores,
    read_calibration,
    scores_of,
    threshold_of,
)
from megasink.analysis.capture.head_changes import HeadChange
from megasink.analysis.capture.probe import Listener, OpenProbe, Probe
from megasink.analysis.capture.probed_models import open_probe_on
from megasink.analysis.heads import GivenHeads, heads_of
from megasink.analysis.interventions.activations import token_ids
from megasink.analysis.interventions.attention_interventions import DrainFirstValue, SteerGates
from megasink.analysis.interventions.dynamic_zeroing import (
    RANDOM,
    DynamicChange,
    DynamicZeroing,
    LayerScore,
)
from megasink.analysis.interventions.intervention_types import Intervention, ZeroHeads
from megasink.errors import UserError
from megasink.files.checked_fields import checked
from megasink.transformers.kv_cache import cache_of, without_cache
from megasink.transformers.model_identity import weights_hash


@contextmanager
def intervening(model: Any, interventions: Sequence[Intervention]) -> Iterator[list[HeadChange]]:
    """Change a model's heads; each intervention sees the result of the previous one.

    Yields:
        the running changes, in order; `DynamicZeroing`'s counts the heads that it zeroes.

    Raises:
        ConfigError: an intervention does not fit the model; one message lists every reason.
        UserError: no such model, another context is open on it, or an intervention changes tokens
            alone: pass those through its `tokens` before they reach the model.
    """
    changes = []
    for intervention in interventions if isinstance(interventions, Iterable) else [interventions]:
        if not isinstance(intervention, Intervention):
            raise UserError(f"{intervention!r:.60}: give interventions, such as ZeroHeads(...)")
        if not intervention.changes_heads:
            raise UserError(
                f"{intervention.kind} changes tokens, not the model: call its tokens(ids, bos) and "
                "run the model on the result"
            )
        changes.append(intervention.running())
    with open_probe_on(model)(Listener(), changes):
        yield changes


@contextmanager
def zero_heads(model: Any, heads: GivenHeads) -> Iterator[None]:
    """Replace the outputs of chosen heads by zero; see `ZeroHeads`."""
    with intervening(model, [ZeroHeads(**heads_of(heads)._asdict())]):
        yield


@checked
@contextmanager
def drain_first_value(
    model: Any, *, threshold: float | None = None, phase: str = "both"
) -> Iterator[None]:
    """Set the first token's value to zero; see `DrainFirstValue`."""
    with intervening(model, [DrainFirstValue(threshold, phase)]):
        yield


@checked
@contextmanager
def steer_gates(
    model: Any,
    heads: GivenHeads,
    *,
    scale: float = 1.0,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Iterator[None]:
    """Scale or clamp the gate of chosen heads of a gated model; see `SteerGates`."""
    with intervening(model, [SteerGates(heads_of(heads).heads, scale, minimum, maximum)]):
        yield


@checked
@contextmanager
def dynamic_zeroing(
    model: Any,
    *,
    score: str,
    threshold: float | None = None,
    quantile: float | None = None,
    calibration: str | Path | Iterable[Sequence[int]] | None = None,
    seed: int = 0,
) -> Iterator[DynamicChange]:
    """Zero the heads that look inactive in each sample; see `DynamicZeroing`.

    Args:
        score: such as "awft" or "ahon_ln".
        threshold: absolute.
        quantile: instead, the share of all heads, over samples, that the threshold makes inactive
            in the unchanged model (P3.11).
        calibration: for `quantile`: a folder of `megasink analyze` of this very model, or token
            sequences. None runs the first call of the model in the context once more, unchanged,
            and calibrates with it: the paper calibrates on the data that it evaluates.
        seed: of the score "random".

    Yields:
        an object with `share` (P3.13), `share_LH`, `threshold`, and `masks` of the last call.

    Raises:
        UserError: an unknown score, not exactly one of `threshold` and `quantile`, values outside
            their range, or a calibration of another model; see `intervening`, too.
    """
    if (threshold is None) == (quantile is None):
        raise UserError("give either threshold or quantile")
    if calibration is not None and quantile is None:
        raise UserError("calibration has no effect without quantile: give quantile too")
    open_probe, first = open_probe_on(model), False
    if quantile is not None:
        check_share(quantile)
        LayerScore(score)  # an unknown one raises before anything runs
        if score == RANDOM:
            threshold = quantile
        elif calibration is not None:
            threshold = _calibrated(open_probe, score, quantile, calibration)
        else:
            threshold, first = LayerScore(score).bounds[0], True
    assert threshold is not None
    change = DynamicZeroing(score, threshold, seed).running()
    with open_probe(Listener(), [change]) as probe, ExitStack() as stack:
        if first:
            assert quantile is not None
            change.threshold = None
            stack.callback(_calibrate_with_first_call(probe, change, score, quantile).remove)
        yield change


def _calibrated(open_probe: OpenProbe, score: str, share: float, calibration: Any) -> float:
    """Return the threshold by an analysis, or by token sequences."""
    probe = open_probe(Listener())
    if isinstance(calibration, str | Path):
        scores = read_calibration(Path(calibration), weights_hash(probe.model), probe.heads)
        if score not in scores:
            raise UserError(f"{calibration} has no {score}: choose {', '.join(sorted(scores))}")
        return threshold_of(score, share, scores[score])
    if not isinstance(calibration, Iterable):
        raise UserError(f"calibration {calibration!r:.60}: give a folder, or token sequences")
    ids = [token_ids(probe.model, tokens) for tokens in calibration]
    if not ids:
        raise UserError("calibration has no token sequences: give at least one")
    samples = [row for ids_BT in ids for row in ids_BT.tolist()]
    measured = measure_scores(open_probe, score, samples, device=ids[0].device)
    return threshold_of(score, share, measured)


def _calibrate_with_first_call(
    probe: Probe, change: DynamicChange, score: str, share: float
) -> Any:
    """Run the first call of the model twice: unchanged for the threshold, then with the change."""
    running = False

    def hook(body: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal running
        if running or change.threshold is not None:
            return
        cached = (cache := cache_of(kwargs)) is not None and int(cache.get_seq_length())
        if cached or kwargs.get("inference_context") is not None:
            raise UserError(
                "the first call in this context continues a cache, so it cannot calibrate the "
                "threshold: run whole prompts first, or pass threshold or calibration"
            )
        kwargs = without_cache(kwargs)  # the unchanged run must leave no trace
        running, change.keeps_scores = True, True
        try:
            with torch.no_grad():
                body(*args, **kwargs)
            change.threshold = threshold_of(score, share, scores_of(change, probe.heads))
        finally:
            running, change.keeps_scores = False, False
            change.forget()

    return probe.body.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
