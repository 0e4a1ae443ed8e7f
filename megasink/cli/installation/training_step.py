"""A step of a tiny sink model in Megatron: ``python -m megasink.cli.installation.training_step``.

Prints the loss before and after it, of the same tokens, as a JSON list.
"""

import json

import torch

from megasink.upstream.process import prepare_quietly

TOKENS, VOCABULARY = 32, 64


def main() -> None:
    """Build the model on the platform that training would choose, and take a step of SGD."""
    prepare_quietly(cpu=False)
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megasink import cpu
    from megasink.megatron import layer_spec
    from megasink.megatron.config import MegasinkTransformerConfig
    from megasink.megatron.model import MegasinkGPTBuilder, MegasinkGPTConfig

    on_cpu = cpu.is_active()
    device = "cpu" if on_cpu else "cuda"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(
        "gloo" if on_cpu else "nccl", store=store, rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    transformer = MegasinkTransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        attention_variant="sink",
        head_balance_coeff=1e-4,
        transformer_impl="local",
        use_cpu_initialization=True,
    )
    config = MegasinkGPTConfig(
        transformer=transformer,
        transformer_layer_spec=layer_spec,
        vocab_size=VOCABULARY,
        seq_length=TOKENS,
        position_embedding_type="rope",
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = MegasinkGPTBuilder(config).build_model(groups, True, True).to(device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=generator).to(device)
    positions = torch.arange(TOKENS, device=device)[None].expand(2, -1)

    def loss() -> torch.Tensor:
        return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()

    first = loss()
    first.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
        second = loss()
    print(json.dumps([float(first), float(second)]))
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
