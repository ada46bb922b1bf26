"""Which rollout workers serve: what is said of those that do not, and the run's end when too few of them are left.

consumes: deaths, weights that could not be had, reports that do not come
waits for: `weight_sync.deadline_seconds`, in which a worker may find its weights after all
is unblocked by: the clock
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncflow.config import Config
from asyncflow.telemetry.hub import Hub
from asyncflow.types import RunError
from asyncflow.workflows.board import Board


class Health:
    """One run's. `fails` ends the run, if it has not ended for another reason."""

    def __init__(
        self, config: Config, board: Board, hub: Hub, *, says: Callable[[str], None], fails: Callable[[RunError], None]
    ) -> None:
        self._config, self._board, self._hub, self._says, self._fails = config, board, hub, says, fails
        self._silent: set[str] = set()
        self._told: dict[str, tuple[float, set[str]]] = {}  # by worker that is stale: since when, and for which reasons
        self._patience_seconds = config.weight_sync.deadline_seconds
        board.is_silent, board.on_stale = self._is_silent, self._stale

    def died(self, worker: str, why: str, is_given_up: bool) -> None:
        """A worker's process has ended, and is started again or given up."""
        self._says(f"worker {worker} {why}")
        if worker.startswith("rollout/"):
            self._board.died(worker, is_given_up)
            self._judge(worker, why)
        elif is_given_up:  # the others are needed, all of them
            self._fails(RunError(f"worker {worker} {why}"))

    def goes_on_without(self, worker: str) -> bool:
        """Whether the run may go on without one that has found a mistake of the user's.

        Not while it is being brought up: what nobody has got past is what is wrong with the run. Later it is with a worker's node.
        """
        return worker.startswith("rollout/") and self._board.has_been_served

    def look_around(self) -> None:
        """Say of who has become silent that he has."""
        silent = {worker for worker in self._hub.states if worker.startswith("rollout/") and self._is_silent(worker)}
        for worker in silent - self._silent:
            self._says(f"worker {worker} says nothing any more: what it holds is given to others")
        self._silent = silent

    def _is_silent(self, worker: str) -> bool:
        return self._hub.is_silent(worker, self._config.queue.lease_seconds / 2)

    def _stale(self, worker: str, why: str) -> None:
        """A worker could not get its weights. It tries again every other second: a reason is said once, until it has them."""
        since = self._board.stale_since[worker]
        if worker not in self._told or self._told[worker][0] != since:
            self._told[worker] = since, set()
            self._look_later(worker, since)
        reasons = self._told[worker][1]
        if why not in reasons:
            reasons.add(why)
            self._says(f"worker {worker} has no weights to serve, and tries again: {why}")

    def _look_later(self, worker: str, since: float) -> None:
        """Judge one that has had no weights since then, in a while, and again for as long as it has none."""

        def look_again() -> None:
            if self._board.stale_since.get(worker) == since and not self._board.is_stopping:
                self._judge(worker, f"has had no weights to serve for {self._patience_seconds:g} s: {self._board.stale[worker]}")
                self._look_later(worker, since)

        asyncio.get_running_loop().call_later(self._patience_seconds, look_again)

    def _judge(self, worker: str, why: str) -> None:
        """With too few others the run stops."""
        workers, needed = len(self._board.crew.members), self._config.weight_sync.min_healthy_workers
        healthy = self._board.num_healthy(self._patience_seconds)
        if healthy < needed and not self._board.is_stopping:
            numbers = f"{healthy} of {workers} rollout workers are left, and weight_sync.min_healthy_workers is {needed}"
            self._fails(RunError(f"worker {worker} {why}; {numbers}"))
