"""The run folder: its configuration, its files, and its lease.

RUN/config.toml       the flags of the last start, which `megasink train --recipe` takes
RUN/config.json       every resolved argument, the run's identity as given, versions, git hash
RUN/starts.jsonl      one line per start: time, command line, layout, versions
RUN/metrics.jsonl     one line per step, one per evaluation
RUN/checkpoints/      torch_dist checkpoints
RUN/tensorboard/
RUN/logs/             output of every rank, if started by ``megasink train``
RUN/tokenizer/        a copy of the tokenizer files
RUN/lease/            the trainer that is writing to the folder
RUN/curves.png        loss, imbalance and head importance
"""

import json
import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import megasink
from megasink.checkpoints import hf_entries
from megasink.checkpoints.damage import (
    TRACKER,
    checkpoint_path,
    go_back_to_intact,
    iterations,
    newest_intact,
)
from megasink.checkpoints.find import newest_checkpoint, runs_in
from megasink.checkpoints.model_arguments import MODEL, plain
from megasink.checkpoints.run_tokenizer import OWN, copy_tokenizer
from megasink.console.printable import printable
from megasink.data.dataset_files import is_stored
from megasink.errors import UserError
from megasink.files.atomic import atomic_text
from megasink.files.json_file import open_file, read_object
from megasink.files.output_folder import OF_SYSTEM
from megasink.files.system_errors import writing
from megasink.options.megatron_flags import having
from megasink.training.checks.schedule import other_schedule
from megasink.training.flag_file import toml_lines
from megasink.training.lease import is_part_of_a_lease
from megasink.training.recipes import OF_RUN
from megasink.training.resume_flags import differences_of, flags_of_words
from megasink.upstream.versions import versions

# The model, data and loss define a run; layout, length and learning rate may change on resume.
IDENTITY = (
    *MODEL,
    "head_balance_coeff",
    "head_balance_scope",
    "replace_tokens_at",
    "replace_tokens_with",
    *having("run"),
)


def problems(args: Namespace) -> list[str]:
    """Return the problems that prevent a start or resume in ``args.run_dir``."""
    if args.run_dir is None:
        alone = ["--resume needs --run-dir"] if args.resume else []
        return alone + _checkpoint_problems(args)
    folder = Path(args.run_dir)
    if problem := _other_contents(folder):
        return [problem]
    config = folder / "config.json"
    if config.is_file() and has_finished_step(folder):
        try:
            saved = read_object(config)
            problem = _elsewhere(saved, args)
            if args.resume and problem:
                return [problem]
            differences = differences_of(config, saved, args, IDENTITY)
        except UserError as error:
            return [f"{error}: choose another --run-dir"]
        except (ValueError, KeyError, TypeError) as error:
            return [f"{config} cannot be read ({error}): choose another --run-dir"]
        if differences:
            return [
                f"--run-dir {folder} holds a run with another configuration "
                f"({'; '.join(differences)}): choose another folder or pass the same flags"
            ]
    if problem := folder_problem(folder, resume=args.resume):
        return [problem]
    if not args.resume:
        return _checkpoint_problems(args)
    try:
        iteration, _ = newest_intact(folder / "checkpoints", quick=True)  # what starts looks again
    except UserError as error:
        return [str(error)] if args.resume != "auto" else _checkpoint_problems(args)
    return other_schedule(args, checkpoint_path(folder / "checkpoints", iteration))


def folder_problem(folder: Path, *, resume: str | None) -> str | None:
    """Return why no run can start, or resume, in a folder; None if one can."""
    if is_stored(folder):
        return (
            f"--run-dir {folder} is in an object store: give a folder (aws s3 sync or rclone "
            "copies it there)"
        )
    if folder.exists() and not folder.is_dir():
        return f"--run-dir {folder} is a file: give a folder"
    if problem := _other_contents(folder):
        return problem
    if not (folder / "config.json").is_file():
        if resume == "newest":
            what = runs_in(folder) or "does not hold a run: drop --resume to start one there"
            return f"--resume: {folder} {what}"
        # Left by a start that ended before it wrote config.json; checkpoints may be on a volume.
        left = _contents(folder) - {"logs", "tensorboard", "wandb", "config.json.partial"}
        saves = folder / "checkpoints"
        if left - {saves.name} or (left and (not saves.is_dir() or _contents(saves))):
            return f"--run-dir {folder} holds other files and is not a run: choose another folder"
        return None
    if resume == "auto":
        return None
    if not has_finished_step(folder):
        if resume:
            return (
                f"--resume: the run in {folder} has not finished a step: drop --resume to start it"
            )
        return None
    saved = iterations(folder / "checkpoints")
    if not resume:
        flag = "--resume" if saved else "--resume auto (without a checkpoint it starts at step 0)"
        return f"--run-dir {folder} already holds a run: add {flag} or choose another folder"
    if not saved:
        return (
            f"--resume: {folder}/checkpoints has no finished checkpoint: use --resume auto to "
            "start at step 0"
        )
    return None


