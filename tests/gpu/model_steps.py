"""One training step of a small GPT of each kind, on a CPU or a GPU: loss and gradients to a file.

    python -m tests.gpu.model_steps DEVICE FILE CASE ...

A case is JSON: {"kind": ..., "dtype": ..., "kernel": ..., "impl": ...}. The initial weights are
drawn on the CPU and are the same in every process.
"""

import json
import sys
import traceback
from typing import Any

import torch
from torch import Tensor

from megasink.cpu.prepare_process import prepare_process

TOKENS, VOCABULARY = 192, 512
PATTERN = "*-*-"
KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {"attention_variant": "vanilla"},
    "sink": {"attention_variant": "sink", "softmax_offset_init": 1.0},
    "headwise": {"attention_variant": "gated"},
    "elementwise": {"attention_variant": "gated", "gate_granularity": "elementwise"},
    "window": {"attention_variant": "sink", "window_size": (63, 0)},
    "key bias": {"attention_variant": "kv-bias"},
}
# TransformerEngine keeps a norm in the projection that follows it.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def build(kind: str, dtype: torch.dtype, kernel: str, impl: str, device: str) -> torch.nn.Module:
    """A GPT of two layers of ten heads, which are not a multiple of eight, in five groups."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megasink.megatron.block_stack import block_stack_spec
    from megasink.megatron.config import MegasinkTransformerConfig
    from megasink.megatron.model import MegasinkModelBuilder, MegasinkModelConfig

    transformer = MegasinkTransformerConfig(
        num_layers=2,
        hidden_size=640,
        num_attention_heads=10,
        num_query_groups=5,
        ffn_hidden_size=1024,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        # Attention far from uniform, so that queries and keys matter.
        init_method_std=0.08,
        head_balance_coeff=0.1,
        attention_kernel=kernel,
        transformer_impl=impl,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **KINDS[kind],
    )
    config = MegasinkModelConfig(
        transformer=transformer,
        hybrid_stack_spec=block_stack_spec(transformer, PATTERN),
        hybrid_layer_pattern=PATTERN,
        vocab_size=VOCABULARY,
        seq_length=TOKENS,
        position_embedding_type="rope",
    )
    torch.manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return MegasinkModelBuilder(config).build_model(groups, True, True).to(device)


def plain_name(name: str) -> str:
    """The name of a parameter in a model of Megatron's local modules."""
    for fused, plain in FUSED_NORMS.items():
        name = name.replace(fused, plain)
    return name


def step(model: torch.nn.Module, device: str) -> dict[str, Tensor]:
    """The loss and the gradient of every parameter, as float32 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=generator).to(device)
    positions = torch.arange(TOKENS, device=device)[None].expand(2, -1)
    model.zero_grad()
    loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
    loss.backward()
    grads = {plain_name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: t.detach().float().cpu() for name, t in ({"loss": loss} | grads).items()}


def run(case: dict[str, str], device: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`step` of a new model with the weights of its kind, drawn by the first model of the kind."""
    dtype = getattr(torch, case["dtype"])
    model = build(case["kind"], dtype, case["kernel"], case["impl"], device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[f"{case['kind']}:{plain_name(name)}"])
    found = step(model, device)
    if device == "cuda":
        model.config.statistics.reduce()  # the next one is another step
        torch.cuda.set_sync_debug_mode("error")
        try:
            _again(model)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def _again(model: torch.nn.Module) -> None:
    """Another forward and backward, which must not wait for the device."""
    tokens = torch.zeros(2, TOKENS, dtype=torch.long, device="cuda")
    model(tokens, tokens, None, labels=tokens).mean().backward()


def draw_weights(kinds: set[str]) -> dict[str, Tensor]:
    """Initial weights in float32, drawn on the CPU: the same in every process."""
    weights = {}
    for kind in sorted(kinds):
        model = build(kind, torch.float32, "eager", "local", "cpu")
        for name, parameter in model.named_parameters():
            # Values that bfloat16 holds, so that what differs afterwards is arithmetic alone.
            weights[f"{kind}:{name}"] = parameter.detach().bfloat16().float()
    return weights


def main() -> None:
    """Write {"CASE/NAME": tensor} to the file, without cases that raise an error."""
    device, path, *cases = sys.argv[1:]
    prepare_process()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    backend = "gloo" if device == "cpu" else "nccl"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    wanted = [json.loads(case) for case in cases]
    weights = draw_weights({case["kind"] for case in wanted})
    results = {}
    for text, case in zip(cases, wanted, strict=True):
        try:
            found = run(case, device, weights)
        except Exception:  # the other cases are still worth their results
            print(f"{text}:", file=sys.stderr)
            traceback.print_exc()
            continue
        results |= {f"{text}/{name}": tensor for name, tensor in found.items()}
    torch.save(results, path)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
