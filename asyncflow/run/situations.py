"""Situations of a run: all that its driver knows of what waits for what, at a moment.

ledger, leases, versions, the workers' reports, open waits --> Situation (telemetry/situation.py) --> its words (telemetry/why.py)
"""

from __future__ import annotations

import asyncio
import heapq
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from asyncflow.control.ledger.step_state import StepState
from asyncflow.loops.samples import EVALUATE_TASK
from asyncflow.run.driver import Driver
from asyncflow.telemetry.hub import LONG_SECONDS
from asyncflow.telemetry.situation import UNKNOWN, SeenGroup, SeenStep, SeenWorker, Situation
from asyncflow.telemetry.why import GONE, SILENT_SECONDS
from asyncflow.threads import places
from asyncflow.waits import LEASE, PROCESS, OpenWait, OpenWaits

SECONDS: Final = 1.0
"""Between two situations; and what nothing has moved for when processes are looked at."""
MOST: Final = 8
"""Groups of a step that a situation has."""
FULL_BYTES: Final = 4 << 20
"""Room on the disk of a run, in bytes, below which its driver may have died of that."""
DRIVER_SECONDS: Final = 5.0
"""A situation that is older: its driver stands, or its disk does."""
STORAGE: Final = "storage/"


class Situations:
    """Situations of a run, as its driver sees them. `fleet`: names of the workers that it starts with."""

    def __init__(self, driver: Driver, waits: OpenWaits, fleet: Sequence[str], pids: Callable[[], Mapping[str, int]]) -> None:
        """`waits`: the driver's own. `pids`: of workers on this machine."""
        self._driver, self._waits, self._fleet, self._pids = driver, waits, fleet, pids

    def now(self, ended: str = "") -> Situation:
        """Situation of the run now: all that the driver knows of what waits for what."""
        driver, now = self._driver, asyncio.get_running_loop().time()
        idle, config, versions = now - driver.last_progress, driver.config, driver.versions
        looks = idle >= SECONDS or bool(ended)
        return Situation(
            run=config.run.name,
            time=time.time(),
            pid=os.getpid(),
            host=socket.gethostname(),
            committed=driver.ledger.ledger.committed,
            steps=config.run.steps,
            idle=idle,
            published=versions.published,
            published_seconds=versions.published_seconds,
            is_held=driver.ledger.is_held or driver.waits_outside,
            limits={
                "run.stall_timeout_seconds": config.run.stall_timeout_seconds,
                "queue.lease_seconds": config.queue.lease_seconds,
                "weight_sync.deadline_seconds": config.weight_sync.deadline_seconds,
                "reward.deadline_seconds": config.reward.deadline_seconds,
                "episodes.deadline_seconds": config.episodes.deadline_seconds,
            },
            workers=self._workers(now, looks=looks),
            open_steps=self._open_steps(now, looks=looks),
            queue={task: controller.table.counts() for task, controller in driver.transfer_queue.controllers.items()},
            waits=[*self._waits.now(now), *driver.signal.open_waits(now), *self._asked(now)],
            threads=places() if idle >= LONG_SECONDS else [],
            ended=ended,
        )

    # -- workers ------------------------------------------------------------------------------------------------------------

    def _workers(self, now: float, *, looks: bool) -> list[SeenWorker]:
        """Workers that the run has or is to have, trainers first. `looks`: whether their processes are looked at; so they are if
        one says nothing any more."""
        driver = self._driver
        looks = looks or any(driver.hub.is_silent(name, SILENT_SECONDS) for name in driver.hub.states)
        pids = self._pids() if looks else {}
        of_pools = {versions.workers.pool: versions for versions in driver.all_versions}
        names = {name: None for name in self._fleet if name.partition("/")[0] not in of_pools}
        names |= {name: None for versions in of_pools.values() for name in versions.workers.working}
        names |= dict.fromkeys(sorted(driver.hub.states))
        return [
            self._worker(name, pids, looks=looks and bool(pids))
            for name in sorted(names, key=lambda name: (not name.startswith("trainer/"), _natural(name)))
        ]

    def _worker(self, name: str, pids: Mapping[str, int], *, looks: bool) -> SeenWorker:
        driver = self._driver
        pool = name.partition("/")[0]
        versions = next((each for each in driver.all_versions if each.workers.pool == pool), None)
        state, silence, pid = driver.hub.states.get(name), driver.hub.silence(name), pids.get(name, 0)
        serving, installing, stale = (None, None, "") if versions is None else versions.of_worker(name)
        seen = SeenWorker(
            name=name,
            pid=pid,
            process=_process(pid) if looks and pid else "",
            silence=0.0 if name.startswith(STORAGE) else silence,  # it reports nothing
            task="serve",
            serving=serving,
            installing=installing,
            stale=stale,
        )
        if state is None or silence is None:
            return seen
        return msgspec.structs.replace(
            seen,
            task=state.task,
            cause=state.cause,
            seconds=state.time - state.since + silence,
            rss_bytes=state.rss_bytes,
            waits=[_now(wait, silence, looks=looks) for wait in state.waits],
            threads=state.threads,
        )

    # -- steps --------------------------------------------------------------------------------------------------------------

    def _open_steps(self, now: float, *, looks: bool) -> list[SeenStep]:
        """The steps that training has come to, and open evaluations. `looks`: whether all groups are looked at for the likeliest
        cause, or the first ones."""
        ledger = self._driver.ledger.ledger
        first = min(ledger.committed_by(task) for task in ledger.tasks.trained)
        steps = [
            self._step(state, "train", now, looks=looks) if state is not None else SeenStep(topic="train", step=step, is_open=False)
            for step in range(first, min(ledger.committed + 1, self._driver.config.run.steps))
            for state in (ledger.step_state(step) if ledger.is_open(step) else None,)
        ]
        return [*steps, *(self._step(state, "eval", now, looks=looks) for state in ledger.open_evaluations())]

    def _step(self, state: StepState, topic: str, now: float, *, looks: bool) -> SeenStep:
        tasks, config = self._driver.ledger.ledger.tasks, self._driver.config
        rows: dict[int, tuple[str, list[int]]] = {}  # by group: the first task that it lacks, and those rows
        for task in tasks.before:
            for row in state.todo[task]:
                of_group = rows.setdefault(row >> state.group_bits, (task, []))
                if of_group[0] == task:
                    of_group[1].append(row)
        seen = sorted(rows) if looks else heapq.nsmallest(MOST, rows)
        groups = sorted((self._group(group, *rows[group], topic, now) for group in seen), key=_head)
        lacking = len(rows)
        asked: list[int] = []
        if topic == "train" and (under_way := next((one for one in state.updates[tasks.policy] if one.members), None)) is not None:
            asked = list(under_way.asked)
            untaken = [group for group in sorted(under_way.members) if group not in rows and group not in under_way.order]
            lacking += len(untaken)
            of_ranks = untaken[: MOST - len(groups[:MOST])]
            groups += [self._group(group, tasks.policy, sorted(under_way.members[group]), topic, now) for group in of_ranks]
        each = config.layout.tp * config.layout.pp
        return SeenStep(
            topic=topic,
            step=state.step,
            groups=groups[:MOST],
            lacking=lacking,
            members_left=state.num_left,
            asked=asked,
            leaders=[f"trainer/{rank * each}" for rank in range(len(asked))],
        )

    def _group(self, group: int, task: str, rows: list[int], topic: str, now: float) -> SeenGroup:
        controllers = self._driver.transfer_queue.controllers
        name = EVALUATE_TASK if topic == "eval" and task == "rollout" and self._driver.config.eval.num_workers else task
        table = controllers[name].table
        row = min(rows)
        state, held, meta = table.state_of(row), table.holder(row), table.meta(group)
        seen = SeenGroup(group=group, task=name, rows=len(rows), state=UNKNOWN if state is None else state.name.lower())
        if meta is not None:
            seen = msgspec.structs.replace(seen, low=meta.interval.low, high=meta.interval.high)
        if held is not None:
            holder = held.worker.rpartition("@")[0] or held.worker
            seen = msgspec.structs.replace(seen, holder=holder, seconds=now - held.since, left=held.deadline - now)
        return seen

    def _asked(self, now: float) -> list[OpenWait]:
        """Requests for rows that are parked at the tasks' controllers."""
        return [
            OpenWait(name=LEASE.name, seconds=now - since, worker=worker, facts={"task": task})
            for task, controller in self._driver.transfer_queue.controllers.items()
            for worker, since in controller.askers()
        ]


