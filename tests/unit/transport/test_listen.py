"""A unix socket at a path: one that somebody serves is not taken, and nobody is waited for."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from asyncflow.transport import Peer, Server
from asyncflow.transport.stream import listen
from asyncflow.types import UserError


@pytest.mark.parametrize("is_full", [False, True])
def test_a_path_that_somebody_serves_is_refused_at_once_though_too_many_wait_there(tmp_path: Path, is_full: bool) -> None:
    path = tmp_path / "s"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(path))
        server.listen(0)
        while is_full:
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            is_full = client.connect_ex(str(path)) == 0
        with pytest.raises(UserError, match="a process serves at"):
            listen(path)
    with listen(path) as taken:  # nobody serves it any more
        assert taken.getsockname() == str(path)


async def test_a_socket_below_a_long_path_costs_no_descriptors(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    server = Server({})
    await server.start(folder / "s")
    for _ in range(3):
        await (await Peer.connect(folder / "s", "w")).close()
    await server.close()
    assert [path for path in Path("/proc/self/fd").iterdir() if path.exists() and os.readlink(path) == str(folder)] == []
