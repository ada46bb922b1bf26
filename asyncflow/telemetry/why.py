"""Chain of waits from the trainer back to its cause, in words: why nothing moves, and what each worker waits for. Pure.

    trainer/0 waits for group 412 of step 7, since 41 s
      rollout/3 has it, since 41 s
        rollout/3 waits for the weights of version 7, since 12 s: 0 bytes have come

Each link names the one behind it; the last one is the cause. A circle of waits is the cause itself: nothing inside the run ends it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import msgspec

from asyncflow.telemetry.idle import WAIT
from asyncflow.telemetry.situation import DONE, LEASED, READY, UNKNOWN, SeenGroup, SeenStep, SeenWorker, Situation
from asyncflow.threads import CHECKPOINT_FILES
from asyncflow.waits import (
    ALL_SERVE,
    CANDIDATES,
    CAPACITY,
    CHECKPOINT,
    CHECKPOINT_WHOLE,
    COLLECTIVE,
    CONSUMED,
    CRITIC_VERSION,
    EVALUATIONS,
    FETCH,
    FREE_CORES,
    INSTALL_LEAVE,
    JOINING,
    LEASE,
    MAY_ADMIT,
    PROMPTS,
    PUBLISHING,
    PULL,
    RAY_ROOM,
    READ,
    RELEASED,
    ROUND,
    STATISTICS,
    STEP_START,
    TARGET,
    UNIT,
    UNITS,
    WAITS,
    WORKERS_START,
    OpenWait,
    Wait,
)

SILENT_SECONDS: Final = 3.0
"""Silence of a worker beyond which it is the cause: it reports several times a second."""
AT_WORK_SECONDS: Final = 1.0
"""A wait of a lane that works is its cause from then on: rewards of some rows are waited for while others are generated."""
STOPPED: Final = ("stopped", "tracing-stop")
GONE: Final = ("gone", "zombie", "dead")
TRAINER: Final = "trainer"
CRITIC: Final = "critic"
STALL: Final = "run.stall_timeout_seconds"
ALONE: Final = "once nothing else moves"
"""Condition of the watchdog's deadline for a worker that stands while others go on."""
HELD: Final = "a user or a process from outside, for whom this run waits without a deadline"
_LEASES: Final = "queue.lease_seconds"
_WEIGHTS: Final = "weight_sync.deadline_seconds"
_CHECKPOINTS: Final = frozenset((CHECKPOINT.name, CHECKPOINT_WHOLE.name))
_BACKGROUND: Final = _CHECKPOINTS | {FETCH.name, PULL.name, PUBLISHING.name}
"""Waits beside a lane that works."""
_POOLS: Final = {"rollout": "rollout", "evaluate": "evaluator", "train": TRAINER, "critic_update": CRITIC}
"""Pool of workers that works for a task, where it has another name."""
_TRAINED: Final = ("train", "critic_update")
_OF_A_STEP: Final = frozenset(
    wait.name for wait in (STEP_START, ROUND, READ, STATISTICS, EVALUATIONS, CONSUMED, RELEASED, CRITIC_VERSION)
)


class Link(msgspec.Struct, frozen=True):
    """A link of the chain: `subject` waits, or is what a wait is for; `text` is a whole sentence. `on`: the worker that is waited
    for; empty at the cause. `ends`: what ends the wait at the latest."""

    subject: str = msgspec.field(name="who")  # its name in `asyncflow why --json`
    text: str
    on: str = ""
    ends: str = ""


class Waiting(msgspec.Struct, frozen=True):
    """A wait, and the waits that it causes. One without a further link is a cause."""

    link: Link
    waiters: list[Waiting]


def chain(situation: Situation) -> list[Link]:
    """The chain of waits from the trainer to its cause."""
    return list(_Chain(situation).links())


def graph(situation: Situation) -> list[Link]:
    """Edges of the graph of waits: what each worker does or waits for, and on which other one."""
    of_chain = {link.text for link in chain(situation)}
    return [_beside(list(_Chain(situation).of_worker(each.name)), each, situation, of_chain)[0] for each in situation.workers]


