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
    """Adam (``adam_w_mode=False``) or AdamW (``True``), multi-tensor, with one step per group.

    Args:
        params: parameters or groups, of any floating dtype; states have the parameter's dtype.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        adam_w_mode: use decoupled weight decay.
        capturable: for compatibility with FusedAdam; must be False.
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
            raise ValueError("GroupStepAdam cannot be captured in a CUDA graph; install apex or TE")
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
            grads = [p.grad for p in params]
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            first = [self.state[p]["exp_avg"] for p in params]
            second = [self.state[p]["exp_avg_sq"] for p in params]
            lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
            if decay and self.adam_w_mode:
                torch._foreach_mul_(params, 1 - lr * decay)
            elif decay:
                grads = list(torch._foreach_add(grads, params, alpha=decay))
            torch._foreach_lerp_(first, grads, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
            root = torch._foreach_sqrt(second)
            torch._foreach_div_(root, (1 - beta2 ** group["step"]) ** 0.5)
            torch._foreach_add_(root, group["eps"])
            torch._foreach_addcdiv_(params, first, root, -lr / (1 - beta1 ** group["step"]))
        return loss
