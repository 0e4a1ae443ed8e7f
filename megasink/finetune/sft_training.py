"""Fine-tuning of a model of transformers by TRL's SFTTrainer, with the head-balance loss."""

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from datasets.exceptions import DatasetGenerationError
from peft import LoraConfig, PeftModel
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from megasink.console.progress import progress
from megasink.errors import UserError
from megasink.files.atomic import atomic_folder
from megasink.files.json_file import read_object
from megasink.finetune import export_finetuned
from megasink.finetune.chats import IGNORED, ChatTokenizer, read_chats
from megasink.finetune.options import FinetuneOptions, processes, uses
from megasink.transformers import NAME
from megasink.transformers.decoder_blocks import carries_state
from megasink.transformers.load_hf_folder import load, load_weights
from megasink.transformers.model_identity import model_identity
from megasink.transformers.trainer_callback import HeadBalanceCallback, check_arguments

HELD_OUT = 0.02
"""Share of the conversations that are held out: the last ones, at least one."""
SAMPLES = 64
"""Conversations for head importance: held-out ones, then others if those are too few."""
_UNSHARDED = ("NO", "MULTI_CPU")
_PACKAGES = ("accelerate", "datasets", "peft", "tokenizers", "trl")


def original(options: FinetuneOptions) -> tuple[Any, Any]:
    """Return the model to fine-tune, as an analysis loads it, and its tokenizer."""
    export_finetuned.plain_weights(options.model)
    return load(options.model, "cuda" if torch.cuda.is_available() else "cpu")


