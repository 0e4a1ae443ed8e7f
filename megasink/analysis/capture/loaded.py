"""Open probes on a model that is already loaded, of any kind."""

import sys
from typing import Any

from megasink.analysis.capture.base import OpenProbe, ProbedModel
from megasink.errors import UserError


def open_probe_on(model: Any) -> OpenProbe:
    """Return the function that opens a probe on a model of any kind.

    Raises:
        UserError: it is none that megasink can change.
    """
    if isinstance(model, ProbedModel):
        return model.open_probe
    if hasattr(model, "tokenizer"):  # what load_model or load_run returned
        model = model.model
    if "megatron.core.models.gpt" in sys.modules:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        from megasink.analysis.capture.megatron_model import MegatronProbe

        if isinstance(model, GPTModel | HybridModel):
            return lambda listener, changes=(): MegatronProbe(
                model, listener, listener.needs, changes
            )
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        from megasink.analysis.capture.transformers_model import TransformersProbe

        return lambda listener, changes=(): TransformersProbe(
            model, listener, listener.needs, changes
        )
    raise UserError(
        f"{type(model).__name__} is neither a model of transformers nor a Megatron GPTModel: "
        "unwrap it first (torch.compile, adapters, parallel wrappers)"
    )
