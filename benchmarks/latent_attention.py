"""A step of latent attention with sinks or gates over one of Megatron's own, on a CPU.

One layer of MLASelfAttention, forward and backward, in one process and thread, float32. Rounds
alternate between Megatron's DotProductAttention and megasink's core attention; the ratio is that of
the minima of their CPU time. DotProductAttention refuses the widths that MLASelfAttention gives it
(without TransformerEngine Megatron has no latent attention), so they are left out here.

    python benchmarks/latent_attention.py --hidden 512 --tokens 256 1024
"""

import argparse
import os
import time
from typing import Any

from megasink import cpu

LATENT = {
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
    "rope_type": "rope",
    "qk_layernorm": True,
}
OURS: dict[str, dict[str, Any]] = {
    "vanilla, no loss": {"attention_variant": "vanilla", "head_balance_coeff": 0.0},
    "sink": {"attention_variant": "sink"},
    "headwise gate": {"attention_variant": "gated"},
    "elementwise gate": {"attention_variant": "gated", "gate_granularity": "elementwise"},
}


def config(kind: Any, hidden: int, **options: Any) -> Any:
    """The configuration of a layer."""
    shape = {"num_layers": 1, "hidden_size": hidden, "num_attention_heads": hidden // 64}
    fixed = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False}
    local = {"transformer_impl": "local", "use_cpu_initialization": True}
    norm = {"normalization": "RMSNorm", "masked_softmax_fusion": False}
    return kind(**shape, **fixed, **local, **norm, **LATENT, **options)


def main() -> None:
    """Print a ratio for each variant and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512, help="hidden size, of heads of 64")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=15, help="the first two do not count")
    arguments = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "RANK": "0"}
    cpu.activate()
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megasink.megatron.latent_config import LatentTransformerConfig
    from megasink.megatron.spec_modules import with_our_modules

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", world_size=1, rank=0)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    options = {"multi_latent_attention": True, "qk_layernorm": True, "normalization": "RMSNorm"}
    spec = get_gpt_layer_local_spec(**options)

    class OwnAttention(DotProductAttention):
        def __init__(self, k_channels: int = 0, v_channels: int = 0, **kwargs: Any):
            super().__init__(**kwargs)

    spec.submodules.self_attention.submodules.core_attention = OwnAttention

    def layer(of: Any, spec: Any) -> Any:
        built = build_module(spec.submodules.self_attention, config=of, layer_number=1)
        return built.train()

    layers = {"Megatron": layer(config(MLATransformerConfig, arguments.hidden), spec)}
    for name, changed in OURS.items():
        of = config(LatentTransformerConfig, arguments.hidden, **changed)
        layers[name] = layer(of, with_our_modules(spec, of))
    first = 0  # number of a step
    for tokens in arguments.tokens:
        hidden = torch.randn(tokens, 1, arguments.hidden, requires_grad=True)
        hidden_mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)[None, None]
        seconds: dict[str, list[float]] = {name: [] for name in layers}
        for number in range(arguments.rounds):
            for name, attention in layers.items():
                loss = None if name == "Megatron" else attention.config.statistics
                if loss is not None:  # of the whole model, so it is not part of a layer's time
                    loss.begin(first + number)
                    loss.set_loss_scale(1.0)
                begin = time.process_time()
                output, _ = attention(hidden, hidden_mask)
                output.sum().backward()
                seconds[name].append(time.process_time() - begin)
                if loss is not None:
                    loss.reduce()
                    loss.commit()
        first += arguments.rounds
        least = {name: min(values[2:]) for name, values in seconds.items()}
        plain = least.pop("Megatron")
        print(f"{tokens} tokens: Megatron's own {plain * 1e3:.1f} ms of CPU time")
        for name, value in least.items():
            print(f"  {name}: {value / plain:.2f}")


if __name__ == "__main__":
    main()
