"""The folder of a run: what started it, where its files are, and who may write to it.

RUN/config.json       every resolved argument, those that make the run as given, versions, git hash
RUN/starts.jsonl      one line per start: time, command line, layout, versions
RUN/metrics.jsonl     one line per step, one per evaluation
RUN/checkpoints/      torch_dist checkpoints
RUN/tensorboard/
RUN/logs/             output of every rank, when started by ``megasink train``
RUN/analysis/         analyses of the model while it trained (--analyze-interval)
RUN/curves.png        loss, imbalance and head importance
"""

import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megasink
from megasink.checkpoint.find import newest_checkpoint
from megasink.checkpoint.identity import MODEL, plain, same
from megasink.checkpoint.intact import go_back_to_intact, iterations, newest_intact
from megasink.compat import versions
from megasink.errors import UserError

# A run is its model, its data and its loss; layout, length and learning rate may change on resume.
IDENTITY = (
    *MODEL,
    "head_balance_coeff",
    "head_balance_scope",
    "data_path",
    "split",
    "seed",
    "global_batch_size",
    "bf16",
    "fp16",
)


def problems(args: Namespace) -> list[str]:
    """What forbids to start, or to resume, in ``args.run_dir``."""
    if args.run_dir is None:
        found = ["--resume needs --run-dir"] if args.resume else []
        return found + _checkpoint_problems(args, args.load)
    folder = Path(args.run_dir)
    config = folder / "config.json"
    if config.is_file():
        try:
            before = _identity_before(config)
        except (ValueError, KeyError, TypeError) as error:
            return [f"{config} cannot be read ({error}): choose another --run-dir"]
        differences = _differences(before, args, IDENTITY)
        if differences:
            return [
                f"--run-dir {folder} holds a run of another configuration "
                f"({'; '.join(differences)}): choose another folder or the same flags"
            ]
    problem = folder_problem(folder, resume=args.resume)
    if problem:
        return [problem]
    if args.resume:
        try:
            newest_intact(folder / "checkpoints")
        except UserError as error:
            return [str(error)]
    return [] if args.resume else _checkpoint_problems(args, args.load)


def folder_problem(folder: Path, *, resume: bool) -> str | None:
    """What forbids any run to start, or to resume, in a folder; None if nothing does."""
    if folder.exists() and not folder.is_dir():
        return f"--run-dir {folder} is a file"
    if not (folder / "config.json").is_file():
        if resume:
            return f"--resume: {folder} holds no run; drop --resume to start one there"
        # The last rank may have opened its writers already.
        if {p.name for p in folder.glob("*")} - {"logs", "tensorboard", "wandb"}:
            return f"--run-dir {folder} is not empty and holds no run: choose another folder"
        return None
    if not resume:
        return f"--run-dir {folder} holds a run already: add --resume or choose another folder"
    if not iterations(folder / "checkpoints"):
        return f"--resume: {folder}/checkpoints holds no finished checkpoint: start a new run"
    return None


def _checkpoint_problems(args: Namespace, load: str | None) -> list[str]:
    """Whether ``--load`` names a checkpoint of this architecture."""
    if not load:
        return []
    if newest_checkpoint(Path(load)) is None:
        return [
            f"--load {load}: no finished checkpoint there (no latest_checkpointed_iteration.txt)"
        ]
    config = Path(load).parent / "config.json"
    if not config.is_file():
        return []  # not from a run folder: Megatron compares the arguments that it saved
    before, names = json.loads(config.read_text()), MODEL
    if "converted_from" in before:
        if not args.finetune:
            return [
                f"--load {load} was converted from Hugging Face and holds no state of an "
                "optimizer: add --finetune"
            ]
        # Data and tokenizer may be others than those of the folder it came from.
        names = tuple(name for name in MODEL if name in before["identity"])
    saved = _identity_before(config)
    differences = _differences(saved, args, names, finetune=args.finetune)
    if not differences:
        return []
    hint = ""
    if not _differences(saved, args, names, finetune=True):
        hint = " (another context goes with --finetune)"
    return [f"--load {load} is a checkpoint of another model: {'; '.join(differences)}{hint}"]


def _identity_before(config: Path) -> dict[str, Any]:
    saved = json.loads(config.read_text())
    return {**saved["arguments"], **saved.get("identity", {})}


def _differences(
    before: dict[str, Any], args: Namespace, names: Sequence[str], *, finetune: bool = False
) -> list[str]:
    now = {name: plain(getattr(args, name)) for name in names if hasattr(args, name)}
    return [
        f"{name} {before[name]!r} -> {value!r}"
        for name, value in now.items()
        if name in before and not same(name, before[name], value, finetune=finetune)
    ]


def set_paths(args: Namespace) -> None:
    """Point Megatron's own options into the run folder where they were not given."""
    if args.run_dir is None:
        return
    folder = Path(args.run_dir)
    args.save = args.save or str(folder / "checkpoints")
    if args.resume:
        args.load = str(folder / "checkpoints")
        # Without it Megatron starts anew, with a warning, where the checkpoint does not load.
        args.exit_on_missing_checkpoint = True
    args.tensorboard_dir = args.tensorboard_dir or str(folder / "tensorboard")
    # Megatron's own place for it is inside --save.
    args.wandb_save_dir = args.wandb_save_dir or str(folder / "wandb")
    args.data_cache_path = args.data_cache_path or str(folder / "data-cache")
    if args.save_interval is None:
        args.save_interval = args.train_iters


def write_start(args: Namespace, identity: dict[str, Any]) -> None:
    """Record this start; on the rank that owns the folder, after validation.

    Args:
        args: validated arguments.
        identity: the arguments as they were given, before Megatron derived others.
    """
    if args.run_dir is None:
        return
    folder = Path(args.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    resumed_from = None
    if args.resume:
        resumed_from = go_back_to_intact(folder / "checkpoints", checksums=args.verify_checkpoint)
    resolved = {name: plain(value) for name, value in sorted(vars(args).items())}
    config = {
        "arguments": resolved,
        "identity": identity,
        "seed": args.seed,
        "versions": {"megasink": megasink.__version__} | versions(),
        "git": git_hash(),
    }
    _write_whole(folder / "config.json", json.dumps(config, indent=1) + "\n")
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "world_size": args.world_size,
        "resumed_from": resumed_from,
        "versions": config["versions"],
        "git": config["git"],
    }
    with (folder / "starts.jsonl").open("a") as file:
        file.write(json.dumps(start) + "\n")


def identity_of(args: Namespace) -> dict[str, Any]:
    """The arguments by which a run is known, as they were given."""
    return {name: plain(getattr(args, name)) for name in IDENTITY if hasattr(args, name)}


def git_hash() -> str | None:
    """The commit of megasink's checkout, '+dirty' with local changes; None outside a checkout."""
    where = Path(megasink.__file__).parent
    try:
        commit, state = (
            subprocess.run(
                ["git", "-C", str(where), *command], capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+dirty" if state else "")


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
