"""The head-balance loss under DeepSpeed's ZeRO-2, on two processes; skipped without deepspeed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

from megasink.transformers.trainer_callback import HeadBalanceCallback
from tests.analysis.capture.tiny_models import tiny_model
from tests.distributed.pool import free_port
from tests.transformers.balance_oracle import tokens, without_grouped_experts

ZERO_2 = {
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train(folder: Path, microbatches: int, deepspeed: dict | None) -> None:
    """Write the weights after three steps of four rows, and the logged losses."""
    torch.manual_seed(0)
    model = without_grouped_experts(tiny_model("gpt-oss", "megasink")).train()
    options = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "optim": "sgd"}
    options |= {"logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True}
    args = TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=1, learning_rate=1e-2,
        gradient_accumulation_steps=microbatches, deepspeed=deepspeed, **options,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in (tokens(seed)[0] for seed in range(12))]
    trainer = InOrder(model=model, args=args, train_dataset=rows)
    callback = HeadBalanceCallback(coeff=5.0).add_to(trainer)
    trainer.train()
    if trainer.is_world_process_zero():
        logs = [log for log in trainer.state.log_history if "loss" in log]
        found = {n: torch.tensor([log[n] for log in logs]) for n in ("loss", "balance_loss")}
        found["importance"] = callback.importance_LH
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        torch.save(weights | found, folder / "found.pt")


def test_two_processes_equal_one(tmp_path):
    pytest.importorskip("deepspeed")
    train(tmp_path / "one", 4, None)
    launch = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    subprocess.run(
        [sys.executable, "-m", *launch, "-m", __name__, str(tmp_path / "two")],
        check=True, env=os.environ | {"DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    one, two = (torch.load(tmp_path / name / "found.pt") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, expected in one.items():
        limit = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(two[name], expected, rtol=0, atol=limit, msg=name)


if __name__ == "__main__":
    train(Path(sys.argv[1]), 2, ZERO_2)
