"""AdamW with one ``step`` per parameter group, like FusedAdam of TransformerEngine and apex.

Megatron's distributed optimizer saves and loads FusedAdam's state format. Its resharding
checkpoints do not load with torch's AdamW, which has a ``step`` tensor per parameter
(megatron/core/optimizer/distrib_optimizer.py:838,1025). This class replaces FusedAdam if neither
library is installed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class GroupStepAdam(torch.optim.Optimizer):
    """Adam (``adam_w_mode=False``) or AdamW (``True``), torch's fused kernels, one step per group.

    Parameters have any floating dtype, and states have the parameter's. `capturable` exists for
    compatibility with FusedAdam and must be False.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ):
        if capturable:
            raise ValueError("no CUDA graphs with GroupStepAdam: install apex or TransformerEngine")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one update; skip parameters without a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            # Count even on a rank with none of the group's parameters: its step is saved too.
            group["step"] = group.get("step", 0) + 1
            if not params:
                continue
            alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            for p in params:
                alike.setdefault((p.device, p.dtype), []).append(p)
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            for of_one_kernel in alike.values():
                self._update(of_one_kernel, group)
        return loss

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        # One tensor for all: the kernel only reads it. Filled, since a copy would wait for the GPU.
        step = torch.full((), float(group["step"]), device=params[0].device)
        update(
            params,
            [p.grad for p in params if p.grad is not None],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
