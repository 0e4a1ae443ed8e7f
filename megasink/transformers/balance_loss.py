"""The head-balance loss for models of transformers (P0.10 to P0.15).

Shapes: T tokens, H query heads, L layers, l layers with softmax attention.
"""

import inspect
from typing import Any, cast

import torch
from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from megasink.balance.gate_sums import HeadStatistics
from megasink.balance.step import LossStep
from megasink.config import HeadBalanceOptions, Scope
from megasink.errors import ConfigError, UserError
from megasink.files.checked_fields import checked
from megasink.transformers.balance_checks import MARK, GateCheck, model_problems, option_problems
from megasink.transformers.balance_layer import (
    LossScale,
    Microbatch,
    ModelLayer,
    Seam,
    explicit_hook,
)
from megasink.transformers.decoder_blocks import find_blocks, gate_reader

SEAM = "megasink_heads"
"""Attribute of an attention module: a function that the attention function "megasink" calls with
out [B, H, T, D], gate [B, H, T] and the mask of real tokens. Its result replaces out."""
# TRL (trl/trainer/utils.py:1548): an argument of its models, and their result with it.
_FUSED, _FUSED_OUTPUT = "fused_lm_head", ("log_probs", "label_mask")


class HeadBalanceLoss:
    """Adds the head-balance loss to the training of a decoder of transformers.

    While attached, every forward pass in training mode with labels is a microbatch: its backward
    pass also runs that of the loss, scaled by whatever scales the loss that the model returned
    (gradient accumulation, the number of targets in the step, fp16). After every step of the
    optimizer, on every rank, call :meth:`finish_step`. :class:`HeadBalanceCallback` does so in a
    Trainer.

    The gate of a head is that of an explicit gate, if the attention has one (Qwen3-Next, Qwen3.5,
    LFM3, AFMoE, Ling 3, megasink's own modeling file), else that of its softmax (P0.1, P0.2). The
    first forward pass shows that output times explicit gate is what is projected. Layers without
    softmax attention have none.

    Args:
        model: A decoder with its adapters, before DDP wraps it.
        coeff: Coefficient (lambda) of the loss. P0 fine-tunes with 1e-2; 0 only records.
        shared_heads: m of Eq. 8: the most important heads of each layer, which are not balanced. 0
            balances all heads (Eq. 7).
        refresh: Interval in steps at which the shared heads are chosen again; 0: once, at the first
            step.
        scope: Tokens over which the loss averages the importance: "global" (those of a step, of the
            previous one for the gradient), "data-parallel" or "microbatch" (docs/maths.md).

    Attributes:
        layers: The loss of each layer that has one, by index.
        step: The loss from step to step, as in Megatron; its `factors` are replaced for every
            microbatch.
        microbatch: Arguments of the model's last call; None outside of training.
        counted: Layers that were counted in the current step.

    Raises:
        ConfigError: Wrong numbers of heads or steps, or an unknown scope; a model
            without the attention implementation "megasink"; all problems at once.
        UserError: A model with unknown layers or gates.
    """

    @checked
    def __init__(
        self,
        model: torch.nn.Module,
        coeff: float = 1e-2,
        *,
        shared_heads: int = 0,
        refresh: int = 0,
        scope: str = "global",
    ):
        blocks = find_blocks(model)
        self.heads = max(block.heads for block in blocks)
        attentions = {i: b.attention for i, b in enumerate(blocks) if b.attention is not None}
        readers = {layer: gate_reader(attention) for layer, attention in attentions.items()}
        problems = option_problems(coeff, shared_heads, refresh, scope, self.heads)
        problems += model_problems(model, blocks, readers)
        if problems:
            raise ConfigError(problems)
        self.options = HeadBalanceOptions(
            head_balance_coeff=coeff,
            head_balance_scope=cast(Scope, scope),
            head_balance_shared_heads=shared_heads,
            head_balance_shared_refresh=refresh,
        )
        self.step = LossStep(len(blocks), self.heads, self.options, installed=True)
        self.microbatch: Microbatch | None = None
        self.layers: dict[int, ModelLayer] = {}
        self.counted: set[int] = set()
        self._model, self._modules = model, list(attentions.values())
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._handles: list[Any] = []
        for layer, attention in attentions.items():
            device = next(attention.parameters()).device
            self.layers[layer] = counter = ModelLayer(self, layer, device)
            if (reads_gate := readers[layer]) is None:
                setattr(attention, SEAM, Seam(counter))
            else:
                module, reader = reads_gate
                read = explicit_hook(attention, counter, reader, self.heads)
                self._handles.append(module.register_forward_hook(read))
        self._unchecked = {i: (blocks[i], reader) for i, reader in readers.items() if reader}
        self._check: GateCheck | None = None
        setattr(model, MARK, True)
        self._handles.append(model.register_forward_pre_hook(self._start, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._end, always_call=True))

    def remove(self) -> None:
        """Detach from the model."""
        for handle in self._handles:
            handle.remove()
        for module, name in [(self._model, MARK), *((one, SEAM) for one in self._modules)]:
            if name in vars(module):
                delattr(module, name)
        self._handles, self._modules = [], []

    def finish_step(self) -> HeadStatistics:
        """End a step: update the coefficients, and return the statistics of all ranks."""
        missing = sorted(self.layers.keys() - self.counted)
        if missing:
            named = ", ".join(str(layer) for layer in missing)
            raise UserError(
                f"no gates of layers {named} reached the head-balance loss in this step: their "
                'attention implementation is not "megasink", or the model was not in training mode'
            )
        self.counted.clear()
        self.step.reduce()
        return self.step.commit()

    @property
    def last(self) -> HeadStatistics | None:
        """Statistics of the last finished step; None before."""
        return self.step.last

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state: [l, H] coefficients and routed heads, [l, 1] steps."""
        names = ("coefficients", "routed", "steps")
        layers = self.layers.values()
        return {n: torch.stack([getattr(one, n) for one in layers]).cpu() for n in names}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from the result of :meth:`state_dict`."""
        for name, own in self.state_dict().items():
            if state[name].shape != own.shape:
                raise UserError(
                    f"the saved state of the head-balance loss has {name} of shape "
                    f"{list(state[name].shape)}, but this model needs {list(own.shape)}"
                )
            for layer, value in zip(self.layers.values(), state[name], strict=True):
                getattr(layer, name).copy_(value)

    def _start(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Record the arguments of the model's call, before its forward pass."""
        if not (model.training and torch.is_grad_enabled()):
            return
        if self._unchecked and not torch.compiler.is_compiling():
            self._check = GateCheck(self._unchecked, self.heads)
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        real_BT, count = _real_tokens(given.get("attention_mask"))
        items, targets = given.get("num_items_in_batch"), None
        if items is not None or given.get(_FUSED):
            targets = _targets(model, given)
        self.step.factors = LossScale()
        self.microbatch = Microbatch(real_BT, count, targets, items, set())

    def _end(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        """Follow the loss that the model returns, in its backward pass."""
        if self._check is not None:
            self._check.remove()
            self._check = None
            if output is not None:  # no exception
                self._unchecked = {}
        microbatch, scale = self.microbatch, self.step.factors
        if microbatch is None or not (model.training and torch.is_grad_enabled()):
            return

        def begin_backward(factor: Tensor) -> None:
            # Layers that gradient checkpointing runs again read them: others may have passed since.
            self.microbatch, self.step.factors = microbatch, scale
            scale.set_loss_scale(factor)

        log_probs_BT, mask_BT = (getattr(output, name, None) for name in _FUSED_OUTPUT)
        if log_probs_BT is not None and mask_BT is not None:
            # TRL's trainer makes the loss of these: the weight of a target is minus its gradient.
            count = mask_BT.sum().clamp(min=1)

            def follow_targets(grad_BT: Tensor) -> None:
                begin_backward(-(grad_BT * mask_BT).sum() / count)

            if log_probs_BT.requires_grad:
                log_probs_BT.register_hook(follow_targets)
            return
        loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
        if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
            return
        items = 1 if microbatch.targets is None else microbatch.items

        loss.register_hook(lambda grad: begin_backward(grad.reshape(()) / items))


def _real_tokens(mask: Any) -> tuple[Tensor | None, int | None]:
    """Return the mask [B, T] of tokens that are not padding, and their number."""
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        kind = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise UserError(
            f"the head-balance loss needs an attention mask [batch, tokens], not {kind}"
        )
    real_BT = mask.bool()
    count = int(real_BT.sum())
    return (None, None) if count == real_BT.numel() else (real_BT, count)


def _targets(model: torch.nn.Module, given: dict[str, Any]) -> Tensor | None:
    """Count targets as Trainer does for num_items_in_batch (transformers/trainer.py:2328)."""
    aligned, labels = given.get("shift_labels"), given.get("labels")
    if aligned is not None:
        labels = aligned
    elif labels is not None:
        loss = LOSS_MAPPING.get(str(getattr(model, "loss_type", None)))
        if given.get(_FUSED) or loss is ForCausalLMLoss:
            labels = labels[..., 1:]
    return None if labels is None else (labels != -100).sum()
