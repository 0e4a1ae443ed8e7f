"""On a CPU, what a rank of an unchanged ``pretrain_gpt.py`` runs before its first import."""

import json
import os
from pathlib import Path

if "RANK" in os.environ:
    from megasink import cpu

    cpu.activate()
    from megatron.core.datasets import gpt_dataset, utils

    from megasink.balance.step import LossStep
    from megasink.upstream import patch_register

    # It runs `make` in the folder of the sources, which an installed wheel is not.
    utils.compile_helpers = lambda: None
    gpt_dataset.MockGPTLowLevelDataset.size = 1000  # as in the workers of the pool
    reduce = LossStep.reduce

    def recorded(self: LossStep) -> None:
        """Reduce, commit at once, and append the numbers of the step to a file."""
        reduce(self)
        last = self.commit()
        line = {"importance": last.importance_LH.tolist(), "balance_loss": float(last.balance_loss)}
        line["patches"] = sorted({made.patch.room for made in patch_register._active})
        with Path(f"{os.environ['RECORD']}-{os.environ['RANK']}").open("a") as file:
            file.write(json.dumps(line) + "\n")

    LossStep.reduce = recorded  # type: ignore[method-assign]
