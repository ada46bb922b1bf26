"""A joined generator whose run ends: at whatever it is just then, there is nothing wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncflow.cli import join
from asyncflow.cli.join import JoinedGenerator, Vitals
from asyncflow.client import PromptsData, PromptToAnswer
from asyncflow.types import RunError


class Run:
    """A served run, as its worker sees it: prompts for version 0, then version 1, and the end at the request of this name."""

    is_away = False

    def __init__(self, ends_at: str, *, is_live: bool, has_begun: bool = True) -> None:
        self._ends_at, self._is_live, self._has_begun, self._asked = ends_at, is_live, has_begun, 0
        self.facts = SimpleNamespace(group_size=2, group_bits=1, seed=0, dtype="float32")
        self.client = SimpleNamespace(status=self._status)

    async def _status(self) -> dict[str, Any]:
        if self.is_away:
            raise RunError("the service does not answer")
        return {"is_live": self._is_live, "has_begun": self._has_begun}

    async def alive(self) -> None:
        if not self._is_live:
            raise RunError("this run is not under way")

    def _at(self, name: str) -> None:
        if name == self._ends_at:
            raise RunError("there is no worker 'outside-0'")

    async def get_prompts_data(self, prompts: int, timeout_seconds: float) -> PromptsData:
        self._asked += 1
        if self._asked == 1:
            sampling: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 2, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": []}
            prompt = PromptToAnswer(rows=[4, 5], prompt_ids=[1], prompt="", **sampling)
            return PromptsData(version=0, prompts=[prompt], install=None, is_over=False)
        self._at("get_prompts_data")
        return PromptsData(version=0, prompts=[], install=1, is_over=self._asked > 2)

    async def fetch_weights(self, version: int, target: Path) -> None:
        self._at("fetch_weights")
        save_file({"w": np.zeros(1, np.float32)}, target)

    async def installed(self, version: int, attested: Any) -> None:
        self._at("installed")

    async def put_experience_data(self, responses: Any) -> None:
        self._at("put_experience_data" if self._is_live else self._ends_at)


class Engine:
    """An engine that goes on with its responses when its weights are in, or when the run is over."""

    num_slots = 4

    def __init__(self, *, has_weights: bool) -> None:
        self._goes_on = asyncio.Event()
        if not has_weights:
            self._goes_on.set()

    async def generate(self, prompt_ids: Any, *, samples: list[int], sampling: Any, key: Any) -> AsyncIterator[Any]:
        for sample in samples:
            await self._goes_on.wait()
            ids = np.array([3])
            yield SimpleNamespace(
                sample=sample, token_ids=ids, logprobs=-ids.astype(float), finish_reason="stop", version_spans=[(0, 0)]
            )

    async def pause(self) -> None:
        self._goes_on.clear()

    async def install(self, version: int, tensors: Any) -> None:
        assert version == 1 and list(tensors) == ["w"]

    async def resume(self) -> None:
        self._goes_on.set()


def joined(run: Run, engine: Engine, folder: Path) -> JoinedGenerator:
    return JoinedGenerator(Vitals(run), engine, folder / "model")  # type: ignore[arg-type]


@pytest.mark.parametrize("ends_at", ["get_prompts_data", "fetch_weights", "installed", "put_experience_data"])
async def test_a_run_that_ends_is_no_error_of_the_generators_and_one_that_goes_on_is(tmp_path: Path, ends_at: str) -> None:
    for is_live in (False, True):
        engine = Engine(has_weights=ends_at == "installed")
        generator = joined(Run(ends_at, is_live=is_live), engine, tmp_path)
        running = asyncio.wait_for(generator.run(asyncio.Event()), 10)
        if not is_live:
            await running  # responses that were under way do not keep it
            continue
        with pytest.raises(ExceptionGroup) as failed:
            await running
        assert failed.group_contains(RunError, match="no worker 'outside-0'")


async def test_a_run_whose_service_was_started_again_is_not_over(tmp_path: Path) -> None:
    """Whoever starts this process again where it has failed would leave the run without it."""
    run = Run("get_prompts_data", is_live=False, has_begun=False)
    with pytest.raises(ExceptionGroup) as failed:
        await asyncio.wait_for(joined(run, Engine(has_weights=False), tmp_path).run(asyncio.Event()), 10)
    assert failed.group_contains(RunError, match="no worker 'outside-0'")


async def test_a_service_that_is_out_of_reach_is_no_run_that_is_over(tmp_path: Path) -> None:
    run = Run("get_prompts_data", is_live=True)
    run.is_away = True
    with pytest.raises(ExceptionGroup) as failed:
        await asyncio.wait_for(joined(run, Engine(has_weights=False), tmp_path).run(asyncio.Event()), 10)
    assert failed.group_contains(RunError, match="no worker 'outside-0'")


async def test_a_service_that_has_said_that_the_run_is_over_may_be_away_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one may be that had nothing to ask for meanwhile: its signs of life were answered."""
    monkeypatch.setattr(join, "POLL_SECONDS", 0.01)
    run = Run("get_prompts_data", is_live=False)
    vitals = Vitals(run)  # type: ignore[arg-type]
    await asyncio.wait_for(vitals.run(), 10)  # it ends with the run
    run.is_away = True
    assert not await vitals.goes_on()
    generator = JoinedGenerator(vitals, Engine(has_weights=False), tmp_path / "model")  # type: ignore[arg-type]
    await asyncio.wait_for(generator.run(asyncio.Event()), 10)
