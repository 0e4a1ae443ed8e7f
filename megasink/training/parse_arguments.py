"""Parse, check and validate command lines.

A launcher does it once, in its own process (preflight.py). A rank parses once more, and checks only
what no launcher has. `look` answers at once, without Megatron, for megasink's own flags and for
files that are not there.
"""

import argparse
import contextlib
import hashlib
import io
import math
import os
import re
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megasink.attention.variants.variant_layers import layers_with_variant
from megasink.console.printable import say
from megasink.errors import ConfigError, nearest
from megasink.megatron.argument_parser import DEFAULTS, parse_known
from megasink.megatron.hybrid_pattern import LATENT, PREDICTION, STAGE, layers_of
from megasink.options.command_parser import CLOSE, Reading, dashed, groups, unknown_flags, with_help
from megasink.options.dataclass_flags import flag_of
from megasink.options.megatron_flags import FLAGS, having
from megasink.options.run_options import add_options
from megasink.training import run_dir
from megasink.training.checks import data_paths, required
from megasink.training.checks.vocabulary import pin_vocabulary
from megasink.training.ffn_width import match_ffn_width
from megasink.training.reinterpreted_flags import in_stages, translate, unread

CHECKED = "MEGASINK_CHECKED"
"""Environment variable for the `digest` of a command line that the launcher has checked."""
_EXIT = "_sitebuiltins"  # the file of exit()
_GATED_UNITS = ("reglu", "geglu", "swiglu")
_HELP = "megasink train --help-all lists every flag"


def digest(argv: Sequence[str]) -> str:
    """Return the SHA-256 of the words of a command line, in hexadecimal."""
    return hashlib.sha256("\0".join(argv).encode(errors="surrogateescape")).hexdigest()


def look(argv: Sequence[str], parser: argparse.ArgumentParser) -> Namespace:
    """Return the options of megasink, added to those of a parser; imports no Megatron."""
    add_options(parser)
    own = list(parser._option_string_actions)
    parser.set_defaults(tokenizer_type=DEFAULTS["tokenizer_type"])
    for name in (*having("read"), "tokenizer_type"):
        parser.add_argument(flag_of(name), nargs="*" if name.endswith("data_path") else "?")
    argv, problems = dashed(parser, argv)
    reading = Reading(parser, argv)
    args = reading.namespace
    for group in groups(reading.unknown):
        if nearest(group[0], own, cutoff=CLOSE):
            problems += unknown_flags(parser, group)
    problems += reading.problems
    unknown, args = required.without_unknown(args)
    run_dir.use_own_tokenizer(args)
    problems = [*with_help(problems, _HELP), *unknown, *required.ranges(args)]
    if problems := [*problems, *data_paths.missing(args), *run_dir.missing_checkpoint(args)]:
        raise ConfigError(problems)
    return args


def read(argv: Sequence[str]) -> Namespace:
    """Return the parsed arguments; `flag_notes` has a line for each flag with another meaning."""
    # Megatron requires it for tensor parallelism on GPUs before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    args = parse_known(argv)
    run_dir.use_own_tokenizer(args)
    imply(args)
    return args


def imply(args: Namespace) -> None:
    """Set what some of the parsed arguments imply for others."""
    if args.use_rotary_position_embeddings:  # the old name, which Megatron follows late
        args.position_embedding_type = "rope"
    args.flag_notes = [*translate(args), *unread(args)]
    del args.given_flags
    _count_layers(args)
    resolve_layers(args)


def _count_layers(args: Namespace) -> None:
    """Set the numbers of layers by the pattern, and the pattern by its deprecated flag."""
    if args.hybrid_layer_pattern is None and args.hybrid_override_pattern is not None:
        args.hybrid_layer_pattern, args.hybrid_override_pattern = args.hybrid_override_pattern, None
    if (pattern := args.hybrid_layer_pattern) is None:
        return
    args.multi_latent_attention |= LATENT in layers_of(pattern)
    if args.num_layers is None:
        args.num_layers = len(layers_of(pattern)) or None
    if args.mtp_num_layers is None:
        args.mtp_num_layers = pattern.count(PREDICTION) or None
    layers, stages = pattern.partition(PREDICTION)[0], args.pipeline_model_parallel_size
    uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    if stages > 1 and STAGE not in layers and not (uneven or len(layers) % stages):
        # Megatron divides such a pattern when it builds the model.
        args.hybrid_layer_pattern = in_stages(layers, stages) + pattern[len(layers) :]


