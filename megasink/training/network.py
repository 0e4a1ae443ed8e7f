"""Find the address and interface by which this host reaches the others of its job.

torchrun and gloo resolve the host's own name, which on many systems is a loopback address, or
nothing. The kernel's routes give the right one. ``python -m megasink.training.network MASTER_ADDR``
prints it, and whether it is the master (1 or 0), for examples/pretrain_gpt_sink.sh.
"""

import contextlib
import ipaddress
import socket
import sys
import time
from collections.abc import MutableMapping, Sequence

import psutil

from megasink.errors import UserError
from megasink.training.waiting import on_several_hosts

# Any address outside (RFC 5737): the route to it is the default one. Nothing is sent.
_OUTSIDE = "192.0.2.1"
_SECONDS = 30.0  # a cluster may publish the name of a node only once it runs


def own_address(master: str) -> tuple[str, bool]:
    """Return the address by which other hosts reach this one, and whether it is `master` itself."""
    try:
        there = _resolved(master)
    except OSError as error:
        raise UserError(f"MASTER_ADDR {master}: {error.strerror}") from error
    try:
        here = _source(there)
        own = here == there or _is_loopback(there)
        return (_source(_OUTSIDE) if _is_loopback(here) else here), own
    except OSError as error:
        why = f"this host has no route to it ({error.strerror})"
        if _is_loopback(there):
            why = f"this host resolves it to {there}, which other hosts cannot reach"
        raise UserError(
            f"MASTER_ADDR {master}: {why}; set it to the first node's address on the network "
            "between the nodes"
        ) from error


def choose_gloo_interface(environment: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME if gloo would listen on the loopback interface of several hosts."""
    if not on_several_hosts(environment) or "GLOO_SOCKET_IFNAME" in environment:
        return
    with contextlib.suppress(OSError):
        if not _is_loopback(_resolved(socket.gethostname())):
            return
    with contextlib.suppress(UserError):
        if name := _interface(own_address(environment["MASTER_ADDR"])[0]):
            environment["GLOO_SOCKET_IFNAME"] = name


def _resolved(host: str) -> str:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])


def _source(there: str) -> str:
    """Return the address from which the kernel would send to `there`; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(there, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(address)
        return str(route.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _interface(address: str) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return None


def main(argv: Sequence[str]) -> int:
    """Print the address of this host, and 1 if it is the master, else 0."""
    end = time.monotonic() + _SECONDS
    while True:
        try:
            address, own = own_address(argv[0])
            print(address, int(own))
            return 0
        except UserError as error:
            if time.monotonic() > end:
                print(f"megasink: error: {error}", file=sys.stderr)
                return 2
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
