"""What is measured, of what, as frozen records; a command line and a program make the same ones.

Nothing here imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

KINDS = ("natural", "random", "repeated")
BOS = ("auto", "add", "none")
DTYPES = ("auto", "float32", "bfloat16")
SEQ_LENGTH = 512
"""Default sequence length in tokens, if the model has as many positions."""
KEPT = "none"
"""The value of --replace-tokens-at that keeps the tokens."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A record that a command line's values can be read into."""

    @classmethod
    def of(cls, values: Any, **others: Any) -> Self:
        """Return the record of an object with its fields, such as a parsed command line.

        Args:
            others: fields of other values than the object's.
        """
        given = {f.name: getattr(values, f.name) for f in fields(cls) if f.name not in others}
        return cls(**{name: _frozen(value) for name, value in (given | others).items()})

    def some(self, *names: str) -> dict[str, Any]:
        """Return some fields by name, lists in place of tuples, as JSON has them."""
        return {name: _listed(getattr(self, name)) for name in names}

    def by_flag(self, *names: str) -> dict[str, Any]:
        """Return some fields by their flags, such as "--batch-size": what results depend on."""
        return {flag_of(name): value for name, value in self.some(*names).items()}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Which model, and how it is loaded.

    Attributes:
        model: Hugging Face model folder, or a run.
        tokenizer: folder of another tokenizer.
        name: in tables and figures; None for the folder's.
        dtype: one of DTYPES.
        attn_implementation: "sdpa" or "eager"; None for the model's own.
        yarn: the factor by which the context of a run is stretched.
    """

    model: Path
    tokenizer: Path | None = None
    name: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    attn_implementation: str | None = None
    yarn: float | None = None

    @property
    def shown_name(self) -> str:
        """The name, or that of the folder."""
        return self.name or self.model.resolve().name


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions(Options):
    """What an analysis reads and measures.

    Attributes:
        data: files or folders of texts; each one is a dataset.
        json_key: of the text, in .jsonl and .parquet.
        inputs: some of KINDS.
        seq_length: most tokens of a sequence; None for the default.
        random_lengths: lowest and highest length, in tokens, at which each sequence is cut; None
            for `seq_length` alone.
        max_samples: of each dataset; None for all.
        bos: one of BOS.
        parse_special_tokens: special tokens spelled out in a text become those tokens.
        replace_tokens_at: positions, or KEPT; None for what the model was trained with.
        replace_tokens_with: "random", or the id of a token.
        seed: of random tokens, projections and baselines.
        positions: tokens in curves.
        columns: keys with a sink rate.
        maps: heads LAYER.HEAD whose attention maps are drawn; none names those that tell most;
            None for no maps.
        map_length: tokens in a map.
        loss: whether the loss is measured.
        output: folder of the results; None for no files.
        overwrite: replace results of other settings.
    """

    data: tuple[str, ...] = ()
    json_key: str = "text"
    inputs: tuple[str, ...] = ("natural",)
    seq_length: int | None = None
    random_lengths: tuple[int, int] | None = None
    max_samples: int | None = 100
    batch_size: int = 8
    bos: str = "auto"
    parse_special_tokens: bool = False
    replace_tokens_at: tuple[str, ...] | None = None
    replace_tokens_with: str | None = None
    seed: int = 1234
    positions: int = 64
    columns: int = 8
    maps: tuple[str, ...] | None = None
    map_length: int = 48
    loss: bool = True
    output: Path | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class SweepOptions(AnalysisOptions):
    """What `megasink sweep` varies: its flags, by name; `beginnings` is --bos."""

    lengths: tuple[int, ...]
    beginnings: tuple[str, ...]
    first_token_copies: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AblationOptions(AnalysisOptions):
    """Which heads `megasink ablate` zeroes, and on what: its flags, by name."""

    score: tuple[str, ...] = ()
    zeroed: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    task: tuple[str, ...] | None = None
    limit: int | None = None
    calibration: Path | None = None
    heads: tuple[str, ...] | None = None
    interventions: Path | None = None
    layer: int | None = None


_LEAST = {"max_samples": 1, "seq_length": 2, "batch_size": 1, "positions": 1, "columns": 1}


def too_small(values: Any, name_of: Callable[[str], str] = str) -> list[str]:
    """Return what is too small among the fields of `AnalysisOptions`.

    Args:
        values: has the fields, such as a parsed command line.
        name_of: field -> what the message calls it.
    """
    return [
        f"{name_of(name)} {value}: at least {least}"
        for name, least in _LEAST.items()
        if (value := getattr(values, name)) is not None and value < least
    ]


def length_problem(random_lengths: Any, seq_length: int | None) -> str | None:
    """Return why these lengths go with nothing, by their flags, or None."""
    if random_lengths is None:
        return None
    low, high = random_lengths
    if not 2 <= low <= high:
        return f"--random-lengths {low} {high}: the lowest first, and at least 2"
    if seq_length is not None:
        return f"--random-lengths {low} {high} and --seq-length {seq_length}: choose one"
    return None


def positions_problem(options: Any, positions: int | None, name: str) -> str | None:
    """Return why sequences of these options do not fit into a model's positions, or None.

    Args:
        options: an `AnalysisOptions`, or what a command was given.
        positions: most tokens of a sequence; None if any number will do, or it is not known.
        name: of the model.
    """
    field = "seq_length" if options.random_lengths is None else "random_lengths"
    value = getattr(options, field)
    lengths = value if isinstance(value, list | tuple) else [value]
    if positions is None or lengths[-1] is None or lengths[-1] <= positions:
        return None
    return (
        f"{flag_of(field)} {' '.join(map(str, lengths))} is longer than the {positions} positions "
        f"of {name}: use at most {positions}"
    )


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def model_problem(folder: Path) -> str | None:
    """Return why a folder cannot be that of a transformers model, or None."""
    if not folder.is_dir():
        return f"{folder}: no such folder; models are read from folders, nothing is downloaded"
    if not (folder / "config.json").is_file():
        return f"{folder} is not a Hugging Face model folder: it has no config.json"
    return None