def resolve_layers(args: Namespace) -> None:
    """Replace a word in ``args.attention_variant_layers`` by its list, if that is possible."""
    # The list identifies a run, so a change of windows does not move its sinks.
    if isinstance(args.attention_variant_layers, str) and args.num_layers:
        with contextlib.suppress(ValueError):  # training/checks/variants.py says why
            args.attention_variant_layers = [int(has) for has in layers_with_variant(args)]


def parse(argv: Sequence[str]) -> tuple[Namespace, dict[str, Any]]:
    """Return the validated arguments of a command line, and those that identify the run."""
    args = read(argv)
    return args, validate(args, checked=os.environ.get(CHECKED) == digest(argv))


def validate(args: Namespace, *, checked: bool = False) -> dict[str, Any]:
    """Check and complete what `read` returned; return the arguments that identify the run."""
    # Without the checks if they are `checked`: a launcher on this host has found nothing.
    from megatron.training import arguments

    for note in vars(args).pop("flag_notes", ()):  # shown, not recorded
        if not (checked or args.rank):
            say(note)
    if not checked:
        from megasink.training.checks import all_checks  # with torch

        if problems := all_checks.problems(args):
            raise ConfigError(problems)
    identity = run_dir.identity_of(args)
    run_dir.set_paths(args)
    # Megatron would still request the optimizer from a GPT checkpoint (checkpointing.py:2210).
    args.no_load_optim = args.no_load_optim or args.finetune or None
    pin_vocabulary(args)
    # Megatron's default FFN size and FLOPs depend on it.
    args.swiglu = args.swiglu or args.ffn_activation in _GATED_UNITS
    set_decay(args)
    with _without_argument_list() as printed, refusals_of_megatron(printed):
        arguments.validate_args(args)
    if args.match_ffn_width:
        match_ffn_width(args)
    # Megatron sets it in the loop that --skip-train skips.
    args.curr_iteration = 0
    return identity


def replica_ranks(args: Namespace) -> int:
    """Return the least number of ranks for these flags; 1 if they are wrong."""
    tensor, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or tensor)
    copies = args.num_distributed_optimizer_instances
    return stages * copies * math.lcm(tensor * args.context_parallel_size, experts) or 1


def set_decay(args: Namespace) -> None:
    """Set the length of the decay that --lr-wsd-decay-fraction stands for."""
    fraction, unit = args.lr_wsd_decay_fraction, "samples" if args.train_samples else "iters"
    length = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
    if fraction is not None and length:
        setattr(args, f"lr_wsd_decay_{unit}", max(1, round(fraction * length)))


@contextlib.contextmanager
def refusals_of_megatron(printed: io.StringIO | None = None) -> Iterator[None]:
    """Turn any error of Megatron about flags into one line; `printed` has its output."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        trace = error.__traceback__
        frames = zip(traceback.extract_tb(trace), traceback.walk_tb(trace), strict=True)
        last, (frame, _) = [pair for pair in frames if _EXIT not in pair[0].filename][-1]
        lines = printed.getvalue().splitlines() if printed and isinstance(error, SystemExit) else []
        text = " ".join(str(lines[-1] if lines else error).split())
        code = re.sub(r", (\\|f?(['\"]).*\2)$", "", last.line or "")  # without its own message
        owner = frame.f_locals.get("args", frame.f_locals.get("self"))
        names = [n for n in re.findall(r"\b(?:args|self)\.(\w+)", code) if hasattr(owner, n)]
        given = [f"{flag_of(FLAGS.get(n, n))} {getattr(owner, n)}" for n in dict.fromkeys(names)]
        where = f"{Path(last.filename).name}:{last.lineno}: {code}"
        if given:
            where += f": {', '.join(given)}"
        if isinstance(error, AssertionError):  # few of them name the flags that they are about
            text = f"{text} ({where})" if text else where
        raise ConfigError([f"Megatron refuses this configuration: {text or where}"]) from error


@contextlib.contextmanager
def _without_argument_list() -> Iterator[io.StringIO]:
    """Drop validate_args's printout of all 600 arguments, but for warnings in a rank's log."""
    sink = io.StringIO()
    with contextlib.redirect_stdout(sink):
        yield sink
    for line in sink.getvalue().splitlines() if "RANK" in os.environ else ():
        if "WARNING" in line or line.startswith("using world size"):
            print(line, flush=True)
