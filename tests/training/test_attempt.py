"""Ranks that meet: in which attempt, and at which address."""

import socket
import threading

import pytest
import torch.distributed as dist

from megasink.errors import UserError
from megasink.training import network
from megasink.training.start_run import agree


def meet(store, world, ranks=None, timeout=60.0):
    """What the ranks agree on, at the same time; an error for those that cannot."""
    found = {}

    def one(rank):
        try:
            found[rank] = agree(store, rank, world, timeout)
        except UserError as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks or range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_attempt_has_its_own_keys():
    store = dist.HashStore()
    first, second = meet(store, 3), meet(store, 3)
    assert len(set(first.values())) == len(set(second.values())) == 1
    assert first[0] != second[0]
    # Of another size, as of an elastic job: ranks 3 and 4 are new, the others are not.
    (third,) = set(meet(store, 5).values())
    assert third not in (first[0], second[0])


def test_a_rank_takes_no_attempt_of_the_past_for_its_own():
    """One that began, and one whose rank 1 died before it joined."""
    store = dist.HashStore()
    (first,) = set(meet(store, 2).values())
    assert "rank 1 of 2 did not start within 0 s" in str(meet(store, 2, [0], timeout=0.2)[0])
    late = {}
    waiting = threading.Thread(target=lambda: late.update({1: agree(store, 1, 2, 60.0)}))
    waiting.start()  # it joins the second attempt, which nobody begins
    waiting.join(0.3)
    assert waiting.is_alive()
    third = agree(store, 0, 2, 60.0)
    waiting.join()
    assert late[1] == third != first


def test_a_rank_without_rank_0_says_so():
    error = meet(dist.HashStore(), 2, [1], timeout=0.1)[1]
    assert str(error) == "rank 1 waited 0 s for all 2 ranks to start"


def fake(monkeypatch, resolved, routes):
    monkeypatch.setattr(network, "_resolved", lambda host: resolved[host])
    monkeypatch.setattr(network, "_source", lambda there: routes[there])


def test_the_address_is_that_of_the_route_to_the_others(monkeypatch):
    fake(monkeypatch, {"node1": "10.0.0.1"}, {"10.0.0.1": "10.0.0.7"})
    assert network.own_address("node1") == ("10.0.0.7", False)
    fake(monkeypatch, {"node1": "10.0.0.1"}, {"10.0.0.1": "10.0.0.1"})
    assert network.own_address("node1") == ("10.0.0.1", True)
    # Debian: on node1 itself its name stands for a loopback address.
    routes = {"127.0.1.1": "127.0.0.1", "192.0.2.1": "10.0.0.1"}
    fake(monkeypatch, {"node1": "127.0.1.1"}, routes)
    assert network.own_address("node1") == ("10.0.0.1", True)


def test_an_unknown_master_is_one_line(monkeypatch, capsys):
    def unknown(host):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(network, "_resolved", unknown)
    monkeypatch.setattr(network, "_SECONDS", 0.0)
    assert network.main(["node1"]) == 2
    assert (
        capsys.readouterr().err == "megasink: error: MASTER_ADDR node1: Name or service not known\n"
    )


@pytest.mark.parametrize(
    ("variables", "own", "chosen"),
    [
        ({}, "127.0.1.1", "eth7"),
        ({}, "10.0.0.7", None),  # the others reach what the name stands for
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "127.0.1.1", "ib0"),
        ({"LOCAL_WORLD_SIZE": "4"}, "127.0.1.1", None),  # one host
    ],
)
def test_gloo_listens_where_others_reach_it(variables, own, chosen, monkeypatch):
    fake(monkeypatch, {socket.gethostname(): own, "m": "10.0.0.1"}, {"10.0.0.1": "10.0.0.7"})
    monkeypatch.setattr(network, "_interface", {"10.0.0.7": "eth7"}.get)
    environment = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "m", **variables}
    network.choose_gloo_interface(environment)
    assert environment.get("GLOO_SOCKET_IFNAME") == chosen
