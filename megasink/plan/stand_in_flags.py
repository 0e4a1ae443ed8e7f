"""What a plan does without: data, tokenizer, checkpoints, and packages of the GPUs that train."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megasink.megatron.argument_parser import DEFAULTS
from megasink.options.megatron_flags import FLAGS, flags_refused, having
from megasink.training import recipes
from megasink.training.checks.data_paths import missing_files
from megasink.training.flag_file import named_values
from megasink.training.reinterpreted_flags import READERS


def _flags(names: Iterable[str]) -> set[str]:
    return {name.replace("_", "-") for name in names}


_DATA = _flags(having("data")) | {"valid-data-path", "test-data-path"}
_DATA |= {"data-args-path", "per-split-data-args-path"}
_TOKENIZER = {"tokenizer-type", "tokenizer-model", "vocab-file", "merge-file", "vocab-size"}
# A plan reads no checkpoint, writes nothing and connects to nothing.
_OUTSIDE = _flags(having("outside"))
_PACKAGES = _flags(FLAGS.get(name, name) for name in having("package"))
_PACKAGES |= {
    flag[2:]
    for when in ("without TransformerEngine", "without TransformerEngine's experts", "without apex")
    for flag in flags_refused(when)
}
# What takes the place of a value that needs a package.
_REPLACED = {"flex": "alltoall", "layernorm": "core_attn", "moe_act": "core_attn"}
_REPLACED["mla_up_proj"] = "core_attn"
_REPLACED_IN = {"moe-token-dispatcher-type", "recompute-modules"}
# Tokens of published tokenizers, by a word of --tokenizer-model or --tokenizer-type.
_PUBLISHED = {
    r"llama-?_?3": 128_256,
    r"llama-?_?2|mi[sx]tral": 32_000,
    r"qwen": 151_936,
    r"deepseek": 129_280,
    r"gpt-?_?oss": 201_088,
    r"gpt-?2": 50_257,
}
_ASSUMED = 131_072
# What a run needs and a model's configuration does not have.
_NEEDED = {"seq-length": "4096", "micro-batch-size": "1", "train-iters": "1000", "lr": "1e-4"}


def with_stand_ins(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Replace files and packages that this machine need not have, and name them on stderr."""
    # Mock data, and a tokenizer of --vocab-size tokens, of the recipe's size, or of the size that
    # is published for its name. Parameters are the same without the packages.
    pairs = list(named_values(flags))
    given, added, notes = dict(pairs), list[str](), list[str]()
    dropped = _OUTSIDE & given.keys()
    named = [value for name in _DATA for value in given.get(name, ())]
    weight = re.compile(r"[\d.eE+-]+")
    absent = [
        value
        for value in named
        if not (weight.fullmatch(value) or "://" in value or Path(value).is_file())
        and missing_files(value)
    ]
    if absent or not (named or "mock-data" in given):
        dropped |= _DATA
        added.append("--mock-data")
        notes.append(f"no data ({absent[0]} was not found)" if absent else "no data")
    if tokens := _tokens(argv, given):
        size, origin = tokens
        dropped |= _TOKENIZER
        added += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(size)]
        notes.append(f"no tokenizer: a vocabulary of {size:,} tokens ({origin})")
    last = re.search(r":(\d+)$", " ".join(given.get("step-batch-size-schedule", ())))
    if last:
        batch = given.get("global-batch-size") or [last[1]]
        dropped |= {"step-batch-size-schedule", "global-batch-size"}
        added += ["--global-batch-size", *batch]
        notes.append(f"--global-batch-size {batch[-1]} in place of --step-batch-size-schedule")
    packages = _PACKAGES & given.keys()
    if given.get("transformer-impl", [""])[-1:] != ["transformer_engine"]:
        packages -= {"transformer-impl"}
    shown = [f"--{name}" for name in packages]
    for reader in READERS:
        if reader.needs[2:] in packages | dropped:
            packages |= _flags(reader.flags) & given.keys()
    replaced = [n for n in _REPLACED_IN & given.keys() if not _REPLACED.keys().isdisjoint(given[n])]
    length = given.get("seq-length", [_NEEDED["seq-length"]])[-1]
    needed = {n: v for n, v in _NEEDED.items() if n not in given}
    if "train-samples" in given:
        needed.pop("train-iters", None)
    if needed:
        added += [word for name, value in needed.items() for word in (f"--{name}", value)]
        notes.append(" ".join(f"--{name} {value}" for name, value in needed.items()))
    if "max-position-embeddings" not in given:
        added += ["--max-position-embeddings", length]
    if shown := sorted([*shown, *(f"--{name}" for name in replaced)]):
        notes.append(
            "no TransformerEngine, FP8 or offloading: the plan is for a run without "
            f"{' '.join(shown)}"
        )
    if notes:
        print(f"megasink: planned with {'; '.join(notes)}", file=sys.stderr)
    kept = list[str]()
    for name, values in pairs:
        if name in replaced:
            values = list(dict.fromkeys(_REPLACED.get(value, value) for value in values))
        if name not in dropped | packages:
            kept += [f"--{name}", *values] if name else values
    return [*kept, *added]


def _tokens(argv: Sequence[str], given: Mapping[str, list[str]]) -> tuple[int, str] | None:
    """Return the size of the vocabulary and its origin; None if a tokenizer is here, or wrong."""
    kind, model = (" ".join(given.get(f"tokenizer-{what}", ())) for what in ("type", "model"))
    kind = kind or str(DEFAULTS["tokenizer_type"])
    if kind == "NullTokenizer" or (model and Path(model).exists()):
        return None
    sizes = {
        f"--{name}": " ".join(given.get(name, ())) for name in ("vocab-size", "padded-vocab-size")
    }
    for origin, text in (*sizes.items(), ("the recipe's", str(recipes.vocabulary(argv) or ""))):
        if text:
            return (int(text), origin) if text.isdecimal() and int(text) > 1 else None
    if not (model or "tokenizer-type" in given or "vocab-file" in given):
        return None  # the checks ask for one
    for pattern, size in _PUBLISHED.items():
        if re.search(pattern, f"{model} {kind}", re.IGNORECASE):
            return size, f"as published for {model or kind}"
    return _ASSUMED, f"assumed, because {model or kind} was not found: give --vocab-size"
