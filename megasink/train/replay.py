"""Select the flags of a run's last start that ``--resume`` reuses.

A run folder may be untrusted, and its starts.jsonl holds a command line. Flags of the model, the
data and training are replayed: numbers, names of choices, files to read. Flags that write outside
the folder, import a module or connect to a service are not: they must be given again.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megasink.data.object_store import is_stored
from megasink.errors import UserError
from megasink.flag_file import Flags

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
    step-batch-size-schedule validation-set-names wandb-entity wandb-exp-name wandb-project
    window-attn-skip-freq window-size
    """.split()
)
"""Flags, without dashes, whose values are lists or patterns of numbers and names."""
READING = set(
    """
    data-args-path data-path expanded-recipe load merge-file per-dataset-sequences-path
    per-split-data-args-path pretrained-checkpoint test-data-path tokenizer-model train-data-path
    valid-data-path vocab-file
    """.split()
)
"""Flags that name files to read, which run no code."""
WRITING = {"data-cache-path", "save", "tensorboard-dir", "wandb-save-dir"}
"""Flags that name folders to write, replayed if inside the run folder."""
# The last eight take no value.
TOLD = set(
    """
    app-tag-run-name app-tag-run-version bert-load block-data-path chat-template checkpoint-store
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
    tokenizer-special-tokens tp-comm-overlap-cfg yaml-cfg enable-ft-package enable-msc
    inprocess-restart record-memory-history run-workload-inspector-server trust-remote-code
    use-checkpoint-args use-mp-args-from-checkpoint-args
    """.split()
)
"""Flags not replayed: they write elsewhere, import, connect, or megasink refuses them."""

_SCHEDULE = r"(min-)?lr(-.*)?|.*weight-decay.*"
_ITS_OWNERS = {"override-opt-param-scheduler", "use-checkpoint-opt-param-scheduler"}
_OF_A_START = ("plugin", "run-dir", "resume", "expanded-recipe")


def replayed(last: Sequence[str], given: Sequence[str], run_dir: Path) -> list[str]:
    """Return the flags of the last start, to prepend to those given now.

    With a rate or a decay that is given and was another, also the flag with which Megatron takes
    the schedule of the flags and not that of the checkpoint.

    Raises:
        UserError: a flag must be given again, and was not.
    """
    said = {name for name, _ in named_values(given)}
    refused = [
        " ".join([f"--{name}", *values])
        for name, values in named_values(last)
        if name not in said and not _harmless(name, values, run_dir)
    ]
    if refused:
        raise UserError(
            f"--resume: the last start in {run_dir} had {', '.join(refused)}, which is not reused "
            "for safety: give it again if the run is yours, or another value"
        )
    before = dict(named_values(last))
    changes = before and any(
        re.fullmatch(_SCHEDULE, name) and before.get(name) != values
        for name, values in named_values(given)
    )
    override = ["--override-opt-param-scheduler"] if changes and not said & _ITS_OWNERS else []
    said |= _ITS_OWNERS if override else set()
    kept = ([f"--{name}", *values] for name, values in named_values(last) if name not in said)
    return [*(word for flag in kept for word in flag), *override]


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


def flags_of_words(words: Sequence[str]) -> Flags:
    """Return the flags of a training command line that a configuration file may hold."""
    flags: Flags = {}
    for name, values in named_values(words):
        if name and name not in _OF_A_START:
            numbers = [_number(value) for value in values]
            flags[name] = numbers if len(numbers) > 1 else numbers[0] if numbers else True
    return flags


def _number(word: str) -> int | float | str:
    """Return a number where its text in TOML is the word again, else the word."""
    if not re.fullmatch(r"-?(\d+|\d+\.\d+)([eE][-+]?\d+)?", word):
        return word
    number = int(word) if re.fullmatch(r"-?\d+", word) else float(word)
    return number if str(number) == word else word


def _harmless(name: str, values: Sequence[str], run_dir: Path) -> bool:
    if name in TOLD or not name:
        return False
    if name in READING:
        return not any(map(is_stored, values))  # connecting to a store
    if name in WRITING:
        return all(Path(value).resolve().is_relative_to(run_dir.resolve()) for value in values)
    form = r"[\w ,.:;*+()|\[\]-]*" if name in DESCRIBING else f"{_NUMBER}|{_WORD}"
    return all(re.fullmatch(form, value) for value in values)
