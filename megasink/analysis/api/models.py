"""Load models for analyses and interventions, and convert runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megasink.analysis.interventions.activations import Activations
from megasink.analysis.options import DTYPES, model_problem
from megasink.checkpoints.find import find_checkpoint
from megasink.cpu.process import prepare_quietly
from megasink.errors import UserError, reason_of
from megasink.files.checked_fields import checked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from megasink.checkpoints.load import LoadedModel


class _Loaded(NamedTuple):
    model: "PreTrainedModel"
    tokenizer: Any
    name: str


class HubModel(Activations, _Loaded):
    """A transformers model in evaluation mode, its tokenizer, and methods for its activations."""


@checked
def load_model(
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    attn_implementation: str | None = None,
) -> HubModel:
    """Load a Hugging Face folder for `analyze` and the interventions; no code in it runs.

    Args:
        folder: config.json, weights, and the tokenizer.
        tokenizer: another folder of a tokenizer.
        dtype: "auto" (as it is stored), "float32" or "bfloat16".
        attn_implementation: "sdpa" or "eager"; None for the model's own.

    Raises:
        UserError: missing or broken files, or an attention that megasink cannot read.
    """
    from megasink.transformers.load import load

    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}: choose {', '.join(DTYPES)}")
    if problem := model_problem(Path(folder)):
        raise UserError(problem)
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise UserError(f"device {device!r}: {reason_of(error)}") from error
    loaded = load(
        Path(folder),
        device,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        dtype=dtype,
        attn_implementation=attn_implementation,
    )
    return HubModel(*loaded, Path(folder).resolve().name)


@checked
def load_run(
    run: str | Path,
    *,
    iteration: int | None = None,
    tokenizer: str | Path | None = None,
    device: str | None = None,
) -> "LoadedModel":
    """Load a checkpoint of a megasink run, of any parallel layout, into this process.

    Needs Megatron-Core. The first call in a process decides whether Megatron runs on the CPU; call
    it before anything imports megatron.

    Args:
        run: a run folder, its checkpoint folder, or the folder of one iteration.
        iteration: the checkpoint; None for the newest.
        tokenizer: a Hugging Face folder that replaces the run's tokenizer.
        device: "cpu", or None for the GPU if there is one.

    Raises:
        UserError: no such run, checkpoint or tokenizer, or they do not match.
    """
    find_checkpoint(Path(run), iteration)  # before the slow imports
    _prepare(device)
    from megasink.checkpoints import load

    class LoadedRun(Activations, load.LoadedModel):
        """A `LoadedModel` with methods for its activations."""

    return LoadedRun(*load.load_model(run, iteration, tokenizer))


@checked
def convert_to_hf(
    run: str | Path,
    output: str | Path,
    *,
    target: str | None = None,
    iteration: int | None = None,
    tokenizer: str | Path | None = None,
) -> Path:
    """Write a checkpoint of a run as a Hugging Face folder that stock transformers loads.

    The logits are not compared with Megatron's here: `megasink convert-to-hf` does that too.

    Args:
        output: must be missing or empty.
        target: architecture; None for the first that fits (docs/convert.md).
        iteration: the checkpoint; None for the newest.
        tokenizer: a Hugging Face folder that replaces the run's tokenizer.

    Returns:
        `output`.

    Raises:
        UserError: any problem that the user can fix; no folder is left behind.
    """
    from megasink.convert.to_hf import export, source_of

    export(source_of(Path(run), iteration, tokenizer, target), Path(output))
    return Path(output)


def _prepare(device: str | None) -> None:
    if device not in (None, "cpu"):
        raise UserError(f"device {device!r}: use 'cpu', or None for the GPU if one is present")
    prepare_quietly(cpu=device == "cpu")
