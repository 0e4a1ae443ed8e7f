"""The settings of an analysis as frozen records, from a command line or a program.

The string below a field is the help of its flag (`options.flags.add_fields`). Nothing here imports
torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from megasink.checkpoints.find import runs_in
from megasink.files.system_errors import missing_folder
from megasink.options.dataclass_flags import flag_of

KINDS = ("natural", "random", "repeated")
BOS = ("auto", "add", "none")
DTYPES = ("auto", "float32", "bfloat16")
SEQ_LENGTH = 512
"""Default sequence length in tokens, if the model has that many positions."""
KEPT = "none"
"""The value of --replace-tokens-at that keeps the tokens."""
_LEAST = {"max_samples": 1, "seq_length": 2, "batch_size": 1, "positions": 1, "columns": 1}


@dataclass(frozen=True, kw_only=True)
class Options:
    """A record that can be filled from a command line's values."""

    grows: ClassVar[tuple[str, ...]] = ()
    """Flags to which values can be added later without losing results."""

    @classmethod
    def of(cls, values: Any, **others: Any) -> Self:
        """Return the record of an object with some of its fields, such as a parsed command line."""
        given = {f.name: getattr(values, f.name) for f in fields(cls) if hasattr(values, f.name)}
        given |= others
        return cls(**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})

    def some(self, *names: str) -> dict[str, Any]:
        """Return some fields by name, lists in place of tuples, as JSON has them."""
        values = {name: getattr(self, name) for name in names}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    def by_flag(self, *names: str) -> dict[str, Any]:
        """Return some fields by their flags, such as "--batch-size": settings of the results."""
        return {flag_of(name): value for name, value in self.some(*names).items()}

    def given(self) -> dict[str, Any]:
        """Return all fields by their flags, except the output folder."""
        names = [f.name for f in fields(self) if f.name not in ("output", "overwrite")]
        return self.by_flag(*names)


def _flag(default: Any = None, **meta: Any) -> Any:
    """Return a dataclass field with argparse's settings for its flag; see `add_fields`."""
    return field(default=default, metadata={"argparse_meta": meta})


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """The model, and how to load it."""

    model: Path
    """Hugging Face model folder, or a run"""

    tokenizer: Path | None = None
    """tokenizer folder (default: MODEL)"""

    name: str | None = None
    """model name in tables and figures (default: the folder's)"""

    dtype: str = _flag("auto", choices=DTYPES)
    """default: the model's"""

    device: str = "cpu"
    """cpu, cuda or cuda:N"""

    attn_implementation: str | None = _flag(choices=("sdpa", "eager"))
    """attention implementation (default: the model's)"""

    yarn: float | None = _flag(metavar="FACTOR")
    """extend the context of a run with rotary embeddings by this factor, without training"""

    @property
    def shown_name(self) -> str:
        """The name, or that of the folder."""
        return self.name or self.model.resolve().name


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions(Options):
    """The texts of an analysis and the measurements on them."""

    data: tuple[str, ...] = _flag((), metavar="TEXT")
    """text, .jsonl(.gz, .zst) or .parquet files, or folders; each argument is one dataset"""

    json_key: str = "text"
    """JSON key of the text (default: text)"""

    inputs: tuple[str, ...] = _flag(("natural",), choices=KINDS)
    """the texts (natural), random tokens, or one repeated token (default: natural)"""

    seq_length: int | None = None
    """maximum tokens per sequence (default: 512, or the model's maximum if smaller)"""

    random_lengths: tuple[int, int] | None = _flag(nargs=2, metavar=("LOW", "HIGH"))
    """cut each sequence at a length drawn uniformly from LOW to HIGH tokens (by --seed), instead of
    --seq-length"""

    max_samples: int | None = 100
    """sequences per dataset (default: %(default)s)"""

    batch_size: int = 8
    """batch size (default: %(default)s)"""

    bos: str = _flag("auto", choices=BOS)
    """BOS token; auto follows the tokenizer (default: auto)"""

    parse_special_tokens: bool = False
    """parse special tokens that are spelled out in a text"""

    replace_tokens_at: tuple[str, ...] | None = _flag(metavar="POSITION")
    """replace the tokens at these positions of every sequence, counted from 0 with BOS; none:
    replace no tokens (default: as the run was trained)"""

    replace_tokens_with: str | None = _flag(metavar="{random,ID}")
    """replacement: random tokens of the vocabulary, or the token with this id"""

    seed: int = 1234
    """seed of random tokens, projections and baselines (default: %(default)s)"""

    positions: int = 64
    """number of token positions in curves (default: %(default)s)"""

    columns: int = 8
    """number of leading keys to compute a sink rate for (default: %(default)s)"""

    maps: tuple[str, ...] | None = _flag(nargs="*", metavar="LAYER.HEAD")
    """also draw attention maps and query-key geometry of these heads, such as 3.5 7.2; with no
    value, of the heads with the highest and lowest AWFT and importance"""

    map_length: int = 48
    """tokens in a map, 2 to 255 (default: %(default)s)"""

    metrics: tuple[str, ...] = _flag((), metavar="NAME")
    """also measure metrics that need a backward pass: gradient, gradient_signed"""

    loss: bool = True
    """measure the loss"""

    output: Path | None = None
    """folder for the results; None: write no files"""

    overwrite: bool = False
    """replace results made with other settings"""

    def problems(self, name_of: Callable[[str], str] = flag_of) -> Iterator[str]:
        """Yield the problems with the numbers that need no model to find."""
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                yield f"{name_of(name)} {value}: use {least} or more"
        if self.metrics and not self.loss:
            yield f"{name_of('metrics')} {' '.join(self.metrics)} needs the loss: measure it too"
        if self.random_lengths is None:
            return
        (low, high), name = self.random_lengths, name_of("random_lengths")
        if not 2 <= low <= high:
            yield f"{name} {low} {high}: use 2 <= LOW <= HIGH"
        elif self.seq_length is not None:
            yield f"{name} {low} {high} and {name_of('seq_length')} {self.seq_length}: choose one"

    def positions_problem(self, positions: int | None, name: str) -> str | None:
        """Return why the sequences do not fit into a model's positions, or None."""
        flag = "seq_length" if self.random_lengths is None else "random_lengths"
        lengths = self.random_lengths or (self.seq_length,)
        if positions is None or lengths[-1] is None or lengths[-1] <= positions:
            return None
        return (
            f"{flag_of(flag)} {' '.join(map(str, lengths))} is longer than the {positions} "
            f"positions of {name}: use at most {positions}"
        )


