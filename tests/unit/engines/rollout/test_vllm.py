"""The vLLM engine over the stand-in: who gets what, what happens when a server is lost, and what is left behind (nothing)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from asyncflow.config import Config, parse
from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.engines.lora_files import lora_shapes
from asyncflow.engines.rollout.vllm import look_up as look_up
from asyncflow.engines.rollout.vllm import servers as servers
from asyncflow.engines.rollout.vllm import transfer as transfers
from asyncflow.engines.rollout.vllm.client import RequestRefused, ServerLost, VllmClient
from asyncflow.engines.rollout.vllm.engine import VllmEngine
from asyncflow.engines.rollout.vllm.hosts import OwnServer, hosts_of
from asyncflow.engines.rollout.vllm.lora_versions import LoraVersions
from asyncflow.engines.rollout.vllm.options import check_arguments, sender
from asyncflow.engines.rollout.vllm.process import IN_VLLM, ServerProcess
from asyncflow.engines.rollout.vllm.servers import ServerHandle
from asyncflow.engines.rollout.vllm.transfer import NcclTransfer
from asyncflow.engines.rollout.vllm.weights import WeightsFile, shapes_of
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.run.preparation.checks import check_choices, check_rollout_engine
from asyncflow.run.services.scaling import Scaling
from asyncflow.types import LoraSpec, RunError, UserError
from asyncflow.waits import SERVER, SERVER_START, OpenWaits
from tests.builders import loop_turns
from tests.conftest import MODEL, ROOT
from tests.depth import in_gate
from tests.families import write_model
from tests.patience import patience
from tests.processes import alive, kill
from tests.unit.engines.train.training import train_options
from tests.vllm.servers import fake_python, server_options

PROMPT = np.arange(7, 27)
TENSORS = load_file(MODEL / "model.safetensors")
VICTIMS = [(instances, victim) for instances in (1, 2) for victim in ("front end", "engine", "guard")]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "RESTART_PAUSES_SECONDS", (0.05, 0.1))
    monkeypatch.setattr(servers, "WATCH_SECONDS", 0.2)


@pytest.fixture
def python(tmp_path: Path) -> str:
    return str(fake_python(tmp_path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy, into which a test may put what makes the stand-in fail."""
    return shutil.copytree(MODEL, tmp_path / "model")


@contextlib.asynccontextmanager
async def opened(model: Path, python: str, **changes: Any) -> AsyncIterator[VllmEngine]:
    options = {"num_slots": 8, "max_context": 512, "stop_ids": (), "python": python, **changes}
    engine = await asyncio.to_thread(lambda: VllmEngine(model, **options))
    try:
        yield engine
    finally:
        await engine.close()


async def responses(
    engine: VllmEngine, samples: Sequence[int] = (0,), length: int = 40, prompt: np.ndarray = PROMPT, index: int = 5
) -> dict[int, Response]:
    stream = engine.generate(prompt, samples=samples, sampling=Sampling(1.0, length), key=SampleKey(11, index))
    return {response.sample: response async for response in stream}


def changed(shift: float) -> dict[str, torch.Tensor]:
    return {name: tensor * (1 + shift) for name, tensor in TENSORS.items()}


def server_of(instance: ServerHandle) -> ServerProcess:
    assert isinstance(instance.host, OwnServer) and instance.host.server is not None
    return instance.host.server


def group_of(instance: ServerHandle) -> list[psutil.Process]:
    """The processes of an instance: guard, front end, and what stands for its engine."""
    return group_of_server(server_of(instance))


def group_of_server(server: ServerProcess) -> list[psutil.Process]:
    guard = psutil.Process(server.pid)
    return [guard, *guard.children(recursive=True)]


