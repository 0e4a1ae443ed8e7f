"""The base of a LoRA run: which it is, and loading it under the run's layout."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasink.checkpoints.find import newest_checkpoint
from megasink.checkpoints.identity import MODEL, SHAPE, plain
from megasink.errors import UserError
from megasink.json_file import read_object
from megasink.lora.targets import BASE, OPTIONS, is_lora, targets_of
from megasink.training.differences import differences_of

_FLAG = "--pretrained-checkpoint"


def base_of(args: Namespace) -> dict[str, str]:
    """Return what config.json records of the base.

    A run keeps the checkpoint that it started from, even if its folder has got newer ones.

    Raises:
        UserError: there is no such checkpoint, or it is not a whole model.
    """
    from megasink.checkpoints.adapter import find_base, fingerprint

    given = Path(args.pretrained_checkpoint)
    recorded = Path(str(_recorded(args.run_dir).get("checkpoint", given)))
    # A relative path is no longer right if the run is resumed from another folder.
    folder = find_base(recorded if args.resume and not given.is_dir() else given).folder.resolve()
    if recorded.parent == folder.parent and recorded.is_dir():
        folder = recorded
    return {"checkpoint": str(folder), "fingerprint": fingerprint(folder)}


def _recorded(run_dir: str | None) -> dict[str, Any]:
    config = Path(run_dir or "", "config.json")
    return (read_object(config).get(BASE) or {}) if run_dir and config.is_file() else {}


def problems(args: Namespace) -> list[str]:
    """Return the problems with the base of a LoRA run, and with the checkpoint it loads."""
    if not args.lora_rank:
        return _of_a_whole_model(args)
    if not args.pretrained_checkpoint:
        return []  # reported by checks/lora.py
    try:
        base = base_of(args)
        if different := _another_model(args):
            return [different]
        recorded = _recorded(args.run_dir) if args.resume else {}
        if recorded and recorded["fingerprint"] != base["fingerprint"]:
            return [
                f"{_FLAG} {args.pretrained_checkpoint}: --run-dir {args.run_dir} has an adapter of "
                f"another base, {recorded['checkpoint']}: give that one"
            ]
        return _of_the_start(args, base) if args.load else []
    except UserError as error:
        return [f"{_FLAG}: {error}"]


def _another_model(args: Namespace) -> str | None:
    """Return why the base is of another architecture than the run."""
    from megasink.checkpoints.adapter import find_base

    config = find_base(Path(args.pretrained_checkpoint)).config
    saved = read_object(config)
    resolved = saved["arguments"]
    known = saved.get("identity") or {name: resolved[name] for name in SHAPE if name in resolved}
    # As given to the base, or as Megatron derived it there: both are the base's.
    names = [n for n in MODEL if n in known and plain(getattr(args, n)) != resolved.get(n)]
    differences = differences_of(config, saved, args, names, finetune=True)
    what = f"{_FLAG} {args.pretrained_checkpoint} is a checkpoint of a different model"
    return f"{what}: {'; '.join(differences)}" if differences else None


def _of_a_whole_model(args: Namespace) -> list[str]:
    """Refuse an adapter in place of a model."""
    config = Path(args.load).parent / "config.json" if args.load else None
    if config is None or not config.is_file() or not is_lora(_arguments(config)):
        return []
    return [
        f"--load {args.load} holds an adapter alone: add --lora-rank and {_FLAG} to train it, or "
        "merge it first (megasink convert-to-hf, then convert-from-hf)"
    ]


def _of_the_start(args: Namespace, base: dict[str, str]) -> list[str]:
    """Return why a run cannot start from the adapter that --load names."""
    config = Path(args.load).parent / "config.json"
    if newest_checkpoint(Path(args.load)) is None or not config.is_file():
        return []  # reported by run_dir.py
    saved = _arguments(config)
    if not is_lora(saved):
        return [
            f"--load {args.load} is a whole model: give the base of a LoRA run with {_FLAG}, and "
            "with --load an adapter"
        ]
    recorded = read_object(config).get(BASE) or {}
    if recorded.get("fingerprint") != base["fingerprint"]:
        return [
            f"--load {args.load} is an adapter of another base, {recorded.get('checkpoint')}: give "
            f"that one with {_FLAG}"
        ]
    different = [
        f"{name} {saved.get(name)!r} -> {getattr(args, name)!r}"
        for name in OPTIONS
        if (saved.get(name) or None) != (getattr(args, name) or None)
    ]
    return [f"--load {args.load} is another adapter: {'; '.join(different)}"] if different else []


def _arguments(config: Path) -> dict[str, Any]:
    return dict(read_object(config).get("arguments") or {})


def describe(args: Namespace) -> str:
    """Return the line that says what a LoRA run trains."""
    gated = bool(args.swiglu or args.quick_geglu)  # set for --ffn-activation too
    parts = [*targets_of(args, gated_unit=gated), *(args.lora_train or ())]
    return f"LoRA: rank {args.lora_rank} on {', '.join(parts)}, of {base_of(args)['checkpoint']}"


def take_base(args: Namespace) -> Callable[[list[Any]], list[Any]]:
    """Return a hook for ``pre_wrap_hooks`` that loads the base, and take it from Megatron.

    Megatron would load it as the model, whose checkpoints now hold the adapter alone.
    """
    folder = Path(base_of(args)["checkpoint"])
    args.pretrained_checkpoint = None

    def load(models: list[Any]) -> list[Any]:
        from megasink.checkpoints.load import load_state
        from megasink.lora.attach import base_state

        for model in models:
            load_state(model, base_state(model), folder)
        return models

    return load
