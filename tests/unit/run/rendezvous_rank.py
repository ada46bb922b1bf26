"""One rank of a layout, in a process of its own, that finds the others at a driver: RANK SIZE ADDRESS KEY."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from asyncflow.engines.base import RANKS_STORE
from asyncflow.engines.train.parallel.ranks import Ranks
from asyncflow.run.services.rendezvous import AT_DRIVER, Rendezvous, meet_at_driver
from asyncflow.transport import Credentials, Peer, proxy
from asyncflow.types import Layout


async def main(rank: int, size: int, address: str, key: Path) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(number) for name, number in numbers.items()} | {RANKS_STORE: AT_DRIVER})
    peer = await Peer.connect(address, f"trainer/{rank}", credentials=Credentials.load(key))
    meet_at_driver(proxy(Rendezvous, peer, "rendezvous"), address)
    ranks = await asyncio.to_thread(Ranks, Layout(dp=size, tp=1, pp=1), "cpu")
    print(ranks.rank, ranks.total([rank + 1])[0], os.environ["GLOO_SOCKET_IFNAME"], flush=True)
    ranks.leave()
    await peer.close()


asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
