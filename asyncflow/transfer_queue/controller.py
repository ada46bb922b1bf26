"""A task's controller: its table, the requests that are parked until it can serve them, and the clock.

consumes: notices from the units; lease, fail and renew requests
waits for: nothing; a request that cannot be served is parked, and the next lease deadline is a timer
is unblocked by: notices, failures, expiries, `end_step` and `close`, each of which serves the parked requests again
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from asyncflow.transfer_queue.table import DeadRow, Lease, Table, TaskSpec, Token
from asyncflow.transport import client_name, remote
from asyncflow.types import GroupMeta


@dataclass(slots=True)
class _Parked:
    """A request waiting to be served."""

    worker: str
    groups: int
    installed: int | None
    step: int | None
    answer: asyncio.Future[Lease | None]


class Controller:
    """`on_done(rows)` and `on_dead(dead rows)` tell whoever keeps the books; both are called in the controller's event loop."""

    def __init__(
        self,
        spec: TaskSpec,
        group_bits: int,
        *,
        on_done: Callable[[list[int]], None] = lambda rows: None,
        on_dead: Callable[[list[DeadRow]], None] = lambda rows: None,
    ) -> None:
        self.spec = spec
        self.table = Table(spec, uuid.uuid4().hex[:12], group_bits)
        self._on_done, self._on_dead = on_done, on_dead
        self._parked: list[_Parked] = []
        self._timer: asyncio.TimerHandle | None = None

    @remote
    async def notify(self, metas: list[GroupMeta], rows: list[int], columns: list[str], token: Token | None) -> None:
        """A unit has stored these columns for these rows; `metas` are newly admitted groups, `token` the lease it completes."""
        self.table.admit(metas)
        done = self.table.notify(rows, columns)
        if token is not None and token.task == self.spec.name:
            self.table.settle(token, rows)
        if done:
            self._on_done(done)
        self._serve()

    @remote
    async def lease(self, groups: int, installed: int | None, step: int | None) -> Lease | None:
        """Up to `groups` ready groups, waiting until there is one.

        None: the step has ended, the task is closed, or the worker has withdrawn its request.
        """
        request = _Parked(client_name.get(), groups, installed, step, asyncio.get_running_loop().create_future())
        self._parked.append(request)
        self._serve()
        try:
            return await request.answer
        finally:
            if request in self._parked:
                self._parked.remove(request)

    @remote
    async def withdraw(self) -> None:
        """Answer the calling worker's parked requests with None (it is about to change what it may generate)."""
        worker = client_name.get()
        for request in [r for r in self._parked if r.worker == worker]:
            self._answer(request, None)

    @remote
    async def check(self, token: Token, rows: list[int]) -> None:
        """Raises `StaleToken` unless the lease is alive and holds these rows."""
        self.table.check(token, rows)

    @remote
    async def fail(self, token: Token, rows: list[int], error: str) -> None:
        """Give rows back after a failure; one that has failed `max_failures` times is a dead letter. Raises `StaleToken`."""
        dead = self.table.fail(token, rows, error)
        if dead:
            self._on_dead(dead)
        self._serve()

    @remote
    async def renew(self, token: Token) -> None:
        """Put the lease's deadline off by `lease_seconds`. Raises `StaleToken`."""
        self.table.renew(token, _now())

    @remote
    async def drop(self, rows: list[int]) -> None:
        """Forget rows."""
        self.table.drop(rows)
        self._serve()

    @remote
    async def end_step(self, step: int) -> None:
        """No more of this step's rows will come: requests for it are answered with None."""
        self.table.ended_steps.add(step)
        self._serve()

    @remote
    async def close(self) -> None:
        """End of the stream: every request, now and later, is answered with None."""
        self.table.is_closed = True
        self._serve()

    def abandon(self, worker: str) -> None:
        """A worker has gone: all that it held is delivered again."""
        self.table.abandon(worker)
        self._serve()

    def _serve(self) -> None:
        self.table.expire(_now())
        for request in list(self._parked):
            if request.answer.done():  # cancelled in this very moment
                continue
            if self.table.is_closed or request.step in self.table.ended_steps:
                self._answer(request, None)
                continue
            lease = self.table.lease(request.worker, _now(), groups=request.groups, installed=request.installed, step=request.step)
            if lease is not None:
                self._answer(request, lease)
        self._set_timer()

    def _answer(self, request: _Parked, lease: Lease | None) -> None:
        self._parked.remove(request)
        if not request.answer.done():
            request.answer.set_result(lease)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.table.next_deadline
        if deadline is not None and not self.table.is_closed:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._serve)


def _now() -> float:
    return asyncio.get_running_loop().time()
