"""Replace the parts of megatron.core that need CUDA beyond what ``torch.cuda`` can emulate."""

import functools
import logging
from typing import Any

import torch
import torch.utils.data

from megasink.cpu import patches


def _get_state(
    device: Any = "cuda", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor | torch.Generator:
    if graph_safe:  # upstream's shares the state; callers that fork restore it
        return torch.default_generator.clone_state()
    return torch.default_generator.get_state()


def _set_state(
    new_state: torch.Tensor | torch.Generator, device: Any = -1, graph_safe: bool = False
) -> None:
    if isinstance(new_state, torch.Generator):
        new_state = new_state.get_state()
    torch.default_generator.set_state(new_state)


class _DropForkWarning(logging.Filter):
    """Filter out upstream's warning that the CPU generator moves inside fork(): here it must."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _unpinned_loader() -> type:
    loader = torch.utils.data.DataLoader

    @functools.wraps(loader, updated=())
    class UnpinnedLoader(loader):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs | {"pin_memory": False})

    return UnpinnedLoader


def _l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Normalize the last dimension as flash-linear-attention does (fla/modules/l2norm.py)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Convolve [B, S, C] causally by channel with [C, K], and apply SiLU."""
    channels, kernel = weight.shape
    padded = torch.nn.functional.pad(x.transpose(1, 2), (kernel - 1, 0))
    mixed = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=channels)
    return torch.nn.functional.silu(mixed).transpose(1, 2), None


def _communicate_shapes(
    self: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
) -> list[list[int]]:
    """Return the shapes of the tensors to receive from both neighbours; zeros for none."""
    from megatron.core.pipeline_parallel import p2p_communication

    sent = (tensor_send_prev, tensor_send_next)
    to_prev, to_next = (None if each is None else torch.tensor(each.shape) for each in sent)
    received = [torch.zeros(3, dtype=torch.int64) for _ in sent]
    pending = p2p_communication._p2p_ops(
        tensor_send_prev=to_prev,
        tensor_recv_prev=received[0] if recv_prev else None,
        tensor_send_next=to_next,
        tensor_recv_next=received[1] if recv_next else None,
        group=self.pp_group,
        prev_pipeline_rank=self.prev_rank,
        next_pipeline_rank=self.next_rank,
    )
    for request in pending.values():
        request.wait()
    return [shape.tolist() for shape in received]


def install() -> None:
    """Install the replacements. Imports megatron."""
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.ssm.gated_delta_net import gdn
    from megatron.core.tensor_parallel import random

    patches.PIPELINE.apply(
        _batched_p2p_ops=lambda **named: [*p2p_communication._p2p_ops(**named).values()]
    )
    patches.PIPELINE_SHAPES.apply(_communicate_shapes=_communicate_shapes)
    patches.RNG_TRACKER.apply(_get_cuda_rng_state=_get_state, _set_cuda_rng_state=_set_state)
    logger = logging.getLogger(random.__name__)
    patches.FORK_WARNING.apply(logger, filters=[*logger.filters, _DropForkWarning()])
    patches.LOADER.apply(DataLoader=_unpinned_loader())
    patches.EXPERTS.apply(maybe_move_tensor_to_cpu=_on_the_host)
    patches.DELTA_NET.apply(HAVE_FLA=True, l2norm=_l2_norm)
    patches.DELTA_RULE.apply(
        causal_conv1d=_convolution, chunk_gated_delta_rule=gdn.torch_chunk_gated_delta_rule
    )
