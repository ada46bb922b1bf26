"""What a worker on another machine is told, and what machines and doors are called."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from asyncflow.cluster.remote_node import RemoteNode, host_of, is_any, is_loopback, own_address, remote_node


def test_a_worker_is_told_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert remote_node() is None
    places = RemoteNode(Path("/m"), Path("/f"))
    for name, value in places.environment().items():
        monkeypatch.setenv(name, value)
    assert remote_node() == places


@pytest.mark.parametrize(("door", "found"), [("tls:127.0.0.1:7", "127.0.0.1"), ("tls:localhost:7", ""), ("tls:[::1]:7", "[::1]")])
def test_a_machine_knows_its_address_by_which_it_reaches_a_door(door: str, found: str) -> None:
    if "::" in door and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    assert (address := own_address(door)) and address.startswith(found)


@pytest.mark.parametrize(
    ("door", "host", "kind"),
    [
        ("tls:10.0.0.1:7001", "10.0.0.1", ""),
        ("10.0.0.1:7001", "10.0.0.1", ""),
        ("tls:node-1:0", "node-1", ""),
        ("auto", "", "any"),
        ("tls::0", "", "any"),
        ("tls:0.0.0.0:7001", "0.0.0.0", "any"),
        ("tls:0:7001", "0", "any"),
        ("tls:[::]:7001", "::", "any"),
        ("tls::::7001", "::", "any"),
        ("tls:[::ffff:0.0.0.0]:7001", "::ffff:0.0.0.0", "any"),
        ("tls:127.0.0.1:0", "127.0.0.1", "loopback"),
        ("tls:127.3.2.1:0", "127.3.2.1", "loopback"),
        ("tls:[::1]:0", "::1", "loopback"),
        ("tls:localhost:0", "localhost", "loopback"),
        ("tls:[fe80::1]:0", "fe80::1", ""),
    ],
)
def test_what_a_door_is_called(door: str, host: str, kind: str) -> None:
    assert (host_of(door), is_any(host), is_loopback(host)) == (host, kind == "any", kind == "loopback")
