"""What vLLM's servers generate with: the engine over the stand-in."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from asyncflow.attestation import fault_of
from asyncflow.engines.base import SampleKey, Sampling
from asyncflow.engines.lora import sum_of_base
from asyncflow.engines.rollout.vllm import servers as servers
from asyncflow.engines.rollout.vllm.client import VllmClient
from asyncflow.engines.rollout.vllm.engine import VllmEngine
from asyncflow.types import RunError
from tests.conftest import MODEL
from tests.patience import patience
from tests.processes import kill
from tests.unit.engines.rollout.test_vllm import LORA, adapter, changed, group_of, opened, responses, running, running_of
from tests.unit.engines.rollout.test_vllm_sums import sums_of
from tests.vllm.servers import fake_python


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "RESTART_PAUSES_SECONDS", (0.05, 0.1))
    monkeypatch.setattr(servers, "WATCH_SECONDS", 0.2)


@pytest.fixture
def python(tmp_path: Path) -> str:
    return str(fake_python(tmp_path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(MODEL, tmp_path / "model")


async def fault(engine: VllmEngine, version: int, tensors: Mapping[str, Tensor], base: int | None = None) -> str:
    attested = await engine.attest()
    assert attested is not None
    return fault_of(attested, version, sums_of(tensors), base)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_each_server_says_what_it_generates_with(model: Path, python: str, dtype: Any) -> None:
    async with opened(model, python, instances=2, dtype=dtype) as engine:
        for version in (1, 2):
            await engine.install(version, changed(0.1 * version))
            attested = await engine.attest()
            assert attested is not None and attested.base is None
            assert len(attested.parts) == 2 * len(changed(0))
            assert fault_of(attested, version, sums_of(changed(0.1 * version), getattr(torch, dtype))) == ""
            assert "other weights than those" in fault_of(attested, version, sums_of(changed(0.3), getattr(torch, dtype)))


@pytest.mark.parametrize(("deaf", "num_parts"), [("nothing", 26), ("half", 14)])
async def test_a_server_that_does_not_load_what_it_is_given_is_found_at_once(
    model: Path, python: str, deaf: str, num_parts: int
) -> None:
    async with opened(model, python) as engine:
        (model / "deaf").write_text(deaf)
        await engine.install(1, changed(0.1))
        assert (await responses(engine))[0].version_spans.tolist() == [[0, 1]], "it says that it has the version"
        words = f"generates with other weights than those of version 1 in {num_parts} of 26 parts"
        assert words in await fault(engine, 1, changed(0.1))
        (model / "deaf").unlink()
        await engine.install(1, changed(0.1))
        assert await fault(engine, 1, changed(0.1)) == ""


async def test_an_adapter_and_its_base_are_attested(model: Path, python: str) -> None:
    base = sum_of_base(MODEL, "float32")
    async with opened(model, python, lora=LORA, instances=2) as engine:
        for version in (1, 2):
            await engine.install(version, adapter(version))
            assert await fault(engine, version, adapter(version), base) == ""
            assert "other weights" in await fault(engine, version, adapter(3), base)
            assert "for another base" in await fault(engine, version, adapter(version), base + 1)
        (model / "deaf").write_text("unbound")
        await engine.install(3, adapter(3))
        assert "generates without 28 of the 28 tensors of version 3" in await fault(engine, 3, adapter(3), base)


async def test_a_server_of_another_base_is_found_whatever_the_adapter(model: Path, python: str) -> None:
    """A model's folder that has changed since the engine was made stands for another machine's."""
    async with opened(model, python, lora=LORA, instances=2) as engine:
        await engine.install(1, adapter(1))
        assert await fault(engine, 1, adapter(1), sum_of_base(MODEL, "float32")) == ""
        save_file(changed(0.01), model / "model.safetensors", metadata={"format": "pt"})
        kill(group_of(engine.instances[1])[1])
        async with asyncio.timeout(patience(20)):
            while not (engine.instances[1].num_restarts and engine.instances[1].is_up):
                await asyncio.sleep(0.02)
        shutil.copyfile(MODEL / "model.safetensors", model / "model.safetensors")
        assert "for another base" in await fault(engine, 1, adapter(1), sum_of_base(MODEL, "float32"))


async def test_a_server_that_comes_back_is_used_when_it_has_what_it_was_given(model: Path, python: str) -> None:
    async with opened(model, python, max_restarts=50) as engine:
        await engine.install(1, changed(0.1))
        before = (await responses(engine))[0]
        (model / "deaf").write_text("nothing")
        (instance,) = engine.instances
        kill(group_of(instance)[1])
        async with asyncio.timeout(patience(30)):
            while instance.num_restarts < 2:
                assert not instance.is_up or instance.num_restarts == 0, "it was used with weights that nobody has given it"
                await asyncio.sleep(0.01)
        (model / "deaf").unlink()
        attesting = asyncio.create_task(fault(engine, 1, changed(0.1)))
        assert await asyncio.wait_for(attesting, patience(30)) == "", "it waits until there is one to ask"
        assert np.array_equal((await responses(engine))[0].logprobs, before.logprobs)


async def test_a_given_server_that_does_not_load_weights_is_refused(
    model: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "deaf").write_text("half")
    save_file(changed(0.1), (tmp := shutil.copytree(MODEL, model.parent / "run")) / "model.safetensors", metadata={"format": "pt"})
    with running(model, python, 1, monkeypatch) as (server,):
        async with opened(tmp, python, addresses=[server.address]) as engine:
            with pytest.raises(RunError, match="has not what it was given: the engine generates with other weights"):
                await responses(engine)


async def test_a_server_that_cannot_tell_is_not_attested_and_one_line_says_why(
    model: Path, python: str, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "deaf").write_text("cannot tell")
    async with opened(model, python, instances=2) as engine:
        with caplog.at_level(logging.WARNING, "asyncflow.engines.rollout.vllm.attesting"):
            for version in (1, 2):
                await engine.install(version, changed(0.1 * version))
                assert await engine.attest() is None
        (line,) = caplog.messages
        assert "model.norm.weight is applied by SomeMethod" in line
        assert [instance.num_restarts for instance in engine.instances] == [0, 0]


@pytest.mark.parametrize("has_lora", [False, True])
async def test_a_server_that_cannot_tell_of_one_layer_is_attested_by_the_others(
    model: Path, python: str, caplog: pytest.LogCaptureFixture, has_lora: bool
) -> None:
    (model / "deaf").write_text("cannot tell of one")
    async with opened(model, python, instances=2, **({"lora": LORA} if has_lora else {})) as engine:
        with caplog.at_level(logging.WARNING, "asyncflow.engines.rollout.vllm.attesting"):
            for version in (1, 2):
                given = adapter(version) if has_lora else changed(0.1 * version)
                await engine.install(version, given)
                attested = await engine.attest()
                assert attested is not None and attested.parts and not attested.is_whole
                assert {*attested.unseen} == {"model.norm", "model.norm.weight"}
                base = sum_of_base(model, "float32") if has_lora else None
                assert attested.base is None, "of what is not all seen no sum is made"
                assert fault_of(attested, version, sums_of(given), base) == ""
                others = sums_of({name: tensor + 1 for name, tensor in given.items()})
                assert "other weights than those" in fault_of(attested, version, others, base)
                share = 1.0 if has_lora else 1 - 1 / len(given)
                assert attested.share_seen(given.keys()) == pytest.approx(share)
        (line,) = caplog.messages
        assert "is not attested: a part is not seen: model.norm.weight is applied by SomeMethod" in line


async def test_a_server_that_tells_its_sums_in_another_form_is_not_attested_and_goes_on(
    model: Path, python: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started with modules of another version."""
    ask = VllmClient._ask

    async def in_another_form(client: VllmClient, method: str, path: str, *given: Any, **more: Any) -> bytes:
        if path.startswith("/asyncflow/sums"):
            return b'{"workers": [{"weights": [[["a"], 1, 2, 0, [], "fp8_per_channel"]]}]}'
        return await ask(client, method, path, *given, **more)

    monkeypatch.setattr(VllmClient, "_ask", in_another_form)
    async with opened(model, python) as engine:
        await engine.install(1, changed(0.1))
        assert await engine.attest() is None and engine.instances[0].num_restarts == 0
    assert any("is not attested: it says that in another form" in line for line in caplog.messages)


