"""The architectures that a model can become, and which one it becomes."""

from megasink.command_line import unknown_name
from megasink.convert.architecture import Architecture
from megasink.convert.targets.target import Target
from megasink.errors import UserError
from megasink.plugins import advice

TARGETS: dict[str, Target] = {}
"""By name, in the order in which they were registered."""


def register(target: Target) -> Target:
    """Add a target: it can be named, and a model that no earlier one fits becomes it.

    Raises:
        UserError: its name is taken.
    """
    if target.name in TARGETS:
        raise UserError(f"two conversion targets are called {target.name!r}: choose another name")
    TARGETS[target.name] = target
    return target


def named(name: str) -> Target:
    """The target of ``--target``.

    Raises:
        UserError: there is none of that name.
    """
    if name not in TARGETS:
        raise UserError(f"{unknown_name('--target', name, TARGETS)}; {advice()}")
    return TARGETS[name]


def choose(model: Architecture, name: str | None = None) -> tuple[Target, str]:
    """The target of a model, and why it is that one.

    Args:
        name: the one that must be taken; None for the first that fits, one of transformers' before
            one with code of its own.

    Raises:
        UserError: none fits, with the reason of each.
    """
    if name is not None:
        target = named(name)
        if problems := target.problems(model):
            raise UserError(f"--target {name} does not fit this model: {'; '.join(problems)}")
        return target, "asked for"
    reasons: list[str] = []
    for target in sorted(TARGETS.values(), key=lambda target: target.custom_code):
        problems = target.problems(model)
        if not problems and not target.custom_code:
            return target, f"the first that has all of: {described(model)}"
        if not problems:
            nearest = f" ({' | '.join(reasons)})" if reasons else ""
            return target, (
                f"no architecture of transformers has all of: {described(model)}{nearest}; "
                "own modelling file; loading needs trust_remote_code=True"
            )
        near = model.attention in target.attention and target.moe == bool(model.experts)
        if near or target.custom_code:
            reasons.append(f"{target.name}: {'; '.join(problems)}")
    raise UserError(f"no architecture of transformers is this model ({' | '.join(reasons)})")


def described(model: Architecture) -> str:
    """What decides about the target, in a few words."""
    units = "units" if model.options.gated_unit else "FFN without a gated unit"
    words = [f"{model.attention} attention", f"{model.activation} {units}"]
    words.append("qk-norm" if model.qk_norm else "no qk-norm")
    words.append(f"{model.experts} experts" if model.experts else "no experts")
    if model.bias or model.qkv_bias:
        words.append("biases" if model.bias else "biases of q, k and v")
    if any(model.windows):
        words.append("sliding windows")
    return ", ".join([*words, *model.options.flags()])
