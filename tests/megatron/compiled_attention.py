"""Core attention under torch.compile, in a process without the CPU platform, which turns it off.

Prints a JSON object by variant.
"""

import json
import warnings

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from torch._dynamo.utils import counters

from megasink.megatron.config import MegasinkTransformerConfig
from megasink.megatron.core_attention import CoreAttention

TOKENS, BATCH, HEADS, HEAD_DIM = 33, 2, 4, 16


def facts(variant: str) -> dict[str, object]:
    """Graphs, the largest difference from eager, and tokens and microbatches that were counted."""
    config = MegasinkTransformerConfig(
        num_layers=1,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        attention_variant=variant,
        head_balance_coeff=0.1,
        transformer_impl="local",
    )
    core = CoreAttention(config, 1, AttnMaskType.causal, "self")
    config.statistics.set_loss_scale(torch.ones(1))
    inputs = [torch.randn(TOKENS, BATCH, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]

    def step(module: torch.nn.Module) -> list[torch.Tensor]:
        out = module(*inputs, None)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    eager = step(core)
    counters.clear()
    compiled = torch.compile(core, backend="aot_eager")
    differences = []
    for _ in range(3):
        pairs = zip(eager, step(compiled), strict=True)
        differences += [float((one - other).abs().max()) for one, other in pairs]
    graphs = counters["stats"]["unique_graphs"]
    core.eval()
    with torch.no_grad():
        whole = torch.compile(core, backend="aot_eager", fullgraph=True)
        differences.append(float((whole(*inputs, None) - core(*inputs, None)).abs().max()))
    counted = config.statistics.heads._counts[0]
    torch._dynamo.reset()
    return {"graphs": graphs, "difference": max(differences), "counted": counted}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    print(json.dumps({name: facts(name) for name in ("sink", "vanilla", "kv-bias")}))
    torch.distributed.destroy_process_group()
