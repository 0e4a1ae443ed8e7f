"""The options of a training run besides its model's (`config.py`), and all options together."""

import argparse
import inspect
import re
from dataclasses import dataclass, field, fields

from megasink.config import MODEL_OPTIONS, HeadBalanceOptions
from megasink.options.dataclass_flags import add_fields, escaped


@dataclass(kw_only=True)
class RecipeOptions:
    """Recipes (docs/recipes.md), and the length of a decay as a share of the run."""

    recipe: list[str] | None = field(
        default=None, metadata={"argparse_meta": {"nargs": "+", "metavar": "NAME"}}
    )
    """Start from the flags of these recipes (`megasink recipes` lists them), TOML files or runs
    (RUN/config.toml). Later files override earlier ones, and the command line overrides all."""

    expanded_recipe: list[str] | None = field(
        default=None, metadata={"argparse_meta": {"nargs": "+", "metavar": "NAME"}}
    )
    """Recorded instead of --recipe, with the name of each file and the start of its SHA-256.
    No effect."""

    lr_wsd_decay_fraction: float | None = None
    """Length of the decay of --lr-decay-style WSD, at the end of the run, as a share of the run;
    replaces --lr-wsd-decay-iters."""


@dataclass(kw_only=True)
class TrainingOptions:
    """Changes of the text (docs/positions.md#replaced-tokens) and of weight decay, as in P2."""

    replace_tokens_at: list[int] | None = field(
        default=None,
        metadata={"argparse_meta": {"nargs": "+", "type": int, "metavar": "POSITION"}},
    )
    """Replace the tokens at these positions (from 0) of every sample, both as input and as target.
    With --dataloader-inter-document-masking, positions count from the start of each document.
    Analyses of the run replace the same tokens (P2.15, P2.16)."""

    replace_tokens_with: str | None = field(
        default=None, metadata={"argparse_meta": {"metavar": "{random,ID}"}}
    )
    """Tokens to use instead. random: drawn uniformly from the vocabulary without special tokens,
    and the same in every epoch. ID: the token with this id."""

    decay_all_parameters: bool = False
    """Also apply --weight-decay to norms and biases, which Megatron exempts (P2.17)."""

    embedding_lr: float | None = None
    """Maximum learning rate of the token embedding, instead of --lr. Its minimum is this
    rate times --min-lr / --lr. --decoupled-lr sets the rates of embedding and output layer."""

    output_lr: float | None = None
    """Maximum learning rate of the output layer, like --embedding-lr for the embedding; needs
    --untie-embeddings-and-output-weights."""


@dataclass(kw_only=True)
class ObservingOptions:
    """Monitoring of a training run (docs/observing.md)."""

    head_heatmap_interval: int = 1000
    """Steps between images of the [layer, head] importance in TensorBoard and W&B. The first and
    the last step also have an image. 0: none. One image takes about 0.3 s on the last rank."""

    log_sink_rate: bool = False
    """Measure the sink rate Sink^0.3_1 (P2.2) in every evaluation: the share of heads whose mean
    attention to the first token, over the first 64 tokens, exceeds 0.3. In variants with a sink
    slot, also measure the same rate for the slot."""

    stop_on_divergence: float | None = None
    """Stop with exit code 2 and no further checkpoint when the training loss (an exponential moving
    average with factor 0.98) is this many nats above its lowest value; checked every --log-interval
    steps."""


RESUME = ("newest", "auto")
DEVICES = ("cpu", "cuda")


@dataclass(kw_only=True)
class RunOptions:
    """Run folder, resuming and platform."""

    run_dir: str | None = None
    """Folder of the run: checkpoints, TensorBoard, metrics.jsonl, logs and the resolved
    configuration. A folder with a run of a different configuration is rejected."""

    resume: str | None = field(
        default=None,
        metadata={"argparse_meta": {"nargs": "?", "const": "newest", "choices": RESUME}},
    )
    """Resume from the newest complete checkpoint of --run-dir. auto: start at step 0 if there is
    none yet, so that one command line starts and resumes a run, for `sbatch --requeue` and
    `torchrun --max-restarts`."""

    verify_checkpoint: bool = False
    """Verify all checksums, not only file sizes. With --resume, verify a checkpoint before it is
    loaded. With --save-retain-interval, read a new checkpoint again in the background before the
    previous one is deleted."""

    plugin: list[str] | None = field(
        default=None, metadata={"argparse_meta": {"action": "append", "metavar": "MODULE"}}
    )
    """First import this Python module, which registers your own variants, metrics or conversion
    targets; may be repeated. Pass it again with --resume."""

    device: str | None = field(default=None, metadata={"argparse_meta": {"choices": DEVICES}})
    """cpu: gloo ranks on the CPU. cuda: one rank per GPU. Default: the GPUs if there are any."""


_OTHERS = (HeadBalanceOptions, TrainingOptions, ObservingOptions)
OPTIONS = (*MODEL_OPTIONS, *_OTHERS, RecipeOptions, RunOptions)
"""All options of megasink, in the order of the help."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a group of flags for each dataclass of OPTIONS."""
    for options in OPTIONS:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", options.__name__).lower()
        group = parser.add_argument_group(words, escaped(inspect.cleandoc(options.__doc__ or "")))
        add_fields(group, options, *(field.name for field in fields(options)))
