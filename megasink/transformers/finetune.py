"""Fine-tuning of a model of transformers by TRL's SFTTrainer, with the head-balance loss."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback, TrainerCallback, set_seed

from megasink.analysis.capture.load import load_weights
from megasink.atomic import atomic_folder
from megasink.errors import UserError
from megasink.finetune_options import FinetuneOptions, processes
from megasink.json_file import read_object
from megasink.progress import progress
from megasink.transformers import NAME
from megasink.transformers.callback import HeadBalanceCallback
from megasink.transformers.chats import IGNORED, read_chats, tokens_of

HELD_OUT = 0.02
"""Share of the conversations that are not trained on, the last ones; at least one."""
SAMPLES = 64
"""Conversations on which head importance is measured: held-out ones, and of a few others too."""


def tokenized(
    options: FinetuneOptions, tokenizer: Any, template: str | None, folder: Path, fingerprint: str
) -> tuple[Any, Any, Any]:
    """Return the conversations to train on, those that are held out, and those to measure on.

    Args:
        template: See `tokens_of`.
        folder: Gets the tokens; processes that call this at once make them once.
        fingerprint: Of all that they depend on; tokens of the same one are not made again.

    Returns:
        `datasets.Dataset` with `input_ids` and `labels`.

    Raises:
        UserError: See `read_chats` and `tokens_of`; also fewer than two conversations with an
            answer in `seq_length` tokens.
    """
    from datasets import Dataset, Features, List, Value
    from datasets.exceptions import DatasetGenerationError

    def rows() -> Iterator[dict[str, Any]]:
        chat = None
        for chat in read_chats(options.data):
            row = tokens_of(chat, tokenizer, template, options.seq_length)
            yield row | {"learned": sum(label != IGNORED for label in row["labels"])}
        if chat is None:
            raise UserError(f"--data {files}: no conversations")

    files = " ".join(map(str, options.data))
    tokens, number = List(Value("int32")), Value("int64")
    names = {"input_ids": tokens, "labels": tokens, "whole": number, "learned": number}
    try:
        every = Dataset.from_generator(
            rows, features=Features(names), cache_dir=str(folder), fingerprint=fingerprint
        )
    except DatasetGenerationError as error:
        raise (error.__cause__ if isinstance(error.__cause__, UserError) else error) from None
    found = np.flatnonzero(np.asarray(every["learned"]))
    if len(found) < 2:
        raise UserError(
            f"--data {files}: of {len(every)} conversations {len(found)} have an answer in their "
            f"first {options.seq_length} tokens: give two or more of these, one is held out"
        )
    count = len(found) - max(1, round(HELD_OUT * len(found)))
    columns = every.select_columns(["input_ids", "labels"])
    if processes() == 1 or torch.distributed.get_rank() == 0:
        cut = int((np.asarray(every["whole"]) > options.seq_length).sum())
        print(
            f"{count:,} conversations to train on, {len(found) - count:,} held out; {cut:,} are "
            f"cut off after {options.seq_length} tokens, and {len(every) - len(found):,} left out, "
            "which have no answer before"
        )
    sample = found[min(count, max(0, len(found) - SAMPLES)) :][:SAMPLES]
    return columns.select(found[:count]), columns.select(found[count:]), columns.select(sample)


def arguments(options: FinetuneOptions, folder: Path) -> Any:
    """Return TRL's SFTConfig; it starts the process group where there are several processes.

    Args:
        folder: Gets the checkpoints.
    """
    import datasets
    from transformers.utils import logging
    from trl import SFTConfig

    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    config = SFTConfig(
        output_dir=str(folder),
        max_length=options.seq_length,
        packing=True,
        eval_packing=False,
        num_train_epochs=options.epochs,
        learning_rate=options.rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,  # a share of the steps
        weight_decay=0.0,
        per_device_train_batch_size=options.micro_batch_size,
        per_device_eval_batch_size=options.micro_batch_size,
        gradient_accumulation_steps=options.global_batch_size
        // (options.micro_batch_size * processes()),
        eval_strategy="epoch",
        save_steps=0.1,  # a share of the steps
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        bf16=options.bf16,
        use_cpu=not torch.cuda.is_available(),
        seed=options.seed,
        gradient_checkpointing=options.gradient_checkpointing,
    )
    if config.n_gpu > 1:
        raise UserError(
            f"this process sees {config.n_gpu} GPUs: start one for each with torchrun or "
            "accelerate launch, or hide the others with CUDA_VISIBLE_DEVICES=0"
        )
    return config


def make_trainer(
    options: FinetuneOptions,
    config: Any,
    tokenizer: Any,
    trained: Any,
    held_out: Any,
    shared_heads: int,
) -> Any:
    """Return TRL's SFTTrainer with the loss.

    Args:
        config: Of `arguments`.
        trained, held_out: Of `tokenized`.
        shared_heads: m of Eq. 8; 0 for Eq. 7.

    Raises:
        UserError: Missing or broken files, or a model without the attention "megasink".
    """
    from peft import LoraConfig
    from trl import SFTTrainer

    lora = None
    if options.lora_rank:
        lora = LoraConfig(
            r=options.lora_rank,
            lora_alpha=options.lora_alpha or options.lora_rank,  # type: ignore[arg-type]
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    set_seed(options.seed)  # TRL makes adapters before it does so
    dtype = torch.bfloat16 if options.bf16 and options.lora_rank else torch.float32
    trainer = SFTTrainer(
        model=load_weights(options.model, dtype=dtype, attn_implementation=NAME),
        args=config,
        train_dataset=trained,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[_Progress()],
    )
    trainer.remove_callback(PrinterCallback)
    HeadBalanceCallback(options.head_balance_coeff, shared_heads).add_to(trainer)
    return trainer


def train(trainer: Any) -> None:
    """Train, from the newest whole checkpoint if there is one; write trainer_state.json."""
    folder = Path(trainer.args.output_dir)
    checkpoint = newest_checkpoint(folder)
    with contextlib.closing(next(c for c in _callbacks(trainer) if isinstance(c, _Progress))):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_state()


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a Trainer that was written to its end.

    Its state is the last file that is written.
    """
    found = {}
    for path in folder.glob("checkpoint-*"):
        with contextlib.suppress(UserError, ValueError):
            read_object(path / "trainer_state.json")
            found[int(path.name.partition("-")[2])] = path
    return found[max(found)] if found else None


