"""Adapt runs and stop strings to transformers' `generate`.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from megasink.analysis.capture.base import Probe, ProbedModel


class ByWholePasses(PreTrainedModel, GenerationMixin):
    """A run wrapped as a transformers model for `generate`; interventions apply in each pass."""

    def __init__(self, model: ProbedModel, probe: Probe):
        super().__init__(PretrainedConfig())
        self.generation_config = GenerationConfig(**model.generation | {"use_cache": False})
        self._run, self._probe = model, probe

    @property
    def device(self) -> torch.device:
        return self._run.device

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        logits_B1V = self._probe.forward(input_ids).logits[:, -1:]
        return CausalLMOutput(logits=logits_B1V[..., : self._run.vocabulary])


class Stop:
    """Stops a row once its last tokens contain a stop string; `lengths` include the prompt."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], start: int, rows: int):
        self.tokenizer, self.stops, self.start = tokenizer, stops, start
        # A token may be one byte, and a stop string may begin and end inside others.
        self.most = max((len(stop.encode()) for stop in stops), default=0) + 2
        self.lengths: list[int | None] = [None] * rows

    def __call__(self, ids_BT: Tensor, scores: Any, **_: Any) -> Tensor:
        new_BT = ids_BT[:, max(self.start, ids_BT.shape[1] - self.most) :]
        for row, text in enumerate(self.tokenizer.batch_decode(new_BT) if self.stops else ()):
            if self.lengths[row] is None and any(stop in text for stop in self.stops):
                self.lengths[row] = ids_BT.shape[1]
        return torch.tensor([length is not None for length in self.lengths], device=ids_BT.device)
