"""The registry of conversion targets, and the choice of one for a model."""

from megasink.convert.architecture import Architecture
from megasink.convert.targets.target import Target
from megasink.errors import UserError, unknown_name
from megasink.plugins import advice

TARGETS: dict[str, Target] = {}
"""Targets by name, in the order of registration."""


def register(target: Target) -> Target:
    """Add a target, which is then chosen for models that fit no earlier one.

    Raises:
        UserError: the name is taken.
    """
    if target.name in TARGETS:
        raise UserError(f"conversion target {target.name!r} is registered twice: rename one")
    TARGETS[target.name] = target
    return target


def named(name: str) -> Target:
    """Return the target for ``--target``.

    Raises:
        UserError: there is no target of that name.
    """
    if name not in TARGETS:
        raise UserError(f"{unknown_name('--target', name, TARGETS)}; {advice()}")
    return TARGETS[name]


def choose(model: Architecture, name: str | None = None) -> tuple[Target, str]:
    """Return the target for a model, and the reason for the choice.

    Args:
        name: the target to use; None for the first that fits, architectures of transformers before
            those with custom code.

    Raises:
        UserError: no target fits, with the reasons.
    """
    if name is not None:
        target = named(name)
        if problems := target.export_problems(model):
            raise UserError(f"--target {name} does not fit this model: {'; '.join(problems)}")
        return target, "requested"
    reasons: list[str] = []
    for target in sorted(TARGETS.values(), key=lambda target: target.custom_code):
        problems = target.export_problems(model)
        if not problems and not target.custom_code:
            return target, f"the first that supports {described(model)}"
        if not problems:
            nearest = f" ({' | '.join(reasons)})" if reasons else ""
            return target, (
                f"no architecture of transformers supports {described(model)}{nearest}; exporting "
                "with megasink's modeling files, which need trust_remote_code=True"
            )
        near = model.attention in target.attention and target.moe in (None, bool(model.experts))
        if near or target.custom_code:
            reasons.append(f"{target.name}: {'; '.join(problems)}")
    raise UserError(f"no conversion target supports this model ({' | '.join(reasons)})")


def described(model: Architecture) -> str:
    """Summarize the features that determine the target."""
    units = "gated FFN" if model.options.gated_unit else "plain FFN"
    words = [f"{model.attention} attention", f"{model.activation} {units}"]
    words.append("qk-norm" if model.qk_norm else "no qk-norm")
    words.append(f"{model.experts} experts" if model.experts else "no experts")
    if model.variant_layers:
        words[0] += f" in {sum(model.variant_layers)} of {model.layers} layers"
    if model.latent:
        words.append("latent attention")
    if model.delta_net:
        words.append(f"gated delta-net in {sum(model.linear_layers)} of {model.layers} layers")
    if model.bias or model.qkv_bias:
        words.append("biases" if model.bias else "q, k and v biases")
    if any(model.windows):
        words.append("sliding windows")
    return ", ".join([*words, *model.options.flags()])
