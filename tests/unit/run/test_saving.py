"""The driver's end of a checkpoint: it becomes one when all parts are there, and none of them is left of one that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from asyncflow.checkpoint import folder
from asyncflow.config import parse
from asyncflow.control.ledger import TaskPlan
from asyncflow.control.modes import Delayed
from asyncflow.data.order import Pushed
from asyncflow.loops.samples import Prompt
from asyncflow.run.factories import shape_of
from asyncflow.run.records.record import RecordState
from asyncflow.run.state import saving
from asyncflow.run.state.driver_state import SavedPrompt, read_driver
from asyncflow.run.state.memory_pace import MemoryPace
from asyncflow.run.state.saving import CheckpointCoordinator, checkpoints_in, checkpoints_of
from asyncflow.run_dir import CRITIC_DIR
from asyncflow.types import RunError
from asyncflow.weight_sync.base import Manifest
from tests.patience import patience

Made = Callable[..., CheckpointCoordinator]


class Record:
    """Of a run whose critic commits after the policy."""

    is_deterministic, critic_skipped_in_a_row = True, 0

    def __init__(self) -> None:
        self.rows = SimpleNamespace(finished=self.finished)

    def state(self) -> RecordState:
        return RecordState(critic_skipped_in_a_row=self.critic_skipped_in_a_row)

    async def finished(self, version: int) -> None: ...


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def made(tmp_path: Path, said: list[str]) -> Made:
    """`CheckpointCoordinator` of a run that has a critic and has committed a step; what it asks the others is answered by the
    least there is, or by what the test has."""

    def make(**others: Any) -> CheckpointCoordinator:
        tree = {"model": {"path": "m"}, "data": {"path": "d"}, "run": {"name": "test", "dir": str(tmp_path)}}
        config = parse(tree | {"rollout": {"group_size": 4}, "checkpoint": others.pop("checkpoint", {})})
        shared: dict[str, Any] = {
            "config": config,
            "shape": shape_of(config),
            "schedule": SimpleNamespace(max_staleness=0, interval=lambda step: SimpleNamespace(low=step, high=step)),
            "ledger": SimpleNamespace(tasks=TaskPlan(trained=("train", "critic_update")), committed=1, groups=dict),
            "versions": SimpleNamespace(kept=lambda versions: []),
            "transfer_queue": SimpleNamespace(),
            "log": said.append,
            "clock": lambda: 0.0,
        }
        own: dict[str, Any] = {
            "evaluating": SimpleNamespace(waiting=lambda version: []),
            "source": SimpleNamespace(num_pushed=0, position=0, pushed=[], items=[]),
            "admissions": SimpleNamespace(prompts={}, waiting={}, forget=lambda groups: None),
            "record": Record(),
        }
        context = {name: others.pop(name, part) for name, part in shared.items()}
        context["ledger"] = SimpleNamespace(ledger=context["ledger"])
        if (memory := others.pop("memory", None)) is not None:
            own["pace"] = MemoryPace(memory, 0, context["clock"], said.append)
        return CheckpointCoordinator(cast(Any, SimpleNamespace(**context)), **(own | others))

    return make


async def waits(saves: CheckpointCoordinator) -> asyncio.Task[None]:
    """The trainers' part is written, and that does not end before the critic has told of its own."""
    writing = asyncio.ensure_future(saves.written(1))
    await asyncio.sleep(0.05)
    assert not writing.done()
    return writing


@pytest.mark.parametrize(
    ("kept", "is_deterministic", "is_whole"),
    [({4, 5, 6, 7}, False, True), ({4, 5, 6}, False, False), (None, False, False), ({4, 5, 6, 7}, True, None)],
)
def test_a_run_that_ends_says_whether_its_last_checkpoint_has_all_that_was_begun(
    made: Made, kept: set[int] | None, is_deterministic: bool, is_whole: bool | None
) -> None:
    """Where engines make rows again exactly, nobody has to know (None)."""

    async def main() -> None:
        saves = made()
        await saves.begin(1)
        await saves.critic_written(1, "")
        await saves.written(1)
        parts = cast(Any, saves)
        parts._record = SimpleNamespace(is_deterministic=is_deterministic)
        parts._transfer_queue = SimpleNamespace(schema=SimpleNamespace(group_bits=2))
        parts._ledger, parts._kept = SimpleNamespace(groups_begun=lambda: [1]), kept
        await saves.close()
        checkpoints = checkpoints_of(saves._config)
        assert checkpoints.added(1).exists() == bool(is_whole)
        assert read_driver(checkpoints.path(1), checkpoints.added(1)).is_whole == bool(is_whole)

    asyncio.run(main())