async def test_each_server_is_asked_for_its_log_probs_of_a_probe_by_the_weights_that_requests_get(model: Path, python: str) -> None:
    ids = np.array([3, 8, 5, 9])
    for lora, tensors in ((None, changed), (LORA, lambda scale: adapter(round(10 * scale)))):
        async with opened(model, python, instances=2, **({} if lora is None else {"lora": lora})) as engine:
            assert await engine.log_probs(ids) is None, "these servers tell none"
            (model / "scores").touch()
            seen = []
            for version in (1, 2):
                await engine.install(version, tensors(0.1 * version))
                found = await engine.log_probs(ids)
                assert found is not None and found.dtype == np.float32 and found.shape == (6,)
                assert found[:3].tolist() == found[3:].tolist(), "both servers have the same"
                seen.append(found)
            assert (seen[0] != seen[1]).all()
            await engine.pause()
            assert await engine.log_probs(ids) is None, "it would wait for the engine to be resumed"
            await engine.resume()
            assert await engine.log_probs(ids) is not None
            (model / "scores").unlink()


async def test_a_server_that_cannot_tell_gives_its_log_probs_while_it_is_paused_and_what_is_under_way_begins_anew(
    model: Path, python: str
) -> None:
    (model / "deaf").write_text("cannot tell")
    (model / "scores").touch()
    ids, sampling = np.array([3, 8, 5, 9]), Sampling(1.0, 64)
    async with opened(model, python) as engine:
        await engine.install(1, changed(0.1))
        assert await engine.attest() is None
        stream = engine.generate(np.arange(3, 9), samples=[0, 1], sampling=sampling, key=SampleKey(3, 1))
        pending = asyncio.create_task(anext(stream))
        async with asyncio.timeout(patience(20)):
            while await running_of(engine) < 2:
                await asyncio.sleep(0.01)
        await engine.pause()
        await engine.install(2, changed(0.2))
        assert await engine.attest() is None
        found = await engine.log_probs(ids)
        assert found is not None and found.shape == (3,) and not pending.done()
        await engine.resume()
        for response in [await pending, await anext(stream)]:
            assert response.version_spans.tolist() == [[0, 2]]
        await stream.aclose()
        alone = await engine.log_probs(ids)
        assert alone is not None and alone.tolist() == found.tolist()
