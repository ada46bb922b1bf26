"""Which workers a run goes on without when they find a mistake of the user's."""

from __future__ import annotations

from asyncflow.build.health import Health
from asyncflow.config import parse
from asyncflow.registry import build
from asyncflow.telemetry.hub import Hub
from asyncflow.transport import client_name
from asyncflow.types import RunError
from asyncflow.workflows import SCHEDULES
from asyncflow.workflows.board import Board
from asyncflow.workflows.crew import Crew
from asyncflow.workflows.signal import Signal


async def test_a_run_goes_on_without_a_rollout_worker_only_when_one_has_served() -> None:
    config = parse({"model": {"path": "none"}, "data": {"path": "none"}, "weight_sync": {"min_healthy_workers": 1}})
    board = Board(build("schedule", "periodic", {}, SCHEDULES), object(), Signal(), lambda: 0.0, Crew(2))  # type: ignore[arg-type]
    said, failures = list[str](), list[RunError]()
    hub: Hub = object()  # type: ignore[assignment]
    health = Health(config, board, hub, says=said.append, fails=failures.append)
    assert not health.goes_on_without("rollout/1")
    client_name.set("rollout/0")
    await board.installed(0)
    assert health.goes_on_without("rollout/1") and not health.goes_on_without("storage/0")
    health.died("rollout/1", "found a mistake", True)
    assert said == ["worker rollout/1 found a mistake"] and not failures
    board.died("rollout/0", is_given_up=False)
    assert health.goes_on_without("rollout/0")  # it may be started again: the run has come up
    health.died("rollout/0", "found a mistake", True)
    (failure,) = failures
    assert str(failure).startswith("worker rollout/0 found a mistake; 0 of 2 rollout workers are left")
