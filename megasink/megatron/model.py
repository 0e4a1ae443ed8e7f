"""The model configuration and builder passed to Megatron's training loop."""

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.models.hybrid import HybridModelBuilder, HybridModelConfig

from megasink.megatron.delta_net import prepare_delta_net
from megasink.megatron.document_rotary import rotate_by_document
from megasink.megatron.inference_guard import refuse_what_bypasses_core_attention
from megasink.megatron.initial_weights import initialize_weights
from megasink.megatron.model_ends import cap_logits, normalize_embeddings
from megasink.megatron.padding_rows import mask_padding_rows
from megasink.megatron.sinusoid import SinusoidalPositions


@dataclass(kw_only=True)
class MegasinkModelConfig(HybridModelConfig):
    """HybridModelConfig whose initial weights are independent of the parallel layout.

    The softmax includes the first `tokens` rows of the vocabulary; None for all, padding included.
    """

    builder: ClassVar[str] = "megasink.megatron.model.MegasinkModelBuilder"
    init_seed: int = 1234
    tokens: int | None = None
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0


class MegasinkModelBuilder(HybridModelBuilder):
    """Builds HybridModel stages, with megasink's additions around their layers."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> HybridModel:
        """Build one pipeline stage; arguments as in Megatron."""
        config: Any = self._model_config
        model = super().build_model(pg_collection, pre_process, post_process, vp_stage)
        prepare_delta_net(model)
        _complete(model, config)
        finish_stage(model, config)
        return model


def _complete(model: Any, config: MegasinkModelConfig) -> None:
    """Apply the options of GPTModel that HybridModel ignores."""
    transformer = config.transformer
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is not None:
        rotary.rotary_interleaved = transformer.rotary_interleaved
    if isinstance(rotary, RotaryEmbedding) and config.rope_scaling:
        model.rotary_pos_emb = RotaryEmbedding(
            kv_channels=transformer.kv_channels,
            rotary_percent=config.rotary_percent,
            rotary_interleaved=transformer.rotary_interleaved,
            seq_len_interpolation_factor=config.seq_len_interpolation_factor,
            rotary_base=config.rotary_base,
            rope_scaling=True,
            rope_scaling_factor=config.rope_scaling_factor,
            use_cpu_initialization=transformer.use_cpu_initialization,
            cp_group=model.pg_collection.cp,
        )
    if model.post_process and transformer.defer_embedding_wgrad_compute:
        layer = model.output_layer
        model.embedding_activation_buffer = layer.embedding_activation_buffer = []
        model.grad_output_buffer = layer.grad_output_buffer = []


def finish_stage(model: Any, config: Any) -> None:
    """Initialize a newly built stage, and register megasink's hooks around its layers."""
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
