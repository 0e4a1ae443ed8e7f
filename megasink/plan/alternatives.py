"""Other memory options for the same run, to step and compare."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megasink.command_line import without

_RECOMPUTE = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers")
_FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
_FULL += ["--recompute-num-layers", "1"]


def alternatives(
    flags: Sequence[str], facts: Mapping[str, Any]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield (title, flags) of each option that changes this run; one option at a time."""
    toggles = ["--use-distributed-optimizer"]
    if facts["tensor"] > 1:
        toggles.append("--sequence-parallel")
    for flag in toggles:
        if flag in flags:
            # Flags that only work with the distributed optimizer go with it.
            dropped = {flag, "--overlap-param-gather"} if "optimizer" in flag else {flag}
            yield f"without {flag}", [word for word in flags if word not in dropped]
        else:
            yield f"with {flag}", [*flags, flag]
    plain = without(flags, (*_RECOMPUTE, "--recompute-activations", "--recompute-modules"))
    if plain != list(flags):
        yield "without recompute", plain
    if not ("--recompute-granularity" in flags and "full" in flags):
        yield "with full recompute", [*plain, *_FULL]
    if facts["attention_kernel"] not in ("", "eager"):
        yield "with --attention-kernel eager", [*flags, "--attention-kernel", "eager"]