def paths(situation: Situation) -> list[list[Link]]:
    """Paths of the graph of waits: the chain, then the one of each worker that is on none so far, up to the first link that an
    earlier path has."""
    found = [chain(situation)]
    of_chain = {link.text for link in found[0]}
    explained = set(of_chain)
    for worker in situation.workers:
        path: list[Link] = []
        for link in _Chain(situation).of_worker(worker.name):
            if link.text in (before.text for before in path):
                break
            path.append(link)
            if link.text in explained:
                break
        if path[0].text not in explained:
            found.append(_beside(path, worker, situation, of_chain))
            explained.update(link.text for link in path)
    return found


def standing(situation: Situation, seconds: float) -> dict[str, str]:
    """Workers that have stood for so many seconds, whatever else moves, and why, in a sentence: they do not report, or their lane
    is held up by a wait that is no request with a deadline of its own. Not what takes its time: a lane that works, or that waits
    for work."""
    found: dict[str, str] = {}
    of_chain = {link.text for link in chain(situation)}
    for worker in situation.workers:
        wait = _culprit(worker)
        is_silent = worker.silence is not None and worker.silence >= max(seconds, SILENT_SECONDS)
        is_held_up = wait is not None and wait.left is None and (wait.seconds if wait.still is None else wait.still) >= seconds
        if is_silent or is_held_up:
            found[worker.name] = _told(_beside(list(_Chain(situation).of_worker(worker.name)), worker, situation, of_chain))
    return found


def _beside(path: list[Link], worker: SeenWorker, situation: Situation, of_chain: Collection[str]) -> list[Link]:
    """The path of a worker. If nobody on the chain waits for it, and something has moved since it began to wait, the watchdog does
    not end that while others move."""
    if worker.seconds <= situation.idle + AT_WORK_SECONDS or any(link.text in of_chain for link in path):
        return path
    return [msgspec.structs.replace(link, ends=f"{link.ends}, {ALONE}") if link.ends.startswith(STALL) else link for link in path]


def causes(situation: Situation) -> list[Waiting]:
    """The graph of waits, as the trees of its causes: the chain's first, then those of other workers that wait. The paths lead from
    the leaves to the roots."""
    roots: list[Waiting] = []
    made: dict[str, Waiting] = {}
    for path in paths(situation):
        waiter: Waiting | None = None
        for link in path:
            is_new = link.text not in made
            waiting = made.setdefault(link.text, Waiting(link, []))
            if waiter is not None:
                waiting.waiters.append(waiter)
            waiter = waiting if is_new else None
        if waiter is not None:
            roots.append(waiter)
    idle = {worker.name for worker in situation.workers if worker.task == WAIT}
    return roots[:1] + [root for root in roots[1:] if root.waiters or root.link.subject in idle]


def sentence(situation: Situation) -> str:
    """The chain as one sentence, with the deadline of its cause, and of each wait before it that has one of its own."""
    return _told(chain(situation))


def _told(links: Sequence[Link]) -> str:
    own = [link for link in links if link is links[-1] or (STALL not in link.ends and link.ends != HELD)]
    return "; ".join(f"{link.text} (ended by {link.ends})" if link in own else link.text for link in links)


