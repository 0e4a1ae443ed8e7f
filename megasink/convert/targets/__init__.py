"""The architectures that a model can become, transformers' and our own, and which it becomes."""

from megasink.convert.architecture import Architecture
from megasink.convert.targets import gates, own, plain, sinks
from megasink.convert.targets.base import Target
from megasink.errors import UserError

# The order of preference: the first that fits is taken.
TARGETS: tuple[Target, ...] = (*plain.TARGETS, *sinks.TARGETS, *gates.TARGETS, *own.TARGETS)
BY_NAME = {target.name: target for target in TARGETS}


def choose(model: Architecture, name: str | None = None) -> tuple[Target, str]:
    """The target of a model, and why it is that one.

    Args:
        name: the one that must be taken; None for the first that fits.

    Raises:
        UserError: none fits, with the reason of each.
    """
    if name is not None:
        if name not in BY_NAME:
            raise UserError(f"--target {name} is unknown: choose {', '.join(BY_NAME)}")
        problems = BY_NAME[name].problems(model)
        if problems:
            raise UserError(f"--target {name} does not fit this model: {'; '.join(problems)}")
        return BY_NAME[name], "asked for"
    reasons: list[str] = []
    for target in TARGETS:
        problems = target.problems(model)
        if not problems and not target.own:
            return target, f"the first that has all of: {described(model)}"
        if not problems:
            nearest = f" ({' | '.join(reasons)})" if reasons else ""
            return target, (
                f"no architecture of transformers has all of: {described(model)}{nearest}; "
                "own modelling file; loading needs trust_remote_code=True"
            )
        near = model.attention in target.attention and target.moe == bool(model.experts)
        if near or target.own:
            reasons.append(f"{target.name}: {'; '.join(problems)}")
    raise UserError(f"no architecture of transformers is this model ({' | '.join(reasons)})")


def described(model: Architecture) -> str:
    """What decides about the target, in a few words."""
    units = "units" if model.own.gated_unit else "FFN without a gated unit"
    words = [f"{model.attention} attention", f"{model.activation} {units}"]
    words.append("qk-norm" if model.qk_norm else "no qk-norm")
    words.append(f"{model.experts} experts" if model.experts else "no experts")
    if model.bias or model.qkv_bias:
        words.append("biases" if model.bias else "biases of q, k and v")
    if any(model.windows):
        words.append("sliding windows")
    return ", ".join([*words, *model.own.flags()])
