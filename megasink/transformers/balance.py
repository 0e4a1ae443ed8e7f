"""The head-balance loss for models of transformers (P0.10 to P0.15).

Shapes: B rows, T tokens, H query heads, D head dim, L layers, l layers with softmax attention.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import torch
from torch import Tensor

from megasink.attention import gate_sum
from megasink.balance.attach import HeadBalanceScale, attach_gradient
from megasink.balance.counter import LayerBalance
from megasink.balance.tracker import HeadStatistics, HeadTracker
from megasink.config import HeadBalanceOptions, Scope
from megasink.errors import ConfigError, UserError
from megasink.probe.blocks import Reader, find_blocks, gate_reader

SEAM = "megasink_heads"
"""Attribute of an attention module that the attention function "megasink" calls with out
[B, H, T, D], gate [B, H, T] and the mask of real tokens, and whose result it takes for out."""
# TRL (trl/trainer/utils.py:1548): an argument of its models, and what they return then.
_FUSED, _FUSED_OUTPUT = "fused_lm_head", ("log_probs", "label_mask")
_MARK = "megasink_balanced"  # attribute of a model with a head-balance loss


class OneRank:
    """The group of a process by itself, whether or not there is a process group."""

    def size(self) -> int:
        """1."""
        return 1

    def rank(self) -> int:
        """0."""
        return 0


class LossScale(HeadBalanceScale):
    """The factors of one microbatch, read in its backward pass from the gradient of its loss."""

    def scaled(self, gradient_H: Tensor, coeff: float) -> Tensor:
        """Scale a gradient [H] as the loss is scaled.

        Raises:
            UserError: The model returned no loss.
        """
        if self._loss_scale is None:
            raise UserError(
                "the head-balance loss is scaled as the loss that the model returns, and it "
                "returned none: call it with labels, without a compute_loss_func or label smoothing"
            )
        return super().scaled(gradient_H, coeff)


@dataclass
class Microbatch:
    """What one forward pass of the model was given.

    Attributes:
        real_BT: Mask of the tokens that are not padding; None if all are real.
        real_tokens: Their number; None if all are real.
        targets: Number of targets, a scalar; None if the loss is a mean over the microbatch.
        items: Number of targets of the whole step, if the model was given it.
        recorded: Layers that have been counted.
    """

    real_BT: Tensor | None = None
    real_tokens: int | None = None
    targets: Tensor | None = None
    items: Any = None
    recorded: set[int] = field(default_factory=set)


@dataclass
class Statistics:
    """What all layers share; `balance` is replaced for every microbatch."""

    heads: HeadTracker
    balance: HeadBalanceScale


class ModelLayer(LayerBalance):
    """The loss at one attention module of a model of transformers.

    Args:
        owner: Holds the options, the statistics and the current microbatch.
        layer: 0-based index of the decoder layer.
        device: Of the attention module.
    """

    def __init__(self, owner: "HeadBalance", layer: int, device: torch.device):
        alone: Any = OneRank()
        super().__init__(owner.options, owner.statistics, layer, owner.heads, alone, device=device)
        self._owner = owner

    # Its counts are Python's, which a compiled graph would take for constants.
    @torch.compiler.disable
    def forward(self, output: Tensor, gate_BHT: Tensor, real_BT: Tensor | None = None) -> Tensor:
        """Count the gates of a microbatch and attach the gradient of the loss.

        Args:
            output: A tensor on which the loss depends, any shape.
            gate_BHT: Its gates, differentiable.
            real_BT: Not read: the mask that the model was called with counts, once for all layers.

        Returns:
            A tensor equal to `output`.
        """
        microbatch = self._owner.microbatch
        batch, heads, tokens = gate_BHT.shape
        if microbatch is None:
            raise UserError(
                "the head-balance loss counts a forward pass of the model that it was attached to: "
                "call that model, not a part of it"
            )
        real_BT, count = microbatch.real_BT, microbatch.real_tokens
        if count is None:
            count = batch * tokens
        if heads != self._owner.heads or (real_BT is not None and real_BT.shape != (batch, tokens)):
            mask = "" if real_BT is None else f" with an attention mask {list(real_BT.shape)}"
            raise UserError(
                f"layer {self.layer} has gates [batch, heads, tokens] of {list(gate_BHT.shape)}, "
                f"not those of {self._owner.heads} heads{mask}"
            )
        if self.routed.device != gate_BHT.device:
            self.to(gate_BHT.device)
        gate_sum_H = gate_sum(gate_BHT, real_BT)
        if self.layer in microbatch.recorded:
            # Gradient checkpointing runs the layer again, to the same operations; the backward
            # pass is that of the first run.
            return attach_gradient(output, gate_sum_H, lambda: torch.zeros_like(gate_sum_H))
        microbatch.recorded.add(self.layer)
        self._owner.counted.add(self.layer)
        self.record(gate_sum_H, count)
        if not self.options.head_balance_coeff:
            return output
        return self.attach(output, gate_sum_H, count)

    def targets(self) -> Tensor | None:
        """Trainer divides a sum over targets by those of the step: then microbatches count so."""
        microbatch = self._owner.microbatch
        return None if microbatch is None else microbatch.targets

    def importance_group(self) -> Any:
        """All ranks in the scope "data-parallel", each of which has other tokens."""
        replicas = self.options.head_balance_scope == "data-parallel"
        if replicas and torch.distributed.is_initialized():
            return torch.distributed.group.WORLD
        return self.tp_group


class HeadBalance:
    """Adds the head-balance loss to the training of a decoder of transformers.

    While attached, every forward pass in training mode with labels is a microbatch: its backward
    pass also runs that of the loss, scaled by whatever scales the loss that the model returned
    (gradient accumulation, the number of targets in the step, fp16). After every step of the
    optimizer, on every rank, call :meth:`finish_step`. :class:`HeadBalanceCallback` does so in a
    Trainer.

    The gate of a head is that of an explicit gate, if the attention has one (Qwen3-Next, Qwen3.5,
    LFM3, megasink's own modeling file), else that of its softmax (P0.1, P0.2). Layers without
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
        last: Statistics of the last finished step; None before.
        microbatch: What the model was last called with; None outside of training.
        counted: Layers that were counted in the current step.

    Raises:
        ConfigError: Options that are no numbers of heads, steps or an unknown scope; a model
            without the attention implementation "megasink"; all problems at once.
        UserError: A model whose layers or gates megasink does not know.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        coeff: float = 1e-2,
        *,
        shared_heads: int = 0,
        refresh: int = 0,
        scope: str = "global",
    ):
        config: Any = model.config
        blocks = find_blocks(model)
        self.heads = int(config.get_text_config().num_attention_heads)
        attentions = {i: b.attention for i, b in enumerate(blocks) if b.attention is not None}
        readers = {layer: _explicit_gate(attention) for layer, attention in attentions.items()}
        problems = _option_problems(coeff, shared_heads, refresh, scope, self.heads)
        problems += _model_problems(model, attentions, readers)
        if problems:
            raise ConfigError(problems)
        self.options = HeadBalanceOptions(
            head_balance_coeff=coeff,
            head_balance_scope=cast(Scope, scope),
            head_balance_shared_heads=shared_heads,
            head_balance_shared_refresh=refresh,
        )
        self.statistics = Statistics(HeadTracker(len(blocks), self.heads), LossScale())
        self.last: HeadStatistics | None = None
        self.microbatch: Microbatch | None = None
        self.layers: dict[int, ModelLayer] = {}
        self.counted: set[int] = set()
        self._model, self._modules = model, list(attentions.values())
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._handles: list[Any] = []
        for layer, attention in attentions.items():
            device = next(attention.parameters()).device
            self.layers[layer] = counter = ModelLayer(self, layer, device)
            if (found := readers[layer]) is None:
                setattr(attention, SEAM, _Seam(counter))
            else:
                module, reader = found
                read = _explicit_hook(attention, counter, reader, self.heads)
                self._handles.append(module.register_forward_hook(read))
        setattr(model, _MARK, True)
        self._handles.append(model.register_forward_pre_hook(self._start, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._end))

    def remove(self) -> None:
        """Detach from the model."""
        for handle in self._handles:
            handle.remove()
        for module, name in [(self._model, _MARK), *((one, SEAM) for one in self._modules)]:
            if name in vars(module):
                delattr(module, name)
        self._handles, self._modules = [], []

    def finish_step(self) -> HeadStatistics:
        """End a step: reduce its statistics over all ranks, and update the coefficients.

        Returns:
            The statistics, on the device.

        Raises:
            UserError: A layer was not counted in the step.
        """
        missing = sorted(self.layers.keys() - self.counted)
        if missing:
            named = ", ".join(str(layer) for layer in missing)
            raise UserError(
                f"no gates of layers {named} reached the head-balance loss in this step: their "
                'attention is not the implementation "megasink", or the model was not training'
            )
        self.counted.clear()
        tracker, options = self.statistics.heads, self.options
        tracker.start_reduction()
        self.last = tracker.finish_step(options.head_balance_coeff, options.head_balance_scope)
        assert self.last is not None
        return self.last

    def state_dict(self) -> dict[str, Tensor]:
        """Return what later steps depend on: [l, H] coefficients and routed heads, [l, 1] steps."""
        names = ("coefficients", "routed", "steps")
        layers = self.layers.values()
        return {n: torch.stack([getattr(one, n) for one in layers]).cpu() for n in names}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from the result of :meth:`state_dict`.

        Raises:
            UserError: It is that of a model with other layers or heads.
        """
        for name, own in self.state_dict().items():
            if state[name].shape != own.shape:
                raise UserError(
                    f"the saved state of the head-balance loss has {name} of "
                    f"{list(state[name].shape)}, this model {list(own.shape)}"
                )
            for layer, value in zip(self.layers.values(), state[name], strict=True):
                getattr(layer, name).copy_(value)

    def _start(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Note what the model is called with, before its forward pass."""
        if not (model.training and torch.is_grad_enabled()):
            return
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        real_BT, count = _real_tokens(given.get("attention_mask"))
        items, targets = given.get("num_items_in_batch"), None
        if items is not None or given.get(_FUSED):
            targets = _targets(model, given)
        self.statistics.balance = LossScale()
        self.microbatch = Microbatch(real_BT, count, targets, items, set())

    def _end(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        """Follow the loss that the model returns, in its backward pass."""
        microbatch, scale = self.microbatch, self.statistics.balance
        if microbatch is None or not (model.training and torch.is_grad_enabled()):
            return
        log_probs_BT, mask_BT = (getattr(output, name, None) for name in _FUSED_OUTPUT)
        if log_probs_BT is not None and mask_BT is not None:
            # TRL's trainer makes the loss of these: the weight of a target is minus its gradient.
            count = mask_BT.sum().clamp(min=1)

            def follow_targets(grad_BT: Tensor) -> None:
                scale.set_loss_scale(-(grad_BT * mask_BT).sum() / count)

            if log_probs_BT.requires_grad:
                log_probs_BT.register_hook(follow_targets)
            return
        loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
        if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
            return
        items = 1 if microbatch.targets is None else microbatch.items

        def follow(grad: Tensor) -> None:
            scale.set_loss_scale(grad.reshape(()) / items)

        loss.register_hook(follow)


class _Seam:
    """A module's attribute that is no submodule, so that no state dict and no cast reaches it."""

    def __init__(self, layer: ModelLayer):
        self._layer = layer

    def __call__(self, out_BHTD: Tensor, gate_BHT: Tensor, real_BT: Tensor | None) -> Tensor:
        result: Tensor = self._layer(out_BHTD, gate_BHT, real_BT)
        return result


def _explicit_gate(attention: torch.nn.Module) -> tuple[torch.nn.Module, Reader] | None:
    """Return the reader of a known gate.

    Raises:
        UserError: The attention has a part named like a gate that megasink does not know.
    """
    found = gate_reader(attention)
    own = hasattr(attention, "gate_position")  # megasink's: a gate elsewhere is not the importance
    names = [name for name, _ in attention.named_children() if "gate" in name]
    if found is None and names and not own:
        raise UserError(
            f"{type(attention).__name__} has a module {names[0]!r}, and megasink does not know "
            "whether it gates the heads"
        )
    return found


def _explicit_hook(
    attention: torch.nn.Module, counter: ModelLayer, reader: Reader, heads: int
) -> Callable[..., Tensor | None]:
    """Return a forward hook of the module that computes the gate's logits."""

    def hook(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not (attention.training and torch.is_grad_enabled()):
            return None
        gate_BTHX = reader(output, heads)
        wide = torch.promote_types(gate_BTHX.dtype, torch.float32)
        gate_BHT = gate_BTHX.to(wide).mean(-1).transpose(1, 2)
        counted: Tensor = counter(output, gate_BHT)
        return counted

    return hook


def _option_problems(coeff: float, shared: int, refresh: int, scope: str, heads: int) -> list[str]:
    problems = []
    if coeff < 0:
        problems.append(f"coeff {coeff} is negative: use 0 or more")
    if shared < 0:
        problems.append(f"shared_heads {shared} is negative: use 0 or more")
    elif shared and shared > heads - 2:
        problems.append(
            f"shared_heads {shared} of {heads} heads leaves fewer than two to balance: use at most "
            f"{max(0, heads - 2)}"
        )
    if refresh < 0:
        problems.append(f"refresh {refresh} is negative: use 0 or more")
    elif refresh and not shared:
        problems.append(f"refresh {refresh} without shared_heads: give both")
    known = get_args(Scope)
    if scope not in known:
        problems.append(f"scope {scope!r} is unknown: use {', '.join(known)}")
    return problems


def _model_problems(
    model: torch.nn.Module, attentions: dict[int, torch.nn.Module], readers: dict[int, Any]
) -> list[str]:
    config: Any = model.config
    name, problems = type(model).__name__, []
    if not attentions:
        problems.append(f"{name} has no layer with softmax attention: there is nothing to balance")
    elif hasattr(model, _MARK):
        problems.append(f"{name} already has a head-balance loss: call its remove() first")
    implementation = config.get_text_config()._attn_implementation
    if any(reader is None for reader in readers.values()) and implementation != "megasink":
        problems.append(
            f"{name} has the attention implementation {implementation!r}, which gives no gates: "
            'import megasink.transformers and call model.set_attn_implementation("megasink")'
        )
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        problems.append(f"{name} is split over devices: the loss needs a whole model on each")
    if (getattr(model, "tp_size", None) or 1) > 1:
        problems.append(f"{name} is tensor-parallel: train with data parallelism only")
    return problems


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
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    labels = given.get("shift_labels")
    if labels is None and (labels := given.get("labels")) is not None:
        shifts = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
        labels = labels[..., 1:] if shifts else labels
    return None if labels is None else (labels != -100).sum()