class _Chain:
    """Chain of waits of one situation. Every method yields the links from a worker, a step or a group on."""

    def __init__(self, situation: Situation) -> None:
        self._at = situation
        self._workers = {worker.name: worker for worker in situation.workers}
        self._trainer = next((name for name in self._workers if name.startswith(f"{TRAINER}/")), "")
        self._seen: set[str] = set()

    def links(self) -> Iterator[Link]:
        if (wait := self._starting()) is not None:
            yield from self._start(wait)
        elif self._trainer:
            yield from self.of_worker(self._trainer)
        else:
            yield from self._of_steps("the run", f"step {self._at.committed}")

    # -- workers ------------------------------------------------------------------------------------------------------------

    def of_worker(self, name: str) -> Iterator[Link]:
        """Chain of waits from a worker on."""
        if name in self._seen:
            yield self._link(name, f"{name} is waited for by those that it waits for: nothing inside the run ends that")
            return
        self._seen.add(name)
        worker = self._workers.get(name)
        if worker is None:
            yield self._link(name, f"{name} is not there")
        elif (off := self._off(worker)) is not None:
            yield off
        elif worker.task != WAIT:
            yield from self._at_work(worker)
        elif worker.cause == "leader":
            yield from self._follower(worker)
        elif name.startswith((f"{TRAINER}/", CRITIC)):
            yield from self._trains(worker)
        elif name.startswith(("rollout/", "evaluator/")):
            yield from self._generates(worker)
        else:
            yield from self._idle(worker)

    def _off(self, worker: SeenWorker) -> Link | None:
        """A worker that does nothing, whatever its last report says."""
        name, pid = worker.name, f"process {worker.pid}" if worker.pid else "process"
        restart, left = STALL, None
        if name.startswith(("rollout/", "evaluator/")):  # what it holds is others' then
            restart, left = _LEASES, self._left(_LEASES, worker.silence or 0.0)
        if worker.process in GONE:
            return self._link(
                name, f"{name} is not there: its {pid} has ended", ends="its cluster, which starts it again or ends the run"
            )
        if worker.process in STOPPED:
            text = f"{name} does nothing: its {pid} is stopped (SIGSTOP) and goes on after SIGCONT"
            return self._link(name, text, ends=restart, left=left)
        if worker.silence is None:
            state = f": its {pid} is {worker.process}" if worker.process else ""
            return self._link(name, f"{name} is not connected: it has not come yet, or has gone{state}")
        if worker.silence > SILENT_SECONDS:
            state = f", its {pid} is {worker.process}" if worker.process else ""
            last = f"waiting for {worker.cause}" if worker.task == WAIT else f"in {worker.task}"
            text = f"{name} has not reported for {_s(worker.silence)}{state}; last heard of {last}"
            return self._link(name, text, ends=restart, left=left)
        return None

    def _at_work(self, worker: SeenWorker) -> Iterator[Link]:
        """A worker whose lane is busy: with its own work, or with a wait inside it."""
        name, does = worker.name, f"{worker.name} is in {worker.task}, since {_s(worker.seconds)}"
        where = f", in thread {'; '.join(worker.threads)}" if worker.threads else ""
        wait = _culprit(worker)
        if wait is not None and wait.seconds >= AT_WORK_SECONDS:
            yield from self._held_up(worker, wait)
        elif name.startswith(f"{TRAINER}/") and (other := self._other_rank(worker)) is not None:
            text = f"{does}{where}; {other}, which computes it together with it, is not in it"
            yield self._link(name, text, other, COLLECTIVE.ends, self._left(COLLECTIVE, worker.seconds))
            yield from self.of_worker(other)
        else:
            yield self._link(name, f"{does}{where}")

    def _other_rank(self, worker: SeenWorker) -> str | None:
        """Another rank that does not take part in what this one computes: it is off, or at something else."""
        others = [w for name, w in self._workers.items() if name.startswith(f"{TRAINER}/") and name != worker.name]
        off = [other.name for other in others if self._off(other) is not None]
        return next(iter([*off, *(other.name for other in others if other.task not in (WAIT, worker.task))]), None)

    def _follower(self, worker: SeenWorker) -> Iterator[Link]:
        yield self._link(worker.name, f"{worker.name} follows {self._trainer}, since {_s(worker.seconds)}", self._trainer)
        yield from self.of_worker(self._trainer)

    def _trains(self, worker: SeenWorker) -> Iterator[Link]:
        """A trainer, or the critic, whose lane waits."""
        parked = next((wait for wait in self._parked(worker.name) if wait.name in _OF_A_STEP), None)
        if worker.cause == "publish" or parked is None:
            yield from self._idle(worker)
        elif parked.name == RELEASED.name:
            text = f"{worker.name} waits for {CRITIC} to commit step {parked.facts.get('step')}, since {_s(parked.seconds)}"
            yield self._link(worker.name, text, CRITIC)
            yield from self.of_worker(CRITIC)
        else:
            yield from self._of_steps(worker.name, f"{parked.words}", parked)

    def _generates(self, worker: SeenWorker) -> Iterator[Link]:
        """A rollout worker, or an evaluator, whose lane waits."""
        name = worker.name
        if worker.stale:
            text = f"{name} has no weights to serve, and tries again: {worker.stale}"
            yield self._link(name, text, ends=_WEIGHTS, left=self._left(_WEIGHTS, 0.0))
            return
        if (wait := _culprit(worker)) is not None:
            yield from self._held_up(worker, wait)
            return
        parked = {wait.name: wait for wait in self._parked(name)}
        leave = parked.get(INSTALL_LEAVE.name)
        if leave is not None:
            yield self._link(name, f"{name} waits for {leave.words}, since {_s(leave.seconds)}")
            return
        target = parked.get(JOINING.name) or parked.get(TARGET.name)
        if worker.cause in ("prompts", "weights") and target is not None:
            text = f"{name} has nothing that it may generate, since {_s(worker.seconds)}: it waits for {target.words}"
            yield self._link(name, text, self._trainer)
            yield from self._publication()
            return
        yield from self._idle(worker)

    def _publication(self) -> Iterator[Link]:
        """The trainer, where a version of it is waited for: its publication, or else its training."""
        worker = self._workers.get(self._trainer)
        publishing = next((wait for wait in worker.waits if wait.name == PUBLISHING.name), None) if worker is not None else None
        if worker is not None and publishing is not None and self._off(worker) is None:
            yield self._open(worker.name, publishing)
        elif worker is not None:
            yield from self.of_worker(worker.name)

    def _idle(self, worker: SeenWorker) -> Iterator[Link]:
        """A worker that waits for what its lane says, and of which nothing more is known."""
        name = worker.name
        wait = _culprit(worker) or next((wait for wait in self._parked(name) if wait.name in WAITS), None)
        if wait is not None:
            yield from self._held_up(worker, wait)
        else:
            yield self._link(name, f"{name} waits for {worker.cause}, since {_s(worker.seconds)}")

    def _held_up(self, worker: SeenWorker, wait: OpenWait) -> Iterator[Link]:
        """A worker in an open wait, and the storage unit that it waits for if that is off."""
        if wait.name in _CHECKPOINTS:
            yield from self._of_files(worker, wait)
            return
        link, unit = self._open(worker.name, wait), self._workers.get(f"storage/{wait.facts.get('unit')}")
        off = self._off(unit) if unit is not None and wait.name == UNIT.name else None
        yield link if off is None else msgspec.structs.replace(link, on=off.subject)
        if off is not None:
            yield off

    def _of_files(self, worker: SeenWorker, wait: OpenWait) -> Iterator[Link]:
        """A worker that waits for a checkpoint: for files that it writes, or for what the driver does with them."""
        link = self._open(worker.name, wait, worker.threads)
        of_driver = next((each for each in self._at.waits if (each.name, each.facts) == (CHECKPOINT.name, wait.facts)), None)
        if wait.name == CHECKPOINT.name or of_driver is None:
            yield link
            return
        yield msgspec.structs.replace(link, on="driver")
        yield self._open("the driver", of_driver, self._at.threads)

    def _open(self, name: str, wait: OpenWait, threads: Sequence[str] = ()) -> Link:
        """An open wait, which is the cause as far as the run knows. `threads`: of which those are told that it may be for."""
        moved = ""
        if wait.name in (FETCH.name, PULL.name):
            still = wait.seconds if wait.still is None else wait.still
            moved = f": {wait.moved} bytes have come, none for {_s(still)}"
        if wait.name == CHECKPOINT.name and (places := [each for each in threads if each.startswith(CHECKPOINT_FILES)]):
            moved = f", in thread {'; '.join(places)}"
        if wait.facts.get("state"):
            moved = f", which is {wait.facts['state']}"
        kind, left = WAITS[wait.name], wait.left
        ends = kind.ends if left is None else f"{kind.ends}, in {_s(max(0.0, left))}"
        if left is None:
            left = self._left(kind, wait.seconds if wait.still is None else wait.still)
        text = f"{name} waits for {wait.words}, since {_s(wait.seconds)}{moved}{self._published(wait)}"
        return self._link(name, text, ends=ends, left=left)

    def _published(self, wait: OpenWait) -> str:
        seconds = self._at.published_seconds
        if wait.name not in (FETCH.name, PULL.name) or seconds is None or wait.facts.get("version") != self._at.published:
            return ""
        return f"; the trainer published them {_s(seconds)} ago"

    # -- steps and groups ---------------------------------------------------------------------------------------------------

    def _of_steps(self, subject: str, what: str, parked: OpenWait | None = None) -> Iterator[Link]:
        """Links of what waits for something of a step: for its next group, a rank, or an evaluation."""
        at, since = self._at, "" if parked is None else f", since {_s(parked.seconds)}"
        number = at.committed if parked is None else int(parked.facts.get("step", at.committed))
        step = next((each for each in at.open_steps if (each.topic, each.step) == ("train", number)), None)
        is_start = parked is not None and parked.name == STEP_START.name
        evaluation = next((each for each in at.open_steps if each.topic == "eval" and each.groups), None)
        if evaluation is not None and (number >= at.steps or not self._trainer):
            left = f"{subject} has no step left{since}: all {at.steps} are committed, and the run" if self._trainer else subject
            text = f"{left} waits for the evaluation of version {evaluation.step}"
            yield self._link(subject, text, f"evaluation {evaluation.step}")
            yield from self._of_group("the evaluation", evaluation, "")
        elif step is None or not step.is_open:
            yield self._link(subject, f"{subject} waits for step {number}{since}, whose prompts are not in the queue", "driver")
            yield from self._admission(number)
        elif step.groups and not (is_start and step.groups[0].task in _TRAINED):
            yield from self._of_group(subject, step, since)
        elif step.members_left:
            lacks = f"{step.members_left} of its members are not found among its candidates"
            text = f"{subject} waits for step {number}{since}: {lacks}"
            yield self._link(subject, text, "driver")
            yield from self._admission(number)
        elif (behind := self._rank_behind(subject, step)) is not None:
            yield self._link(subject, f"{subject} waits for {what}{since}, which {behind} has not asked for", behind)
            yield from self.of_worker(behind)
        elif evaluation is not None:
            text = f"{subject} waits{since} for an evaluation of version {evaluation.step}, whose weights its update displaces"
            yield self._link(subject, text, f"evaluation {evaluation.step}")
            yield from self._of_group("the evaluation", evaluation, "")
        else:
            reason = "the schedule does not let it begin" if is_start else "it has not been told"
            yield self._link(subject, f"{subject} waits for {what}{since}: all of its groups are there, and {reason}")

    def _rank_behind(self, subject: str, step: SeenStep) -> str | None:
        """Leading rank that has not asked for a round that others have asked for."""
        if not step.asked or min(step.asked) == max(step.asked):
            return None
        rank = step.asked.index(min(step.asked))
        behind = step.leaders[rank] if rank < len(step.leaders) else None
        return None if behind == subject else behind

    def _of_group(self, subject: str, step: SeenStep, since: str) -> Iterator[Link]:
        """Links of what waits for the first group that a step lacks."""
        group, of = step.groups[0], f"step {step.step}" if step.topic == "train" else f"the evaluation of version {step.step}"
        more = f" (and {step.lacking - 1} more)" if step.lacking > 1 else ""
        yield self._link(subject, f"{subject} waits for group {group.group} of {of}{more}{since}", f"group {group.group}")
        if group.state == DONE:
            text = f"group {group.group} is done by task {group.task}, and the ledger has not been told: a notice is lost"
            yield self._link(f"group {group.group}", text)
        elif group.state == LEASED:
            text = f"{group.holder or 'a worker that has gone'} has it for task {group.task}, since {_s(group.seconds)}"
            holder = group.holder if group.holder in self._workers else ""
            if group.holder == "driver" or (holder and self._off(self._workers[holder]) is None):  # it renews its lease
                yield self._link(f"group {group.group}", text, holder)
            else:
                ends = f"{_LEASES}, in {_s(max(0.0, group.left))}{'' if holder else ', unless it renews'}"
                yield self._link(f"group {group.group}", text, holder, ends, group.left)
            if holder:
                yield from self.of_worker(holder)
        elif group.state == READY:
            yield from self._ready(group)
        elif group.state == UNKNOWN:
            yield self._link(f"group {group.group}", f"group {group.group} is not in the queue of task {group.task}", "driver")
            yield from self._admission(step.step)
        else:
            text = f"group {group.group} lacks columns that task {group.task} reads: no storage unit has told its queue of them"
            yield self._link(f"group {group.group}", text)

    def _ready(self, group: SeenGroup) -> Iterator[Link]:
        """Link of a group that lies ready, and that no worker has taken."""
        subject, pool = f"group {group.group}", _POOLS.get(group.task, group.task)
        workers = [w for name, w in self._workers.items() if name == pool or name.startswith(f"{pool}/")]
        lies = f"group {group.group} lies ready for task {group.task}"
        if group.task in _TRAINED:
            asks = any(wait.name == LEASE.name and wait.facts.get("task") == group.task for wait in self._parked("driver"))
            why = "which asks for such rows, has not got it" if asks else "which takes it when a rank can use it, has not taken it"
            yield self._link(subject, f"{lies}, and the driver, {why}", "driver")
            return
        if group.task not in ("rollout", "evaluate"):
            yield from self._taker(subject, lies, workers, group.task)
            return
        lies += f", for version {group.low}" if group.low == group.high else f", for versions {group.low} to {group.high}"
        able = [w for w in workers if w.serving is not None and group.low <= w.serving <= group.high and not w.stale]
        if able:
            yield from self._taker(subject, lies, able, group.task)
        elif self._at.published < group.low:
            yield self._link(subject, f"{lies}, and the newest that is published is {self._at.published}", self._trainer)
            yield from self._publication()
        elif workers:
            late = min(workers, key=self._lateness)
            served = ", ".join(f"{w.name} serves {'none' if w.serving is None else w.serving}" for w in workers[:4])
            yield self._link(subject, f"{lies}, which no worker serves ({served})", late.name)
            yield from self.of_worker(late.name)
        else:
            yield self._link(subject, f"{lies}, and there is no {pool} worker")

    def _taker(self, subject: str, lies: str, workers: list[SeenWorker], task: str) -> Iterator[Link]:
        """Links of a group that one of these workers is to take."""
        names = {worker.name for worker in workers}
        leases = [wait for wait in self._at.waits if wait.name == LEASE.name and wait.facts.get("task") == task]
        asking = [wait.worker for wait in leases if wait.worker in names]
        if asking and all(self._off(worker) is None for worker in workers):
            yield self._link(subject, f"{lies}, and {asking[0]} asks for such rows: the queue has not handed it out")
            return
        if not workers:
            yield self._link(subject, f"{lies}, and there is no worker for that")
            return
        first = min(workers, key=self._lateness)
        yield self._link(subject, f"{lies}, and no worker has taken it", first.name)
        yield from self.of_worker(first.name)

    def _lateness(self, worker: SeenWorker) -> tuple[int, float]:
        """Sort key: the likeliest cause comes first: off, stale, in a wait of its own, then by how long its state has lasted."""
        kind = 0 if self._off(worker) is not None else 1 if worker.stale else 2 if _culprit(worker) is not None else 3
        return kind, -worker.seconds

    # -- the driver ---------------------------------------------------------------------------------------------------------

    def _starting(self) -> OpenWait | None:
        """The driver's wait for workers that the cluster has not started yet, or for storage units that have not come."""
        waits = {wait.name: wait for wait in self._at.waits if not wait.worker}
        return waits.get(RAY_ROOM.name) or waits.get(WORKERS_START.name) or waits.get(UNITS.name)

    def _start(self, wait: OpenWait) -> Iterator[Link]:
        """The driver in such a wait, and the storage unit that is off, if one is."""
        link = self._open("the driver", wait)
        units = (worker for name, worker in self._workers.items() if name.startswith("storage/") and wait.name == UNITS.name)
        off = next((off for worker in units if (off := self._off(worker)) is not None), None)
        yield link if off is None else msgspec.structs.replace(link, on=off.subject)
        if off is not None:
            yield off

    def _admission(self, step: int) -> Iterator[Link]:
        """Reason why prompts of a step are not in the queue."""
        names = (CAPACITY.name, PROMPTS.name, MAY_ADMIT.name, CANDIDATES.name)
        of_driver = [wait for wait in self._at.waits if wait.name in names and wait.worker in ("", "driver")]
        wait = min(of_driver, key=lambda each: names.index(each.name), default=None)
        if wait is None:
            yield self._link("driver", f"the driver has not admitted step {step}")
        else:
            yield self._open("the driver", wait)

    def _parked(self, name: str) -> list[OpenWait]:
        return [wait for wait in self._at.waits if wait.worker == name and wait.name not in (ALL_SERVE.name, FREE_CORES.name)]

    def _left(self, deadline: Wait | str, age: float) -> float | None:
        """Seconds until a deadline, a configuration key's or that of a kind of wait, after so many; None: it is not known."""
        ends, seconds = (deadline, None) if isinstance(deadline, str) else (deadline.ends, deadline.seconds)
        seconds = self._at.limits.get(ends) if seconds is None else seconds
        return None if seconds is None else seconds - age

    @property
    def _stalls_in(self) -> float:
        """Seconds until the watchdog ends a run in which nothing moves until then; infinite where there is none."""
        is_starting = any(wait.name == WORKERS_START.name for wait in self._at.waits)  # it begins when all are started
        return math.inf if self._at.is_held or is_starting else self._at.limits.get(STALL, math.inf) - self._at.idle

    def _link(self, subject: str, text: str, on: str = "", ends: str = STALL, left: float | None = None) -> Link:
        """A link, with the seconds behind each configuration key of what ends it. `left`: seconds until a deadline of its own,
        where they are known; the watchdog's is named if it comes before, or if that one is over and has ended nothing."""
        limits = self._at.limits
        if left is not None and (left > self._stalls_in or left < -SILENT_SECONDS):
            ends = STALL
        if self._at.is_held and STALL in ends:  # it is not guarded: see `Watch.guard`
            ends = HELD
        ends = re.sub(r"[a-z_]+\.[a-z_]+", lambda key: f"{key[0]} ({limits[key[0]]:g} s)" if key[0] in limits else key[0], ends)
        return Link(subject, text, on, ends)


def _culprit(worker: SeenWorker) -> OpenWait | None:
    """The open wait that a worker's lane is held up by: the oldest one; of those in its background only while the lane waits, and
    of a fetch the bytes that it waits for. A checkpoint that is due waits for the one before."""
    beside = _BACKGROUND if worker.task != "checkpoint" else _BACKGROUND - _CHECKPOINTS
    waits = [wait for wait in worker.waits if wait.name not in beside]
    if not waits and worker.task == WAIT:
        waits = sorted(worker.waits, key=lambda wait: wait.name != PULL.name)
    return waits[0] if waits else None


def _s(seconds: float) -> str:
    """Seconds, as they are read."""
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
