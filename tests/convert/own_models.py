"""Models of our own modelling file with random weights, without megatron or a checkpoint."""

import torch

from megasink.convert.hf_config import config_of
from megasink.convert.targets import TARGETS
from megasink.transformers.modeling.configuration_megasink import MegasinkConfig
from megasink.transformers.modeling.modeling_megasink import MegasinkForCausalLM
from tests.convert.models import OWN

TOKENS = torch.randint(101, (2, 21), generator=torch.Generator().manual_seed(5))
POSITIONED = ["own-kv-bias-alibi", "own-t5", "own-bucket"]
BIASED = ["own-k-bias", *POSITIONED]
SINKS = [name for name, (_, m) in OWN.items() if m.has_sink and name not in BIASED]


def tiny(name):
    """The model of `OWN` with random weights, and sinks, gates and norms that differ by head."""
    torch.manual_seed(3)
    architecture = OWN[name][1]
    config = MegasinkConfig(**config_of(architecture, TARGETS["megasink"], {}))
    model = MegasinkForCausalLM(config).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("position_bias.weight"):
            parameter.data = 2.0 * torch.randn_like(parameter)
        elif key.endswith(("sinks", "logit")) and parameter.requires_grad:
            parameter.data = torch.tensor([3.0, -2.0, 1.0, -4.0])
        elif "norm" in key or key.endswith("bias"):
            parameter.data += torch.randn_like(parameter) / 2
    return model
