"""Separation of the first token: MLP activations of block 0 and normed states (P4.6, P4.9).

This is a separate pass over the first tokens of a few samples. Attention is causal, so the values
at these positions are those of the full sequence. docs/instruments.md lists the arrays of
geometry.npz that `project` returns.

Shapes: N points, the same in every array, S states (0 the embedding, 0.5 after attention, ...), E
hidden size, X that or the intermediate size of the MLP.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megasink.analysis.capture.first_block_tensors import PRODUCT, UP, Site
from megasink.analysis.capture.input_samples import Sample
from megasink.analysis.capture.probe import Listener, OpenProbe
from megasink.analysis.metrics.pca_tsne import (
    Components,
    Floats,
    neighbor_embedding,
    principal_components,
)

SAMPLES, POSITIONS = 16, 8


class _FirstStates(Listener):
    """Sums the states of the first token."""

    def __init__(self) -> None:
        self.needs = {"state_TE"}
        self.sums: dict[int, Tensor] = {}

    def state(self, sample: int, half: int, state_TE: Tensor) -> None:
        first_E = state_TE[0].to("cpu", torch.float64)
        self.sums[half] = self.sums[half] + first_E if half in self.sums else first_E


@dataclass
class Rows:
    """The collected rows."""

    by_site: dict[str, NDArray[np.float32]]  # name -> float32 [N, X]
    # position_N, sample_N: token position and sample index of each row.
    position_N: NDArray[np.int64]
    sample_N: NDArray[np.int64]
    missing: dict[str, str]  # name -> reason the site is absent
    # Mean state of the first token over the samples (P4.5), and its states.
    first_state_SE: Floats
    first_state_S: Floats


@torch.no_grad()
def read_rows(
    open_probe: OpenProbe, samples: Sequence[Sample], *, device: torch.device | str = "cpu"
) -> Rows:
    """Run the first tokens of some samples, evenly spaced over all, one sample at a time."""
    kept: dict[str, list[Tensor]] = {}
    states = _FirstStates()
    with open_probe(states) as probe:
        sites = probe.sites()
        length = max(POSITIONS, sites.context)
        positions = min(POSITIONS, max(len(sample.tokens) for sample in samples))
        long = [i for i, sample in enumerate(samples) if len(sample.tokens) >= positions]
        chosen = list(dict.fromkeys(long[i * len(long) // SAMPLES] for i in range(SAMPLES)))
        with ExitStack() as stack:
            for site in sites.available:
                stack.callback(_hook(site, kept).remove)
            for index in chosen:
                ids_BT = torch.tensor([samples[index].tokens[:length]], device=device)
                probe.forward(ids_BT, logits=False)
    return Rows(
        {
            name: torch.cat([t[0, :positions] for t in tensors]).numpy()
            for name, tensors in kept.items()
        },
        np.tile(np.arange(positions), len(chosen)),
        np.repeat(np.asarray(chosen), positions),
        sites.missing,
        np.stack([states.sums[half].numpy() / len(chosen) for half in sorted(states.sums)]),
        np.asarray(sorted(states.sums)) / 2,
    )


def _hook(site: Site, kept: dict[str, list[Tensor]]) -> Any:
    def hook(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        first = args[0] if args else kwargs["hidden_states"]
        kept.setdefault(site.name, []).append(site.read(first, output).float().cpu())

    return site.module.register_forward_hook(hook, with_kwargs=True)


def project(rows: Rows, *, seed: int) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the contents of geometry.npz, and "geometry" of results.json, by a seed of t-SNE."""
    arrays: dict[str, NDArray[Any]] = dict(vars(rows))
    del arrays["by_site"], arrays["missing"]
    results: dict[str, Any] = {
        "samples": len(np.unique(rows.sample_N)),
        "positions": int(rows.position_N.max()) + 1,
        "missing": dict(rows.missing),
    }
    for name in (PRODUCT, UP):
        if name not in rows.by_site:
            continue
        try:
            embedded = neighbor_embedding(rows.by_site[name].astype(np.float64), seed)
        except ValueError as error:
            results["missing"][name] = str(error)
            continue
        arrays[f"{name}_tsne_N2"] = embedded.points
        results[name] = {
            "width": rows.by_site[name].shape[1],
            "perplexity": embedded.perplexity,
            "seed": seed,
            "kl_divergence": embedded.divergence,
        }
    normed: dict[float, Components] = {}
    for half in sorted(int(name) for name in rows.by_site if name.isdigit()):
        try:
            normed[half / 2] = principal_components(rows.by_site[str(half)].astype(np.float64))
        except ValueError as error:
            results["missing"][f"normed state {half / 2:g}"] = str(error)
    if normed:
        points, explained = (np.stack(each) for each in zip(*normed.values(), strict=True))
        arrays |= {"normed_pca_SN2": points, "normed_pca_N2": points[-1]}
        arrays["normed_state_S"] = np.asarray(list(normed))
        results["normed"] = {"states": list(normed), "explained": explained}
    return arrays, results
