"""Hosts on one machine: network namespaces with cables to a switch (Linux, as root).

A host has its own interfaces, name, processes and /dev/shm; only the file system is shared. Its
own name resolves to 127.0.1.1, as on Debian.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import forkserver

_INTERFACE = "eth7"
SETUP = """
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
        self._started: list[Any] = []
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
        words = ["bash", "-c", SETUP, "host", self.name, str(self._names), setup]
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

    def fork(
        self, line: Sequence[str], log: Path, environment: Mapping[str, str], setup: str = ""
    ) -> forkserver.Process:
        """Do the same for a script that starts torchrun, by the fork server."""
        folder = log.with_suffix(".fork")
        folder.mkdir()
        request = {"space": self.space, "name": self.name, "names": str(self._names)}
        request |= {"folder": str(folder), "line": list(line), "setup": setup}
        request |= {"environment": {**os.environ, **environment}}
        (folder / "request").write_text(json.dumps(request))
        with log.open("wb") as file:
            process = forkserver.server().start(
                ["tests.hosts.enter", str(folder / "request")], stdout=file, stderr=file
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
def connected(folder: Path, letters: str = "ab") -> Iterator[tuple[Host, ...]]:
    """Hosts with an interface each, whose cables end in a switch."""
    hosts = [Host(letter, f"10.77.0.{n}", folder) for n, letter in enumerate(letters, 1)]
    switch = Host("switch", "", folder)
    try:
        switch.ip("link", "add", "bridge", "type", "bridge")
        switch.ip("link", "set", "bridge", "up")
        for host, letter in zip(hosts, letters, strict=True):
            port = ["peer", "name", f"port-{letter}", "netns", switch.space]
            _ip("link", "add", _INTERFACE, "netns", host.space, "type", "veth", *port)
            switch.ip("link", "set", f"port-{letter}", "up", "master", "bridge")
            host.plug_in()
        yield tuple(hosts)
    finally:
        for host in (*hosts, switch):
            host.remove()


def small_packets(hosts: Sequence[Host]) -> None:
    """Let the switch drop what is larger than a packet of Ethernet, and hosts send larger ones."""
    for host in hosts:
        host.ip("link", "set", _INTERFACE, "mtu", "9000", "gso_max_segs", "1")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
