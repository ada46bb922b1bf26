"""A broadcast between the threads of one process: the bits, and how a group ends."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest
import torch.distributed as dist

from asyncflow.transport.torch_store import RendezvousStore, reason
from asyncflow.types import Array
from asyncflow.weight_sync.group import CHUNK_BYTES, Group
from tests.patience import patience


def members(size: int, timeout_seconds: float) -> list[Group]:
    """A formed group."""
    box, groups = dist.HashStore(), dict[int, Group]()

    def form(rank: int) -> None:
        store = RendezvousStore(lambda method, *arguments: {"put": box.set, "get": box.get}[method](*arguments))
        groups[rank] = Group(store, rank, size, device="cpu", timeout_seconds=timeout_seconds, is_local=True)

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(20))
    return [groups[rank] for rank in range(size)]


def receive(group: Group, num_bytes: int, into: list[Array | RuntimeError]) -> threading.Thread:
    def run() -> None:
        pieces: list[Array] = []
        try:
            group.receive(num_bytes, lambda piece: pieces.append(piece.copy()))
            into.append(np.concatenate(pieces))
        except RuntimeError as error:
            into.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("num_bytes", [1, CHUNK_BYTES, 3 * CHUNK_BYTES + 17])
def test_everybody_receives_the_bytes_in_order_and_again(num_bytes: int) -> None:
    group = members(3, 10)
    for seed in range(3):
        file = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
        arrived: list[Array | RuntimeError] = []
        threads = [receive(member, num_bytes, arrived) for member in group[1:]]
        group[0].send(file)
        for thread in threads:
            thread.join(patience(20))
        assert len(arrived) == 2 and all(np.array_equal(one, file) for one in arrived)


def test_closing_it_is_an_error_at_the_others_at_once() -> None:
    sender, receiver = members(2, 30)
    arrived: list[Array | RuntimeError] = []
    thread, deadline = receive(receiver, 4 * CHUNK_BYTES, arrived), time.monotonic() + patience(20)
    while not receiver._under_way:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    start = time.monotonic()
    sender.close()
    thread.join(patience(20))
    assert time.monotonic() - start < patience(20) and isinstance(arrived[0], RuntimeError)
    said = reason(arrived[0])  # reset, where something lay there that the sender had not read
    assert re.search("Connection (closed|reset) by peer", said) and "[/" not in said


def test_a_silent_member_is_waited_for_until_the_deadline() -> None:
    _, receiver = members(2, 1.0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out"):
        receiver.receive(CHUNK_BYTES, lambda piece: None)
    assert 0.9 < time.monotonic() - start < patience(20)
