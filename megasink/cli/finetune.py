"""``megasink finetune``: adapt a Hugging Face model on conversations, and export it again."""

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import megasink
from megasink.analysis.options import model_problem
from megasink.checkpoints.find import is_run
from megasink.cli import hub
from megasink.command_line import CommandParser
from megasink.errors import ConfigError, UserError
from megasink.finetune_options import FinetuneOptions, processes
from megasink.flags import add_fields
from megasink.output_folder import foreign_contents, results_in
from megasink.plugins import add_flag

_PACKAGES = ("accelerate", "datasets", "peft", "trl")
_MADE = ("partial", "before", "run", "model", "adapter", "after")
_GRACE_SECONDS = 60.0
_LICENSE = ("license", "license_name", "license_link")
_FLAGS = [field.name for field in fields(FinetuneOptions) if field.name != "model"]


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tune a model on conversations with LoRA and the head-balance loss of Eq. 8.

    Measures the importance of the model's heads, chooses which of them to share (m of Eq. 8),
    trains with TRL's SFTTrainer on what the assistant says, exports for transformers, and measures
    again. A repeated command goes on from the last checkpoint. Several processes (data parallelism)
    are started by `torchrun --nproc-per-node N -m megasink finetune ...` or `accelerate launch`.
    """
    with _reported_once():
        args = _parser(main.__doc__).parse_args(sys.argv[1:] if argv is None else list(argv))
        options = _options(args)
        if missing := [name for name in _PACKAGES if not find_spec(name)]:
            raise UserError(
                f"megasink finetune needs {', '.join(missing)}: pip install 'megasink[finetune]'"
            )
        hub.stay_offline()
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's advice
        _run(options, args.output, args.overwrite, args.base)
    return 0


@contextlib.contextmanager
def _reported_once() -> Iterator[None]:
    """Report an error once, on rank 0; leave the group of processes.

    The others meet it too, or that rank 0 has ended: their launcher ends them meanwhile.
    """
    try:
        yield
    except Exception:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_GRACE_SECONDS)
        raise
    finally:
        torch = sys.modules.get("torch")
        if processes() > 1 and torch and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _parser(description: str | None) -> CommandParser:
    parser = CommandParser(prog="megasink finetune", description=description)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="a Hugging Face folder with safetensors")
    add("--output", type=Path, required=True, help="output folder")
    add("--overwrite", action="store_true", help="replace the contents of --output and start again")
    add_fields(parser, FinetuneOptions, *_FLAGS)
    add_flag(parser)
    hub.add_allow_download(parser)
    first = (
        "data output full lora-rank adapter head-balance-coeff shared-heads epochs seq-length lr"
    )
    first += " micro-batch-size global-batch-size bf16"
    return parser.first_screen(
        "megasink finetune MODEL --data chats.jsonl --output out --bf16",
        *(f"--{name}" for name in first.split()),
    )


def _options(args: argparse.Namespace) -> FinetuneOptions:
    """Return the options, or raise every problem that is known before anything runs."""
    args.base, model = args.model, hub.fetched(args)
    given = {name: getattr(args, name) for name in _FLAGS} | {"data": tuple(args.data)}
    found = [model_problem(model, "--allow-download")]
    if is_run(model):
        found.append(f"{model} is a megasink run: megasink convert-to-hf exports it")
    if not args.overwrite:
        found.append(foreign_contents(args.output))
    problems = [problem for problem in found if problem]
    try:
        options = FinetuneOptions(model=model, **given)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return options


def _run(options: FinetuneOptions, out: Path, overwrite: bool, base: Path) -> None:
    from megasink.transformers import finetune
    from megasink.transformers.chats import ChatTokenizer

    chats = ChatTokenizer(options.model)
    config = finetune.arguments(options, out / "run")  # the processes meet here
    state = config.distributed_state
    is_first, before, settings = state.is_main_process, None, {}
    if is_first:
        before = finetune.original(options)
        settings = finetune.settings(options, *before)
        if chats.turn_end is None:
            print(
                "megasink: warning: the chat template ends no turn with a learned token: the model "
                "may not learn to stop",
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
        trained, held_out, sample = finetune.tokenized(options, chats, partial)
        state.wait_for_everyone()
        if before is not None:
            record()
            _analyze(options, *before, sample, out / "before")
        del before
        state.wait_for_everyone()
        exported = out / ("adapter" if options.adapter else "model")
        if not exported.is_dir():
            shared = _shared_heads(options, out / "before", say=is_first)
            trainer = finetune.make_trainer(options, config, chats.tokenizer, trained, shared)
            finetune.train(trainer, held_out)
            state.wait_for_everyone()
            if is_first:
                finetune.export(trainer, chats, options, exported)
            del trainer
        if is_first:
            _analyze(options, *finetune.after(options, exported), sample, out / "after")
            _summarize(options, base, out, exported)
        state.wait_for_everyone()


def _shared_heads(options: FinetuneOptions, before: Path, *, say: bool) -> int:
    """Return m of Eq. 8, and print the heads that it shares."""
    from megasink.analysis.folder import read_analysis
    from megasink.balance.shared_heads import choose_shared_heads

    if options.shared_heads is not None:
        return options.shared_heads
    chosen = choose_shared_heads(read_analysis(before).values("importance"))
    if say:
        print(chosen.describe())
    return chosen.m


def _analyze(options: FinetuneOptions, model: Any, tokenizer: Any, rows: Any, output: Path) -> None:
    """Measure the heads on the tokens of conversations, unless that was done before."""
    from megasink.analysis.capture.inputs import Sample, data_hash
    from megasink.analysis.capture.models import of_transformers
    from megasink.analysis.capture.samples import Inputs
    from megasink.analysis.options import AnalysisOptions
    from megasink.analysis.results import RunFacts
    from megasink.analysis.run import analyze

    if (output / "results.json").is_file() and not (output / "partial").exists():
        return
    samples = [
        Sample(tuple(ids), "conversations", f"conversation {n}")
        for n, ids in enumerate(rows["input_ids"])
    ]
    facts = RunFacts(
        data=[str(path) for path in options.data],
        bos="none",
        seq_length=options.seq_length,
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
    import numpy as np

    from megasink.analysis.folder import read_analysis
    from megasink.analysis.pages.heatmap import importance_pictures
    from megasink.atomic import atomic_file, atomic_text
    from megasink.json_file import read_object

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
    from huggingface_hub import ModelCardData

    from megasink.papers import cited

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
    equation = f"Eq. 8, without the {shared_heads} most important of each layer"
    rows = {
        "base model": named or base.name,
        "license of the base": licensed.get("license", "not stated in its folder"),
        "conversations": ", ".join(path.name for path in options.data),
        "weights trained": "all" if options.full else f"LoRA ({lora})",
        "head-balance coefficient": f"{options.head_balance_coeff:g}",
        "heads balanced": equation if shared_heads else "Eq. 7, all",
        "steps, epochs": f"{len(losses)}, {options.epochs:g}",
        "samples per step, tokens per sample": f"{options.global_batch_size}, {options.seq_length}",
        "peak learning rate, schedule": f"{options.rate:g}, cosine to 0",
        "computed in": "bfloat16" if options.bf16 else "float32",
        "seed": options.seed,
        "training loss, first and last step": f"{losses[0]:.4f}, {losses[-1]:.4f}",
        "loss of held-out conversations, after": f"{log[-1]['eval_loss']:.4f} nats per token",
        "head imbalance, before and after": f"{imbalance[0]:.4f}, {imbalance[1]:.4f}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
{data.to_yaml()}
---

# {base.name}, fine-tuned with the head-balance loss

Made by `megasink finetune` {megasink.__version__} with TRL, on the assistant's turns alone.

| | |
|---|---|
{table}

The head-balance loss is that of {cited("P0")}.
"""


def _license(folder: Path) -> dict[str, str]:
    """Return the license that the card of a model's folder states; nothing without a card."""
    from huggingface_hub import repocard

    with contextlib.suppress(OSError, ValueError):
        found = repocard.metadata_load(folder / "README.md") or {}
        return {name: found[name] for name in _LICENSE if isinstance(found.get(name), str)}
    return {}
