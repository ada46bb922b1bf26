"""A client's side of leasing: what it has asked for, what it holds and keeps alive, what is on its way back.

consumes: requests for leases; what its holder says has been worked on
waits for: the controllers
is unblocked by: their answers; `withdraw`
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

from asyncflow.transfer_queue.controller import Controller, Handed
from asyncflow.transfer_queue.leases import Lease, Token, Want
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.transport import ConnectionLost

log = logging.getLogger(__name__)


class ClientLeases:
    """Leases of one client, of all tasks. `held`: the rows of each lease that are neither done nor failed yet; a lease is renewed
    as long as it has some."""

    def __init__(self, schema: Schema, controller: Callable[[str], Controller], keys: Iterator[int]) -> None:
        """`keys`: of requests; clients that a controller takes for one worker have them in common."""
        self._keys = keys
        self.held: dict[Token, set[int]] = {}
        self._schema, self._controller = schema, controller
        self._asking: dict[str, set[asyncio.Future[None]]] = {}  # each is done when its request is withdrawn
        self._withdrawn: set[asyncio.Future[Handed | None]] = set()  # requests that may have an answer on its way all the same
        self._withdrawals: Counter[str] = Counter()
        self._calling: set[asyncio.Future[None]] = set()

    # -- asking -------------------------------------------------------------------------------------------------------------

    async def ask(self, task: str, want: Want, columns: list[str]) -> Handed | None:
        """See `Controller.lease`. A request that is withdrawn comes to None. A lease that it comes to all the same is given back,
        and so is one whose asker has gone."""
        key = next(self._keys)
        request = asyncio.ensure_future(self._controller(task).lease(want, columns, key))
        withdrawn = asyncio.get_running_loop().create_future()
        asking = self._asking.setdefault(task, set())
        asking.add(withdrawn)
        try:
            await asyncio.wait([request, withdrawn], return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                return request.result()
            self._leave(request)
            return None
        except asyncio.CancelledError:
            if not request.done():
                self._start(self._controller(task).withdraw(key))  # if that is lost, so is the request
            self._leave(request)
            raise
        finally:
            asking.discard(withdrawn)

    def num_withdrawals(self, task: str) -> int:
        """Number of the task's withdrawals. A request from before the last one is not repeated: the worker has withdrawn it."""
        return self._withdrawals[task]

    async def withdraw(self, task: str) -> None:
        """See `TransferQueueClient.withdraw`."""
        self._withdrawals[task] += 1
        asking = list(self._asking.get(task, ()))
        await self._controller(task).withdraw(None)
        for withdrawn in asking:  # a request that was lost on its way has no answer yet
            if not withdrawn.done():
                withdrawn.set_result(None)

    def close(self) -> None:
        """Cancel the requests that were withdrawn and are not answered yet: the connection ends."""
        for request in self._withdrawn:
            request.cancel()

    def _leave(self, request: asyncio.Future[Handed | None]) -> None:
        """Leave a request that nobody waits for. It is not cancelled: the controller may have answered it with a lease already."""
        self._withdrawn.add(request)
        request.add_done_callback(self._unwanted)

    def _unwanted(self, request: asyncio.Future[Handed | None]) -> None:
        """Give back a lease that came when its request had been withdrawn, or its asker had gone."""
        self._withdrawn.discard(request)
        if not request.cancelled() and request.exception() is None and (handed := request.result()) is not None:
            self.give_back(handed.lease)

    # -- holding ------------------------------------------------------------------------------------------------------------

    def hold(self, lease: Lease) -> None:
        """Keep a lease that was given to this client."""
        self.held[lease.token] = set(lease.indices)

    def let_go(self, lease: Lease, rows: Sequence[int]) -> None:
        """Release rows of a lease that were completed, failed or given back; with the last of them the lease is over."""
        held = self.held.get(lease.token, set())
        held.difference_update(rows)
        if not held:
            self.held.pop(lease.token, None)

    async def renew_held(self) -> None:
        """See `TransferQueueClient.renew_held`."""
        async with asyncio.TaskGroup() as tasks:  # the controller of one may be away, and is not to hold the others up
            for task in self._schema.tasks:
                tasks.create_task(self._renew_held(task))

    async def _renew_held(self, task: TaskSpec) -> None:
        while True:
            await asyncio.sleep(task.lease_seconds / 3)
            held = [token for token in self.held if token.task == task.name]
            try:
                over = await self._controller(task.name).renew(held) if held else []
            except ConnectionLost as error:
                log.warning("the leases of task %r could not be renewed: %s", task.name, error)
                continue
            for token in over:  # expired all the same: its rows are somebody else's by now
                self.held.pop(token, None)

    # -- giving back --------------------------------------------------------------------------------------------------------

    def give_back(self, lease: Lease) -> None:
        """Give a lease back without waiting: the asker may have been cancelled."""
        giving_back = self._controller(lease.token.task).give_back(lease.token)
        self._start(giving_back, "a lease could not be given back, and is over when it expires: %s")

    def _start(self, call: Coroutine[Any, Any, None], failure: str = "") -> None:
        """Make a call of the controller that nobody waits for. `failure`: what is logged when it fails, if anything."""
        calling = asyncio.ensure_future(call)
        self._calling.add(calling)
        calling.add_done_callback(partial(self._called, failure))

    def _called(self, failure: str, calling: asyncio.Future[None]) -> None:
        self._calling.discard(calling)
        if not calling.cancelled() and (error := calling.exception()) is not None and failure:
            log.warning(failure, error)