def _contents(folder: Path) -> set[str]:
    """Return the names in a folder, without a lease and a volume's system files."""
    there = (path for path in folder.glob("*") if not any(map(path.match, OF_SYSTEM)))
    return {path.name for path in there if not is_part_of_a_lease(path.name)}


def _other_contents(folder: Path) -> str | None:
    """Return the contents of a folder with a config.json that is not a run; None for a run."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = read_object(path)
    except UserError as error:
        return f"{error}: choose another --run-dir"
    if "converted_from" in config:
        return (
            f"--run-dir {folder} holds a converted model, not a run: choose another "
            f"folder, and add --load {folder}/checkpoints --finetune"
        )
    if not isinstance(config.get("arguments"), dict):
        return f"--run-dir {folder}: its config.json does not describe a run: choose another folder"
    return None


def has_finished_step(folder: Path) -> bool:
    """Return whether the run in a folder finished a step or a checkpoint; if not, it is free."""
    if iterations(folder / "checkpoints"):
        return True
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        return False
    with metrics.open(errors="replace") as file:
        return file.readline().endswith("\n")


def _elsewhere(saved: dict[str, Any], args: Namespace) -> str | None:
    """Report missing data whose path is relative to another folder."""
    before, here = saved.get("cwd"), str(Path.cwd())
    if before is None or before == here:
        return None
    for prefix in args.data_path or []:
        there = Path(before, prefix)
        if not Path(f"{prefix}.idx").is_file() and Path(f"{there}.idx").is_file():
            return (
                f"--data-path {prefix} is relative to {before}, where the run was started, "
                f"not to {here}: change to {before}, or pass --data-path {there}"
            )
    return None


def missing_checkpoint(args: Namespace) -> list[str]:
    """Report a ``--load`` without a finished checkpoint."""
    if not args.load or is_stored(args.load) or newest_checkpoint(Path(args.load)) is not None:
        return []
    return [f"--load {args.load}: no finished checkpoint there (no {TRACKER})"]


def _checkpoint_problems(args: Namespace) -> list[str]:
    """Report a ``--load`` that is not a checkpoint of this architecture and schedule."""
    if not (load := args.load):
        return []
    if absent := missing_checkpoint(args):
        return absent
    config = Path(load).parent / "config.json"
    if not config.is_file():
        return _other_schedule(args)  # not a run folder: Megatron compares its saved arguments
    try:
        saved, names = read_object(config), MODEL
    except UserError as error:
        return [f"--load {load}: {error}"]
    if "converted_from" in saved:
        if not args.finetune:
            return [f"--load {load} is a converted model without optimizer state: add --finetune"]
        # Data and tokenizer may differ from those of the original model.
        names = tuple(name for name in MODEL if name in saved["identity"])
    differences = differences_of(config, saved, args, names, finetune=args.finetune)
    if not differences:
        return _other_schedule(args)
    hint = ""
    if not differences_of(config, saved, args, names, finetune=True):
        hint = " (--finetune allows another context)"
    return [f"--load {load} is a checkpoint of a different model: {'; '.join(differences)}{hint}"]


def _other_schedule(args: Namespace) -> list[str]:
    iteration = args.ckpt_step or newest_checkpoint(Path(args.load))
    if is_stored(args.load) or iteration is None:
        return []
    return other_schedule(args, checkpoint_path(Path(args.load), iteration))


def use_own_tokenizer(args: Namespace) -> None:
    """On resume, use the run's copy of the tokenizer if the original is not found."""
    given = args.tokenizer_model
    if not (args.run_dir and args.resume and args.tokenizer_type == "HuggingFaceTokenizer"):
        return
    own = Path(args.run_dir, OWN)
    if given is not None and own.is_dir() and not Path(given).is_dir():
        args.tokenizer_model = str(own)