def are_gone(processes: list[psutil.Process], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + patience(seconds)
    while alive(processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(patience(seconds)):
        while not condition():
            await asyncio.sleep(0.01)


def asked_for(instance: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when a server is being waited for that does not answer yet."""
    is_asked, wait = asyncio.Event(), instance._until_it_answers

    async def until_it_answers(client: VllmClient) -> None:
        is_asked.set()
        await wait(client)

    monkeypatch.setattr(instance, "_until_it_answers", until_it_answers)
    return is_asked


async def under_way(engine: VllmEngine, count: int) -> None:
    """Wait until so many responses have tokens, over all instances."""
    async with asyncio.timeout(patience(20)):
        while True:
            states = [await state_of(instance) for instance in engine.instances]
            if sum(s["running"] for s in states) == count and all(s["least_tokens"] or not s["running"] for s in states):
                return
            await asyncio.sleep(0.01)


async def state_of(instance: ServerHandle) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(await instance.client._ask("GET", "/state"))
    return state


# -- who gets what ----------------------------------------------------------------------------------------------------------


async def test_prompts_go_to_the_instance_with_the_fewest_outstanding_tokens(model: Path, python: str) -> None:
    async with opened(model, python, instances=2, num_slots=16) as engine:
        await responses(engine)
        one, other = engine.instances
        before = [one.num_served, other.num_served]
        long = asyncio.create_task(responses(engine, range(4), 400))
        await until(lambda: one.outstanding_tokens + other.outstanding_tokens == 4 * 420)
        assert sorted([one.outstanding_tokens, other.outstanding_tokens]) == [0, 4 * 420]
        free, busy = sorted(engine.instances, key=lambda instance: instance.outstanding_tokens)
        front_end = group_of(busy)[1]
        front_end.suspend()  # its responses do not end meanwhile
        for _ in range(3):  # each of them leaves it emptier than the other
            await responses(engine, range(2), 5)
        front_end.resume()
        assert free.num_served - before[engine.instances.index(free)] == 6
        balanced = [asyncio.create_task(responses(engine, range(2), 300, index=i)) for i in range(6)]
        await until(lambda: free.outstanding_tokens >= 4 * 420)
        assert abs(one.outstanding_tokens - other.outstanding_tokens) <= 2 * 320
        await asyncio.gather(long, *balanced)
        assert [one.outstanding_tokens, other.outstanding_tokens] == [0, 0]
        assert one.num_served > 0 and other.num_served > 0
        assert [(await state_of(i))["served"] for i in engine.instances] == [one.num_served, other.num_served]


async def test_no_instance_is_given_more_than_its_slots(model: Path, python: str) -> None:
    async with opened(model, python, instances=2, num_slots=4) as engine:
        tasks = [asyncio.create_task(responses(engine, range(4), 60, index=i)) for i in range(4)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.01)
            for instance in engine.instances:
                assert not instance.is_up or (await state_of(instance))["running"] <= 2
        await asyncio.gather(*tasks)


async def test_a_request_that_is_cancelled_is_dropped_by_the_server(model: Path, python: str) -> None:
    async with opened(model, python) as engine:
        await responses(engine)
        (instance,) = engine.instances
        task = asyncio.create_task(responses(engine, range(3), 490))
        await under_way(engine, 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(patience(10)):
            while (state := await state_of(instance))["dropped"] < 3:
                await asyncio.sleep(0.01)
        assert state["running"] == 0 and state["dropped"] == 3 and instance.outstanding_tokens == 0


async def test_a_sample_has_the_same_seed_whenever_and_wherever_it_is_asked_for(model: Path, python: str) -> None:
    async with opened(model, python, instances=2) as engine:
        made = [await responses(engine, (3, 1)) for _ in range(3)]
        assert len({tuple(m[3].token_ids) for m in made}) == 1 and made[0][3].token_ids.tolist() != made[0][1].token_ids.tolist()
    async with opened(model, python, seeded=False) as engine:
        unseeded = await responses(engine, (3, 1))
        assert unseeded[3].token_ids.tolist() == unseeded[1].token_ids.tolist()  # the stand-in takes no seed for 0


async def test_what_the_server_writes_for_no_number_is_none(model: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row fails then, as it does with every engine (`check_response`)."""
    async with opened(model, python, version=1) as engine:
        await responses(engine)
        made = await answer(GOOD)

        async def generate(*arguments: object) -> Any:
            return made

        monkeypatch.setattr(engine.instances[0].client, "generate", generate)
        logprobs = (await responses(engine))[0].logprobs
    assert logprobs[:2].tolist() == [-1.0, -2.0] and np.isnan(logprobs[2])


async def test_what_a_server_refuses_to_generate_is_said_in_a_sentence(model: Path, python: str) -> None:
    async with opened(model, python, max_context=50) as engine:
        await responses(engine, length=30)
        engine.max_context = 512
        with pytest.raises(RunError, match=r"does not generate what this run asks for .*status 400: .*too long"):
            await responses(engine, length=40)


# -- pauses and versions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pause_mode", "spans"), [("keep", [0, 4]), ("wait", [0]), ("abort", [4])])
async def test_pause_modes(model: Path, python: str, pause_mode: Any, spans: list[int]) -> None:
    """Responses under way are kept and go on under the new version, are ended under the old one, or begin anew."""
    async with opened(model, python, pause_mode=pause_mode) as engine:
        for pauses in (True, False):
            await engine.install(0, TENSORS)
            task = asyncio.create_task(responses(engine, range(3), 250))
            await under_way(engine, 3)
            if pauses:
                await engine.pause()
            await engine.install(4, changed(0.1))
            if pauses:
                await engine.resume()
            made = await task
            assert [r.version_spans[:, 1].tolist() for r in made.values()] == [spans] * 3
            after = (await responses(engine, (0,), 250 if pause_mode == "abort" else 5))[0]
            if pause_mode == "abort":
                assert np.array_equal(made[0].logprobs, after.logprobs)


async def test_the_cache_of_an_idle_server_is_cleared(model: Path, python: str) -> None:
    async with opened(model, python) as engine:
        await responses(engine)
        await engine.install(1, changed(0.1))
        assert (await state_of(engine.instances[0]))["cleared"] == 1


async def test_an_engine_that_is_reset_drops_what_its_servers_keep(model: Path, python: str) -> None:
    async with opened(model, python) as engine:
        await responses(engine)
        task = asyncio.create_task(responses(engine, range(4), 300))
        await under_way(engine, 4)
        processes = [group_of(instance) for instance in engine.instances]
        await engine.reset()
        with pytest.raises(RuntimeError, match="was reset"):
            await task
        states = [await state_of(instance) for instance in engine.instances]
        assert [(state["running"], state["cleared"]) for state in states] == [(0, 1)]
        assert [group_of(instance) for instance in engine.instances] == processes


@pytest.mark.parametrize("kv_on_install", ["keep", "recompute"])
async def test_what_waits_in_the_servers_queue_begins_with_no_keys_of_the_old_weights(
    model: Path, python: str, kv_on_install: Any
) -> None:
    """A response that one version made whole is what this version makes, whatever is in the server's prefix cache."""
    async with opened(model, python, kv_on_install=kv_on_install, arguments={"max_num_seqs": 1}) as engine:
        task = asyncio.create_task(responses(engine, range(2), 300))
        while await running_of(engine) != 2:
            await asyncio.sleep(0.01)
        await engine.install(4, changed(0.1))
        begun, waiting = sorted((await task).values(), key=lambda made: made.version_spans[0, 1])  # either may have come first
        assert begun.version_spans[0, 1] == 0 and waiting.version_spans.tolist() == [[0, 4]]
        again = (await responses(engine, (waiting.sample,), 300))[waiting.sample]
        assert np.array_equal(waiting.logprobs, again.logprobs)


async def running_of(engine: VllmEngine) -> int:
    return sum([(await state_of(i))["running"] for i in engine.instances if i.is_up])


async def test_a_server_whose_weights_somebody_else_has_named_is_lost_and_nothing_asks_for_ever(model: Path, python: str) -> None:
    async with opened(model, python, version=3) as engine:
        expected = (await responses(engine))[0]
        await engine.instances[0].client.set_weight_version(9)
        made = (await asyncio.wait_for(responses(engine), patience(20)))[0]
        assert np.array_equal(made.logprobs, expected.logprobs) and made.version_spans.tolist() == [[0, 3]]
        assert engine.instances[0].num_restarts == 1


# -- servers that are lost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("instances", "victim"), in_gate((1, "guard"), (2, "engine"), of=VICTIMS))
async def test_a_killed_server_is_started_again_with_the_current_weights(
    model: Path, python: str, instances: int, victim: str
) -> None:
    """Nothing is lost: what it was generating begins anew."""
    async with opened(model, python, instances=instances, num_slots=8 * instances) as engine:
        await engine.install(6, changed(0.1))
        expected = await responses(engine, range(8), 300)
        tasks = [asyncio.create_task(responses(engine, range(4), 300)) for _ in range(2 * instances)]
        await under_way(engine, 8 * instances)
        killed = engine.instances[0]
        group = group_of(killed)
        assert len(group) == 3
        kill(group[["guard", "front end", "engine"].index(victim)])
        for made in await asyncio.gather(*tasks):
            for sample, response in made.items():
                assert np.array_equal(response.logprobs, expected[sample].logprobs)
                assert response.version_spans.tolist() == [[0, 6]]
        await until(lambda: killed.is_up)
        assert killed.num_restarts == 1 and are_gone(group)
        assert [instance.num_restarts for instance in engine.instances[1:]] == [0] * (instances - 1)
        assert (await state_of(killed))["updates"] == 1
        assert [i.outstanding_tokens for i in engine.instances] == [0] * instances


async def test_without_staleness_there_is_one_version_in_memory(model: Path, python: str) -> None:
    """What is not prepared is written over the last version, which no server reads meanwhile, not one that comes back either."""
    async with opened(model, python) as engine:
        for version in (1, 2):
            await engine.install(version, changed(0.1 * version))
        weights = engine._weights
        assert weights.file is not None and weights.file.version == weights.version == 2
        assert os.fstat(weights.next_file._fd).st_size == 0
        lock, fd = engine.instances[0].unchanged(), weights.file._fd
        async with lock:
            installing = asyncio.create_task(engine.install(3, changed(0.3)))
            await until(lambda: bool(engine.instances[0]._lock._waiters))  # type: ignore[attr-defined]
            assert weights.file.version == weights.version == 2  # which somebody reads
        await installing
        assert weights.file.version == weights.version == 3 and weights.file._fd == fd
        await engine.prepare(4, changed(0.4))
        assert weights.file.version == 3 and weights.next_file.version == 4
        await engine.install(4, changed(0.4))
        assert weights.file.version == weights.version == 4 and weights.file._fd != fd


async def test_a_cancelled_install_leaves_a_whole_version(model: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(model, python) as engine:
        await engine.install(1, changed(0.1))
        write, is_writing, may_write = WeightsFile.write, threading.Event(), threading.Event()

        def slow(file: WeightsFile, version: int, tensors: Any, **more: Any) -> None:
            is_writing.set()
            may_write.wait(patience(10))
            write(file, version, tensors, **more)

        monkeypatch.setattr(WeightsFile, "write", slow)
        installing = asyncio.create_task(engine.install(2, changed(0.2)))
        await until(is_writing.is_set)
        installing.cancel()
        await loop_turns()
        may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await installing
        assert engine._weights.file is not None and engine._weights.file.version == engine._weights.version == 2


async def test_an_update_that_fails_half_way_ends_the_server_which_comes_back_with_the_version(model: Path, python: str) -> None:
    async with opened(model, python) as engine:
        (instance,) = engine.instances
        await responses(engine)
        task = asyncio.create_task(responses(engine, range(4), 490))
        await under_way(engine, 4)
        group = group_of(instance)
        (model / "fault").write_text("/update_weights")
        await engine.install(2, changed(0.1))
        assert not instance.is_up and engine._weights.version == 2
        (model / "fault").unlink()
        made = await task
        assert {tuple(map(tuple, r.version_spans.tolist())) for r in made.values()} == {((0, 2),)}
        assert instance.num_restarts >= 1 and are_gone(group)
        one = (await responses(engine, (0,), 150))[0]
        await engine.install(3, changed(0.2))
        await engine.install(2, changed(0.1))
        assert np.array_equal((await responses(engine, (0,), 150))[0].logprobs, one.logprobs)


def answers_within_a_second(instance: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Awaitable[bool]]:
    """A front end that hangs has failed after a second: this one alone. Another may take longer, beside other work."""
    is_ready = instance.client.is_ready

    async def soon() -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience(1.0)):
                return await is_ready()
        return False

    monkeypatch.setattr(instance.client, "is_ready", soon)
    return soon


async def hang(instance: ServerHandle, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Stop the front end: it takes connections and answers none. That is looked for once the event is set."""
    is_looked_for, may_be_seen = asyncio.Event(), asyncio.Event()

    async def later() -> bool:
        is_looked_for.set()
        await may_be_seen.wait()
        return await is_ready()

    is_ready = answers_within_a_second(instance, monkeypatch)
    monkeypatch.setattr(instance.client, "is_ready", later)
    await asyncio.wait_for(is_looked_for.wait(), patience(10))
    group_of(instance)[1].suspend()
    return may_be_seen


async def test_a_front_end_that_hangs_keeps_neither_the_others_nor_an_install(
    model: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again; meanwhile the others generate by the new version."""
    async with opened(model, python, instances=2, num_slots=16) as engine:
        await engine.install(1, changed(0.1))
        hung, other = engine.instances
        before = [asyncio.create_task(responses(engine, range(4), 490, index=i)) for i in range(2)]
        await under_way(engine, 8)
        may_be_seen = await hang(hung, monkeypatch)
        installing = asyncio.create_task(engine.install(2, changed(0.2)))
        await until(lambda: engine._weights.version == 2)
        hung.outstanding_tokens += 10_000  # what is asked now is asked of the other
        made = await asyncio.wait_for(responses(engine), patience(20))
        hung.outstanding_tokens -= 10_000
        assert made[0].version_spans.tolist() == [[0, 2]] and not installing.done() and hung.is_up
        may_be_seen.set()
        await asyncio.wait_for(installing, patience(20))
        assert [len(made) for made in await asyncio.wait_for(asyncio.gather(*before), patience(20))] == [4, 4]
        await until(lambda: hung.is_up)
        assert [hung.num_restarts, other.num_restarts] == [1, 0]
        assert [i.outstanding_tokens for i in engine.instances] == [0, 0]


async def test_those_who_are_resumed_do_not_wait_for_one_that_hangs(
    model: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(model, python, instances=2, num_slots=16) as engine:
        await responses(engine)
        await engine.pause()
        hung = engine.instances[0]
        may_be_seen = await hang(hung, monkeypatch)
        resuming = asyncio.create_task(engine.resume())
        hung.outstanding_tokens += 10_000
        assert await asyncio.wait_for(responses(engine), patience(20)) and not resuming.done()
        hung.outstanding_tokens -= 10_000
        may_be_seen.set()
        await asyncio.wait_for(resuming, patience(20))
        await until(lambda: hung.is_up)
        assert hung.num_restarts == 1


async def test_an_install_that_hangs_on_a_dead_engine_ends(model: Path, python: str) -> None:
    """vLLM's front end stays when its engine has died, and requests for a pause wait."""
    async with opened(model, python) as engine:
        await engine.install(2, changed(0.1))
        one = (await responses(engine))[0]
        kill(group_of(engine.instances[0])[2])
        async with asyncio.timeout(patience(20)):
            await engine.install(3, changed(0.2))
        await engine.install(2, changed(0.1))
        assert np.array_equal((await responses(engine))[0].logprobs, one.logprobs)
        assert engine.instances[0].num_restarts == 1


async def test_waits_for_a_server_have_the_deadlines_that_are_configured(model: Path, python: str) -> None:
    async with opened(model, python, start_seconds=555.0, generation_seconds=77.0) as engine:
        (server,) = engine.instances
        await responses(engine)
        clock, recorded = asyncio.get_running_loop().time, OpenWaits()
        recorded.begin()
        response = asyncio.create_task(responses(engine, length=400))
        while not (waits := recorded.now(clock())):
            await asyncio.sleep(0)
        assert (waits[0].name, waits[0].seconds + (waits[0].left or 0.0)) == (SERVER.name, pytest.approx(77.0))
        await response
        async with server.until_lost():
            assert recorded.now(clock())[0].left is None, "what is no response has another deadline"
        server.is_up = False
        coming = asyncio.create_task(engine._servers.least_loaded())
        await loop_turns()
        (wait,) = recorded.now(clock())
        assert (wait.name, wait.seconds + (wait.left or 0.0)) == (SERVER_START.name, pytest.approx(555.0))
        coming.cancel()
        server.is_up = True


async def test_a_server_that_is_lost_too_often_fails_with_a_sentence(model: Path, python: str) -> None:
    async with opened(model, python, max_restarts=2) as engine:
        await responses(engine)
        (model / "fault").write_text("/update_weights")
        await engine.install(2, changed(0.1))
        with pytest.raises(RunError, match=r"vLLM 0 was lost .*it has been started again 2 times, and is not started again"):
            await asyncio.wait_for(responses(engine), patience(30))


async def test_with_one_failed_instance_the_other_goes_on(model: Path, python: str) -> None:
    async with opened(model, python, instances=2, max_restarts=0) as engine:
        await responses(engine)
        tasks = [asyncio.create_task(responses(engine, range(2), 400, index=i)) for i in range(4)]
        await under_way(engine, 8)
        kill(group_of(engine.instances[0])[1])
        assert [len(made) for made in await asyncio.gather(*tasks)] == [2] * 4
        assert engine.instances[0].error is not None and engine.instances[1].num_served >= 8


async def test_a_server_that_has_failed_leaves_its_device(model: Path, python: str) -> None:
    """Its front end would live on without its engine."""
    async with opened(model, python, instances=2, max_restarts=0) as engine:
        await responses(engine)
        group = group_of(engine.instances[0])
        kill(group[2])
        await until(lambda: engine.instances[0].error is not None)
        assert are_gone(group) and server_of(engine.instances[1]).is_alive


async def test_a_process_that_has_ended_is_not_watched(model: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came back between two looks: the client of the process before is closed."""
    monkeypatch.setattr(servers, "WATCH_SECONDS", 3.0)
    async with opened(model, python) as engine:
        (instance,) = engine.instances
        await responses(engine)
        watching = instance._watching
        assert watching is not None
        instance.lost(instance.num_starts, ServerLost("as the test wants it"))
        await until(lambda: instance.is_up)
        await asyncio.wait([watching], timeout=patience(10))
        assert watching.done() and (watching.cancelled() or watching.exception() is None)


async def test_whatever_an_update_raises_the_server_is_lost(model: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's errors, for instance: were it used on, it would be between start and finish."""
    async with opened(model, python, instances=2) as engine:
        await responses(engine)
        first, send = engine.instances[0].client, engine._transfer.send

        async def failing(client: VllmClient, file: WeightsFile) -> None:
            if client is first:
                await client.start_weight_update()
                raise OSError("the link is down")
            await send(client, file)

        monkeypatch.setattr(engine._transfer, "send", failing)
        await engine.install(1, changed(0.1))
        assert [i.is_up for i in engine.instances] == [False, True]
        await until(lambda: engine.instances[0].is_up)
        assert (await responses(engine))[0].version_spans.tolist() == [[0, 1]] and engine.instances[0].num_restarts == 1


async def test_closing_ends_a_wait_for_a_server_that_never_answers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "x")
    async with opened(model, "", addresses=["unix:/nowhere"]) as engine:
        is_waited_for = asked_for(engine.instances[0], monkeypatch)
        task = asyncio.create_task(responses(engine))
        await asyncio.wait_for(is_waited_for.wait(), patience(20))
        await engine.close()
        with pytest.raises(RunError, match="not wanted any more"):
            await asyncio.wait_for(task, patience(5))


async def test_a_server_with_weights_of_its_own_is_brought_to_the_current_ones(model: Path, python: str) -> None:
    """One that somebody has started again behind the engine's back."""
    async with opened(model, python) as engine:
        await engine.install(3, changed(0.1))
        expected = (await responses(engine))[0]
        await engine.instances[0].client._ask("POST", "/update_weight_version", {"new_version": "default"})
        assert np.array_equal((await responses(engine))[0].logprobs, expected.logprobs)
        assert engine.instances[0].num_restarts == 1


async def test_closing_while_a_server_comes_back_leaves_nothing(model: Path, python: str) -> None:
    async with opened(model, python) as engine:
        await responses(engine)
        group = group_of(engine.instances[0])
        folder = Path(server_of(engine.instances[0]).socket).parent
        kill(group[1])
        task = asyncio.create_task(responses(engine))
        await until(lambda: engine.instances[0].num_restarts == 1)
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await task
        assert are_gone(group) and not folder.exists()
        assert isinstance(engine.instances[0].host, OwnServer) and engine.instances[0].host.server is None


# -- servers of others ------------------------------------------------------------------------------------------------------


async def test_a_server_that_is_there_already(model: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given the weights at once, whatever it had, and stays when the engine closes."""
    server = ServerProcess(server_options(python, model, max_context=512), "another's")
    server.spawn()
    try:
        await asyncio.to_thread(server.wait_until_ready)
        monkeypatch.setenv("THE_KEY", server.key)
        for shift in (0.1, 0.0):
            async with opened(model, python, addresses=[server.address], key_variable="THE_KEY") as engine:
                first = (await responses(engine))[0]
                await engine.install(1, changed(shift))
                assert np.array_equal((await responses(engine))[0].logprobs, first.logprobs) == (shift == 0.0)
        assert server.is_alive
    finally:
        server.stop()


@contextlib.contextmanager
def running(model: Path, python: str, count: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Iterator[list[ServerProcess]]:
    """Servers that somebody has started, with one key."""
    servers = [ServerProcess(server_options(python, model, max_context=512, **changes), f"another's {i}") for i in range(count)]
    monkeypatch.setenv("VLLM_API_KEY", servers[0].key)
    try:
        for server in servers:
            server.key = servers[0].key
            server.spawn()
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


async def test_a_given_server_that_dies_does_not_keep_the_others_from_new_weights(
    model: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for, as long as a server may take to come; the others install and generate meanwhile."""
    with running(model, python, 2, monkeypatch) as (one, other):
        async with opened(model, python, addresses=[one.address, other.address]) as engine:
            await responses(engine)
            is_waited_for = asked_for(engine.instances[0], monkeypatch)
            one.stop()
            await asyncio.wait_for(is_waited_for.wait(), patience(20))
            for version in (1, 2):
                await asyncio.wait_for(engine.install(version, changed(0.1 * version)), patience(10))
                assert (await asyncio.wait_for(responses(engine), patience(10)))[0].version_spans.tolist() == [[0, version]]
            assert not engine.instances[0].is_up and engine.instances[0].error is None


async def test_what_a_given_server_that_hangs_was_making_is_made_by_another(
    model: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody ends it here, so it would keep its requests for `generation_seconds`. It is used again when it goes on."""
    with running(model, python, 2, monkeypatch) as (one, other):
        async with opened(model, python, addresses=[one.address, other.address], num_slots=16) as engine:
            await engine.install(1, changed(0.1))
            answers_within_a_second(engine.instances[0], monkeypatch)
            tasks = [asyncio.create_task(responses(engine, range(4), 400, index=i)) for i in range(2)]
            await under_way(engine, 8)
            front_end = group_of_server(one)[1]
            front_end.suspend()
            for made in await asyncio.wait_for(asyncio.gather(*tasks), patience(20)):
                assert [response.version_spans.tolist() for response in made.values()] == [[[0, 1]]] * 4
            await asyncio.wait_for(engine.install(2, changed(0.2)), patience(10))
            assert not engine.instances[0].is_up and engine.instances[0].error is None
            front_end.resume()
            await until(lambda: engine.instances[0].is_up)
            engine.instances[1].outstanding_tokens += 10_000
            assert (await asyncio.wait_for(responses(engine), patience(10)))[0].version_spans.tolist() == [[0, 2]]
            engine.instances[1].outstanding_tokens -= 10_000


@pytest.mark.parametrize(
    ("is_open", "changes", "words"),
    [
        (True, {}, "answers without a key, .*--middleware asyncflow_vllm.RequireKey"),
        (False, {"arguments": {"logprobs_mode": "raw_logprobs"}}, "--logprobs-mode raw_logprobs, .*processed_logprobs"),
        (False, {"arguments": {"max_model_len": 511}}, "--max-model-len 511, .* up to 512 tokens"),
        (
            False,
            {"arguments": {"no_enable_chunked_prefill": False}},
            "on a CPU and cuts long prompts, .*--no-enable-chunked-prefill",
        ),
    ],
)
async def test_a_given_server_that_was_started_otherwise_is_refused(
    model: Path, python: str, monkeypatch: pytest.MonkeyPatch, is_open: bool, changes: dict[str, Any], words: str
) -> None:
    """Before it is given any weights."""
    if is_open:
        (model / "open").touch()
    with running(model, python, 1, monkeypatch, **changes) as (server,):
        async with opened(model, python, addresses=[server.address]) as engine:
            with pytest.raises(UserError, match=words):
                await responses(engine)


@pytest.mark.parametrize(("seeded", "device_type"), [(False, "cpu"), (True, "cuda")])
async def test_a_given_server_may_cut_prompts_where_vllm_does_not_die_of_it(
    model: Path, python: str, monkeypatch: pytest.MonkeyPatch, seeded: bool, device_type: str
) -> None:
    (model / "settings").write_text(json.dumps({"device_type": device_type}))
    with running(model, python, 1, monkeypatch, arguments={"no_enable_chunked_prefill": False}) as (server,):
        async with opened(model, python, addresses=[server.address], seeded=seeded) as engine:
            assert len(await responses(engine)) == 1


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode raw_logprobs"),
        ({"enable_chunked_prefill": True}, "cuts long prompts"),
        ({"enable_eplb": True}, "--enable-eplb: it moves experts"),
    ],
)
async def test_the_runs_own_servers_are_asked_too(model: Path, python: str, said: dict[str, Any], words: str) -> None:
    (model / "settings").write_text(json.dumps(said))
    async with opened(model, python) as engine:
        with pytest.raises(UserError, match=words):
            await responses(engine)


async def test_a_server_with_asyncflows_modules_of_before_is_said_to_be_one(model: Path, python: str) -> None:
    (model / "settings").write_text(json.dumps({"device_type": None}))
    async with opened(model, python) as engine:
        with pytest.raises(RunError, match=r"does not say how it was started: .*device_type"):
            await responses(engine)


@pytest.mark.parametrize(
    "address",
    [
        "http://10.0.0.7:8000",
        "https://127.0.0.1:8000",
        "http://vllm:8000",
        "http://127.0.0.1",
        "127.0.0.1:8000",
        "unix:",
        "http://127.0.0.1@10.0.0.7:80",
    ],
)
def test_a_server_on_another_machine_is_refused(model: Path, address: str) -> None:
    """Its key would travel in the clear."""
    with pytest.raises(UserError, match=r"is neither http://127\.0\.0\.1:PORT nor unix:PATH"):
        VllmEngine(model, num_slots=2, max_context=64, addresses=[address])


OWN = {"path": "d", "num_workers": 1}


def config_of(rollout: dict[str, Any], **changes: Any) -> Config:
    tree = {"model": {"path": "none"}, "data": {"path": "none"}, "train": {"prompts_per_step": 12}}
    engine = {"name": "vllm", **rollout.pop("engine", {})}
    return parse({**tree, "rollout": {**rollout, "engine": engine}, **changes})


@pytest.mark.parametrize(
    ("rollout", "changes", "words"),
    [
        ({"num_workers": 2, "engine": {"addresses": ["unix:/a", "unix:/b"]}}, {}, "2 rollout workers would install their weights"),
        ({"engine": {"addresses": ["unix:/a", "unix:/a"]}}, {}, "names a server twice"),
        ({"engine": {"addresses": ["http://localhost:1", "http://localhost:1/"]}}, {}, "names a server twice"),
        ({"engine": {"addresses": ["http://10.0.0.7:1"]}}, {}, "is neither http"),
        ({"num_workers": 2, "device": "cuda"}, {}, "under cluster=local would start their servers on the same devices"),
        ({"num_workers": 2, "device": "cuda"}, {"cluster": "inline"}, "under cluster=inline would start their servers on the same"),
        ({"engine": {"addresses": ["unix:/a"]}}, {"eval": OWN}, "eval.num_workers=1 would install their weights in the rollout"),
        ({"device": "cuda"}, {"eval": OWN}, "eval.num_workers=1 under cluster=local would start their servers on the rollout"),
        ({"engine": {"instances": 0}}, {}, "instances=0, .*do not go together"),
        ({"engine": {"tensor_parallel": 0}}, {}, "tensor_parallel=0 .*do not go together"),
        ({"engine": {"devices": [[0]], "instances": 2}}, {}, r"devices=\[\[0\]\] do not go together"),
        ({"engine": {"devices": [[0], [1]], "instances": 2, "tensor_parallel": 2}}, {}, "a list of 2 for each instance"),
        ({"engine": {"instances": "two"}}, {}, 'instances must be a whole number, not "two"'),
        ({"engine": {"arguments": {"logprobs_mode": "raw_logprobs"}}}, {}, "arguments: logprobs_mode is not to be given there"),
        ({"engine": {"pause_mode": "wait"}}, {"schedule": {"name": "bounded", "max_staleness": 2}}, "pause_mode=wait ends all"),
        ({"device": "cuda", "engine": {"transfer": "nccl", "sender_device": "cuda:0"}}, {}, r"is a device of the servers' \(\[0"),
        ({"device": "cuda", "engine": {"transfer": "nccl", "sender_device": "GPU 3"}}, {}, "is no device: write it as cuda:1"),
        (
            {"device": "cuda:1", "engine": {"transfer": "nccl", "sender_device": "cuda:2", "instances": 2}},
            {},
            r"sender_device=cuda:2 is a device of the servers' \(\[1, 2\]\), .*leave it out, which takes cuda:3",
        ),
        ({"device": "npu", "engine": {"transfer": "nccl", "sender_device": "npu", "devices": [[0]]}}, {}, "sender_device=npu is a"),
    ],
)
def test_what_cannot_go_together_is_refused_before_a_start(rollout: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_choices(config_of(rollout, **changes))


@pytest.mark.parametrize(
    ("rollout", "changes"),
    [
        ({"engine": {"addresses": ["unix:/a", "http://127.0.0.1:1", "http://[::1]:1"]}}, {}),
        ({"num_workers": 2}, {}),
        ({"num_workers": 2, "device": "cpu:0"}, {"cluster": "inline"}),
        ({"engine": {"devices": [[0, 1], [2, 3]], "instances": 2, "tensor_parallel": 2}}, {}),
        ({"engine": {"arguments": {"max_num_seqs": 7, "gpu-memory-utilization": 0.85, "compilation_config.mode": 3}}}, {}),
        ({"num_workers": 2, "device": "cuda"}, {"cluster": "ray"}),
        ({"device": "cuda"}, {"cluster": "ray", "eval": OWN}),
        ({}, {"eval": OWN}),
        ({"engine": {"pause_mode": "wait"}}, {"schedule": "delayed"}),
        ({"engine": {"pause_mode": "abort"}}, {"schedule": {"name": "bounded", "max_staleness": 2}}),
        ({"device": "cuda", "engine": {"transfer": "nccl", "sender_device": "cuda:2", "instances": 2}}, {}),
        ({"device": "cuda", "engine": {"transfer": "nccl", "sender_device": "cuda", "devices": [[1]]}}, {}),
        ({"device": "cuda", "engine": {"transfer": "nccl", "sender_device": "cuda:0", "addresses": ["unix:/a"]}}, {}),
        ({"device": "cuda", "engine": {"sender_device": "cuda:0"}}, {}),  # by shared memory nothing sends
    ],
)
def test_what_can_go_together_is_taken(rollout: dict[str, Any], changes: dict[str, Any]) -> None:
    config = config_of(rollout, **changes)
    check_rollout_engine(config, config.rollout.num_workers)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"api_key": "sekret"}, r"api_key is not to be given there: a secret is on no command line"),
        ({"api-key": ["sekret"]}, "api-key is not"),
        ({"hf_token": "sekret"}, "a secret is on no command line"),
        ({"middleware": None}, "middleware is not to be given there"),
        ({"middleware": "their.Middleware"}, "middleware is not"),
        ({"no_enable_scale_out": True}, "no_enable_scale_out .*is not"),
        ({"enable_scale_out": False}, "enable_scale_out is not"),
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size is not .*rollout\.engine\.tensor_parallel"),
        ({"max_model_len": 50}, "it is what the longest prompt"),
        ({"dtype": "auto"}, r"it is rollout\.dtype"),
        ({"model": "elsewhere"}, r"it is model\.path"),
        ({"config": "vllm.yaml"}, "a file might set"),
        ({"enable_eplb": True}, "moves experts while it generates"),
        ({"eplb_config.num_redundant_experts": 2}, "moves experts"),
        ({"port": 8000}, "a socket of AsyncFlow's own"),
        ({"weight_transfer_config.backend": "nccl"}, "it is rollout.engine.transfer"),
        ({"logprobs_m": "raw_logprobs"}, r"logprobs_m \(vLLM may take it for logprobs-mode\) is not"),
        ({"--logprobs-mode": "raw_logprobs"}, "is no option of vLLM's"),
        ({"logprobs_mode=raw_logprobs": True}, "is no option of vLLM's"),
        ({"": 1}, "is no option of vLLM's"),
        ({7: 1}, "7 is no option of vLLM's"),
        ({"enable_prefix_caching": "--logprobs-mode=raw_logprobs"}, "would take for another option"),
        ({"max_num_seqs": 7, "max-num-seqs": 8}, "one option in two spellings: max_num_seqs, max-num-seqs"),
        ({"no_enforce_eager": True, "enforce_eager": True}, "one option in two spellings"),
        ("max_num_seqs", "takes vLLM's options by name|arguments must be a mapping or null"),
    ],
)
def test_what_asyncflow_relies_on_is_not_set_by_name(model: Path, python: str, given: Any, words: str) -> None:
    """However it is written: neither in a run's configuration, nor where an engine is built without one."""
    with pytest.raises(UserError, match=words) as of_a_run:
        check_choices(config_of({"engine": {"arguments": given}}))
    with pytest.raises(UserError, match=words):
        VllmEngine(model, num_slots=2, max_context=64, python=python, arguments=given)
    assert "sekret" not in str(of_a_run.value)


@pytest.mark.parametrize("name", ["enable_chunked_prefill", "no-enable-chunked-prefill"])
def test_only_on_a_cpu_prompts_are_never_cut(name: str) -> None:
    for device in ("cpu", "cpu:0"):
        with pytest.raises(UserError, match=f"{name} is not .*vLLM dies there of a prompt that is cut"):
            check_choices(config_of({"device": device, "engine": {"arguments": {name: True}}}))
    config = config_of({"device": "cuda", "engine": {"arguments": {name: True}}})
    check_rollout_engine(config, 1)


def test_what_asyncflow_sets_for_good_is_in_the_command_line_and_is_refused() -> None:
    """An option that it sets from now on has to be one of the two."""
    command = server_options("py", MODEL).command("/s")
    may_be_changed = {"max-num-seqs", "disable-uvicorn-access-log", "enforce-eager", "kv-cache-memory-bytes"}
    may_be_changed |= {"distributed-executor-backend"}
    options = {word.removeprefix("--") for word in command if word.startswith("--")}
    assert may_be_changed < options
    for option in options - may_be_changed:
        with pytest.raises(UserError, match=f"{option} is not to be given there"):
            check_arguments({option: "1"}, "cpu")
    check_arguments(dict.fromkeys(may_be_changed, 1), "cpu")


async def test_no_worker_joins_one_with_given_servers() -> None:
    nothing = cast(Any, None)
    config = config_of({"engine": {"addresses": ["unix:/a"]}})
    scaling = Scaling(config, nothing, nothing, nothing, start=nothing, log=nothing)
    with pytest.raises(UserError, match="2 rollout workers would install their weights"):
        await scaling.scale("rollout", 2, 1.0)


def test_a_server_that_is_there_already_needs_its_key(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(UserError, match="environment variable VLLM_API_KEY"):
        VllmEngine(model, num_slots=2, max_context=64, addresses=["http://127.0.0.1:1"])


async def test_a_key_that_is_not_the_servers_is_said_at_once(model: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for, up to `start_seconds`, as for a server that does not answer."""
    with running(model, python, 1, monkeypatch) as (server,):
        monkeypatch.setenv("THE_KEY", "another's")
        async with opened(model, python, addresses=[server.address], key_variable="THE_KEY") as engine:
            with pytest.raises(UserError, match="does not take the key in the environment variable THE_KEY: give the one that"):
                await asyncio.wait_for(responses(engine), patience(10))


async def test_a_server_that_comes_back_with_another_key_has_failed(
    model: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, python, 1, monkeypatch) as (server,):
        async with opened(model, python, addresses=[server.address], max_restarts=2) as engine:
            await responses(engine)
            engine.instances[0].client._http.headers["Authorization"] = "Bearer the one before"
            monkeypatch.setattr(engine.instances[0].host, "_key", "the one before")
            with pytest.raises(RunError, match=r"was lost .*does not take the key in the environment variable VLLM_API_KEY"):
                await until(lambda: engine.instances[0].error is not None)
                await asyncio.wait_for(responses(engine), patience(10))


# -- starting ---------------------------------------------------------------------------------------------------------------


def test_a_server_that_does_not_start_says_why(model: Path, python: str) -> None:
    (model / "refuse").touch()
    with pytest.raises(UserError, match=r"vLLM 0 did not start: ValueError: the model's heads do not divide by 3$"):
        VllmEngine(model, num_slots=2, max_context=64, python=python, instances=2)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("ValueError: Free memory on device (3/80 GiB) on startup is less than desired", RunError),
        ("torch.OutOfMemoryError: CUDA out of memory", RunError),
        ("api_server.py: error: unrecognized arguments: --max-sequences", UserError),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig", UserError),
    ],
)
def test_only_what_is_the_users_to_mend_ends_a_run(model: Path, python: str, said: str, kind: type[Exception]) -> None:
    """A worker that is started again finds its device taken, say: it is started again once more, `rollout.max_restarts` times."""
    (model / "refuse").write_text(said)
    with pytest.raises(kind, match=re.escape(said)):
        VllmEngine(model, num_slots=2, max_context=64, python=python)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "ValidationError: 1 validation error for VllmConfig\n  Assertion failed, Chunked prefill is required "
            "[type=assertion_error, input_value=ArgsKwargs(())]\n    For further information visit https://errors.pydantic.dev",
            "ValidationError: 1 validation error for VllmConfig Assertion failed, Chunked prefill is required",
        ),
        (
            "ValidationError: 1 validation error for SchedulerConfig\nmax_num_seqs\n  Input should be greater than 0 "
            "[type=greater_than, input_value=0]\n    For further information visit https://errors.pydantic.dev",
            "ValidationError: 1 validation error for SchedulerConfig max_num_seqs Input should be greater than 0",
        ),
        ("ValidationError: 1 validation error for VllmConfig", "ValidationError: 1 validation error for VllmConfig"),
        (
            "AttributeError: no attribute 'block_dim'\n"
            "Exception: WorkerProc initialization failed due to an exception in a process.\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "AttributeError: no attribute 'block_dim'",
        ),
    ],
)
def test_the_cause_of_an_end_is_said_and_not_what_came_of_it(model: Path, python: str, said: str, words: str) -> None:
    (model / "refuse").write_text(said)
    with pytest.raises((RunError, UserError), match=rf"vLLM 0 did not start: {re.escape(words)}$"):
        VllmEngine(model, num_slots=2, max_context=64, python=python)


def test_a_server_that_takes_too_long_may_come_the_next_time(model: Path, python: str) -> None:
    with pytest.raises(RunError, match=r"did not answer within 0\.01 s"):
        VllmEngine(model, num_slots=2, max_context=64, python=python, start_seconds=0.01)


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_devices_are_counted_among_those_that_the_worker_sees(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives a worker some of the machine's, by their own numbers or names."""
    variable = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}[device]
    options = server_options("py", MODEL, device=device, devices=[1, 2], tensor_parallel=2)
    monkeypatch.setenv(variable, "4, 5,GPU-7a")
    assert options.environment("secret")[variable] == "5,GPU-7a"
    for seen in ("4,5", ""):
        monkeypatch.setenv(variable, seen)
        with pytest.raises(UserError, match=rf"the devices \[1, 2\], counted from 0 among the {len(seen) // 2 + bool(seen)} of"):
            options.environment("secret")


@pytest.mark.parametrize(
    ("interpreter", "words"),
    [(sys.executable, "vLLM is not installed for .*rollout.engine.python"), ("/nowhere/python", "cannot be started: No such file")],
)
def test_an_interpreter_without_vllm_is_refused(model: Path, interpreter: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        VllmEngine(model, num_slots=2, max_context=64, python=interpreter)


def test_an_interpreter_that_does_not_get_so_far_as_to_look_for_vllm_is_no_mistake(model: Path, tmp_path: Path) -> None:
    short = tmp_path / "python"
    short.write_text(f'#!/bin/sh\nulimit -v 10240; exec {sys.executable} "$@"\n')
    short.chmod(0o755)
    with pytest.raises(RunError, match=r"rollout\.engine\.python is .*, which ended with status"):
        VllmEngine(model, num_slots=2, max_context=64, python=str(short))


@pytest.mark.parametrize("wrong", [{"instances": 0}, {"tensor_parallel": 0}, {"instances": 2, "devices": [[0]]}])
def test_impossible_numbers_are_refused(model: Path, python: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"rollout\.engine: instances="):
        VllmEngine(model, num_slots=2, max_context=64, python=python, **wrong)


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = server_options(
        "py", MODEL, device="cuda", devices=[2, 3], tensor_parallel=2, arguments={"max_num_seqs": 7, "x_y": [1]}
    )
    command = options.command("/s")
    assert command[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    assert command[command.index("--max-num-seqs") + 1] == "7" and command[command.index("--x-y") + 1] == "[1]"
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs" and "--enable-scale-out" in command
    for cpu in ("cpu", "cpu:0"):
        on_cpu = server_options("py", MODEL, device=cpu, devices=[0])
        assert {"--no-enable-chunked-prefill", "--enforce-eager", "--kv-cache-memory-bytes"} <= set(on_cpu.command("/s"))
        assert on_cpu.environment("secret")["OMP_NUM_THREADS"] == "1"
        hosts = hosts_of(server_options("py", MODEL, device=cpu, instances=2).engine, "asyncflow")
        assert [host._options.devices for host in hosts if isinstance(host, OwnServer)] == [None, None]
    assert "--enforce-eager" not in command and "--distributed-executor-backend" not in command
    monkeypatch.setenv("VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS", "1")
    environment = options.environment("secret")
    assert environment["VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"] == "0"
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3" and environment["PYTHONPATH"].split(os.pathsep)[0] == str(IN_VLLM)
    assert "secret" not in " ".join(command) and environment["VLLM_API_KEY"] == "secret"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),  # vLLM's own default may be true
        ({"no-enable-prefix-caching": True}, ["--no-enable-prefix-caching"]),
        ({"no_enable_prefix_caching": False}, ["--enable-prefix-caching"]),
        ({"swap_space": None}, []),
        ({"compilation_config.pass_config.fuse_norm_quant": False}, ["--compilation-config.pass_config.fuse_norm_quant", "false"]),
        ({"compilation_config.use_inductor": True}, ["--compilation-config.use_inductor", "true"]),
    ],
)
def test_what_is_given_by_name_is_on_the_command_line(given: dict[str, Any], words: list[str]) -> None:
    plain = server_options("py", MODEL).command("/s")
    assert server_options("py", MODEL, arguments=given).command("/s") == [*plain, *words]


@pytest.mark.parametrize("spelling", ["kv_cache_memory_bytes", "kv-cache-memory-bytes"])
def test_an_option_that_asyncflow_gives_too_is_there_once_however_it_is_written(spelling: str) -> None:
    command = server_options("py", MODEL, arguments={spelling: 99, "enforce-eager": False}).command("/s")
    assert command.count("--kv-cache-memory-bytes") == 1 and command[command.index("--kv-cache-memory-bytes") + 1] == "99"
    assert "--no-enforce-eager" in command and "--enforce-eager" not in command
    left_out = server_options("py", MODEL, arguments={spelling: None, "no_enforce_eager": False}).command("/s")
    assert "--kv-cache-memory-bytes" not in left_out and left_out.count("--enforce-eager") == 1


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 3, "hidden_size": 4096}, 1024),
        ({"n_head": 8, "n_layer": 3, "n_embd": 4096}, 4096),
        ({"n_head": 8, "n_layer": 3, "hidden_size": 4096}, 4096),
        ({"num_attention_heads": None, "n_head": 8, "num_hidden_layers": 3, "hidden_size": 4096}, 4096),
        ({"num_hidden_layers": 3, "hidden_size": 4096}, 4096),
    ],
)
def test_a_cpu_s_cache_has_room_for_all_slots_whatever_a_family_calls_its_sizes(
    fields: dict[str, Any], width: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    command = server_options("py", tmp_path, num_slots=8, max_context=512).command("/s")
    blocks = 512 // 128 * 8 + 1
    assert int(command[command.index("--kv-cache-memory-bytes") + 1]) == blocks * 128 * 2 * 3 * width * 4


async def test_nobody_reaches_a_server_without_its_key(model: Path, python: str) -> None:
    async with opened(model, python) as engine:
        await responses(engine)
        server = server_of(engine.instances[0])
        assert (Path(server.socket).parent.stat().st_mode & 0o777) == 0o700
        assert not any(server.key in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))
        stranger = VllmClient(server.address, "another key", generation_seconds=5, deadline_seconds=5)
        for call in (stranger.resume(), stranger.set_weight_version(3), stranger.settings()):
            with pytest.raises(RequestRefused, match="401"):
                await call
        with pytest.raises(RequestRefused, match="401"):
            await stranger.is_ready()
        await stranger.close()


# -- weights by NCCL --------------------------------------------------------------------------------------------------------


class StandInSender:
    """What vLLM's trainer-side engine does with its client, without the broadcast: the stand-in reads the engine's file."""

    made: ClassVar[list[Any]] = []
    file: ClassVar[dict[str, Any]] = {}

    def __init__(self, info: Any, client: Any, source: Any) -> None:
        self.info, self.client, self.source = info, client, source

    @classmethod
    def trainer_init(cls, info: Any, *, client: Any, source: Any) -> StandInSender:
        client.init_weight_transfer_engine({"world_size": info.world_size})
        cls.made.append(cls(info, client, source))
        return cls.made[-1]

    def send_weights(self) -> None:
        meta = self.source.metadata()
        assert [(m.name, m.dtype, m.shape) for m in meta] == [(n, t.dtype, tuple(t.shape)) for n, t in self.source]
        self.client.start_weight_update()
        self.client.update_weights(self.file)
        self.client.finish_weight_update()


async def test_by_nccl_one_sender_is_kept_for_each_start_of_a_server(
    model: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control plane of it: nobody here has the GPUs. Its parts are vLLM's, as they were found in 0.32.0."""

    @dataclass
    class ParamMeta:
        name: str
        dtype: torch.dtype
        shape: tuple[int, ...]

    base, engine_module = ModuleType("base"), ModuleType("nccl_engine")
    base.ParamMeta = ParamMeta  # type: ignore[attr-defined]
    engine_module.NCCLTrainerInitInfo = lambda **fields: SimpleNamespace(**fields)  # type: ignore[attr-defined]
    engine_module.NCCLTrainerWeightTransferEngine = StandInSender  # type: ignore[attr-defined]
    package = ModuleType("vllm.distributed.weight_transfer")
    package.base, package.nccl_engine = base, engine_module  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(StandInSender, "made", [])
    async with opened(model, python, transfer="nccl", sender_device="cpu", tensor_parallel=2) as engine:
        for version in (1, 2):
            await engine.prepare(version, changed(0.1 * version))
            monkeypatch.setattr(StandInSender, "file", engine._weights.next_file.description())
            await engine.install(version, changed(0.1 * version))
            assert (await responses(engine))[0].version_spans.tolist() == [[0, version]]
        assert len(StandInSender.made) == 1 and StandInSender.made[0].info.world_size == 3
        kill(group_of(engine.instances[0])[1])
        assert (await responses(engine))[0].version_spans.tolist() == [[0, 2]]
        assert len(StandInSender.made) == 2


def test_by_nccl_tensors_of_wider_elements_come_first() -> None:
    """vLLM packs them one behind another, and looks at each as its elements."""
    tensors = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(2), "c": torch.zeros(5, dtype=torch.bfloat16)}
    source = transfers._Source(tensors, "cpu", lambda name, *_: name)
    assert source.metadata() == [name for name, _ in source] == ["b", "a", "c"]


async def test_a_send_that_stays_in_nccl_is_a_lost_server_and_keeps_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio joins its own threads at the end, so it may not be one of them."""
    transfer = NcclTransfer.__new__(NcclTransfer)
    transfer._deadline_seconds = 0.1
    threads: list[threading.Thread] = []
    let_go = threading.Event()

    def stays(*arguments: object) -> None:
        threads.append(threading.current_thread())
        let_go.wait(patience(20))

    def fails(*arguments: object) -> None:
        raise OSError("no route")

    file = WeightsFile("float32")
    file.write(1, TENSORS)
    client = VllmClient("unix:/nowhere", "key", generation_seconds=1, deadline_seconds=1)
    for call, words in ((stays, r"within 0\.1 s"), (fails, "by NCCL: no route")):
        monkeypatch.setattr(transfer, "_send", call)
        with pytest.raises(ServerLost, match=words):
            await transfer.send(client, file)
    assert threads[0].daemon and threads[0].is_alive()
    let_go.set()
    await client.close()
    file.close()


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        ("cuda", {}, "cuda:1"),
        ("cuda", {"instances": 2, "tensor_parallel": 4}, "cuda:8"),
        ("cuda:2", {"instances": 2}, "cuda:4"),
        ("npu", {"devices": [[5], [1]], "instances": 2}, "npu:6"),
        ("cuda", {"addresses": ["unix:/a"], "tensor_parallel": 2}, "cuda:0"),  # nobody knows which they have
        ("cpu", {"instances": 2}, "cuda:0"),
        ("cuda", {"instances": 2, "sender_device": "cuda:7"}, "cuda:7"),
    ],
)
def test_weights_are_sent_from_the_first_device_after_the_servers(device: str, changes: dict[str, Any], expected: str) -> None:
    arguments = {"instances": 1, "tensor_parallel": 1, "devices": None, "addresses": (), "sender_device": None, **changes}
    assert sender(device, **arguments) == expected


def test_an_engine_sends_from_there(model: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no server has it: what each is started with."""
    asked: list[object] = []

    def transfer(*arguments: object) -> None:
        asked.extend(arguments)
        raise UserError("as the test wants it")

    monkeypatch.setattr(transfers, "NcclTransfer", transfer)
    with pytest.raises(UserError, match="as the test"):
        VllmEngine(model, num_slots=2, max_context=64, python=python, transfer="nccl", instances=2, device="cuda:1")
    assert asked[0] == "cuda:3"
    hosts = hosts_of(server_options("py", MODEL, device="cuda:1", instances=2).engine, "asyncflow")
    assert [host._options.devices for host in hosts if isinstance(host, OwnServer)] == [[1], [2]]


def test_nccl_needs_vllm_beside_asyncflow(model: Path, python: str) -> None:
    with pytest.raises(UserError, match=r"rollout\.engine\.transfer=nccl needs vLLM in AsyncFlow's own environment"):
        VllmEngine(model, num_slots=2, max_context=64, python=python, transfer="nccl")


# -- what is left behind ----------------------------------------------------------------------------------------------------

OWNER = """
import resource, sys, time
from functools import partial
from pathlib import Path
from asyncflow.engines.rollout.vllm.engine import VllmEngine
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
engine = VllmEngine(Path(sys.argv[1]), num_slots=2, max_context=64, python=sys.argv[2], instances=2)
print(*(i.host.server.pid for i in engine.instances), *(Path(i.host.server.socket).parent for i in engine.instances), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", in_gate(signal.SIGKILL, of=[signal.SIGKILL, signal.SIGTERM]))
def test_servers_end_with_their_owner_however_it_goes(model: Path, python: str, how: signal.Signals) -> None:
    command = [sys.executable, "-c", OWNER, str(model), python]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        first, second, *folders = owner.stdout.readline().split()
        guards = [psutil.Process(int(first)), psutil.Process(int(second))]
        everyone = [p for guard in guards for p in (guard, *guard.children(recursive=True))]
        assert len(everyone) == 6 and all(Path(folder).is_dir() for folder in folders)
        handles = {resource.prlimit(process.pid, resource.RLIMIT_NOFILE) for process in everyone}
        assert handles == {(resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2}, "as many as they may, whatever their owner has"
        owner.send_signal(how)
    assert are_gone(everyone)
    assert not any(Path(folder).exists() for folder in folders)


# -- the weights' memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_file_holds_what_it_was_given(dtype: str) -> None:
    file = WeightsFile(dtype)
    for version, shift in ((1, 0.1), (2, 0.2)):
        file.write(version, changed(shift))
        described = file.description()
        with open(described["path"], "rb") as opened_by_path:
            data = opened_by_path.read()
        assert len(data) == described["num_bytes"] and described["dtype_name"] == dtype
        for name, shape, begin in described["tensors"]:
            count = int(np.prod(shape))
            there = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype), count=count, offset=begin).view(shape)
            assert torch.equal(there, changed(shift)[name].to(getattr(torch, dtype))) and begin % 64 == 0
        assert "dtype_names" not in described
    odd = {"a": torch.full((3,), 1.1), "b": torch.full((5,), 1.1), "c": torch.full((2,), 1.1, dtype=torch.float64)}
    file.write(3, odd, as_they_are={"a", "c", "d"})
    held = file.tensors()
    assert torch.equal(held["c"], odd["c"]) and torch.equal(held["a"], odd["a"]) and held["b"].dtype == getattr(torch, dtype)
    names = {"float32": {"c": "float64"}, "bfloat16": {"a": "float32", "c": "float64"}}
    assert file.description()["dtype_names"] == names[dtype]
    file.close()
    assert not os.path.exists(described["path"])


def test_shapes_are_read_from_the_files_heads() -> None:
    assert shapes_of(MODEL) == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


# -- what a server may answer -----------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "finish_reason": "stop",
    "token_ids": [4, 5, 6],
    "logprobs": {
        "content": [{"token_id": 4, "logprob": -1.0}, {"token_id": 5, "logprob": -2.0}, {"token_id": 6, "logprob": -9999.0}]
    },
    "weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "3", "start": 2, "end": 3}],
}


async def answer(choice: dict[str, Any]) -> Any:
    client = VllmClient("unix:/nowhere", "key", generation_seconds=1, deadline_seconds=1)

    async def ask(*arguments: object) -> bytes:
        return json.dumps({"choices": [choice]}).encode()

    client._ask = ask  # type: ignore[method-assign]
    try:
        return await client.generate(0, [1], {}, "salt")
    finally:
        await client.close()


async def test_an_answer_is_read() -> None:
    made = await answer(GOOD)
    assert made.token_ids.tolist() == [4, 5, 6]
    assert made.logprobs.tolist() == pytest.approx([-1.0, -2.0, float("nan")], nan_ok=True), "-9999 stands for no number"
    assert made.version_spans.tolist() == [[0, 1], [2, 3]] and made.finish_reason == "stop"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"finish_reason": "error"}, "for the reason 'error'"),
        ({"token_ids": [4, 5, 7]}, "log-probs of others"),
        ({"logprobs": None}, "log-probs of others"),
        ({"weight_versions": None}, "which weights made"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 2}]}, "which weights made"),
        ({"weight_versions": [{"version": "1", "start": 1, "end": 3}]}, "which weights made"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 3}]}, "weights 'default'"),
        ({"token_ids": "abc"}, "what is no response"),
    ],
)
async def test_an_answer_that_makes_no_sense_is_a_lost_server(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ServerLost, match=words):
        await answer({**GOOD, **change})


# -- low-rank adapters ----------------------------------------------------------------------------------------------------------

LORA = LoraSpec(rank=4, alpha=8.0)


def adapter(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    linears = {n.removesuffix(".weight"): t.shape for n, t in TENSORS.items() if ".layers." in n and t.ndim == 2}
    shapes = lora_shapes({name: (shape[0], shape[1]) for name, shape in linears.items()}, LORA)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


async def test_requests_name_their_adapter_and_an_old_one_goes_when_none_does(model: Path, python: str) -> None:
    async with opened(model, python, lora=LORA, instances=2) as engine:
        base = await responses(engine)
        await engine.install(1, adapter(1))
        first = await responses(engine)
        assert first[0].version_spans.tolist() == [[0, 1]] and base[0].version_spans.tolist() == [[0, 0]]
        assert not np.array_equal(first[0].logprobs, base[0].logprobs), "the adapter has not arrived"
        long = asyncio.create_task(responses(engine, samples=(1, 2), length=300))
        await under_way(engine, 2)
        await engine.install(2, adapter(2))
        second = await responses(engine)
        assert second[0].version_spans.tolist() == [[0, 2]] and not np.array_equal(second[0].logprobs, first[0].logprobs)
        loaded = [(await state_of(instance))["loras"] for instance in engine.instances]
        assert loaded == [["version-1-1", "version-2-2"]] * 2, "one that is still asked for was unloaded"
        made = await long
        assert [made[number].version_spans.tolist() for number in (1, 2)] == [[[0, 1]]] * 2
        assert len({float(made[number].logprobs[-1] - made[number].logprobs[0]) for number in (1, 2)}) == 1, (
            "no other came in between"
        )
        async with asyncio.timeout(patience(20)):
            while [(await state_of(instance))["loras"] for instance in engine.instances] != [["version-2-2"]] * 2:
                await asyncio.sleep(0.01)
            while [*engine._lora._root.iterdir()] != [engine._lora._root / "version-2-2"]:  # its files go after it
                await asyncio.sleep(0.01)
        assert engine._lora.current.version == 2
        await engine.install(0, {})
        again = await responses(engine)
        assert np.array_equal(again[0].logprobs, base[0].logprobs) and again[0].version_spans.tolist() == [[0, 0]]
        root = engine._lora._root
    assert not root.exists()


async def test_a_killed_server_comes_back_with_the_current_adapter(model: Path, python: str) -> None:
    async with opened(model, python, lora=LORA) as engine:
        await engine.install(1, adapter(1))
        before = await responses(engine)
        kill(group_of(engine.instances[0])[1])
        after = await responses(engine)
        assert engine.instances[0].num_restarts == 1 and np.array_equal(after[0].logprobs, before[0].logprobs)


@pytest.mark.parametrize(
    "name",
    in_gate(
        "gpt_oss", "mamba", "phi3", of=["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "bloom", "mamba", "falcon_h1", "phi3"]
    ),
)
def test_an_adapter_is_checked_by_the_modules_that_the_trainer_has(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families whose files have other matrices than their modules have linear layers. One asks in a process, as a worker does."""
    path = write_model(name, tmp_path / "model")
    if name == "mixtral":
        monkeypatch.setattr(look_up, "subprocess", subprocess)
    trained = {n: p.detach() for n, p in OneRank(path, train_options(lora=LORA)).policy.parameters.items()}
    versions = LoraVersions(path, LORA, 0, lambda: None)
    written = versions.write(1, trained)
    assert versions.tensors(written).keys() == trained.keys()
    less = dict(sorted(trained.items())[1:])
    with pytest.raises(ValueError, match=f"the adapter lacks 1 of {len(trained)} tensors"):
        versions.write(2, less)
    versions.close()


def test_a_model_that_transformers_does_not_know_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    versions = LoraVersions(tmp_path, LORA, 0, lambda: None)
    with pytest.raises(ValueError, match="the adapter's shapes are not known: transformers has no causal language model"):
        versions.write(1, {"a.lora_A.weight": torch.zeros(4, 2)})
    versions.close()


async def test_an_adapter_that_does_not_fit_is_refused_before_any_server_hears_of_it(model: Path, python: str) -> None:
    async with opened(model, python, lora=LORA) as engine:
        half = {name: tensor for name, tensor in adapter(1).items() if "q_proj" in name}
        with pytest.raises(ValueError, match=r"the adapter lacks \d+ of \d+ tensors"):
            await engine.install(1, half)
        assert (await state_of(engine.instances[0]))["loras"] == [] and engine._lora.current.version == 0
        command = server_of(engine.instances[0])._options.command("socket")
        assert command[command.index("--max-lora-rank") + 1] == "8" and "--enable-lora" in command
