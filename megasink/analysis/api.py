"""Analyze a model that is in memory, or in a folder."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megasink.analysis import run_analysis
from megasink.analysis.analysis_object import Analysis
from megasink.analysis.capture.input_samples import inputs_of
from megasink.analysis.capture.probe import ProbedModel
from megasink.analysis.capture.probed_models import of_run, of_transformers, open_probe_on
from megasink.analysis.interventions.activations import Activations
from megasink.analysis.metrics import registry
from megasink.analysis.options import BOS, DTYPES, AnalysisOptions, model_problem
from megasink.checkpoints.find import find_checkpoint, is_run
from megasink.cpu.prepare_process import prepare_quietly
from megasink.errors import ConfigError, UserError, nearest, reason_of
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
    from megasink.transformers.load_hf_folder import load

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
    if device not in (None, "cpu"):
        raise UserError(f"device {device!r}: use 'cpu', or None for the GPU if one is present")
    prepare_quietly(cpu=device == "cpu")
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


@checked
def analyze(
    model: Any,
    texts: Sequence[str] | Path | Sequence[Path],
    *,
    tokenizer: Any = None,
    name: str | None = None,
    seq_length: int | None = None,
    random_lengths: tuple[int, int] | None = None,
    max_samples: int | None = 100,
    batch_size: int = 8,
    bos: str = "auto",
    parse_special_tokens: bool = False,
    loss: bool = True,
    metrics: Sequence[str] = (),
    seed: int = 1234,
    output: str | Path | None = None,
    overwrite: bool = False,
) -> Analysis:
    """Measure a model's attention sinks, heads and hidden states on texts, in one pass.

    The same as `megasink analyze`, whose options docs/instruments.md explains. The model is
    unchanged afterwards, bit for bit.

    Args:
        model: a transformers model in evaluation mode, a result of `load_model` or `load_run`,
            or the folder of either kind.
        texts: strings, each a text; or paths of files, as for `megasink analyze --data`.
        tokenizer: of transformers; required with a bare model of transformers.
        name: of the model, in tables and figures; default: the folder's, or the class's.
        seq_length: most tokens of a sequence, BOS included; default: 512, or the model's maximum.
        random_lengths: lowest and highest number of tokens, between which each text is cut at
            random; in place of `seq_length`.
        max_samples: of the texts, or of each file; None for all.
        bos: "auto" (as the tokenizer does), "add" or "none".
        parse_special_tokens: special tokens spelled out in a text become those tokens, as in output
            of a chat template; otherwise they are text.
        loss: also measure the loss.
        metrics: also measure these, which take a backward pass: "gradient", "gradient_signed".
        seed: of the projections and the random baselines.
        output: folder for all files of `megasink analyze`, the page included.
        overwrite: replace results of other settings in the folder.

    Returns:
        the measurements, one attribute for each metric.

    Raises:
        ConfigError: a model whose attention megasink cannot read, or options out of their range;
            one message with every problem.
        UserError: no text of two tokens, a tokenizer that does not fit, or a broken folder; an
            `output` that another process writes, or that holds other results.

    Example:
        >>> import megasink
        >>> texts = ["A text.", "Another, longer one."]
        >>> analysis = megasink.analyze(model, texts, tokenizer=tokenizer)
        >>> analysis.sink_rate.number <= 1
        True
        >>> analysis.importance.values.shape  # [layers, heads]
        (2, 4)
        >>> plot = analysis.importance.plot()
    """
    arguments = SimpleNamespace(**locals())
    if isinstance(texts, str):
        raise UserError("texts is one string: give a list of texts, or a Path")
    if isinstance(texts, Path) or not isinstance(texts, Iterable):
        texts = [texts]
    given = list(texts)
    of_files = bool(given) and all(isinstance(text, Path) for text in given)
    if not of_files and (wrong := [text for text in given if not isinstance(text, str)]):
        raise UserError(f"texts contains {wrong[0]!r:.60}: give a list of strings, or of Paths")
    options = AnalysisOptions.of(
        arguments,
        data=tuple(map(str, given)) if of_files else (),
        metrics=tuple(metrics),
        output=None if output is None else Path(output),
    )
    problems = list(options.problems(str))
    if bos not in BOS:
        problems.append(f"bos {bos!r}: choose {', '.join(BOS)}")
    known = registry.metrics()
    for one in metrics:
        if one not in known:
            meant = nearest(one, known)
            hint = f"did you mean {meant}?" if meant else "docs/metrics.md lists all"
            problems.append(f"metrics: {one!r} is unknown: {hint}")
    if problems:
        raise ConfigError(problems)
    probed = _probed(model, tokenizer, name)
    inputs = inputs_of(options, probed, None if of_files else map(str, given))
    analysis = run_analysis.analyze(probed, options, inputs=inputs)
    assert analysis is not None  # one process
    return analysis


def _probed(model: Any, tokenizer: Any, name: str | None) -> ProbedModel:
    if isinstance(model, ProbedModel):
        return model
    if isinstance(model, str | Path):
        path = Path(model)
        if is_run(path):
            model, name = load_run(path), name or path.resolve().name
        else:
            model = load_model(path)
    if isinstance(model, HubModel):
        model, own, folder = model
        tokenizer, name = own if tokenizer is None else tokenizer, name or folder
    if hasattr(model, "iteration"):
        return of_run(model, name or f"step {model.iteration}")
    open_probe_on(model)  # raises for what is not a model
    if tokenizer is None:
        raise UserError("give the tokenizer too: analyze(model, texts, tokenizer=...)")
    if not hasattr(tokenizer, "eos_token_id"):
        raise UserError(f"tokenizer {tokenizer!r:.60}: give a transformers tokenizer")
    return of_transformers(model, tokenizer, name or type(model).__name__)
