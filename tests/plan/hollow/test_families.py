"""A plan of released families and latent attention counts the parameters of transformers' model."""

import dataclasses
import shlex

import pytest
import torch
import transformers

from megasink.convert.hf_config import config_of
from megasink.convert.model_flags import model_flags
from megasink.convert.targets import TARGETS
from megasink.plan import whole_job
from megasink.transformers.modeling.configuration_megasink import MegasinkConfig
from megasink.transformers.modeling.modeling_megasink import MegasinkForCausalLM
from tests.convert.models import MODELS, OWN

FLAGS = shlex.split("""
    --mock-data --tokenizer-type NullTokenizer --vocab-size 101 --seq-length 32
    --micro-batch-size 2 --global-batch-size 16 --train-iters 2 --lr 1e-3 --bf16 --log-interval 1
    --head-balance-coeff 1e-3 --tensor-model-parallel-size 2 --sequence-parallel
""")
EXPERTS = ["--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]
EXPERTS += ["--moe-token-dispatcher-type", "alltoall"]
# NCCL takes no views, and without a norm the latent is one.
_, plain = OWN["own-latent"]
NO_NORMS = {"own-latent-no-norms": ("megasink", dataclasses.replace(plain, qk_norm=False))}
FAMILIES = MODELS | OWN | NO_NORMS


@pytest.mark.parametrize(
    "name",
    [
        *("own-latent-sink-experts", "own-latent-elementwise-sandwich", "own-latent-no-norms"),
        *("qwen3_next-shared", "qwen3_5-delta-net", "gpt_oss-biases"),
    ],
)
def test_parameters_under_tensor_and_expert_parallelism(gpu, name):
    target, model = FAMILIES[name]
    flags = [*model_flags(model), *FLAGS, *(EXPERTS if model.experts else [])]
    record = gpu.run("plan_tasks:step", flags=flags, ranks=2)
    config = config_of(model, TARGETS[target], {})
    with torch.device("meta"):
        if target == "megasink":
            built = MegasinkForCausalLM(MegasinkConfig(**config))
        else:
            of_type = transformers.AutoConfig.for_model(**config)
            built = transformers.AutoModelForCausalLM.from_config(of_type)
    expected = sum(parameter.numel() for parameter in built.parameters())
    assert sum(whole_job.parameters([record]).values()) == expected