def settings(options: FinetuneOptions, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return everything that the results depend on, by contents rather than by path."""
    hashes = {}
    for path in options.data:
        with path.open("rb") as file:
            hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    given = {k: v for k, v in asdict(options).items() if k not in ("model", "data")}
    given |= model_identity(model, tokenizer, hashes) | {"seq_length": options.length}
    given |= {name: version(name) for name in _PACKAGES}
    return given | {"processes": processes(), "device": str(model.device.type)}


def tokenized(options: FinetuneOptions, chats: ChatTokenizer, folder: Path) -> tuple[Any, Any, Any]:
    """Return the tokens of the conversations to train on, to hold out, and to measure on.

    All processes call this; one makes the tokens, in the folder.
    """
    most, files = options.length, " ".join(map(str, options.data))
    vocabulary = options.model_config.get("vocab_size")

    def rows() -> Iterator[dict[str, Any]]:
        chat = None
        for chat in read_chats(options.data):
            ids, labels = chats.read(chat)
            if vocabulary is not None and (highest := max(ids, default=0)) >= vocabulary:
                raise UserError(
                    f"{chat.place}: the tokenizer gives token id {highest}, but the model's "
                    f"vocabulary has {vocabulary} tokens: it belongs to another model"
                )
            # The first token is not a target.
            learned = sum(label != IGNORED for label in labels[1:most])
            row = {"input_ids": ids[:most], "labels": labels[:most]}
            yield row | {"whole": len(ids), "learned": learned}
        if chat is None:
            raise UserError(f"--data {files}: no conversations")

    kinds = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
    features = Features(kinds | {"whole": Value("int64"), "learned": Value("int64")})
    try:
        every = Dataset.from_generator(
            rows, features=features, cache_dir=str(folder), fingerprint="tokens"
        )
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None
    found = np.flatnonzero(np.asarray(every["learned"]))
    if len(found) < 2:
        raise UserError(
            f"--data {files}: only {len(found)} of {len(every)} conversations have an answer in "
            f"their first {most} tokens: at least two are needed, because one is held out"
        )
    count = len(found) - max(1, round(HELD_OUT * len(found)))
    columns = every.select_columns(["input_ids", "labels"])
    if processes() == 1 or torch.distributed.get_rank() == 0:
        cut = int((np.asarray(every["whole"]) > most).sum())
        print(
            f"{count:,} conversations to train on, {len(found) - count:,} held out. {cut:,} "
            f"are cut off after {most} tokens, and {len(every) - len(found):,} are left out, "
            "because they have no answer before the cut"
        )
    sample = found[min(count, max(0, len(found) - SAMPLES)) :][:SAMPLES]
    return columns.select(found[:count]), columns.select(found[count:]), columns.select(sample)


def arguments(options: FinetuneOptions, folder: Path) -> Any:
    """Return TRL's SFTConfig, with checkpoints in a folder; it starts the process group."""
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    config = SFTConfig(
        output_dir=str(folder),
        max_length=options.length,
        packing=True,
        num_train_epochs=options.epochs,
        learning_rate=options.rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,  # a share of the steps
        per_device_train_batch_size=options.micro_batch_size,
        gradient_accumulation_steps=options.global_batch_size
        // (options.micro_batch_size * processes()),
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
    check_arguments(config)
    state: Any = config.distributed_state
    if uses("FSDP") and (kind := state.distributed_type.value) in _UNSHARDED:
        raise UserError(
            f"accelerate ignores FSDP for {kind} (one process, or a CPU): start one process per GPU"
        )
    return config


def make_trainer(
    options: FinetuneOptions, config: Any, tokenizer: Any, trained: Any, shared_heads: int
) -> Any:
    """Return TRL's SFTTrainer with the loss of Eq. 8, or of Eq. 7 without shared heads."""
    lora = None
    if not options.full:
        lora = LoraConfig(
            r=options.lora_rank,
            lora_alpha=options.lora_alpha or options.lora_rank,  # type: ignore[arg-type]
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    dtype = torch.bfloat16 if options.bf16 and not options.full else torch.float32
    model = load_weights(options.model, dtype=dtype, attn_implementation=NAME)
    text = model.config.get_text_config()
    asks = getattr(text, "output_router_logits", False) and getattr(text, "num_experts", 1)
    if asks and getattr(text, "moe_router_score_function", "softmax") != "softmax":
        raise UserError(
            f"{options.model}/config.json enables the router loss (output_router_logits), which "
            "TRL computes only for softmax routers: set it to false"
        )
    if not asks:  # TRL trains it for every model that has a coefficient
        config.router_aux_loss_coef = 0.0
    if carries_state(model):
        config.packing = False
        if config.process_index == 0:
            print(f"{text.model_type} is trained on one conversation per sample (not packed)")
    trainer: Any = SFTTrainer(
        model=model,
        args=config,
        train_dataset=trained,
        processing_class=tokenizer,
        peft_config=lora,
    )
    if trainer.accelerator.is_fsdp2:
        # FSDP's own policy would round sinks to bfloat16. Instead compute as DDP does.
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = None
        kind = trainer.accelerator.device.type
        trainer.autocast_smart_context_manager = lambda: torch.autocast(
            kind, torch.bfloat16, options.bf16
        )
    trainer.remove_callback(PrinterCallback)
    HeadBalanceCallback(options.head_balance_coeff, shared_heads).add_to(trainer)
    return trainer


def train(trainer: Any, held_out: Any) -> None:
    """Train, from the newest complete checkpoint if there is one; write trainer_state.json.

    Its log has the loss of the held-out conversations as `eval_loss`.
    """
    checkpoint = newest_checkpoint(Path(trainer.args.output_dir))
    if checkpoint is not None:  # TRL counts from 0 again
        log = read_object(checkpoint / "trainer_state.json")["log_history"]
        trainer._total_train_tokens = int(log[-1]["num_tokens"])
    with contextlib.ExitStack() as shown:
        trainer.add_callback(_Progress(shown))
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    history = trainer.state.log_history
    # Trainer's final entry covers only the steps of this process.
    history[:] = [entry for entry in history if "train_runtime" not in entry]
    trainer.log({"eval_loss": held_out_loss(trainer, held_out)})
    trainer.save_state()


@torch.no_grad()
def held_out_loss(trainer: Any, rows: Any) -> float:
    """Return the mean loss of the language model over all targets of rows, in nats.

    Each row runs by itself, so the batch size does not matter.
    """
    model, accelerator = trainer.model.eval(), trainer.accelerator
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    first, step = accelerator.process_index, accelerator.num_processes
    # FSDP gathers weights from all ranks in each forward pass, so all make equally many.
    for number in range(first, first + -(-len(rows) // step) * step, step):
        batch = trainer._prepare_inputs(trainer.data_collator([rows[number % len(rows)]]))
        with trainer.compute_loss_context_manager():
            output = model(**batch, use_cache=False, fused_lm_head=True)
        if number < len(rows):
            sums[0] -= output.log_probs.double().sum()
            sums[1] += output.label_mask.sum()
    loss, targets = accelerator.reduce(sums).tolist()
    return float(loss / targets)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a Trainer.

    The first process writes its state last; the others write the state of their random numbers.
    """
    found = {}
    for path in folder.glob("checkpoint-*"):
        with contextlib.suppress(UserError, ValueError):
            read_object(path / "trainer_state.json")
            if len([*path.glob("rng_state*.pth")]) == processes():
                found[int(path.name.partition("-")[2])] = path
    return found[max(found)] if found else None


def export(trainer: Any, chats: ChatTokenizer, options: FinetuneOptions, folder: Path) -> None:
    """Write the trained model, or its adapter; the folder appears when it is complete.

    All processes call this; the first one writes.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if not trainer.is_world_process_zero():
        return
    requested = export_finetuned.with_end(options.model, chats.turn_end)
    if requested:
        token = chats.tokenizer.convert_ids_to_tokens(chats.turn_end)
        ids = f"eos_token_id={requested['eos_token_id']}"
        stop = f"pass {ids} to generate()" if options.adapter else f"generation_config.json: {ids}"
        print(f"the template ends answers with {token}, but MODEL does not stop there: {stop}")
    with atomic_folder(folder) as unfinished:
        if options.adapter:
            model.save_pretrained(unfinished, state_dict=weights)
            export_finetuned.copy_files(options.model, unfinished)
        else:
            if not options.full:  # into the original's weights, which may be wider than trained
                base = load_weights(options.model, dtype=torch.float32, attn_implementation=NAME)
                with tempfile.TemporaryDirectory() as adapter:
                    model.save_pretrained(adapter, state_dict=weights)
                    model = merged(base, Path(adapter))
                weights = None
            export_finetuned.write_model(model, options.model, unfinished, requested, weights)
        export_finetuned.refuse_changes(options.model, unfinished, requested)


def after(options: FinetuneOptions, folder: Path) -> tuple[Any, Any]:
    """Return an exported model, as an analysis loads it, and its tokenizer."""
    if not options.adapter:
        return original(replace(options, model=folder))
    model, tokenizer = original(options)
    return merged(model, folder).eval(), tokenizer


def merged(base: Any, adapter: Path) -> Any:
    """Return a model with an adapter merged into it."""
    return PeftModel.from_pretrained(base, str(adapter)).merge_and_unload(safe_merge=True)


class _Progress(TrainerCallback):
    """A bar on a terminal, lines elsewhere, in place of a line for every step."""

    def __init__(self, shown: contextlib.ExitStack) -> None:
        self._shown, self._report = shown, lambda *_, **__: None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            shown = progress("training", state.max_steps, "steps", before=state.global_step)
            self._report = self._shown.enter_context(shown)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            text = f"loss {logs['loss']:.4f}, head imbalance {logs['head_imbalance']:.4f}"
            self._report(state.global_step, text, now=state.global_step == state.max_steps)
