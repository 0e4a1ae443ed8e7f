"""The model configuration and builder passed to Megatron's training loop."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

from megasink.megatron.inference_guard import refuse_what_bypasses_core_attention
from megasink.megatron.init import initialize_weights
from megasink.megatron.model_ends import cap_logits, normalize_embeddings
from megasink.megatron.padding_rows import mask_padding_rows
from megasink.megatron.rotary import rotate_by_document
from megasink.megatron.sinusoid import SinusoidalPositions
from megasink.upstream.mends import PREDICTION_SPEC


@dataclass(kw_only=True)
class StageOptions:
    """Megasink's additions to Megatron's model configurations.

    Attributes:
        init_seed: Seed of the initial weights, which are independent of the parallel layout.
        tokens: Vocabulary rows included in the softmax; None for all, padding included.
    """

    init_seed: int = 1234
    tokens: int | None = None


@dataclass(kw_only=True)
class MegasinkGPTConfig(StageOptions, GPTModelConfig):
    """GPTModelConfig whose initial weights are independent of the parallel layout."""

    builder: ClassVar[str] = "megasink.megatron.model.MegasinkGPTBuilder"


class MegasinkGPTBuilder(GPTModelBuilder):
    """Builds GPTModel stages and initializes their weights independently of the layout."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> GPTModel:
        """Build one pipeline stage; arguments as in Megatron."""
        config: Any = self._model_config
        (upstream,) = PREDICTION_SPEC.originals().values()
        with PREDICTION_SPEC.replacing(mtp_block_spec=partial(_prediction_spec, upstream)):
            model = super().build_model(pg_collection, pre_process, post_process, vp_stage)
        finish_stage(model, config)
        return model


def _prediction_spec(
    upstream: Callable[..., ModuleSpec | None],
    config: MegasinkGPTConfig,
    decoder: Any,
    vp_stage: int | None = None,
) -> ModuleSpec | None:
    """Return the spec of the layers of multi-token prediction, with megasink's attention."""
    from megasink.megatron.prediction import prediction_spec

    spec = upstream(config, decoder, vp_stage=vp_stage)
    return None if spec is None else prediction_spec(spec, config.transformer)


def finish_stage(model: Any, config: Any) -> None:
    """Initialize a newly built stage, and register what megasink does around its layers.

    Args:
        model: A GPTModel or HybridModel.
        config: StageOptions of a model configuration.
    """
    if config.transformer.sinusoidal_position_embedding and model.pre_process:
        learned = model.embedding.position_embeddings.weight
        rows, hidden_size = learned.shape
        model.embedding.position_embeddings = SinusoidalPositions(rows, hidden_size, learned.device)
    if config.transformer.perform_initialization:  # else loaded from a checkpoint
        initialize_weights(model, config.init_seed)
    normalize_embeddings(model)
    cap_logits(model)  # before the mask, whose logits must stay out of every softmax
    mask_padding_rows(model, config.tokens)
    rotate_by_document(model)
    model.register_forward_pre_hook(refuse_what_bypasses_core_attention, with_kwargs=True)
