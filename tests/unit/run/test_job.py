"""After which deaths a run is resumed by its driver."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.cluster.base import WorkerDied
from asyncflow.config import parse
from asyncflow.data.order import SeededOrder
from asyncflow.run.job import Job
from tests.conftest import MODEL
from tests.full_disk import files_of_at_most


@pytest.mark.parametrize(
    ("worker", "state", "expected"),
    [
        ("trainer/1", {}, True),
        ("critic", {}, True),
        ("reward/0", {}, True),
        ("values/2", {}, True),
        ("trainer/0", {"has_failed": True}, False),  # it would fail again
        ("trainer/0", {"has_failed": True, "has_trained": True}, True),
        ("trainer/0", {"num_in_vain": 2}, False),
        ("trainer/0", {"is_interrupted": True}, False),
        ("trainer/0", {"evaluate_only": True}, False),
        ("rollout/0", {}, False),  # with rollout.max_restarts: 0
        ("evaluator/0", {}, False),
        ("storage/0", {}, False),
    ],
)
async def test_a_run_is_resumed_after_the_death_of_a_worker_that_is_not_started_again_by_itself(
    tmp_path: Path, worker: str, state: dict[str, Any], expected: bool
) -> None:
    tree = {"model": {"path": "m"}, "data": {"path": "d"}, "run": {"name": "test", "dir": str(tmp_path)}}
    job = Job(parse(tree | {"train": {"max_restarts": 2}}), evaluate_only=state.get("evaluate_only", False))
    job._has_trained = state.get("has_trained", False)
    for _ in range(state.get("num_in_vain", 0)):
        job._restarts.begin()
    if state.get("is_interrupted"):
        job.interrupt()
    death = WorkerDied("worker it has ended", worker, has_failed=state.get("has_failed", False))
    assert job._may_restart_after(death) == expected


async def test_attempts_that_have_committed_no_step_have_longer_pauses_behind_them_and_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tenth death in a run of days would cost half a minute, and the fourth would end it."""
    tree = {"model": {"path": "m"}, "data": {"path": "d"}, "run": {"name": "test", "dir": str(tmp_path)}}
    monkeypatch.setattr("asyncflow.cluster.base.RESTART_SECONDS", (0.001, 0.02))
    said: list[str] = []
    job = Job(parse(tree | {"train": {"max_restarts": 2}}), SimpleNamespace(log=said.append))  # type: ignore[arg-type]

    async def nothing() -> bool:
        return False

    async def die(first: int, committed: int) -> None:
        ledger, source = SimpleNamespace(ledger=SimpleNamespace(committed=committed)), SimpleNamespace(next_place=0)
        job.attempt = SimpleNamespace(driver=SimpleNamespace(ledger=ledger, source=source), abandon=nothing, close=nothing)  # type: ignore[assignment]
        job._folder.job = SimpleNamespace(first=first)  # type: ignore[assignment]
        await job.restart_after(WorkerDied("worker trainer/0 has died", "trainer/0", has_failed=False))

    for first, committed in ((0, 0), (0, 0), (0, 3), (3, 3), (3, 4), (4, 9)):
        await die(first, committed)
    pauses = [line.rpartition(" in ")[2] for line in said]
    assert pauses == ["0.001 s", "0.002 s", "0.001 s", "0.002 s", "0.001 s", "0.001 s"]
    await die(9, 9)
    with pytest.raises(WorkerDied):
        await die(7, 9)  # two steps are trained again, and it dies where it did


def fed_job(folder: Path, journal: Path | None) -> tuple[Job, SeededOrder[Any]]:
    """A job that is under way, as far as prompts that are put are concerned, and the order that they come to."""
    tree: dict[str, Any] = {"model": {"path": str(MODEL), "max_context_tokens": 512}, "data": {"path": None}}
    job = Job(parse(tree | {"run": {"name": "test", "dir": str(folder)}}), journal=journal)
    source = SeededOrder[Any]([], 0)
    told = {"saves": SimpleNamespace(pushed=lambda: None), "signal": SimpleNamespace(notify=lambda: None)}
    job.attempt = SimpleNamespace(driver=SimpleNamespace(source=source, **told))  # type: ignore[assignment]
    job.prepared = SimpleNamespace(model=MODEL, tools=(), prompts=[], max_context=512)  # type: ignore[assignment]
    return job, source


def test_a_prompt_that_the_journal_could_not_keep_is_not_trained(tmp_path: Path) -> None:
    job, source = fed_job(tmp_path, tmp_path / "journal")
    with files_of_at_most(5), pytest.raises(OSError):
        job.push([{"prompt": "a", "answer": "1"}])
    assert source.num_pushed == 0
    job.push([{"prompt": "b", "answer": "1"}])
    kept, prompts = job._pushed.to_resume(job.prepared, None)
    assert [put.row["prompt"] for put in kept.prompts] == ["b"] and len(prompts) == source.num_pushed == 1


@pytest.mark.parametrize("has_journal", [True, False])
def test_prompts_that_were_put_with_other_columns_are_put_again_as_they_were(tmp_path: Path, *, has_journal: bool) -> None:
    job, source = fed_job(tmp_path, tmp_path / "journal" if has_journal else None)
    source.num_pushed = 2  # of a checkpoint that the run began with
    job.push([{"question": "What is 7 and 5?", "answer": "12"}, {"question": "And 2?", "answer": "2", "prompt": "no"}])
    job.push([{"prompt": "Say 3.", "question": "no", "answer": "3"}])
    taken = source.take(3)
    resumed: Any = SimpleNamespace(state=SimpleNamespace(num_pushed=2, version=0), rows=None)
    kept, prompts = job._pushed.to_resume(job.prepared, resumed)
    assert [prompt.ids.tolist() for prompt in prompts] == [prompt.ids.tolist() for prompt in taken]
    assert [put.number for put in kept.prompts] == [2, 3, 4]
