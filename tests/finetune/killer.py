"""A plugin that kills its process at a place that the environment names: step:N, save:N, export."""

import os
import signal

from transformers import Trainer, TrainerCallback

WHERE, _, STEP = os.environ.get("MEGASINK_TEST_KILL", "").partition(":")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killer(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if WHERE == "step" and state.global_step == int(STEP):
            die()


_init, _save = Trainer.__init__, Trainer._save_optimizer_and_scheduler


def init(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    self.add_callback(Killer())


def save(self, folder):
    """The adapter of the checkpoint is written, and nothing else of it."""
    if WHERE == "save" and self.state.global_step == int(STEP):
        die()
    _save(self, folder)


Trainer.__init__, Trainer._save_optimizer_and_scheduler = init, save

if WHERE == "export":
    from megasink.finetune import export_finetuned

    export_finetuned.refuse_changes = lambda *_: die()