@dataclass(frozen=True, kw_only=True)
class SweepOptions(AnalysisOptions):
    """The settings that `megasink sweep` varies."""

    lengths: tuple[int, ...] = _flag((64,), metavar="T")
    """text lengths in tokens; texts shorter than the longest length are left out (default: 64)"""

    beginnings: tuple[str, ...] = ("auto",)
    """one or more values of --bos"""

    first_token_copies: tuple[int, ...] = _flag((1,), metavar="N")
    """copies of BOS or, without BOS, of the first token of the text (default: 1)"""

    def given(self) -> dict[str, Any]:
        """Return all fields by their flags."""
        given = super().given()
        return given | {"--bos": given.pop("--beginnings")}


@dataclass(frozen=True, kw_only=True)
class AblationOptions(AnalysisOptions):
    """The heads that `megasink ablate` zeroes, and its texts or tasks."""

    # Extending these measures only the new points.
    grows = ("--score", "--zeroed", "--seeds", "--heads", "--layer")

    score: tuple[str, ...] = _flag((), metavar="NAME", names=("--by",))
    """zero the heads that these scores find inactive, separately in each sequence; gradient and
    gradient_signed zero the same heads in all sequences (default: awft ahon_ln, unless --heads,
    --interventions or --layer is given)"""

    zeroed: tuple[float, ...] = _flag((), metavar="PERCENT")
    """percentages of heads to zero by each score (default: 0 5 10 15 20 25 30)"""

    seeds: tuple[int, ...] = ()
    """seeds of the random baseline (default: 1 2 3)"""

    tasks: tuple[str, ...] | None = _flag(metavar="TASK")
    """tasks of lm-evaluation-harness: measure accuracy, instead of the loss of --data"""

    limit: int | None = _flag(metavar="N")
    """maximum number of questions per task (default: all)"""

    calibration: Path | None = _flag(metavar="ANALYSIS")  # noqa: RUF009
    """analysis folder whose texts set the thresholds (default: --data or --tasks sets them)"""

    heads: tuple[str, ...] | None = _flag(metavar="LAYER.HEAD")
    """also zero these heads together, such as 3.5 7.2, or those of a .json or .csv file"""

    interventions: Path | None = _flag(metavar="FILE")  # noqa: RUF009
    """also apply the interventions in this file"""

    layer: int | None = _flag(metavar="L")
    """also zero the heads of this layer one at a time"""


def model_problem(folder: Path, flag: str = "") -> str | None:
    """Return why a folder is not a transformers model, or None; see `missing_folder`."""
    if not folder.is_dir():
        return missing_folder(folder, flag)
    if not (folder / "config.json").is_file():
        if runs := runs_in(folder):
            return f"{folder} {runs}"
        return f"{folder} is not a Hugging Face model folder: it has no config.json"
    return None
