"""Health of rollout workers and evaluators: what is said of those that do not serve, and the run's end when too few of them are
left.

consumes: deaths, weights that could not be had, reports that do not come
waits for: `weight_sync.deadline_seconds`, in which a worker may find its weights after all; half of `queue.lease_seconds`, in which
           it reports
is unblocked by: the clock
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.loops.evaluation import EVALUATORS
from asyncflow.run.context import RunContext
from asyncflow.telemetry.hub import Hub
from asyncflow.types import RunError


class Health:
    """Health of a run's workers. `all_versions`: the policy versions of each pool."""

    def __init__(self, context: RunContext, all_versions: Sequence[PolicyVersions], hub: Hub) -> None:
        config, self._hub, self._signal = context.config, hub, context.signal
        self._log, self._fail = context.log, context.background.fail
        self._silent_seconds, self._min_healthy_workers = config.queue.lease_seconds / 2, config.weight_sync.min_healthy_workers
        self._by_pool = {versions.workers.pool: versions for versions in all_versions}
        self._silent: set[str] = set()
        self._unattested_pools: set[str] = set()
        self._logged: dict[str, tuple[float, set[str]]] = {}  # by worker that is stale: since when, and for which reasons
        self._patience_seconds = config.weight_sync.deadline_seconds
        for versions in all_versions:
            versions.is_silent, versions.on_stale = self._is_silent, self._stale
            versions.on_unattested = self._unattested

    def died(self, worker: str, why: str, is_final: bool) -> None:
        """Take note of a worker's death. `is_final`: it is not started again."""
        self._log(f"worker {worker} {why}")
        if (versions := self._versions(worker)) is not None:
            versions.died(worker, is_final)
            self._stop_if_too_few(versions, worker, why)
        elif is_final:  # the others are needed, all of them
            self._fail(RunError(f"worker {worker} {why}"))

    def continues_without(self, worker: str) -> bool:
        """Whether the run may go on without one that has found a mistake of the user's.

        Not while it is being brought up: what nobody has got past is what is wrong with the run. Later it is with a worker's node.
        """
        versions = self._versions(worker)
        return versions is not None and versions.has_been_served

    async def run(self) -> None:
        """Watch for ever. A silent worker is reported; nothing waits until it speaks again, since it may hold no rows whose lease
        would end."""
        while True:
            await asyncio.sleep(self._silent_seconds / 4)
            self._look_around()

    def _look_around(self) -> None:
        silent = {worker for worker in self._hub.states if self._versions(worker) is not None and self._is_silent(worker)}
        for worker in silent - self._silent:
            self._log(f"worker {worker} says nothing any more: what it holds is given to others")
        if silent != self._silent:
            self._silent = silent
            self._signal.notify()

    def _versions(self, worker: str) -> PolicyVersions | None:
        """Policy versions of the worker's pool; None for a pool that has none."""
        return self._by_pool.get(worker.partition("/")[0])

    def _is_silent(self, worker: str) -> bool:
        return self._hub.is_silent(worker, self._silent_seconds)

    def _stale(self, worker: str, why: str) -> None:
        """A worker could not get its weights. It tries again every other second: a reason is said once, until it has them."""
        versions = self._versions(worker)
        assert versions is not None, "it is one that some versions know"
        since = versions.stale_since[worker]
        if worker not in self._logged or self._logged[worker][0] != since:
            self._logged[worker] = since, set()
            self._look_later(versions, worker, since)
        reasons = self._logged[worker][1]
        if why not in reasons:
            reasons.add(why)
            self._log(f"worker {worker} has no weights to serve, and tries again: {why}")

    def _unattested(self, worker: str) -> None:
        """A worker serves a version, and its engine does not tell what it has. Said once of each pool."""
        if (pool := worker.partition("/")[0]) not in self._unattested_pools:
            self._unattested_pools.add(pool)
            self._log(
                f"worker {worker} does not tell what it generates with (docs/lora.md, attested weights): that it has the weights "
                f"which it was given is not checked"
            )

    def _look_later(self, versions: PolicyVersions, worker: str, since: float) -> None:
        """Judge one that has had no weights since then, in a while, and again for as long as it has none."""

        def look_again() -> None:
            if versions.stale_since.get(worker) == since and not versions.is_stopping:
                why = f"has had no weights to serve for {self._patience_seconds:g} s: {versions.stale[worker]}"
                self._stop_if_too_few(versions, worker, why)
                self._look_later(versions, worker, since)

        asyncio.get_running_loop().call_later(self._patience_seconds, look_again)

    def _stop_if_too_few(self, versions: PolicyVersions, worker: str, why: str) -> None:
        """Stop the run if too few other workers are healthy."""
        pool, healthy = versions.workers, versions.num_healthy(self._patience_seconds)
        named, needs, needed = "rollout workers", "weight_sync.min_healthy_workers is", self._min_healthy_workers
        if pool.pool == EVALUATORS:
            named, needs, needed = "evaluators", "evaluations need", 1
        if healthy < needed and not versions.is_stopping:
            numbers = f"{healthy} of {len(pool.members)} {named} are left, and {needs} {needed}"
            self._fail(RunError(f"worker {worker} {why}; {numbers}"))