def state_of_driver(situation: Situation, run_dir: Path) -> str:
    """State of a run's driver since the situation, in words, from the operating system: no question is asked of the run."""
    age, moved = max(0.0, time.time() - situation.time), f"nothing has moved for {situation.idle:.0f} s"
    since = _rounded(age)
    if situation.ended:
        return f"it ended {since} ago: {situation.ended}. When it ended, {moved}"
    if situation.host != socket.gethostname():
        return f"as of {since} ago, on {situation.host}, {moved}"
    process = _process(situation.pid)
    if process in GONE or _began_after(situation):
        free = shutil.disk_usage(run_dir).free
        why = f"{run_dir} has no room ({free >> 10:,} kB)" if free < FULL_BYTES else "it was killed, or its disk was full"
        return f"its driver (process {situation.pid}) is gone without a word: {why}, {since} ago or later. At last {moved}"
    if age > DRIVER_SECONDS:
        return f"its driver (process {situation.pid}, {process}) has written nothing for {since}. Before that {moved}"
    return moved


def _rounded(seconds: float) -> str:
    """An age in words. That of a run that ended long ago changes seldom: the live page sends again what changes."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _began_after(situation: Situation) -> bool:
    """Whether the process that has the driver's number is another one."""
    try:
        return psutil.Process(situation.pid).create_time() > situation.time
    except psutil.Error:
        return True


def _head(group: SeenGroup) -> tuple[int, float, int]:
    """Sorts first the likeliest cause: a group whose notice is lost, then the one that somebody has had longest."""
    order = ("done", "leased", "ready", "waiting", UNKNOWN)
    return (order.index(group.state) if group.state in order else len(order), -group.seconds, group.group)


def _natural(name: str) -> tuple[str, int]:
    pool, _, number = name.partition("/")
    return pool, int(number) if number.isdigit() else -1


def _process(pid: int) -> str:
    """State of a process, as the operating system says."""
    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return "gone"
    except OSError:  # no more file handles
        return "unknown"


def _now(wait: OpenWait, age: float, *, looks: bool) -> OpenWait:
    """An open wait that was reported so many seconds ago, at this moment; what is waited for is looked at if it is a process."""
    facts = wait.facts
    if looks and wait.name == PROCESS.name and isinstance(pid := facts.get("pid"), int):
        facts = {**facts, "state": _process(pid)}
    left = None if wait.left is None else wait.left - age
    still = None if wait.still is None else wait.still + age
    return msgspec.structs.replace(wait, seconds=wait.seconds + age, left=left, still=still, facts=facts)
