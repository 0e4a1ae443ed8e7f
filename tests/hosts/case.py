"""What may be wrong between hosts, as data: two or three hosts, one or two ranks on each.

Words in braces are paths: {tmp}, {shared} (of all hosts), {run}, {own} (of a case), {data} (prefix)
and {tokenizer}, and {root}, the checkout. A host's mounts are its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One job that is to be refused, or to end, with a reason.

    Attributes:
        named: a regular expression that a line of every host in `on` must match; empty: the job is
            to train, and every exit code to be 0.
        on: the hosts that can know it.
        hosts: number of hosts.
        ranks: of each host.
        flags: of the hosts in `of`, behind those of all.
        all: flags of all hosts.
        variables: of the hosts in `of`.
        everywhere: variables of all hosts.
        setup: shell commands on the hosts in `of`.
        first: shell commands on all hosts, before those.
        of: the hosts that are different.
        before: shell commands on this machine, before any host starts.
        saved: whether the run exists, with a checkpoint of two ranks, and is to be resumed.
        start: the hosts that are started; empty: all.
        at: what happens once a step was logged: "SIGKILL rank 0", "SIGKILL torchrun a", "crash a",
            "cut a".
        codes: exit codes by host; None: it waits for longer than a minute. Others must not be 0.
        may_be_right: whether the hosts may train together in spite of it.
    """

    named: str = ""
    on: str = "ab"
    hosts: int = 2
    ranks: int = 1
    flags: Sequence[str] = ()
    all: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    everywhere: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    first: str = ""
    of: str = "b"
    before: str = ""
    saved: bool = False
    start: str = ""
    at: str = ""
    codes: Mapping[str, int | None] = field(default_factory=dict)
    may_be_right: bool = False