def export(trainer: Any, tokenizer: Any, options: FinetuneOptions, folder: Path) -> None:
    """Write the trained model, or its adapter; the folder appears when it is complete."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if options.lora_rank and not options.adapter:
        model = model.merge_and_unload(safe_merge=True)
    if not options.adapter:
        config = read_object(options.model / "config.json")
        stored = config.get("dtype", config.get("torch_dtype"))
        if isinstance(dtype := getattr(torch, str(stored), None), torch.dtype):
            model = model.to(dtype)
    if folder.exists():
        shutil.rmtree(folder)
    with atomic_folder(folder) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


def merged(base: Any, adapter: Path) -> Any:
    """Return a model with an adapter merged into it."""
    from peft import PeftModel

    return PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()


class _Progress(TrainerCallback):
    """A bar on a terminal, lines elsewhere, in place of a line for every step."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._tell: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            begun = state.global_step
            shown = progress("training", state.max_steps, "steps", before=begun)
            self._tell = self._open.enter_context(shown)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self._tell is None or not logs or "loss" not in logs:
            return
        told = f"loss {logs['loss']:.4f}, head imbalance {logs['head_imbalance']:.4f}"
        self._tell(state.global_step, told, now=state.global_step == state.max_steps)

    def close(self) -> None:
        """Take the bar away."""
        self._open.close()
        self._tell = None


def _callbacks(trainer: Any) -> list[Any]:
    callbacks: list[Any] = trainer.callback_handler.callbacks
    return callbacks


def fingerprint_of(settings: dict[str, Any]) -> str:
    """Return a name for settings, of letters and digits."""
    import hashlib

    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
