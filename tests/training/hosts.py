"""Two hosts on one machine: network namespaces with a cable between them (Linux, as root).

A host has its own interfaces, name, processes and /dev/shm; only the file system is shared. Its
own name resolves to 127.0.1.1, as on Debian.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_INTERFACE = "eth7"
_SETUP = """
    set -e; hostname "$1"; mount --bind "$2" /etc/hosts; mount -t tmpfs tmpfs /dev/shm; eval "$3"
    shift 3; exec "$@"
"""


def lacking() -> str | None:
    """Say what is missing for hosts of this kind, or None."""
    if missing := [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]:
        return f"needs {' and '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    name = f"megasink-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespaces here: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return None


class Host:
    """A host of the network 10.77.0.0/24."""

    def __init__(self, letter: str, address: str, folder: Path):
        self.name, self.address = f"host-{letter}", address
        self.space = f"megasink-{os.getpid()}-{letter}"
        self._names = folder / f"{self.name}.hosts"
        self._names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        self._started: list[subprocess.Popen[bytes]] = []
        _ip("netns", "add", self.space)
        self.ip("link", "set", "lo", "up")

    def ip(self, *words: str) -> None:
        _ip("-n", self.space, *words)

    def plug_in(self) -> None:
        """Give the address to the interface that is there."""
        self.ip("addr", "add", f"{self.address}/24", "dev", _INTERFACE)
        self.connect()

    def connect(self) -> None:
        self.ip("link", "set", _INTERFACE, "up")

    def disconnect(self) -> None:
        """Pull the cable: nothing is told to either end of a connection."""
        self.ip("link", "set", _INTERFACE, "down")

    def start(
        self, line: Sequence[str], log: Path, environment: Mapping[str, str], setup: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start a program; its process is `unshare`, whose only child it is.

        Args:
            setup: shell commands before it, on this host: its mounts are its own.
        """
        spaces = ["--pid", "--fork", "--kill-child", "--uts", "--mount", "--mount-proc"]
        words = ["bash", "-c", _SETUP, "host", self.name, str(self._names), setup]
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, "unshare", *spaces, *words, *line],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
            )
        self._started.append(process)
        return process

    def crash(self) -> None:
        """Kill everything that runs here."""
        for process in self._started:
            process.kill()  # its child, the first process of its namespace, dies with it
            process.wait()

    def remove(self) -> None:
        self.crash()
        _ip("netns", "del", self.space)


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts, connected by a veth cable."""
    hosts = Host("a", "10.77.0.1", folder), Host("b", "10.77.0.2", folder)
    first, second = (host.space for host in hosts)
    try:
        ends = ["netns", first, "type", "veth", "peer", "name", _INTERFACE, "netns", second]
        _ip("link", "add", _INTERFACE, *ends)
        for host in hosts:
            host.plug_in()
        yield hosts
    finally:
        for host in hosts:
            host.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
