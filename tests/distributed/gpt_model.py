"""The GPTModel that a hybrid model of blocks equals: Megatron's builder, with megasink's layers."""

import dataclasses
from argparse import Namespace
from typing import Any, ClassVar
from unittest import mock

from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
)
from megatron.training.models import gpt
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

from megasink.megatron.block_options import changed, with_block_options
from megasink.megatron.config import MegasinkTransformerConfig
from megasink.megatron.embedding_rows import counted_rows
from megasink.megatron.model import finish_stage
from megasink.megatron.multi_token_prediction import counted_once
from megasink.megatron.spec_modules import with_our_modules
from megasink.megatron.specs import layer_spec
from tests.distributed import launch_task


def _spec(config: Any, vp_stage: int | None = None) -> Any:
    # With multi-token prediction, only a bare loop may give its spec to a builder like ours.
    bare = config.transformer.mtp_num_layers
    return layer_spec(config.transformer if bare else config, vp_stage=vp_stage)


@dataclasses.dataclass(kw_only=True)
class GPTConfig(GPTModelConfig):
    """Of a GPTModel that starts with the weights that megasink draws."""

    builder: ClassVar[str] = "tests.distributed.gpt_model.GPTBuilder"
    transformer_layer_spec: Any = _spec
    hybrid_layer_pattern: None = None
    init_seed: int = 1234
    tokens: int | None = None


def train(flags: list[str], ranks: int, port: int) -> None:
    """Run the trainer as `launch_task.train` does, with a GPTModel."""
    with mock.patch("megasink.megatron.model_of_arguments.model_config", _of_arguments):
        launch_task.train(flags, ranks, port)


def _of_arguments(args: Namespace) -> GPTConfig:
    transformer = core_transformer_config_from_args(args, MegasinkTransformerConfig)
    config: GPTConfig = gpt_config_from_args(args, config=transformer, model_config_cls=GPTConfig)
    config.rope_scaling_factor = args.rope_scaling_factor
    config.init_seed, config.tokens = args.seed, counted_rows(vars(args))
    return config


class GPTBuilder(GPTModelBuilder):
    """Builds a GPTModel, as the trainer did before it built a HybridModel."""

    def build_model(self, *args: Any, **kwargs: Any) -> Any:
        """Build one pipeline stage; arguments as in Megatron."""
        upstream = gpt.mtp_block_spec

        def prediction(config: Any, decoder: Any, vp_stage: int | None = None) -> Any:
            spec = upstream(config, decoder, vp_stage=vp_stage)
            return None if spec is None else _with_our_layers(spec, config.transformer)

        with mock.patch.object(gpt, "mtp_block_spec", prediction):
            model = super().build_model(*args, **kwargs)
        finish_stage(model, self._model_config)
        return model


def _with_our_layers(upstream: Any, config: Any) -> Any:
    ours = with_our_modules(upstream, config)
    layers = []
    for layer in ours.layer_specs:
        alone = gpt.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        alone = dataclasses.replace(alone, layer_specs=[layer.submodules.mtp_model_layer])
        (inner,) = with_block_options(alone, config).layer_specs
        layers.append(changed(layer, mtp_model_layer=counted_once(inner)))
    return dataclasses.replace(ours, layer_specs=layers)
