"""The registry of gate kernels, which run around an attention kernel, and the choice among them."""

from megasink.attention.gate_kernels.plain_gate_kernels import PlainGateKernels
from megasink.attention.gate_kernels.protocol import BeforeBackward, FirstKey, GateKernels, GateRows
from megasink.attention.kernels import Choice, backend_named, choose_backend, remembered
from megasink.attention.kernels.backend import AttentionRequest
from megasink.errors import ConfigError

__all__ = ["OWN", "BeforeBackward", "FirstKey", "GateKernels", "GateRows", "choose_gate_kernels"]
__all__ += ["gate_kernels_named"]

# The choice where the attention kernel adds the sink itself.
OWN, TRITON = "own-sink", "triton"
# In the order in which they are tried; Triton's (None) are imported when a CUDA device asks.
_REGISTRY: dict[str, GateKernels | None] = {TRITON: None, PlainGateKernels.name: PlainGateKernels()}


def gate_kernels_named(name: str) -> GateKernels:
    """Return the gate kernels with this name."""
    kernels = _REGISTRY[name]
    if kernels is None:
        from megasink.attention.gate_kernels.triton_gate_kernels import TritonGateKernels

        _REGISTRY[name] = kernels = TritonGateKernels()
    return kernels


def _refusal(name: str, request: AttentionRequest) -> str | None:
    if _REGISTRY[name] is None and request.device_type != "cuda":
        return f"these kernels run on CUDA devices, not on {request.device_type}"
    return gate_kernels_named(name).supports(request)


@remembered
def choose_gate_kernels(request: AttentionRequest, requested: str = "auto") -> Choice:
    """Select the gate kernels for a request.

    `requested` is "auto" or an attention backend; "+" and a name require those gate kernels, as in
    "auto+torch". Without "+", the sink of an attention kernel comes first (`OWN`); slots other than
    sinks take the next. Raise ConfigError if they do not exist or cannot run this request.
    """
    _, plus, name = requested.partition("+")
    if plus and name not in _REGISTRY:
        raise ConfigError([f"unknown gate kernels {name!r}: choose {', '.join(_REGISTRY)}"])
    refusals = {known: _refusal(known, request) for known in _REGISTRY}
    if request.variant == "sink":
        own: str | None = "other kernels were requested"
        if not plus:
            own = backend_named(choose_backend(request, requested).name).sink_reason(request)
        refusals = {OWN: own, **refusals}
    able = [known for known, refusal in refusals.items() if refusal is None]
    if plus and name not in able:
        raise ConfigError(
            [f"gate kernels {name!r} cannot run here: {refusals[name]}; use '+{able[0]}'"]
        )
    chosen = name if plus else able[0]
    idle = f"{chosen} was requested" if plus else f"{chosen} comes first"
    reasons = {other: why or idle for other, why in refusals.items() if other != chosen}
    return Choice(chosen, reasons)
