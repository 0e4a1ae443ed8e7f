"""Trainings of tiny models by transformers' Trainer with the head-balance loss."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from megasink.transformers.trainer_callback import HeadBalanceCallback
from tests.transformers.balance_oracle import tokens

RATE, COEFF = 0.05, 0.5
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 1,
    "use_cpu": True,
    "report_to": [],
    "train_sampling_strategy": "sequential",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}


def dataset(rows: int, masked: bool) -> list[dict[str, Tensor]]:
    """Rows of 12 tokens; `masked`: answers of different lengths."""
    found = []
    for index, ids in enumerate(tokens(7, rows)):
        labels = ids.clone()
        if masked:
            labels[: 2 + 3 * (index % 4)] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def trainer_of(
    folder: Path, model: Any, callbacks: list[Any], data: list[Any], **options: Any
) -> Trainer:
    """A Trainer with plain gradient descent, which sees the rows in order."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return Trainer(
        model=model,
        args=TrainingArguments(**{**ARGUMENTS, "output_dir": str(folder), **options}),
        train_dataset=data,
        callbacks=callbacks,
        optimizers=(optimizer, schedule),
    )


def weights(model: Any) -> dict[str, Tensor]:
    """A copy of the parameters."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def callback(**options: Any) -> HeadBalanceCallback:
    """With a coefficient that moves the weights as much as the loss does."""
    return HeadBalanceCallback(**{"coeff": COEFF, **options})
