"""The FlashAttention packages: 2 (flash-attn), 3 (the folder hopper/) and 4 (flash-attn-4).

All take strided [B, T, H, D] and return the natural LSE [B, H, T] in float32. The autograd
functions of 2 and 3 silently drop its gradient; here it is injected. 4 supports it.

Shapes: B batch, H query heads, T queries, D head dim.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, BackwardTensors
from megasink.attention.documents import Ends
from megasink.attention.kernels.backend import AttentionRequest
from megasink.attention.kernels.cuda import BTHDLayout, PackageBackend, installed_version


class FlashAttentionBackend(BTHDLayout, PackageBackend):
    """Code shared by the packages, with sliding window and GQA; `unbounded` hides nothing."""

    native_window = True
    writes_gradients = True
    # forward_name, packed_forward_name: Its functions for sequences and for packed documents.
    forward_name = packed_forward_name = "_flash_attn_forward"
    forward_options: ClassVar[dict[str, Any]] = {}
    unbounded: int | None = -1

    def launch_rows(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, packed: Ends | None
    ) -> tuple[Tensor, Tensor]:
        name = self.forward_name if packed is None else self.packed_forward_name
        out_BTHD, lse_BHT, *_ = getattr(self.load(), name)(
            *(query, key, value),
            causal=call.causal,
            **self._shared(call, packed),
            **self.forward_options,
        )
        return out_BTHD, lse_BHT

    def _shared(self, call: AttentionCall, packed: Ends | None) -> dict[str, Any]:
        """Return the options common to forward and backward in every package."""
        left, right = self.unbounded, self.unbounded
        if call.window is not None:
            left, right = call.window - 1, 0  # excluding the token itself
        shared = {"softmax_scale": call.scale, "window_size_left": left, "window_size_right": right}
        return shared if packed is None else {**shared, **packed._asdict()}


class FlashAttention2Backend(FlashAttentionBackend):
    """FlashAttention 2, for A100 and later.

    Follows v2.8.3, flash_attn/flash_attn_interface.py; parameters unchanged since v2.7.0.
    """

    name = "flash-attn-2"
    package = "flash-attn"
    module = "flash_attn.flash_attn_interface"
    packed_forward_name = "_flash_attn_varlen_forward"
    keywords: ClassVar[dict[str, str]] = {
        "_flash_attn_forward": "softcap window_size_left return_softmax",
        "_flash_attn_backward": "softcap window_size_left deterministic",
        "_flash_attn_varlen_forward": "cu_seqlens_q window_size_left",
        "_flash_attn_varlen_backward": "cu_seqlens_q window_size_left",
    }
    tested = "pip install --no-build-isolation 'flash-attn>=2.7'"
    unused: ClassVar[dict[str, Any]] = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
    forward_options: ClassVar[dict[str, Any]] = {**unused, "return_softmax": False}

    def launch_rows_backward(
        self, tensors: BackwardTensors, call: AttentionCall, packed: Ends | None
    ) -> Sequence[Tensor]:
        *inputs, lse_BHT, _, into = tensors
        grads = into or tuple(map(torch.empty_like, inputs[1:4]))
        name = "_flash_attn_backward" if packed is None else "_flash_attn_varlen_backward"
        getattr(self.load(), name)(
            *inputs,
            lse_BHT.contiguous(),
            *grads,
            causal=call.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._shared(call, packed),
            **self.unused,
        )
        return grads


class FlashAttention3Backend(FlashAttentionBackend):
    """FlashAttention 3, for Hopper only.

    Follows 3.0.0 (August 2026), hopper/flash_attn_interface.py.
    """

    name = "flash-attn-3"
    package = "flash_attn_3 (hopper/ of github.com/Dao-AILab/flash-attention)"
    module = "flash_attn_interface"
    capability = (9, 0)
    keywords: ClassVar[dict[str, str]] = {
        "_flash_attn_forward": "causal window_size_left cu_seqlens_q max_seqlen_q",
        "_flash_attn_backward": "is_causal window_size_left cu_seqlens_q max_seqlen_q dq",
    }
    tested = "build hopper/ of release 3.0.0"

    def supports(self, request: AttentionRequest) -> str | None:
        if request.compute_capability is not None and request.compute_capability >= (10, 0):
            return "it runs only on Hopper (compute capability 9.0)"
        if request.deterministic and request.head_dim > 192:
            # hopper/flash_bwd_launch_template.h, run_mha_bwd_dispatch: the flag is dropped
            return f"its backward pass is deterministic up to head dim 192, got {request.head_dim}"
        return super().supports(request)

    def launch_rows_backward(
        self, tensors: BackwardTensors, call: AttentionCall, packed: Ends | None
    ) -> Sequence[Tensor]:
        *inputs, lse_BHT, _, into = tensors
        grads = into or tuple(map(torch.empty_like, inputs[1:4]))
        self.load()._flash_attn_backward(
            *inputs,
            lse_BHT.contiguous(),
            is_causal=call.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._shared(call, packed),
            **dict(zip(("dq", "dk", "dv"), grads, strict=True)),
        )
        return grads


class FlashAttention4Backend(FlashAttentionBackend):
    """FlashAttention 4 in CuTe, for Hopper and later; without injection, float16 trains too.

    Follows the wheels 4.0.0b26 to b36, flash_attn/cute/interface.py.
    """

    name = "flash-attn-4"
    package = "flash-attn-4"
    module = "flash_attn.cute.interface"
    capability = (9, 0)
    takes_lse_gradient = True
    takes_sink = True
    narrow_values = frozenset({(192, 128)})
    # flash-attn 2.8 has an old copy of the module.
    keywords: ClassVar[dict[str, str]] = {
        "_flash_attn_fwd": "causal return_lse window_size_left cu_seqlens_q max_seqlen_q",
        "_flash_attn_bwd": "dlse deterministic window_size_left cu_seqlens_q max_seqlen_q dq",
    }
    tested = "pip install 'flash-attn-4[cu13]>=4.0.0b30'"
    forward_name = packed_forward_name = "_flash_attn_fwd"
    forward_options: ClassVar[dict[str, Any]] = {"return_lse": True}
    unbounded = None

    def supports(self, request: AttentionRequest) -> str | None:
        # Blackwell's backward asserts that there is no dlse at D 256, and lacks D 136 to 248.
        capability = request.compute_capability
        dims = request.head_dim, request.value_dim
        narrow = dims in self.narrow_values
        if capability is not None and capability >= (10, 0) and dims[0] > 128 and not narrow:
            return f"on GPUs after Hopper its head dim is at most 128, got {request.head_dim}"
        if capability is not None and capability[0] == 12 and request.deterministic:
            return "its backward pass for compute capability 12 is not deterministic"
        return super().supports(request)

    def sink_reason(self, request: AttentionRequest) -> str | None:
        capability = request.compute_capability
        if capability is not None and capability[0] not in (9, 10, 11):
            return "flash-attn-4's sink has a backward pass only for compute capability 9 to 11"
        if "learnable_sink" not in signature(self.load()._flash_attn_bwd).parameters:
            return (
                f"flash-attn-4 {installed_version(self.package)} has no backward pass for its "
                "sink: install flash-attn-4>=4.0.0b26"
            )
        return None

    def _shared(self, call: AttentionCall, packed: Ends | None) -> dict[str, Any]:
        shared = super()._shared(call, packed)
        return shared if call.sink_H is None else {**shared, "learnable_sink": call.sink_H}

    def launch_rows_backward(
        self, tensors: BackwardTensors, call: AttentionCall, packed: Ends | None
    ) -> Sequence[Tensor]:
        grad_out, query, key, value, out, lse_BHT, lse_grad_BHT, into = tensors
        grads: Sequence[Tensor] = self.load()._flash_attn_bwd(
            query,
            key,
            value,
            out,
            grad_out,
            lse_BHT.contiguous(),
            causal=call.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dlse=None if lse_grad_BHT is None else lse_grad_BHT.contiguous(),
            **({} if into is None else dict(zip(("dq", "dk", "dv"), into, strict=True))),
            **self._shared(call, packed),
        )
        return grads
