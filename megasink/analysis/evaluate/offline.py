"""Block network connections while tasks load, so that nothing is fetched unasked."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

# Set by HF_HUB_OFFLINE and HF_DATASETS_OFFLINE, which are read when these modules are imported.
_SWITCHES = {
    "huggingface_hub.constants": ("HF_HUB_OFFLINE",),
    "datasets.config": ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
}


class UnreachableError(OSError):
    """Raised when a host is looked up inside `offline`."""


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Read datasets only from their cache, and make every host lookup fail immediately.

    Some tasks fetch data in their own code (lm-eval's RULER does). Without the second part they
    would do so, or wait for a missing network.
    """
    import datasets.config
    import huggingface_hub.constants

    modules: dict[str, Any] = {
        "datasets.config": datasets.config,
        "huggingface_hub.constants": huggingface_hub.constants,
    }
    before = {
        (modules[name], switch): getattr(modules[name], switch)
        for name, switches in _SWITCHES.items()
        for switch in switches
    }
    lookup = socket.getaddrinfo
    try:
        for module, switch in before:
            setattr(module, switch, True)
        socket.getaddrinfo = _unreachable
        yield
    finally:
        socket.getaddrinfo = lookup
        for (module, switch), value in before.items():
            setattr(module, switch, value)


def _unreachable(host: Any, *args: Any, **named: Any) -> NoReturn:
    raise UnreachableError(f"no request is sent to {host}: tasks load offline")