def test_of_a_checkpoint_that_the_drivers_part_spoils_no_file_of_the_critic_stays(
    made: Made, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device", "driver.msgpack")

    async def main() -> None:
        saves = made()
        partial = checkpoints_of(saves._config).partial(1)
        with monkeypatch.context() as patched:
            patched.setattr(saving, "write_driver", full)
            await saves.begin(1)
            writing = await waits(saves)
        (partial / CRITIC_DIR).mkdir(parents=True)
        (partial / CRITIC_DIR / "state").write_text("late")
        await saves.critic_written(1, "")
        await writing
        assert not partial.exists() and (saves.settled, saves.newest) == (1, 0)
        (sentence,) = said
        assert "could not be written" in sentence and sentence.endswith("driver.msgpack: No space left on device")
        await saves.begin(1)  # what the critic said of the other one says nothing of this
        (await waits(saves)).cancel()

    asyncio.run(main())


@pytest.mark.parametrize("why", ["", "the critic's disk is full"])
def test_a_checkpoint_has_the_critics_part_or_fails(made: Made, said: list[str], why: str) -> None:
    async def main() -> None:
        saves = made()
        checkpoints = checkpoints_of(saves._config)
        await saves.begin(1)
        writing = await waits(saves)
        await saves.critic_written(1, why)
        await writing
        assert checkpoints.versions() == ([] if why else [1]) and not checkpoints.partial(1).exists()
        assert [sentence.split(": ", 1)[1] for sentence in said] == ([why] if why else [])

    asyncio.run(main())


def test_a_checkpoint_holds_the_updates_that_the_critic_has_skipped_in_a_step_committed_after_the_policys(made: Made) -> None:
    async def main() -> None:
        saves = made()
        cast(Any, saves._record).critic_skipped_in_a_row = 2
        await saves.critic_written(1, "")
        await saves.begin(1)
        await saves.written(1)
        folder = checkpoints_of(saves._config).path(1)
        assert read_driver(folder).record.critic_skipped_in_a_row == 2

    asyncio.run(main())


def test_a_checkpoint_holds_every_step_that_is_open_and_the_older_weights_that_the_next_one_needs(made: Made) -> None:
    """Step 3 is generated by version 2, and nothing else may make its rows again."""

    async def main() -> None:
        prompts = {group: Prompt(np.arange(group), {}) for group in (20, 30, 40)}
        saves = made(
            schedule=Delayed(),
            ledger=SimpleNamespace(tasks=TaskPlan(trained=("train",)), committed=3, groups=lambda: {3: [30], 4: [40]}),
            versions=SimpleNamespace(kept=lambda versions: [Manifest("i", version, "", "", 0, {}) for version in versions]),
            admissions=SimpleNamespace(prompts=prompts, waiting={2: {20: prompts[20]}}, forget=lambda groups: None),
        )
        assert [manifest.version for manifest in await saves.begin(3)] == [2]
        await saves.written(3)
        resumed = read_driver(checkpoints_of(saves._config).path(3))
        assert {step: {g: len(p.ids) for g, p in groups.items()} for step, groups in resumed.steps.items()} == {
            3: {30: 30},
            4: {40: 40},
        }

    asyncio.run(main())


def test_prompts_that_were_pushed_after_a_checkpoint_was_begun_are_kept_beside_it(made: Made) -> None:
    async def main() -> None:
        source = SimpleNamespace(num_pushed=0, position=6, pushed=[], items=[])
        saves = made(
            source=source,
            ledger=SimpleNamespace(tasks=TaskPlan(trained=("train",)), committed=1, groups=dict, groups_begun=list),
            transfer_queue=SimpleNamespace(schema=SimpleNamespace(group_bits=2)),
        )
        await saves.begin(1)
        await saves.written(1)
        source.position, source.pushed = 7, [Pushed(Prompt(np.arange(3), {"answer": "1"}), 5)]
        saves.pushed()
        await saves.close()
        checkpoints = checkpoints_of(saves._config)
        alone, state = (read_driver(checkpoints.path(1), added).state for added in (None, checkpoints.added(1)))
        assert (alone.position, alone.pushed) == (6, [])
        assert (state.position, state.pushed) == (7, [SavedPrompt([0, 1, 2], {"answer": "1"}, after=5)])

    asyncio.run(main())


def test_a_whole_checkpoint_stays_one_whatever_fails_afterwards(
    made: Made, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        saves = made()
        checkpoints = checkpoints_of(saves._config)
        await saves.begin(1)
        await saves.critic_written(1, "")

        def fail(path: Path) -> None:
            if not path.name.endswith(".partial"):
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(folder, "sync_folder", fail)
        await saves.written(1)
        assert checkpoints.newest(said.append) == 1 and saves.settled == 1
        (sentence,) = said
        assert "step-000001 is written, but" in sentence and "could not be written" not in sentence

    asyncio.run(main())


def test_a_checkpoint_is_due_by_the_clock_and_less_often_where_it_takes_more_than_a_hundredth_of_that_time(made: Made) -> None:
    now = 0.0

    async def main() -> None:
        nonlocal now
        saves = made(clock=lambda: now)
        found = []
        for moment in (0.0, 599.0, 600.0):
            now = moment
            found.append(saves.due() == "disk")
        assert found == [False, False, True]
        await saves.begin(1)
        assert saves.due() is None  # while it is written, and for ten minutes after it was begun
        now += 5.0
        await saves.critic_written(1, "")
        await saves.written(1)
        now = 1199.0
        assert saves.due() is None
        now = 1200.0
        assert saves.due() == "disk"
        await saves.begin(1)
        now += 9.0  # a hundredth of 900 seconds
        await saves.critic_written(1, "No space left on device")
        await saves.written(1)
        now = 1200.0 + 899.0
        assert saves.due() is None
        now = 1200.0 + 900.0
        assert saves.due() == "disk"
        now = 0.0
        others = [made(clock=lambda: now, checkpoint=never) for never in ({"every_minutes": None}, {"keep": 0})]
        now = 1e9
        assert not any(other.due() for other in others)

    asyncio.run(main())


def test_one_in_memory_is_due_at_its_own_pace_while_no_other_is_under_way_and_changes_nothing_of_those_on_the_disk(
    made: Made, tmp_path: Path
) -> None:
    now = 0.0

    async def main() -> None:
        nonlocal now
        (memory := tmp_path / "memory").mkdir()
        saves = made(clock=lambda: now, memory=memory, checkpoint={"every_minutes": 1.0})
        assert saves.due() == "memory"
        await saves.begin(1, "memory")
        assert saves.due() is None  # it is under way
        await saves.critic_written(1, "", "memory")
        await saves.written(1, "memory", 0.5)
        assert checkpoints_in(memory).newest(print) == 1 and not checkpoints_of(saves._config).versions() and saves.settled == 0
        now = 49.9
        assert saves.due() is None
        now = 50.0  # a hundred times as long as the trainer was held up
        assert saves.due() == "memory"
        now = 60.0
        assert saves.due() == "disk"
        await saves.begin(1)
        assert saves.due() is None  # an engine writes one at a time
        await saves.critic_written(1, "")
        await saves.written(1)
        assert saves.due() == "memory" and saves.settled == 1

    asyncio.run(main())


def test_one_in_memory_that_cannot_be_written_is_the_last(made: Made, said: list[str], tmp_path: Path) -> None:
    async def main() -> None:
        (memory := tmp_path / "memory").mkdir()
        saves = made(memory=memory)
        await saves.begin(1, "memory")
        await saves.critic_written(1, "", "memory")
        await saves.written(1, "memory", why="No space left on device")
        assert saves.due() is None and not [*memory.iterdir()]
        (sentence,) = said
        assert "no more checkpoints in shared memory" in sentence and sentence.endswith("No space left on device")

    asyncio.run(main())


def test_files_that_are_all_there_become_a_checkpoint_although_their_trainer_has_died(made: Made, tmp_path: Path) -> None:
    """Its connection goes, and with it the handlers of its requests."""

    async def main() -> None:
        (memory := tmp_path / "memory").mkdir()
        saves, told = made(memory=memory), asyncio.Event()
        cast(Any, saves._record).rows.finished = lambda version: told.wait()
        await saves.begin(1, "memory")
        await saves.critic_written(1, "", "memory")
        writing = asyncio.ensure_future(saves.written(1, "memory"))
        async with asyncio.timeout(patience(10)):
            while not saves._finishing:
                await asyncio.sleep(0.001)
        writing.cancel()
        settling = asyncio.ensure_future(saves.settle())
        await asyncio.sleep(0.05)
        assert not settling.done() and not checkpoints_in(memory).versions()
        told.set()
        await settling
        assert checkpoints_in(memory).versions() == [1]

    asyncio.run(main())


def test_a_step_without_its_metrics_is_in_no_checkpoint_and_nobody_waits_for_them(made: Made, said: list[str]) -> None:
    """A full disk, for example. The trainer dies of it, too, and the attempt that follows waits for the checkpoint (`settle`)."""

    async def main() -> None:
        saves = made()

        async def finished(version: int) -> None:
            raise RunError("the metrics of step 1 could not be written: No space left on device")

        cast(Any, saves._record).rows.finished = finished
        await saves.begin(1)
        await saves.critic_written(1, "")
        await asyncio.wait_for(saves.written(1), patience(10))
        await asyncio.wait_for(saves.settle(), patience(10))
        (sentence,) = said
        assert "there is none before it" in sentence and sentence.endswith("No space left on device")
        assert not saves._checkpoints.versions()

    asyncio.run(main())
