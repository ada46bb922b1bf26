"""A joined generator whose run ends: at whatever it is just then, there is nothing wrong."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncflow.cli import join
from asyncflow.cli.join import JoinedGenerator, RunPlace
from asyncflow.client import OutOfReach, PromptsData, PromptToAnswer, RunOver
from asyncflow.cluster.clock import VirtualLoop
from asyncflow.types import RunError
from tests.patience import patience


class Run:
    """A served run, as its worker sees it: prompts for version 0, then version 1, and the end at the request of this name."""

    is_away = refuses = False

    def __init__(self, ends_at: str, *, is_live: bool, has_begun: bool = True, is_known: bool = False) -> None:
        self._ends_at, self._is_live, self._has_begun, self._asked = ends_at, is_live, has_begun, 0
        self.facts = SimpleNamespace(group_size=2, group_bits=1, seed=0, dtype="float32", run="one")
        self.is_known, self._asked_for_status = is_known, itertools.count(1)

    async def status(self) -> dict[str, Any]:
        if self.is_away:
            raise OutOfReach("the service does not answer")
        told = {"is_live": self._is_live, "has_begun": self._has_begun}
        if not self._has_begun and (asked := next(self._asked_for_status)) > 2:
            assert asked == 3
            self._has_begun = self._is_live = True  # somebody has begun it
        return told

    async def join_generators(self, num_slots: int) -> Run:
        assert num_slots == Engine.num_slots
        if self.refuses:
            raise RunError("this run takes no more workers")
        self._ends_at, self._asked = "", 0
        return self

    async def alive(self, timeout_seconds: float = 0.0) -> None:
        if self.is_away:
            raise OutOfReach("the service does not answer")
        if not self._is_live or not self.is_known:
            self._raise()

    async def leave(self) -> None: ...

    def _at(self, name: str) -> None:
        if name == self._ends_at:
            self._raise()

    def _raise(self) -> NoReturn:
        if self._has_begun and not self._is_live:
            raise RunOver("the run is over")
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
        self.installed: list[int] = []
        if not has_weights:
            self._goes_on.set()

    async def generate(self, prompt_ids: Any, *, samples: list[int], sampling: Any, key: Any) -> AsyncIterator[Any]:
        for sample in samples:
            await self._goes_on.wait()
            ids = np.array([3])
            yield SimpleNamespace(
                sample=sample, token_ids=ids, logprobs=-ids.astype(float), finish_reason="stop", version_spans=[(0, 0)]
            )

    @property
    def is_going_on(self) -> bool:
        return self._goes_on.is_set()

    async def pause(self) -> None:
        self._goes_on.clear()

    async def install(self, version: int, tensors: Any) -> None:
        assert list(tensors) == ["w"]
        self.installed.append(version)

    async def resume(self) -> None:
        self._goes_on.set()


def place_in(run: Run) -> RunPlace:
    return RunPlace(cast(Any, run), cast(Any, run), Engine.num_slots)


def joined(run: Run, engine: Engine, folder: Path) -> JoinedGenerator:
    return JoinedGenerator(place_in(run), cast(Any, engine), folder / "model")


@pytest.mark.parametrize("ends_at", ["get_prompts_data", "fetch_weights", "installed", "put_experience_data"])
async def test_a_run_that_ends_is_no_error_of_the_generators_and_one_that_goes_on_is(tmp_path: Path, ends_at: str) -> None:
    for is_live in (False, True):
        engine = Engine(has_weights=ends_at == "installed")
        generator = joined(Run(ends_at, is_live=is_live, is_known=True), engine, tmp_path)
        running = asyncio.wait_for(generator.run(asyncio.Event()), patience(10))
        if not is_live:
            assert await running == "over"  # responses that were under way do not keep it
            continue
        with pytest.raises(RunError, match="no worker 'outside-0'"):
            await running


@pytest.mark.parametrize("has_begun", [True, False])
async def test_who_is_not_known_any_more_joins_again_with_the_first_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """Of a run whose service was started again, for example, and which may have to be begun there."""
    monkeypatch.setattr(join, "POLL_SECONDS", 0.01)
    (tmp_path / "model").mkdir()
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "model" / "model.safetensors")
    run, engine = Run("get_prompts_data", is_live=has_begun, has_begun=has_begun), Engine(has_weights=False)
    place = place_in(run)
    generator = JoinedGenerator(place, cast(Any, engine), tmp_path / "model")
    assert await asyncio.wait_for(generator.run(asyncio.Event()), patience(10)) == "forgotten"
    assert engine.installed == []
    assert await asyncio.wait_for(place.join_again(asyncio.Event(), is_new=True), patience(10))
    assert await asyncio.wait_for(generator.run(asyncio.Event()), patience(10)) == "over"
    assert engine.installed == [1]
    run._asked = 0
    assert await asyncio.wait_for(generator.run(asyncio.Event()), patience(10)) == "over"  # as whoever was forgotten once more
    assert engine.installed == [1, 0, 1]


async def test_a_change_that_is_cut_off_is_undone_where_this_process_joins_again(tmp_path: Path) -> None:
    """A response is refused while the engine changes its weights: nobody knows how far that has come, and it goes on."""
    (tmp_path / "model").mkdir()
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "model" / "model.safetensors")
    run, engine = Run("installed", is_live=True), Engine(has_weights=True)
    place = place_in(run)
    generator = JoinedGenerator(place, cast(Any, engine), tmp_path / "model")
    assert await asyncio.wait_for(generator.run(asyncio.Event()), patience(10)) == "forgotten"
    assert engine.installed == [1] and engine.is_going_on
    assert await asyncio.wait_for(place.join_again(asyncio.Event(), is_new=True), patience(10))
    assert await asyncio.wait_for(generator.run(asyncio.Event()), patience(10)) == "over"
    assert engine.installed == [1, 0, 1] and engine.is_going_on and generator.has_put


async def test_another_run_at_the_same_address_is_not_joined() -> None:
    run, other = Run("", is_live=True), Run("", is_live=True)
    other.facts.run = "two"
    place = RunPlace(cast(Any, other), cast(Any, run), Engine.num_slots)
    with pytest.raises(RunError, match="another run"):
        await asyncio.wait_for(place.join_again(asyncio.Event(), is_new=True), patience(10))


async def test_a_run_that_takes_nobody_is_told_so() -> None:
    """Not tried again for ever: a script that starts this process again is to know."""
    run = Run("", is_live=True)
    run.refuses = True
    with pytest.raises(RunError, match="takes no more workers"):
        await asyncio.wait_for(place_in(run).join_again(asyncio.Event(), is_new=True), patience(10))


def test_a_place_that_was_of_no_use_is_asked_for_later_each_time() -> None:
    loop, place, stopped = VirtualLoop(), place_in(Run("", is_live=True)), asyncio.Event()

    async def main() -> list[float]:
        moments = []
        for is_new in (True, False, False, False, True, False):
            assert await place.join_again(stopped, is_new=is_new)
            moments.append(loop.time())
        return moments

    assert loop.run_until_complete(main()) == [0, 1, 3, 7, 7, 8]
    loop.finish()


async def test_nobody_joins_again_who_was_stopped_or_whose_run_is_over() -> None:
    (stopped := asyncio.Event()).set()
    assert not await place_in(Run("", is_live=True)).join_again(stopped, is_new=True)
    assert not await place_in(Run("", is_live=False)).join_again(asyncio.Event(), is_new=True)


async def test_a_service_that_is_out_of_reach_is_no_run_that_is_over(tmp_path: Path) -> None:
    run = Run("get_prompts_data", is_live=True)
    run.is_away = True
    with pytest.raises(RunError, match="no worker 'outside-0'"):
        await asyncio.wait_for(joined(run, Engine(has_weights=False), tmp_path).run(asyncio.Event()), patience(10))
    with pytest.raises(OutOfReach):
        await asyncio.wait_for(place_in(run).join_again(asyncio.Event(), is_new=True), patience(10))


async def test_a_service_that_has_said_that_the_run_is_over_may_be_away_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one may be that had nothing to ask for meanwhile: its heartbeats were answered."""
    monkeypatch.setattr(join, "POLL_SECONDS", 0.01)
    run = Run("get_prompts_data", is_live=False)
    place = place_in(run)
    await asyncio.wait_for(place.send_heartbeats(), patience(10))  # it ends with the run
    run.is_away = True
    assert await place.verdict(OutOfReach("the service does not answer")) == "over"
    generator = JoinedGenerator(place, cast(Any, Engine(has_weights=False)), tmp_path / "model")
    assert await asyncio.wait_for(generator.run(asyncio.Event()), patience(10)) == "over"
