"""Tasks for a gloo worker: a model built on the CPU."""

import os
from unittest import mock

from megatron.core.process_groups_config import ProcessGroupCollection

from megasink.megatron.model import MegasinkModelBuilder
from megasink.megatron.model_of_arguments import model_config
from megasink.training import parse_arguments


def number_of_parameters(flags: list[str]) -> int:
    """Of the whole model on one rank, padding of the vocabulary included."""
    with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1"}):
        args, _ = parse_arguments.parse(flags)
    config = model_config(args)
    config.finalize()
    model = MegasinkModelBuilder(config).build_model(
        ProcessGroupCollection.use_mpu_process_groups(), pre_process=True, post_process=True
    )
    return sum(parameter.numel() for parameter in model.parameters())