def set_paths(args: Namespace) -> None:
    """Point Megatron's path options into the run folder, unless given."""
    if args.run_dir is None:
        return
    folder = Path(args.run_dir)
    args.save = args.save or str(folder / "checkpoints")
    args.tensorboard_dir = args.tensorboard_dir or str(folder / "tensorboard")
    # Megatron's default is inside --save.
    args.wandb_save_dir = args.wandb_save_dir or str(folder / "wandb")
    args.data_cache_path = args.data_cache_path or str(folder / "data-cache")
    if args.save_interval is None:
        # At the end: a run has no more steps than samples.
        args.save_interval = args.train_iters or args.train_samples


def go_on(args: Namespace) -> None:
    """Make Megatron resume from the run's newest checkpoint. Call on every rank."""
    if args.load:
        # These applied to the checkpoint that the run started from.
        args.no_load_optim = args.no_load_rng = None
        args.ckpt_step = None
    args.finetune = False
    args.load = str(Path(args.run_dir, "checkpoints"))
    # Otherwise Megatron only warns and starts over if the checkpoint does not load.
    args.exit_on_missing_checkpoint = True


def write_start(args: Namespace, identity: dict[str, Any]) -> int | None:
    """Record this start on the rank that owns the folder; return the step it resumes from."""
    folder = Path(args.run_dir)
    with writing(f"--run-dir {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        resumed_from = None
        if args.resume:
            resumed_from = go_back_to_intact(
                folder / "checkpoints",
                checksums=args.verify_checkpoint,
                or_start=args.resume == "auto",
            )
        if resumed_from is not None:
            go_on(args)
        _write_config(folder, args, identity, resumed_from)
        _keep_tokenizer(folder, args, new=resumed_from is None)
    return resumed_from


def _keep_tokenizer(folder: Path, args: Namespace, *, new: bool) -> None:
    """Copy the tokenizer into the run; a new run replaces the copy of an earlier start."""
    given = args.tokenizer_type == "HuggingFaceTokenizer" and Path(args.tokenizer_model)
    own = folder / OWN
    if new and own.is_dir() and not (given and given.resolve() == own.resolve()):
        shutil.rmtree(own)
    if given:
        copy_tokenizer(given, folder)


def _write_config(
    folder: Path, args: Namespace, identity: dict[str, Any], resumed_from: int | None
) -> None:
    config = {
        "arguments": {name: plain(value) for name, value in sorted(vars(args).items())},
        "identity": identity,
        "cwd": str(Path.cwd()),
        "seed": args.seed,
        "versions": {"megasink": megasink.__version__} | versions(),
        "git": git_hash(),
        **hf_entries.entry(args, folder, resumed=resumed_from is not None),
    }
    atomic_text(folder / "config.json", json.dumps(config, indent=1) + "\n")
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "world_size": args.world_size,
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)),
        "resumed_from": resumed_from,
        "versions": config["versions"],
        "git": config["git"],
    }
    with open_file(folder / "starts.jsonl", appending=True) as file:
        file.write(f"{json.dumps(start)}\n".encode())
    flags = {"about": f"the flags of {printable(folder.name)}"} | flags_of_words(sys.argv[1:])
    text = "".join(f"{line}\n" for line in toml_lines(flags))
    # A path that is not UTF-8 has no form in TOML: the file is refused when it is read.
    atomic_text(folder / OF_RUN, text)


def identity_of(args: Namespace) -> dict[str, Any]:
    """Return the arguments that identify a run, as given."""
    return {name: plain(getattr(args, name)) for name in IDENTITY if hasattr(args, name)}


def git_hash() -> str | None:
    """Return the checkout's commit, '+dirty' with local changes; None outside a checkout."""
    git = ["git", "-C", str(Path(megasink.__file__).parent), "describe", "--always", "--abbrev=40"]
    git += ["--exclude=*", "--dirty=+dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
