"""Reports reach the driver, and a step's metrics wait for them, but not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncflow.own_metrics import MAX_NAMES
from asyncflow.telemetry import hub as hub_module
from asyncflow.telemetry.hub import Hub, Reporter
from asyncflow.telemetry.tokens import TrainedTokens
from asyncflow.telemetry.trace import SpanLog, read_spans
from tests.patience import patience


async def test_spans_samples_and_state_arrive(tmp_path: Path) -> None:
    samples: list[Mapping[str, Any]] = []
    trained: list[TrainedTokens] = []
    progress: list[bool] = []
    hub = Hub(
        SpanLog(tmp_path / "spans.jsonl"), samples.append, trained.append, lambda response: None, lambda: progress.append(True)
    )
    loop = asyncio.get_running_loop()
    reporter = Reporter(hub, "rollout/0", loop.time, "cpu", 0.01)
    reporter.recorder.enter("generate", version=4)
    reporter.recorder.add(tokens=3)
    reporter.keep_sample({"step": 1})
    row = TrainedTokens(8, 1, 0, 1, [5], [-0.5], [1], [0], {"ratio": [1.0]})
    reporter.keep_tokens(row)
    reporter.why_not_deterministic, reporter.reward_failures = "2 threads", {"timeout": 2}
    await asyncio.sleep(0.01)
    await reporter.flush()
    assert samples == [{"step": 1}] and trained == [row] and progress == [True]
    state = hub.states["rollout/0"]
    assert (state.task, state.cause) == ("generate", "") and state.rss_bytes > 1e6
    assert (state.why_not_deterministic, state.reward_failures) == ("2 threads", {"timeout": 2})
    hub.log.close()
    assert [(s.task, s.tokens) for s in read_spans(tmp_path / "spans.jsonl") if s.task == "generate"] == [("generate", 3)]


async def test_settle_waits_for_the_slowest_worker_and_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(SpanLog(tmp_path / "spans.jsonl"), lambda sample: None, lambda row: None, lambda response: None, lambda: None)
    loop = asyncio.get_running_loop()
    fast, slow = (Reporter(hub, f"rollout/{i}", loop.time, "cpu", 0.01) for i in range(2))
    await fast.flush()
    await slow.flush()
    await asyncio.sleep(0.001)
    moment = loop.time()
    settling = asyncio.create_task(hub.settle(moment))
    await fast.flush()
    await asyncio.sleep(0.02)
    assert not settling.done()
    await slow.flush()
    await asyncio.wait_for(settling, patience(1.0))
    monkeypatch.setattr(hub_module, "SETTLE_SECONDS", 0.05)
    await asyncio.wait_for(hub.settle(loop.time() + 1000), patience(1.0))


async def test_nobody_waits_for_a_worker_that_has_gone_and_what_it_said_is_kept(tmp_path: Path) -> None:
    hub = Hub(SpanLog(tmp_path / "spans.jsonl"), lambda sample: None, lambda row: None, lambda response: None, lambda: None)
    loop = asyncio.get_running_loop()
    alive, gone, again = (Reporter(hub, name, loop.time, "cpu", 0.01) for name in ("rollout/0", "rollout/1", "rollout/1"))
    gone.reward_failures, again.reward_failures = {"timeout": 2}, {"timeout": 1}
    await alive.flush()
    await gone.flush()
    await asyncio.sleep(0.001)
    settling = asyncio.create_task(hub.settle(loop.time()))
    await asyncio.sleep(0.01)
    await alive.flush()
    await asyncio.sleep(0.01)
    assert not settling.done()
    hub.left("rollout/1")
    hub.left("rollout/1")  # it had two connections, or none
    hub.left("status")
    await asyncio.wait_for(settling, hub_module.SETTLE_SECONDS / 2)
    assert hub.states.keys() == {"rollout/0"}
    await again.flush()
    assert [state.reward_failures for state in [hub.states["rollout/1"], *hub.past]] == [{"timeout": 1}, {"timeout": 2}]


async def test_more_names_of_metrics_than_a_step_may_have_are_left_out(tmp_path: Path) -> None:
    hub = Hub(SpanLog(tmp_path / "spans.jsonl"), lambda sample: None, lambda row: None, lambda response: None, lambda: None)
    reporter = Reporter(hub, "rollout/0", asyncio.get_running_loop().time, "cpu", 0.01)
    for first in (0, MAX_NAMES - 1):  # of two reports, whose names are too many together
        reporter.own_metrics = {3: {f"acc/{first + i}": (1, 1.0) for i in range(MAX_NAMES)}}
        await reporter.flush()
    assert hub.own_metrics == {3: {f"acc/{i}": (1 + (i == MAX_NAMES - 1), 1.0 + (i == MAX_NAMES - 1)) for i in range(MAX_NAMES)}}


async def test_on_another_machine_times_are_told_by_the_driver_s_clock() -> None:
    loop, delays = asyncio.get_running_loop(), iter((0.03, 0.002, 0.02, 0.0, 0.05, 0.01, 0.03, 0.04))

    class Far:
        """Whose clock shows 1,000 s more, and whose answers take their time on the way back."""

        async def now(self) -> float:
            shown = loop.time() + 1000.0
            await asyncio.sleep(next(delays))
            return shown

    clock = await hub_module.driver_clock(Far(), loop.time)  # type: ignore[arg-type]
    assert abs(clock() - loop.time() - 1000.0) < 0.002  # by the quickest; the mean would be off by 0.01
