"""The model that the benchmarks of training steps take, and the start of a process for it."""

from typing import Any

import torch

from megasink import cpu
from megasink.cpu.prepare_process import prepare_process

SHAPE = {"num_layers": 6, "hidden_size": 256, "num_attention_heads": 8}
VOCABULARY = 4096


# The 0.6B shape of examples/pretrain_gpt_sink.sh.
SHAPE_06B = {"num_layers": 20, "hidden_size": 1280, "num_attention_heads": 10}


def gpt_config(sequence: int, *, vocabulary: int = VOCABULARY, **options: Any) -> Any:
    """Configuration of a GPT.

    Args:
        sequence: length.
        vocabulary: number of tokens.
        options: of MegasinkTransformerConfig, its shape among them.
    """
    from megasink.megatron.block_stack import block_stack_spec
    from megasink.megatron.config import MegasinkTransformerConfig
    from megasink.megatron.model import MegasinkModelConfig
    from megasink.megatron.model_of_arguments import pattern_of_blocks

    transformer = MegasinkTransformerConfig(
        transformer_impl="local",
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        **options,
    )
    pattern = pattern_of_blocks(transformer)
    return MegasinkModelConfig(
        transformer=transformer,
        hybrid_stack_spec=block_stack_spec(transformer, pattern),
        hybrid_layer_pattern=pattern,
        vocab_size=vocabulary,
        seq_length=sequence,
        position_embedding_type="rope",
    )


def one_process(threads: int, device: str = "cpu") -> None:
    """Make this process the only rank, on the CPU platform or on the first GPU."""
    torch.set_num_threads(threads)
    if device == "cpu":
        cpu.activate()
    else:
        prepare_process()
        torch.cuda.set_device(0)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    store = torch.distributed.HashStore()
    backend = "gloo" if device == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
