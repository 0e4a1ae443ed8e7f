"""Tasks for the workers: losses and gradients of models whose vocabulary is padded.

Shapes: B batch, S sequence, V rows of the vocabulary.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor

from megasink.megatron.initial_weights import global_names
from megasink.megatron.model import MegasinkModelBuilder
from tests.distributed import tiny_gpt

ROWS = ("word_embeddings.weight", "output_layer.weight")


def text(tokens: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [B, S], of the first tokens of the vocabulary."""
    generator = torch.Generator().manual_seed(5)
    shape = (tiny_gpt.MICROBATCH, tiny_gpt.SEQUENCE + 1)
    text_BS = torch.randint(tokens, shape, generator=generator)
    return text_BS[:, :-1].contiguous(), text_BS[:, 1:].contiguous()


def padded(rows: int, tokens: int | None, **options: Any) -> dict[str, Any]:
    """One microbatch through Megatron's schedule and DDP."""
    config = _config(rows, tokens, **options)
    models = tiny_gpt.build(config)
    inputs_BS, labels_BS = text(tokens or rows)
    positions_BS = torch.arange(tiny_gpt.SEQUENCE).expand_as(inputs_BS)
    report: dict[str, Any] = {"losses": None}

    def step(_: Any, model: Any) -> tuple[Tensor, Any]:
        def loss(losses_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            report["losses"] = losses_BS.detach().float().clone()
            count = torch.tensor(losses_BS.numel(), dtype=torch.int)
            return losses_BS.float().sum(), count, losses_BS.detach().sum()

        return model(inputs_BS, positions_BS, None, labels=labels_BS), loss

    for model in models:
        model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[None] * len(models),
        model=models,
        num_microbatches=1,
        seq_length=tiny_gpt.SEQUENCE,
        micro_batch_size=tiny_gpt.MICROBATCH,
        forward_only=False,
    )
    report["gradients"] = tiny_gpt.shards(models, "main_grad")
    return report


def unpadded(rows: int, tokens: int, **options: Any) -> dict[str, Any]:
    """The definition: the same weights without the padding, in float64, by plain autograd."""
    whole = unwrap_model(tiny_gpt.build(_config(rows, None, **options)))[0]
    weights = {
        name: tensor[:tokens] if name.endswith(ROWS) else tensor
        for name, tensor in whole.state_dict().items()
    }
    model = unwrap_model(tiny_gpt.build(_config(tokens, None, **options)))[0]
    model.load_state_dict(weights)
    for parameter in model.parameters():  # double() leaves the sinks in float32
        parameter.data = parameter.data.double()
    inputs_BS, labels_BS = text(tokens)
    positions_BS = torch.arange(tiny_gpt.SEQUENCE).expand_as(inputs_BS)
    logits_BSV = model(inputs_BS, positions_BS, None)
    losses_BS = -logits_BSV.log_softmax(-1).gather(-1, labels_BS[..., None])[..., 0]
    losses_BS.mean().backward()
    names = global_names(model)
    trained = ((names[name], p.grad) for name, p in model.named_parameters())
    gradients = {name: gradient for name, gradient in trained if gradient is not None}
    return {"losses": losses_BS.detach(), "gradients": gradients}


@torch.no_grad()
def inferred(rows: int, tokens: int) -> dict[str, Any]:
    """Logits without labels: of this rank's part of the vocabulary, and gathered."""
    model = MegasinkModelBuilder(_config(rows, tokens)).build_model(
        ProcessGroupCollection.use_mpu_process_groups()
    )
    inputs_BS, _ = text(tokens)
    positions_BS = torch.arange(tiny_gpt.SEQUENCE).expand_as(inputs_BS)
    report = {
        name: model(inputs_BS, positions_BS, None, runtime_gather_output=gather)
        for name, gather in (("part", False), ("gathered", True))
    }
    return report | {"rank": parallel_state.get_tensor_model_parallel_rank()}


def _config(rows: int, tokens: int | None, **options: Any) -> Any:
    config = tiny_gpt.model_config(head_balance_coeff=0.0, **options)
    config.vocab_size, config.tokens = rows, tokens
    return config
