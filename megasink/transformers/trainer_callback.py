"""The head-balance loss in transformers' Trainer and TRL's SFTTrainer.

Shapes: L layers, l layers with softmax attention, H query heads.
"""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from megasink.errors import UserError
from megasink.figures.importance_heatmap import importance_pictures
from megasink.files.atomic import atomic_file, atomic_text
from megasink.files.checked_fields import checked
from megasink.transformers.balance_loss import HeadBalanceLoss

_DTYPES = {"coefficients": torch.float32, "routed": torch.bool, "steps": torch.int64}


class HeadBalanceCallback(TrainerCallback, ExportableState):
    """Adds the head-balance loss to a Trainer; its options are those of :class:`HeadBalanceLoss`.

    Every log of the training loss then has `balance_loss` (Eq. 7 or 8), `head_imbalance` (Eq. 6)
    and `head_importance` (the mean gate of all heads) of the last step. The coefficients and the
    shared heads are part of every checkpoint's trainer_state.json. At the end,
    head_importance.csv and head_importance.png are in the output folder.

    Trainer calls its loggers before the callbacks that it is given: with ``callbacks=[...]`` the
    values reach ``state.log_history`` and the progress bar; with :meth:`add_to` also TensorBoard
    and W&B.

    Attributes:
        balance: The loss; None outside of training.
        importance_LH: [L, H] importance in the last step of the last training, float64, NaN for
            layers without softmax attention.

    Raises:
        ConfigError, UserError: See :class:`HeadBalanceLoss`, when training starts; also for a
            Trainer with DataParallel, tensor, context or sequence parallelism, or TRL's "dft" loss.
    """

    @checked
    def __init__(
        self, coeff: float = 1e-2, shared_heads: int = 0, refresh: int = 0, scope: str = "global"
    ):
        self._options: dict[str, Any] = {
            "coeff": coeff,
            "shared_heads": shared_heads,
            "refresh": refresh,
            "scope": scope,
        }
        self.balance: HeadBalanceLoss | None = None
        self.importance_LH: Tensor | None = None

    def add_to(self, trainer: Any) -> "HeadBalanceCallback":
        """Add this callback in front of a Trainer's loggers, and return it."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def state(self) -> dict[str, Any]:
        """Return the state that Trainer writes into a checkpoint."""
        saved = None if self.balance is None else _encoded(self.balance.state_dict())
        return {"args": self._options, "attributes": {"saved": saved}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the loss, and continue from the checkpoint that training resumes from."""
        if self.balance is not None:  # from an interrupted training
            self.balance.remove()
            self.balance = None
        check_arguments(args)
        self.balance = HeadBalanceLoss(kwargs["model"], **self._options)
        kept = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(kept, list):
            raise UserError(
                f"a Trainer needs exactly one {type(self).__name__}, but this one has {len(kept)}"
            )
        if kept is not None and kept["attributes"]["saved"] is not None:
            self.balance.load_state_dict(_decoded(kept["attributes"]["saved"]))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the coefficients."""
        assert self.balance is not None
        self.balance.finish_step()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Add the values of the last step to the log of a training loss."""
        if self.balance is None or self.balance.last is None or not logs or "loss" not in logs:
            return
        last = self.balance.last
        values = torch.stack(
            [last.balance_loss, last.imbalance, last.importance_LH.nanmean()]
        ).tolist()
        added = dict(
            zip(("balance_loss", "head_imbalance", "head_importance"), values, strict=True)
        )
        logs.update(added)
        # Trainer has put a copy into the history before it calls any callback.
        state.log_history[-1].update(added)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the importance of the last step, and detach the loss."""
        if self.balance is None:
            return
        balance, self.balance = self.balance, None
        balance.remove()
        if balance.last is None:
            return
        self.importance_LH = balance.last.importance_LH.double().cpu()
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["layer,head,importance,shared"]
        for layer, counter in balance.layers.items():
            shared_H = (~counter.routed).tolist()
            for head, value in enumerate(self.importance_LH[layer].tolist()):
                lines.append(f"{layer},{head},{value:.9g},{int(shared_H[head])}")
        atomic_text(folder / "head_importance.csv", "\n".join(lines) + "\n")
        title = f"head importance (mean gate), step {state.global_step}"
        with atomic_file(folder / "head_importance.png") as file:
            file.write(importance_pictures([(title, self.importance_LH.numpy())]))


def check_arguments(args: Any) -> None:
    """Reject split models or sequences, copies of the model in a process, and weighted targets."""
    if args.n_gpu > 1:
        raise UserError(
            f"the head-balance loss does not work under DataParallel, which Trainer uses for "
            f"{args.n_gpu} GPUs in one process: start one process per GPU with torchrun or "
            "accelerate launch"
        )
    if (loss_type := getattr(args, "loss_type", None)) == "dft":  # TRL's
        raise UserError(
            f"loss_type {loss_type!r} weights targets by their probability, which would also "
            "scale the head-balance loss: use 'nll'"
        )
    deepspeed = getattr(args, "deepspeed_plugin", None)
    if deepspeed is not None and deepspeed.hf_ds_config.is_zero3():
        raise UserError("the head-balance loss was not tested with stage 3 of DeepSpeed: use 2")
    parallelism = getattr(args, "parallelism_config", None)
    for kind in ("tp", "cp", "sp"):
        size = getattr(parallelism, f"{kind}_size", 1) or 1
        if size > 1:
            raise UserError(
                f"the head-balance loss in transformers needs whole models and sequences on every "
                f"rank, but parallelism_config has {kind}_size {size}: use data parallelism, or "
                "megasink train"
            )


def _encoded(state: dict[str, Tensor]) -> dict[str, Any]:
    """Return exact values as text: JSON with a line per number would dwarf the Trainer's state."""
    return {
        name: {
            "shape": list(tensor.shape),
            "base64": base64.b64encode(tensor.contiguous().numpy().tobytes()).decode(),
        }
        for name, tensor in state.items()
    }


def _decoded(saved: dict[str, Any]) -> dict[str, Tensor]:
    """Invert :func:`_encoded`."""
    state = {}
    try:
        for name, dtype in _DTYPES.items():
            kind = np.dtype(str(dtype).removeprefix("torch."))
            values = np.frombuffer(base64.b64decode(saved[name]["base64"]), kind)
            state[name] = torch.from_numpy(values.reshape(saved[name]["shape"]).copy())
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the checkpoint's state of the head-balance loss is damaged ({error!r}): resume from "
            "another checkpoint"
        ) from error
    return state
