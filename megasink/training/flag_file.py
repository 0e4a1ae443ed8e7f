"""Flags in files: their form in TOML, and which flags a file may set.

One rule for every file, whoever made it: a run's starts.jsonl and config.toml, a recipe, a grid
and its measurements, flags.txt of a conversion. They set the model, what is read, and the training.
What writes elsewhere, imports, connects or sends, the command line alone says (`refused`).
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megasink.data.object_store import is_stored
from megasink.errors import UserError

Flags = dict[str, Any]
"""Flags of `megasink train` by flat name: a number, a string, true, false or a list."""
_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"
# The name of a choice, which argparse or a check validates.
_WORD = r"[A-Za-z0-9][\w.-]*"
# Flags with free-form values that only describe.
DESCRIBING = set(
    """
    attention-bias-type attention-kernel attention-normalization attention-similarity
    attention-variant attention-variant-layers bias-fixed-value cp-comm-type ffn-activation
    gate-activation gate-granularity gate-input gate-operation gate-position head-balance-scope
    hybrid-layer-pattern hybrid-override-pattern linear-attention-freq lora-targets lora-train
    moe-layer-freq muon-coefficient-type no-rope-freq onnx-safe phase-transition-iterations
    pipeline-model-parallel-layout recompute-modules replace-tokens-with sdpa-output-norm split
    step-batch-size-schedule validation-set-names window-attn-skip-freq window-size
    device json-key name
    """.split()
)
"""Flags, without dashes, whose values are lists or patterns of numbers and names. The last ones of
each list are of commands that a grid measures with."""
READING = set(
    """
    data-args-path data-path expanded-recipe load merge-file per-dataset-sequences-path
    per-split-data-args-path pretrained-checkpoint test-data-path tokenizer-model train-data-path
    valid-data-path vocab-file
    calibration data heads interventions tokenizer
    """.split()
)
"""Flags that name files to read, which run no code."""
WRITING = {"data-cache-path", "output", "save", "tensorboard-dir", "wandb-save-dir"}
"""Flags that name folders to write; a file of a folder may set them to a place inside it."""
TOLD = set(
    """
    app-tag-run-name app-tag-run-version bert-load block-data-path chat-template
    ckpt-convert-save config config-logger-dir cuda-graph-modules cuda-graph-scope
    ddp-param-name-patterns-for-fp32-local-accumulation dist-ckpt-format
    dump-param-to-param-group-map embedding-path evidence-data-path
    fault-injector-fault-probabilities fault-injector-fault-types fault-injector-ranks fim-eod-token
    fim-middle-token fim-no-prefix fim-pad-token fim-prefix-token fim-split-sample fim-suffix-token
    flight-recorder-dump-path fp4-quantizer-factory fp8-quantizer-factory
    heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path
    high-priority-stream-groups ict-load
    inference-shards langrl-env-config logits-load-dir logits-save-dir memory-snapshot-path
    moe-routing-trace-path mtp-hybrid-override-pattern nccl-communicator-config-path
    non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir object-storage-cache-path
    offload-modules one-logger-project one-logger-run-name plugin recipe
    result-rejected-tracker-filename rl-inference-parsers rl-profile-dir run-dir
    sft-tokenizer-prompt-format spec te-precision-config-file titles-data-path tokenizer-metadata
    tokenizer-special-tokens tp-comm-overlap-cfg wandb-entity wandb-exp-name wandb-project yaml-cfg
    adlr-autoresume allow-download confirm-run-unsafe-code enable-ft-package enable-msc
    inference-wandb-logging inprocess-restart log-straggler perform-rl-step record-memory-history
    run-workload-inspector-server task-folder trust-remote-code use-checkpoint-args
    use-mp-args-from-checkpoint-args
    """.split()
)
"""Flags that no file sets: they write elsewhere, import (--adlr-autoresume from the current
directory), connect, listen (--log-straggler), send, or megasink refuses them."""


def refused(words: Sequence[str], folder: Path | None = None) -> dict[str, str]:
    """Return the flags among words of a file that the command line alone may set: name -> words.

    Args:
        words: flags and their values, as on a command line.
        folder: where the file may also say to write; None if nowhere.
    """
    return {
        name: " ".join([f"--{name}", *values])
        for name, values in named_values(words)
        if not _harmless(name, values, folder)
    }


def _harmless(name: str, values: Sequence[str], folder: Path | None) -> bool:
    if name in TOLD or not name:
        return False
    if name in READING:
        return not any(map(is_stored, values))  # connecting to a store
    if name in WRITING:
        inside = folder and folder.resolve()
        return all(inside and Path(value).resolve().is_relative_to(inside) for value in values)
    form = r"[\w ,.:;*+()|\[\]-]*" if name in DESCRIBING else f"{_NUMBER}|{_WORD}"
    return all(re.fullmatch(form, value) for value in values)


def named_values(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name without dashes, values) per flag; leading values have an empty name."""
    name, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if name or values:
                yield name, values
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    if name or values:
        yield name, values


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UserError: it is not TOML.
        OSError: it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as words of a command line; false leaves a flag out."""
    words: list[str] = []
    for name, value in flags.items():
        if value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def form_problems(name: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with the form of a flag in a file; each continues the flag's name."""
    if name.startswith("-"):
        yield f": write {name.lstrip('-')}, without dashes"
    elif not re.fullmatch(r"\w[\w.-]*", name):
        yield " is no name of a flag"
    values = value if isinstance(value, list) else [value]
    if not all(type(entry) in (int, float, str, bool) for entry in values):
        yield f" is {value!r}: give a number, a string, true, false or a list"
    elif isinstance(value, list) and (not value or bool in map(type, values)):
        yield f" is {value!r}: give a list of numbers or strings"
    elif any(str(entry).startswith("--") for entry in values):
        yield f" is {value!r}, which would be a flag of its own"


def toml_lines(flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield flags as the lines of a file; `read_toml` returns the same flags."""
    for name, value in flags.items():
        key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)
        yield f"{key} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return _text(value) if isinstance(value, str) else repr(value)


def _text(value: str) -> str:
    """Return a basic string: control characters, quotes and backslashes are escaped."""
    body = "".join(
        f"\\{c}" if c in '"\\' else f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c
        for c in value
    )
    return f'"{body}"'
