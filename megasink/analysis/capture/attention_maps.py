"""Optional geometry: attention maps, panels of chosen heads, and principal components.

Two short passes run after the measurement: all maps of sequences cut to a few tokens, and the
queries and keys of the chosen heads for one whole sequence.

Shapes: L layers, H heads, C chosen heads, T tokens (at most the map's length), S = T keys,
Q queries and keys of the whole sequence, D head dim, M = L * H matrices.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megasink.analysis.capture.attention_statistics import MAP
from megasink.analysis.capture.input_samples import Sample, equal_lengths, shown
from megasink.analysis.capture.probe import Listener, OpenProbe
from megasink.analysis.heads import head_problems, parse_head
from megasink.analysis.metrics.pca_tsne import (
    Floats,
    attention_map_components,
    query_key_components,
)
from megasink.console.progress import tracked
from megasink.errors import UserError

Arrays = dict[str, NDArray[Any]]


class Head(NamedTuple):
    """A head to show, and the reason."""

    layer: int
    head: int
    why: str


def named_heads(texts: Sequence[str], heads: Sequence[int]) -> list[Head]:
    """Return the heads named on the command line."""
    chosen = list(dict.fromkeys(parse_head(text) for text in texts))
    if problems := head_problems(chosen, heads):
        raise UserError(f"--maps: {'; '.join(problems)}")
    return [Head(layer, head, "requested") for layer, head in chosen]


def extreme_heads(awft_LH: Floats, importance_LH: Floats) -> list[Head]:
    """Return the heads with extreme first-token attention or importance; missing heads are NaN."""
    heads: dict[tuple[int, int], list[str]] = {}
    for name, table_LH, find in (
        ("highest AWFT", awft_LH, np.nanargmax),
        ("lowest AWFT", awft_LH, np.nanargmin),
        ("lowest importance", importance_LH, np.nanargmin),
        ("highest importance", importance_LH, np.nanargmax),
    ):
        layer, head = (int(i) for i in np.unravel_index(find(table_LH), table_LH.shape))
        heads.setdefault((layer, head), []).append(f"{name} {table_LH[layer, head]:.3g}")
    return [Head(layer, head, ", ".join(why)) for (layer, head), why in heads.items()]


class _Points(Listener):
    """Collect queries and keys of the chosen heads for one sequence."""

    def __init__(self, heads: Sequence[Head]):
        self.needs = {"query_HTD", "key_GTD"}
        self._heads = heads
        self._kept: dict[int, tuple[Floats, Floats]] = {}

    def layer(self, sample: int, layer: int, statistics: dict[str, Tensor]) -> None:
        if not self.needs <= statistics.keys():
            return
        query_HTD, key_GTD = statistics["query_HTD"], statistics["key_GTD"]
        for index, (at, head, _) in enumerate(self._heads):
            if at == layer:
                group = head // (len(query_HTD) // len(key_GTD))
                both = (query_HTD[head], key_GTD[group])
                query_QD, key_QD = (tensor.cpu().double().numpy() for tensor in both)
                self._kept[index] = query_QD, key_QD

    def arrays(self) -> Arrays:
        """Return the joint PCA of each head; NaN where all queries and keys are equal."""
        parts = []
        for index in range(len(self._heads)):
            query_QD, key_QD = self._kept[index]
            try:
                parts.append(query_key_components(query_QD, key_QD))
            except ValueError:
                blank = np.full((len(query_QD), 2), np.nan)
                parts.append((blank, blank, np.full(2, np.nan)))
        query, key, share = (np.stack(part) for part in zip(*parts, strict=True))
        return {"query_CQ2": query, "key_CQ2": key, "share_C2": share}


class _Maps(Listener):
    """Sum maps over samples, and keep those of the sample to show."""

    def __init__(self, heads_of: Sequence[int], heads: Sequence[Head], length: int):
        self.needs = {MAP, "slot_weight_HT", "value_GTD", "gated_out_HTD", "gate_HT"}
        layers, self._heads, self.length = len(heads_of), heads, length
        self.first = next(i for i, count in enumerate(heads_of) if count)
        # The sink's column comes first, as in the figures.
        self._mean_LTS = np.zeros((layers, length, length + 1))
        self._first_HTS = np.zeros((heads_of[self.first], length, length + 1))
        self._count_T = np.zeros(length)
        self.is_shown = True  # the first sequence is
        self._panels: dict[int, dict[str, NDArray[np.float32]]] = {}
        self._all: list[NDArray[np.float32]] = []
        self._of: list[tuple[int, int]] = []

    def layer(self, sample: int, layer: int, statistics: dict[str, Tensor]) -> None:
        if MAP not in statistics:
            return
        map_HTS = statistics[MAP].float().cpu().numpy()
        heads, tokens = map_HTS.shape[:2]
        slot_HT = statistics["slot_weight_HT"].float().cpu().numpy()
        whole_HTS = np.concatenate([slot_HT[..., None], map_HTS], -1)
        self._mean_LTS[layer, :tokens, : tokens + 1] += whole_HTS.mean(0)
        if layer == self.first:
            self._first_HTS[:, :tokens, : tokens + 1] += whole_HTS
            self._count_T[:tokens] += 1
        if not self.is_shown:
            return
        self._all.append(map_HTS)
        self._of += [(layer, head) for head in range(heads)]
        norms_GT = statistics["value_GTD"].norm(dim=-1).cpu().numpy()
        for index, (at, head, _) in enumerate(self._heads):
            if at == layer:
                self._panels[index] = {
                    "map_CTS": whole_HTS[head],
                    "value_norm_CT": norms_GT[head // (heads // len(norms_GT))],
                    "output_norm_CT": statistics["gated_out_HTD"][head].norm(dim=-1).cpu().numpy(),
                    "gate_CT": statistics["gate_HT"][head].cpu().numpy(),
                }

    def arrays(self) -> Arrays:
        """Return the map arrays documented in `geometry`."""
        count_T1 = np.maximum(self._count_T, 1)[:, None]
        reached = int((self._count_T > 0).sum())
        cut = (slice(None), slice(reached), slice(reached + 1))
        panels = [self._panels[i] for i in range(len(self._heads))]
        arrays = {
            "layer_map_LTS": (self._mean_LTS / count_T1)[cut],
            "first_layer": np.asarray(self.first),
            "first_layer_map_HTS": (self._first_HTS / count_T1)[cut],
            **{name: np.stack([panel[name] for panel in panels]) for name in panels[0]},
        }
        maps_MTS = np.concatenate(self._all)
        with suppress(ValueError):  # a single head, or identical heads
            points_MC, shares, images = attention_map_components(maps_MTS)
            arrays |= {"component_KTS": images, "component_share_K": shares}
            arrays |= {"component_point_MK": points_MC, "component_head_M2": np.asarray(self._of)}
        return arrays


def geometry(
    open_probe: OpenProbe,
    samples: Sequence[Sample],
    heads_of: Sequence[int],
    heads: Sequence[Head],
    *,
    length: int,
    batch_size: int,
    device: torch.device | str,
    text_of: Callable[[int], str],
) -> Arrays:
    """Run both passes and return the contents of maps.npz.

    Maps are means over texts, or of the first of the longest texts; the columns S of `map_CTS` are
    the sink or bias, then the keys. Queries and keys are those of the uncut text.
    """
    about = shown(sample.dataset for sample in samples)
    texts = [sample for sample in samples if sample.dataset in about]
    longest = max(texts, key=lambda sample: len(sample.tokens))  # first on ties
    points = _Points(heads)
    with open_probe(points) as probe:
        probe.forward(torch.tensor([longest.tokens], device=device), logits=False)
    maps = _Maps(heads_of, heads, length)
    others = [sample for sample in texts if sample is not longest]
    cut = sorted((sample.tokens[:length] for sample in others), key=len)
    batches = [(longest.tokens[:length],), *equal_lengths(cut, len, batch_size)]
    with open_probe(maps) as probe:
        for batch in tracked(batches, "maps", len(batches), "batches"):
            probe.forward(torch.tensor(batch, device=device), logits=False)
            maps.is_shown = False
    return maps.arrays() | {
        **points.arrays(),
        "head_C2": np.asarray([(head.layer, head.head) for head in heads]),
        "why_C": np.asarray([head.why for head in heads]),
        "token_T": np.asarray([text_of(token) for token in longest.tokens[:length]]),
        "token_id_T": np.asarray(longest.tokens[:length]),
        "source": np.asarray(longest.source),
        "samples": np.asarray(len(texts)),
    }
