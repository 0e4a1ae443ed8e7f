"""The whole of `megasink finetune`: heads measured, weights trained and exported, heads again."""

import contextlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import ModelCardData, repocard

import megasink
from megasink.analysis.analysis_folder import read_analysis
from megasink.analysis.capture.input_samples import Inputs, Sample, data_hash
from megasink.analysis.capture.probed_models import of_transformers
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.result_schemas import RunFacts
from megasink.analysis.run_analysis import analyze
from megasink.balance.shared_heads import choose_shared_heads
from megasink.console.papers import cited
from megasink.figures.importance_heatmap import importance_pictures
from megasink.files.atomic import atomic_file, atomic_text
from megasink.files.json_file import read_object
from megasink.files.output_folder import results_in
from megasink.finetune import sft_training
from megasink.finetune.chats import ChatTokenizer
from megasink.finetune.options import FinetuneOptions

_MADE = ("partial", "before", "run", "model", "adapter", "after")
_LICENSE = ("license", "license_name", "license_link")


def fine_tune(options: FinetuneOptions, out: Path, overwrite: bool, base: Path) -> None:
    """Measure the heads, train, export and measure again, each unless OUT has it already."""
    chats = ChatTokenizer(options.model)
    config = sft_training.arguments(options, out / "run")  # the processes meet here
    state = config.distributed_state
    is_first, before, settings = state.is_main_process, None, {}
    if is_first:
        before = sft_training.original(options)
        settings = sft_training.settings(options, *before)
        if chats.turn_end is None:
            print(
                "megasink: warning: the chat template does not end a turn with a trained token: "
                "the model may not learn to stop",
                file=sys.stderr,
            )
    held = results_in(out, "finetune", settings, overwrite=overwrite, writes=is_first)
    with held as record, contextlib.ExitStack() as ended:
        partial = out / "partial"
        if is_first:
            for name in _MADE if overwrite else ("partial",):
                shutil.rmtree(out / name, ignore_errors=True)
            ended.callback(shutil.rmtree, partial, ignore_errors=True)
        state.wait_for_everyone()
        trained, held_out, sample = sft_training.tokenized(options, chats, partial)
        state.wait_for_everyone()
        if before is not None:
            record()
            _analyze(options, *before, sample, out / "before")
        del before
        state.wait_for_everyone()
        exported = out / ("adapter" if options.adapter else "model")
        if not exported.is_dir():
            shared = _shared_heads(options, out / "before", say=is_first)
            trainer = sft_training.make_trainer(options, config, chats.tokenizer, trained, shared)
            sft_training.train(trainer, held_out)
            state.wait_for_everyone()
            sft_training.export(trainer, chats, options, exported)
            del trainer
        if is_first:
            _analyze(options, *sft_training.after(options, exported), sample, out / "after")
            _summarize(options, base, out, exported)
        state.wait_for_everyone()


def _shared_heads(options: FinetuneOptions, before: Path, *, say: bool) -> int:
    """Return m of Eq. 8, and print the heads that it shares."""
    if options.shared_heads is not None:
        return options.shared_heads
    chosen = choose_shared_heads(read_analysis(before).values("importance"))
    if say:
        print(chosen.describe())
    return chosen.m


def _analyze(options: FinetuneOptions, model: Any, tokenizer: Any, rows: Any, output: Path) -> None:
    """Measure the heads on the tokens of conversations, unless that was done before."""
    if (output / "results.json").is_file() and not (output / "partial").exists():
        return
    samples = [
        Sample(tuple(ids), "conversations", f"conversation {n}")
        for n, ids in enumerate(rows["input_ids"])
    ]
    facts = RunFacts(
        data=[str(path) for path in options.data],
        bos="none",
        seq_length=options.length,
        seed=options.seed,
        device=str(model.device),
        data_sha256=data_hash(samples),
    )
    analyze(
        of_transformers(model, tokenizer, output.name),
        AnalysisOptions(loss=False, output=output, seed=options.seed),
        inputs=Inputs(samples, facts),
    )


def _summarize(options: FinetuneOptions, base: Path, out: Path, exported: Path) -> None:
    """Draw importance.png, write the card, and print what was made."""
    analyses = [read_analysis(out / name) for name in ("before", "after")]
    with atomic_file(out / "importance.png") as file:
        file.write(importance_pictures([(a.name, a.values("importance")) for a in analyses]))
    imbalance = [float(np.nanmean(a.values("imbalance"))) for a in analyses]
    log = read_object(out / "run" / "trainer_state.json")["log_history"]
    shared = _shared_heads(options, out / "before", say=False)
    # In place of peft's, whose fields are empty.
    atomic_text(exported / "README.md", _card(options, base, shared, log, imbalance))
    for what, value in (
        ("held-out loss", f"{log[-1]['eval_loss']:.4f}"),
        ("head imbalance", f"{imbalance[0]:.4f} -> {imbalance[1]:.4f}"),
        ("picture", out / "importance.png"),
        ("the heads", f"megasink report {out / 'before'} {out / 'after'}"),
        ("exported", exported),
    ):
        print(f"  {what:15} {value}")


def _card(
    options: FinetuneOptions,
    base: Path,
    shared_heads: int,
    log: Sequence[Mapping[str, Any]],
    imbalance: Sequence[float],
) -> str:
    """Return the model card: Markdown with the front matter that the Hugging Face hub reads."""
    licensed: dict[str, Any] = _license(options.model)
    # A name of the hub was fetched into its cache.
    named = str(base) if options.model.parent.name == "snapshots" else None
    data = ModelCardData(
        base_model=named,
        library_name="peft" if options.adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["megasink"],
        **licensed,
    )
    lora = f"rank {options.lora_rank}, alpha {options.lora_alpha or options.lora_rank:g}"
    losses = [entry["loss"] for entry in log if "loss" in entry]
    equation = f"Eq. 8, all but the {shared_heads} most important heads of each layer"
    rows = {
        "base model": named or base.name,
        "license of the base model": licensed.get("license", "not stated in its folder"),
        "conversations": ", ".join(path.name for path in options.data),
        "weights trained": "all" if options.full else f"LoRA ({lora})",
        "head-balance coefficient": f"{options.head_balance_coeff:g}",
        "heads balanced": equation if shared_heads else "Eq. 7, all",
        "steps, epochs": f"{len(losses)}, {options.epochs:g}",
        "samples per step, tokens per sample": f"{options.global_batch_size}, {options.length}",
        "peak learning rate, schedule": f"{options.rate:g}, cosine to 0",
        "computed in": "bfloat16" if options.bf16 else "float32",
        "seed": options.seed,
        "training loss, first and last step": f"{losses[0]:.4f}, {losses[-1]:.4f}",
        "held-out loss after training": f"{log[-1]['eval_loss']:.4f} nats per token",
        "head imbalance, before and after": f"{imbalance[0]:.4f}, {imbalance[1]:.4f}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
{data.to_yaml()}
---

# {base.name}, fine-tuned with the head-balance loss

Made by `megasink finetune` {megasink.__version__} with TRL, on the assistant's turns only.

| | |
|---|---|
{table}

The head-balance loss is that of {cited("P0")}.
"""


def _license(folder: Path) -> dict[str, str]:
    """Return the license that the card of a model's folder states; nothing without a card."""
    with contextlib.suppress(OSError, ValueError):
        found = repocard.metadata_load(folder / "README.md") or {}
        return {name: found[name] for name in _LICENSE if isinstance(found.get(name), str)}
    return {}
