"""Hangs that are planted in simulated runs: each is named, in words, when the run ends, and long before that in the log.

What is planted is what the field sees: processes that stand still, services that never answer, notices that are lost, permissions
that never come. That the words are right in real processes, too, is tests/e2e/test_why.py's to show.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from asyncflow.cluster.faults import Faults, Hangs
from asyncflow.config import parse
from asyncflow.control.ledger import LedgerService
from asyncflow.control.modes import Periodic
from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.loops.admissions import Admissions
from asyncflow.loops.selection import Selection
from asyncflow.run.driver import Driver
from asyncflow.run.job import Listener
from asyncflow.run.watch import LOGGED_SHARE, Watch
from asyncflow.simulation.run import NO_FAULTS, drawn_faults, simulate
from asyncflow.telemetry.why import chain, graph
from asyncflow.transfer_queue.capacity import Capacity
from asyncflow.transfer_queue.controller import Controller
from asyncflow.transfer_queue.table import Table
from asyncflow.transport import remote
from asyncflow.types import UserError
from tests.conftest import merged
from tests.depth import few
from tests.schedules.configurations import MODES, drawn

STALL = 60.0
NEVER = 1e9
COSTS = Costs(lengths=Lengths(prompt=16, response_median=20.0))
BASE: dict[str, Any] = {
    "run": {"name": "stands", "steps": 6, "stall_timeout_seconds": STALL},
    "model": {"path": "none"},
    "data": {"path": "generated:arithmetic"},
    "schedule": "periodic",
    "rollout": {"num_workers": 1, "num_slots": 16, "group_size": 4, "max_new_tokens": 64},
    "train": {"prompts_per_step": 4},
    "telemetry": {"samples_per_step": 0},
}

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Hang:
    """A hang: what is planted, and the sentences of the chain, in order, as regular expressions."""

    chain: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    faults: Faults = NO_FAULTS
    costs: Costs = COSTS
    plant: Plant = lambda monkeypatch: None


def frozen(worker: str, when: float = 3.0) -> Faults:
    """A worker that stands still, for ever."""
    return Faults(stalls=((when, worker, math.inf),))


def never(owner: type, name: str, answer: Any, *, after: int = 0) -> Plant:
    """A method that gives this answer and does nothing, from its call number `after` on."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original, calls = getattr(owner, name), [0]

        def planted(*arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            return original(*arguments, **named) if calls[0] <= after else answer

        monkeypatch.setattr(owner, name, planted)

    return plant


def publishes_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver never takes note of a version."""

    @remote
    async def publish(self: PolicyVersions, manifest: Any) -> None:
        await self.stopped()

    monkeypatch.setattr(PolicyVersions, "publish", publish)


def loses_what_is_done(is_lost: Callable[[int], bool]) -> Plant:
    """The ledger is not told of these groups' rows."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        done = LedgerService.done

        def planted(self: LedgerService, task: str, rows: list[int]) -> None:
            done(self, task, [row for row in rows if not is_lost(row >> 2)])

        monkeypatch.setattr(LedgerService, "done", planted)

    return plant


def hands_out_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue of task rollout serves nobody from step 2 on."""
    serve = Controller._serve

    def planted(self: Controller) -> None:
        if self.spec.name != "rollout" or self.table.counts()["done_total"] < 32:
            serve(self)

    monkeypatch.setattr(Controller, "_serve", planted)


def loses_notices(task: str, is_lost: Callable[[int], bool]) -> Plant:
    """A task's queue is not told of these groups' rows."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        notify = Table.notify

        def planted(self: Table, rows: Any, mask: int, tokens: Any, now: float) -> list[int]:
            if self.spec.name == task:
                kept = np.array([not is_lost(row >> 2) for row in rows.tolist()], bool)
                rows, tokens = rows[kept], tokens[kept] if tokens is not None else None
            return notify(self, rows, mask, tokens, now)

        monkeypatch.setattr(Table, "notify", planted)

    return plant


def units_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver waits for more storage units than there are, each of which would be a process of its own."""
    units_there = Driver._units_there

    async def planted(self: Driver) -> None:
        queue = self.config.queue.model_copy(update={"place": "workers", "num_units": 3})
        config = self.config.model_copy(update={"queue": queue})
        seen = SimpleNamespace(config=config, queue=self.queue, transfer_queue=self.transfer_queue)
        await units_there(cast(Any, seen))

    monkeypatch.setattr(Driver, "_units_there", planted)


GROUP = r"trainer/0 waits for group \d+ of step \d+( \(and \d+ more\))?, since "
HANGS: dict[str, Hang] = {
    "a stopped rollout worker": Hang(
        (GROUP, r"rollout/0 has it for task rollout, since ", r"rollout/0 has not reported for [\d.]+ s; last heard of in "),
        faults=frozen("rollout/0", 1.35),
    ),
    "a stopped trainer": Hang((r"trainer/0 has not reported for [\d.]+ s; last heard of ",), faults=frozen("trainer/0")),
    "a reward that sleeps": Hang(
        (GROUP, r"rollout/0 has it for task rollout", r"rollout/0 waits for reward worker 0, since [\d.]+ s$"),
        config={"reward": {"deadline_seconds": 1000}},
        costs=Costs(lengths=COSTS.lengths, reward_seconds=NEVER),
    ),
    "a reward that sleeps, in a worker of its own": Hang(
        (GROUP, r"reward/0 has it for task reward", r"reward/0 waits for reward worker 0, since [\d.]+ s$"),
        config={"reward": {"deadline_seconds": 1000, "place": "task"}},
        costs=Costs(lengths=COSTS.lengths, reward_seconds=NEVER),
    ),
    "an environment that never answers": Hang(
        (GROUP, r"rollout/0 has it for task rollout", r"rollout/0 waits for environment process 0, since [\d.]+ s$"),
        config={"environment": "my_file.py:Game", "episodes": {"max_turns": 4, "deadline_seconds": 1000}},
        costs=Costs(lengths=COSTS.lengths, environment_seconds=NEVER, environment_turns=4),
    ),
    "a fetch at 0 bytes": Hang(
        (
            GROUP,
            r"group \d+ lies ready for task rollout, for version 1, which no worker serves \(rollout/0 serves 0\)",
            r"rollout/0 waits for the weights of version 1, since [\d.]+ s: 0 bytes have come, none for [\d.]+ s; "
            r"the trainer published them [\d.]+ s ago$",
        ),
        faults=Faults(hanging_fetches={"rollout/0": Hangs(1.0, 4000.0)}),
    ),
    "weights that do not arrive whole": Hang(
        (
            GROUP,
            r"group \d+ lies ready for task rollout, for version 1, which no worker serves \(rollout/0 serves 0\)",
            r"rollout/0 has no weights to serve, and tries again: version 1 did not arrive whole$",
        ),
        config={"weight_sync": {"deadline_seconds": 1000}},
        faults=Faults(broken_fetches={"rollout/0": 1.0}),
    ),
    "a rank missing in a collective": Hang(
        (
            r"trainer/0 is in forward_backward, since .*; trainer/1, which computes it together with it, is not in it",
            r"trainer/1 has not reported for",
        ),
        config={"plan": {"train": {"dp": 2}}},
        costs=Costs(lengths=COSTS.lengths, forward_backward_seconds=0.5, collectives_seconds=0.01),
        faults=frozen("trainer/1", 3.0),
    ),
    "a stopped reference worker": Hang(
        (GROUP, r"reference/0 has it for task reference", r"reference/0 has not reported for"),
        config={"algorithm": {"name": "grpo", "kl_coefficient": 0.1}, "train": {"reference": "task"}},
        costs=Costs(lengths=COSTS.lengths, reference_seconds=0.5),
        faults=frozen("reference/0"),
    ),
    "a stopped critic": Hang(
        (r"trainer/0 waits for ", r"(critic has it for task values)?", r"critic has not reported for"),
        config={"algorithm": {"name": "ppo"}},
        faults=frozen("critic", 4.0),
    ),
    "a worker that never loads": Hang(
        (
            GROUP,
            r"group \d+ lies ready .* which no worker serves \(rollout/0 serves none\)",
            r"rollout/0 is in load, since [\d.]+ s$",
        ),
        faults=Faults(slow={"rollout/0": NEVER}),
    ),
    "a lost notice to the ledger": Hang(
        (r"trainer/0 waits for group 6 of step 1", r"group 6 is done by task rollout, and the ledger has not been told: a notice"),
        plant=loses_what_is_done(lambda group: group == 6),
    ),
    "a lost notice of prompts": Hang(
        (r"trainer/0 waits for group 6 of step 1", r"group 6 lacks columns that task rollout reads"),
        plant=loses_notices("rollout", lambda group: group == 6),
    ),
    "a lost notice of responses": Hang(
        (r"trainer/0 waits for group 6 of step 1", r"group 6 lacks columns that task train reads: no storage unit"),
        plant=loses_notices("train", lambda group: group == 6),
    ),
    "a sampler that hands out nothing": Hang(
        (GROUP, r"group \d+ lies ready .* and rollout/0 asks for such rows: the queue has not handed it out$"),
        plant=hands_out_nothing,
    ),
    "a publication that is never noted": Hang(
        (
            GROUP,
            r"group 4 lies ready .*, and the newest that is published is 0",
            r"trainer/0 waits for version 1 to be published",
        ),
        plant=publishes_never,
    ),
    "prompts that nobody puts": Hang(
        (r"trainer/0 waits for step 3, since .*, whose prompts are not in the queue", r"the driver waits for prompts for step 3"),
        plant=never(Admissions, "has_prompts", False, after=3),
    ),
    "a schedule that never admits": Hang(
        (r"trainer/0 waits for step 2, since .*", r"the driver waits for the schedule's leave to admit step 2"),
        plant=never(Periodic, "may_admit", False, after=2),
    ),
    "a schedule that never lets weights be installed": Hang(
        (
            GROUP,
            r"group \d+ lies ready .* which no worker serves",
            r"rollout/0 waits for the schedule's leave to install version 1",
        ),
        plant=never(Periodic, "may_install", False),
    ),
    "a schedule that never lets training start": Hang(
        (r"trainer/0 waits for the start of step 1 for task train",), plant=never(Periodic, "may_start", False, after=1)
    ),
    "storage units that never come": Hang(
        (r"the driver waits for 3 storage units to come, since ",),
        config={"run": {"stall_timeout_seconds": STALL / 2}},  # sooner than UNITS_SECONDS
        plant=units_never_come,
    ),
    "room in a storage unit that never comes free": Hang(
        (r"trainer/0 waits for ", r".*", r"the driver waits for room for 16 rows in a storage unit"),
        config={"queue": {"capacity_rows": 40}},
        plant=never(Capacity, "leave", None),
    ),
    "candidates that are never decided": Hang(
        (GROUP, r"driver has it for task select, since [\d.]+ s"),
        config={"algorithm": {"name": "dapo", "dynamic_sampling": True}, "train": {"max_candidates": 100}},
        plant=never(Selection, "decided", None),
    ),
    "an evaluation that holds an update up": Hang(
        (
            r"trainer/0 waits, .*for an evaluation of version 0, whose weights its update displaces",
            r"the evaluation waits for group \d+ of the evaluation of version 0",
            r"group \d+ lacks columns that task rollout reads: no storage unit has told its queue of them",
        ),
        config={"eval": {"path": "generated:arithmetic", "num_prompts": 2, "every_steps": 1}},
        plant=loses_notices("rollout", lambda group: group >= 1 << 40),
    ),
    "an evaluation that holds the run's end up": Hang(
        (
            r"trainer/0 has no step left, since .*: all \d+ are committed, and the run waits for the evaluation of version [1-9]",
            r"the evaluation waits for group \d+ of the evaluation of version [1-9]",
            r"group \d+ lacks columns that task rollout reads: no storage unit has told its queue of them",
        ),
        config={"eval": {"path": "generated:arithmetic", "num_prompts": 2}},
        plant=loses_notices("rollout", lambda group: group >= (1 << 40) + 4),  # those of version 0 are not lost
    ),
}


class Log(Listener):
    """Lines that a run has logged."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize("name", HANGS)
def test_a_planted_hang_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hang, log = HANGS[name], Log()
    hang.plant(monkeypatch)
    config = parse(merged(BASE, hang.config))
    violations = simulate(config, costs=hang.costs, faults=hang.faults, listener=log).violations
    (stalled,) = [each for each in violations if each.startswith("nothing has moved")]
    words = stalled.split("(run.stall_timeout_seconds): ")[1].split(". Workers: ")[0]
    found, _, ends = words.rpartition(" (ended by ")
    assert _fits(found, hang.chain), words
    assert ends, words
    (logged,) = [line for line in log.lines if line.startswith("nothing has moved for ")]
    assert float(logged.split()[4]) < STALL / 10 + 2 and _fits(logged.partition(": ")[2].rpartition(" (ended by ")[0], hang.chain)


def _fits(found: str, chain: tuple[str, ...]) -> bool:
    return re.search("^" + ".*; ".join(each.removesuffix("$") for each in chain), found) is not None


def test_a_run_that_an_error_ends_says_who_waited_for_whom() -> None:
    log, config = Log(), parse(merged(BASE, {"rollout": {"max_restarts": 0}}))
    violations = simulate(config, faults=Faults(deaths=((1.9, "rollout/0"),)), costs=COSTS, listener=log).violations
    assert any("rollout/0" in violation for violation in violations)
    (told,) = [line for line in log.lines if line.startswith("at the end: ")]
    assert re.match(r"at the end: trainer/0 waits for group \d+ of step 1.*; rollout/0 has it for task rollout, since ", told), told


STANDS = "a worker stands, whatever else moves: "
BESIDE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one of two rollout workers": (
        "rollout/1",
        r"queue.lease_seconds \(5 s\)",
        {"rollout": {"num_workers": 2}, "queue": {"lease_seconds": 5.0}},
    ),
    "an evaluator": (
        "evaluator/0",
        r"run.stall_timeout_seconds \(60 s\), once nothing else moves",
        {"eval": {"path": "generated:arithmetic", "num_prompts": 2, "num_workers": 1}, "queue": {"lease_seconds": 100.0}},
    ),
}


