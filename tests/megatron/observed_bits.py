"""Task for a worker: steps that are observed and steps that are not, by either set of gate kernels.

`test_observed_bits.py` runs it with TRITON_INTERPRET=1, in which Triton's kernels run on a CPU.
"""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megasink.attention.gate_kernels import gate_kernels_named
from megasink.attention.kernels import forget_choices
from megasink.megatron.model import MegasinkModelBuilder
from tests.distributed import tiny_gpt
from tests.distributed.skewed_gates import skew_gates, skew_sinks

TOKENS = 12


def differences(gates: str, models: Sequence[dict[str, Any]]) -> list[str]:
    """The losses and gradients that differ by a bit, of every model.

    Args:
        gates: the gate kernels, "triton" or "torch".
        models: their options.
    """
    with mock.patch.object(type(gate_kernels_named("triton")), "supports", return_value=None):
        forget_choices()
        try:
            return [name for options in models for name in _differences(gates, options)]
        finally:
            forget_choices()


def _differences(gates: str, options: dict[str, Any]) -> list[str]:
    shape = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 16}
    scope = {"head_balance_coeff": 10.0, "head_balance_scope": "microbatch"}
    config = tiny_gpt.model_config(**shape, **scope, attention_kernel=f"auto+{gates}", **options)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = skew_gates(skew_sinks([MegasinkModelBuilder(config).build_model(groups)]))
    statistics = config.transformer.statistics
    text = torch.randint(128, (1, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    steps = []
    for observes in (False, True):
        model.zero_grad()
        statistics.heads.observes = observes
        statistics.set_loss_scale(torch.ones(1))
        positions = torch.arange(TOKENS)[None]
        loss = model(text[:, :-1], positions, None, labels=text[:, 1:]).mean()
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        importance_H = tiny_gpt.recorded(config.transformer)[0, : tiny_gpt.HEADS]
        steps.append({n: grad.clone() for n, grad in found.items()})
        steps[-1] |= {"loss": loss.detach(), "importance": importance_H}
    plain, observed = steps
    assert len(plain) > 5
    return [f"{options}: {n}" for n in plain if not torch.equal(plain[n], observed[n])]