@pytest.mark.parametrize("what", BESIDE)
@pytest.mark.parametrize("is_held", [False, True])
def test_a_worker_that_stands_while_others_go_on_is_named_once(what: str, is_held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name, ends, changes = BESIDE[what]
    if is_held:  # a run that waits for somebody outside: nobody knows how long nothing moves by design
        monkeypatch.setattr(Driver, "waits_outside", True)
        ends = r"queue.lease_seconds \(\d+ s\)"
    log, costs = Log(), Costs(lengths=COSTS.lengths, forward_backward_seconds=0.5)
    config = parse(merged(BASE, {"run": {"steps": 12}, **changes}))
    simulate(config, costs=costs, faults=Faults(stalls=((3.0, name, 30.0),)), listener=log)
    (told,) = [line for line in log.lines if line.startswith("a worker stands")]
    words = re.match(rf"{STANDS}{name} has not reported for ([\d.]+) s; last heard of .* \(ended by (.*)\)$", told)
    assert words is not None and float(words[1]) < 2 * LOGGED_SHARE * STALL, told  # it is looked so often
    assert re.fullmatch(ends, words[2]), told
    assert not [line for line in log.lines if line.startswith("nothing has moved")]


def test_a_run_that_is_done_says_nothing_of_waits() -> None:
    log = Log()
    assert not simulate(parse(BASE), costs=COSTS, listener=log).violations
    assert not [line for line in log.lines if line.startswith(("at the end", "nothing has moved", "a worker stands"))]


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_works_or_waits_for_work_does_not_stand_however_long_steps_are(mode: str) -> None:
    log, evaluates = Log(), {"eval": {"path": "generated:arithmetic", "num_prompts": 2, "num_workers": 1}}
    config = parse(merged(BASE, {"schedule": MODES[mode], "rollout": {"num_workers": 2}, **evaluates}))
    long = Costs(lengths=COSTS.lengths, forward_backward_seconds=4 * LOGGED_SHARE * STALL, decode_step_seconds=0.5)
    simulated = simulate(config, costs=long, listener=log)
    assert not simulated.violations and simulated.seconds > 8 * STALL
    assert not [line for line in log.lines if line.startswith(("at the end", "a worker stands"))]


def test_a_mistake_of_the_users_is_told_without_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(self: Admissions, *_: Any) -> None:
        raise UserError("there is no such prompt")

    log = Log()
    monkeypatch.setattr(Admissions, "has_prompts", mistaken)
    with contextlib.suppress(UserError):
        assert "there is no such prompt" in simulate(parse(BASE), costs=COSTS, listener=log).violations
    assert not [line for line in log.lines if line.startswith("at the end")]


@pytest.mark.parametrize("mode", MODES)
def test_at_any_moment_of_any_run_there_is_a_chain_to_a_cause(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the run is at, and whatever goes wrong with its workers: a run must not end by what looks at it."""
    moments = [0]

    async def look(self: Watch) -> None:
        while True:
            await asyncio.sleep(0.37)
            situation = self.situations.now()
            links, edges = chain(situation), graph(situation)
            assert links and links[-1].ends and all(link.on for link in links[:-1]), links
            assert [link.subject for link in edges] == [worker.name for worker in situation.workers]
            moments[0] += 1

    monkeypatch.setattr(Watch, "run", look)
    for seed in range(few(2, 40)):
        config, costs = drawn(mode, seed)
        simulated = simulate(config, costs=costs, faults=drawn_faults(config, costs, seed), seed=seed)
        assert not simulated.violations, f"{mode}, seed {seed}"
    assert moments[0] > 10
