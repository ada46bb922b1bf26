"""Routes over engines that are not there: sessions, order and repetition of requests, results, failures. By JSON."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, Response
from asyncflow.engines.lora_files import CONFIG_FILE, holds_adapter
from asyncflow.service.app import AuditLog, GatePaths, make_app
from asyncflow.service.keys import KeyRing
from asyncflow.service.limits import Limits
from asyncflow.service.tickets import Tickets
from asyncflow.service.tinker import messages, routes
from asyncflow.service.tinker import sessions as sessions_file
from asyncflow.service.tinker.checkpoint_store import CheckpointStore
from asyncflow.service.tinker.context import BaseModel, Bounds, ServerContext
from asyncflow.service.tinker.messages import LoraConfig
from asyncflow.service.tinker.results import Results
from asyncflow.service.tinker.samplers import ReadWeights, Samplers
from asyncflow.service.tinker.sessions import Sessions
from asyncflow.service.tinker.training_passes import TrainingPasses
from asyncflow.types import LoraSpec, Objective, Ragged, TokenBatch
from tests.patience import patience, until


class Training:
    """Train engine whose log-prob of a target t is - t / 10, and whose weights are the number of its updates."""

    def __init__(self, folder: Path | None, adapter: LoraConfig | None) -> None:
        self.adapter = adapter
        self.calls: list[Any] = []
        self.updates = 0 if folder is None else int((folder / "weights").read_text())
        self.added = 0.0
        self.is_finite = True
        self.may_go = asyncio.Event()
        self.may_go.set()

    async def begin_step(self) -> None:
        self.calls.append("begin")

    async def forward_backward(self, batches: list[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        await self.may_go.wait()
        (batch,) = batches
        assert batch.target_ids is not None
        logprobs_T = (-torch.tensor(batch.target_ids.values).float() / 10).requires_grad_()
        sampled_T = torch.tensor(batch.rollout_logprobs.values)
        rows = TokenBatch(
            logprobs_T=logprobs_T,
            old_logprobs_T=sampled_T,
            rollout_logprobs_T=sampled_T,
            ref_logprobs_T=None,
            entropy_T=torch.zeros_like(sampled_T),
            advantages_T=torch.tensor(batch.token_advantages),
            mask_T=torch.tensor(batch.loss_mask.values).float(),
            row_T=torch.zeros(len(sampled_T), dtype=torch.int64),
            row_tokens_R=torch.ones(len(batch.indices)),
        )
        loss = objective.loss(rows).loss
        self.added += loss.item()
        self.calls.append(("pass", round(loss.item(), 4)))
        return [MicroBatchResult(loss.item(), len(sampled_T), len(sampled_T), is_finite=self.is_finite)]

    async def log_probs(self, prompt_ids: np.ndarray, response_ids: Ragged, target_ids: Ragged) -> Ragged:
        return Ragged(-target_ids.values.astype(np.float32) / 10, target_ids.offsets)

    async def set_hyperparameters(self, chosen: Any) -> None:
        self.calls.append(("rate", chosen.learning_rate))

    async def optim_step(self, normaliser: int) -> OptimResult:
        assert normaliser == 1
        self.calls.append("step")
        self.updates, self.added = self.updates + 1, 0.0
        return OptimResult(grad_norm=2.5, learning_rate=0.1)

    async def discard(self) -> None:
        self.calls.append("discard")

    async def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        (path / "weights").write_text(str(self.updates))
        if self.adapter is not None:
            (path / CONFIG_FILE).write_text("{}")

    async def save_state(self, folder: Path) -> Any:
        async def written() -> None:
            folder.mkdir()
            (folder / "moments").write_text("m")

        return written()

    async def load_state(self, folder: Path) -> None:
        self.calls.append(("moments", (folder / "moments").read_text()))

    async def close(self) -> None:
        self.calls.append("close")


class Rollout:
    """Rollout engine whose samples say which weights it has."""

    def __init__(self) -> None:
        self.weights, self.may_go = "base", asyncio.Event()
        self.loaded: dict[str, str] = {}
        self.may_go.set()

    async def install(self, version: int, tensors: Any) -> None:
        self.weights = tensors

    async def load_adapter(self, name: str, lora: LoraSpec, tensors: Any) -> None:
        self.loaded[name] = tensors

    async def unload_adapter(self, name: str) -> None:
        del self.loaded[name]

    async def generate(self, prompt_ids, *, samples, sampling, key, adapter):
        if sampling.max_new_tokens > 20:
            raise ValueError("too many tokens")
        await self.may_go.wait()
        for sample in samples:
            weights = self.weights if adapter is None else self.loaded[adapter]
            tokens = np.array([0 if weights == "base" else 1 + int(weights), key.prompt_index])
            yield Response(sample, tokens, np.full(2, -0.5, np.float32), np.zeros((1, 2), np.int64), "length")

    async def close(self) -> None:
        self.may_go.set()


class World:
    """A server over such engines. `engines`: of the models, in the order in which they were made."""

    def __init__(self, folder: Path, *, trains_whole_weights: bool = False, **bounds: Any) -> None:
        self.base_folder = folder / "base"
        self.base_folder.mkdir()
        (self.base_folder / "config.json").write_text('{"eos_token_id": 1}')
        (self.base_folder / "tokenizer.json").write_text("{}")
        base = BaseModel(name="base", folder=self.base_folder, vocab_size=50, max_context=32)
        self.engines: list[Training] = []
        self.rollout = Rollout()
        context = ServerContext(
            base=base,
            make_engine=self._make,
            store=CheckpointStore(folder / "state", 2),
            results=Results(kept_bytes=1 << 20, largest_number=100),
            passes=TrainingPasses(2, 1000),
            bounds=Bounds(**bounds),
        )
        samplers = Samplers([self.rollout], self.base_folder, read, largest_queue=10, num_adapters=1)
        self.sessions = Sessions(context, samplers, trains_whole_weights=trains_whole_weights)
        self.audit_file = folder / "audit.jsonl"
        keys, audit = KeyRing.open(folder / "keys.json", time.time, "tml-"), AuditLog(self.audit_file)
        self.now = 0.0
        tickets = Tickets(lambda: self.now)
        paths = GatePaths(looks=routes.LOOKS)
        self.app = make_app(title="t", description="", keys=keys, limits=Limits(), audit=audit, paths=paths, tickets=tickets)
        self.app.include_router(routes.routes(self.sessions, tickets))
        self.key = keys.all[0].secret
        transport = httpx2.ASGITransport(app=self.app)
        self.client = httpx2.AsyncClient(transport=transport, base_url="http://t/api/v1", headers={"X-API-Key": self.key})

    def _make(self, folder: Path | None, adapter: LoraConfig | None) -> Training:
        self.engines.append(Training(folder, adapter))
        return self.engines[-1]

    async def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        answer = await self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def result(self, future: dict[str, Any]) -> Any:
        async with asyncio.timeout(patience(10)):
            return await self.post("/retrieve_future", {"request_id": future["request_id"]})

    async def done(self, path: str, body: dict[str, Any]) -> Any:
        return await self.result(await self.post(path, body))

    async def session(self) -> str:
        made = await self.post(
            "/create_session", {"tags": [], "user_metadata": {"a": 1}, "sdk_version": "0", "type": "create_session"}
        )
        assert (
            made["session_id"] and ("all weights" if self.sessions.trains_whole_weights else "no adapter") in made["info_message"]
        )
        return made["session_id"]

    async def model(self, session: str, number: int = 0) -> str:
        body = {"session_id": session, "model_seq_id": number, "base_model": "base", "lora_config": {"rank": 8}}
        return (await self.done("/create_model", body))["model_id"]


def read(folder: Path) -> ReadWeights:
    lora = LoraSpec(8, 32.0) if holds_adapter(folder) else None
    return ReadWeights("base" if folder.name == "base" else (folder / "weights").read_text(), lora)


@asynccontextmanager
async def opened(folder: Path, **bounds: Any) -> AsyncIterator[World]:
    world = World(folder, **bounds)
    try:
        yield world
    finally:
        await world.sessions.close()
        await world.client.aclose()


def passed(model: str, number: int, weights: list[float], loss: str = "cross_entropy") -> dict[str, Any]:
    tensors = {
        "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
        "weights": {"data": weights, "dtype": "float32", "shape": [2]},
    }
    datum = {"model_input": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}, "loss_fn_inputs": tensors}
    return {"forward_backward_input": {"data": [datum], "loss_fn": loss}, "model_id": model, "seq_id": number}


def stepped(model: str, number: int, rate: float = 0.5) -> dict[str, Any]:
    return {"adam_params": {"learning_rate": rate}, "model_id": model, "seq_id": number, "type": "optim_step"}


async def test_nothing_is_answered_without_a_key(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        for route in world.app.routes:
            path, methods = getattr(route, "path", ""), getattr(route, "methods", None) or ()
            for method in methods if path.startswith("/api") else ():
                world.client.headers.pop("X-API-Key", None)
                answer = await world.client.request(method, f"http://t{path}")
                assert answer.status_code in (401, 429), (method, path)
        world.client.headers["X-API-Key"] = world.key
        capabilities = (await world.client.get("/get_server_capabilities")).json()
        assert capabilities["training"] == "lora" and capabilities["supported_models"][0]["model_name"] == "base"
        assert (await world.client.get("/healthz")).json() == {"status": "ok"}
        assert world.key.startswith("tml-")


async def test_requests_are_applied_once_and_in_their_order(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        model = await world.model(await world.session())
        first, step = passed(model, 1, [0.0, 1.0]), stepped(model, 2)
        futures = [await world.post("/optim_step", step) for _ in range(2)]
        assert futures[0] == futures[1] and world.engines[0].calls == ["begin"]
        waiting = await world.client.post("/retrieve_future", json={"request_id": "s:other:1"})
        assert waiting.status_code == 410
        futures += [await world.post("/forward_backward", first) for _ in range(3)]
        answer = await world.result(futures[2])
        assert answer["metrics"] == {"loss:sum": pytest.approx(0.3)}
        assert answer["loss_fn_outputs"] == [{"logprobs": {"data": pytest.approx([-0.2, -0.3]), "dtype": "float32", "shape": [2]}}]
        assert (await world.result(futures[0]))["metrics"]["grad_norm"] == 2.5
        assert world.engines[0].calls == ["begin", ("pass", 0.3), ("rate", 0.5), "step", "begin"]
        assert await world.post("/forward_backward", first) == futures[2]  # long after its turn
        assert await world.result(futures[2]) == answer and world.engines[0].updates == 1
        refused = await world.post("/forward_backward", passed(model, 1, [0.0, 2.0]), 400)
        assert "number 1 belongs to another request" in refused["error"]["message"]
        assert (await world.done("/forward", {**passed(model, 3, [0.0, 1.0])}))["metrics"]["loss:sum"] == pytest.approx(0.3)
        assert len(world.engines[0].calls) == 5
        audited = Counter(json.loads(line)["path"].rpartition("/")[2] for line in world.audit_file.read_text().splitlines())
        changes = {"create_session": 1, "create_model": 1, "forward_backward": 5, "optim_step": 2, "forward": 1}
        assert audited == changes, "what is looked at leaves no line"


async def test_a_result_that_is_not_there_yet_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "RETRIEVE_SECONDS", 0.05)
    async with opened(tmp_path) as world:
        model = await world.model(await world.session())
        world.engines[0].may_go.clear()
        future = await world.post("/forward_backward", passed(model, 1, [0.0, 1.0]))
        again = await world.client.post("/retrieve_future", json={**future, "allow_metadata_only": True})
        assert again.status_code == 408 and again.json() == {"type": "try_again", "queue_state": "active", **future}
        monkeypatch.setattr(routes, "RETRIEVE_SECONDS", patience(20))
        world.engines[0].may_go.set()
        assert (await world.result(future))["metrics"]["loss:sum"] == pytest.approx(0.3)


async def test_a_request_that_finds_no_room_is_none(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        model = await world.model(await world.session())
        world.sessions.results._largest_number = 1
        first = await world.post("/forward_backward", passed(model, 1, [0.0, 1.0]))
        busy = await world.client.post("/optim_step", json=stepped(model, 2))
        assert busy.status_code == 429 and int(busy.headers["Retry-After"]) >= 1
        assert (await world.result(first))["metrics"] and world.engines[0].updates == 0
        assert (await world.done("/optim_step", stepped(model, 2)))["metrics"] and world.engines[0].updates == 1


async def test_a_name_that_is_taken_again_has_the_weights_that_were_saved_last(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        session = await world.session()
        model, drawn = await world.model(session), []
        for number in (1, 2):
            await world.done("/optim_step", stepped(model, 2 * number - 1))
            saved = await world.done("/save_weights_for_sampler", {"model_id": model, "seq_id": 2 * number, "path": "a"})
            body = {"session_id": session, "sampling_session_seq_id": number, "model_path": saved["path"]}
            sampler = (await world.post("/create_sampling_session", body))["sampling_session_id"]
            asked = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 2}, "sampling_session_id": sampler}
            drawn.append((await world.done("/asample", {**asked, "seq_id": 0}))["sequences"][0]["tokens"][0])
            await world.client.delete(f"/training_runs/{model}/checkpoints/sampler_weights/a")
        assert drawn == [2, 3]
        gone = await world.done("/asample", {**asked, "sampling_session_id": f"{session}:sample:1", "seq_id": 1})
        assert "not there any more" in gone["error"]


async def test_two_models_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        models = [await world.model(await world.session()) for _ in range(2)]
        world.engines[0].may_go.clear()
        slow = await world.post("/forward_backward", passed(models[0], 1, [0.0, 1.0]))
        for number in range(1, 4):
            assert (await world.done("/forward_backward", passed(models[1], number, [0.0, 1.0])))["metrics"]
        world.engines[0].may_go.set()
        assert (await world.result(slow))["metrics"]


async def test_a_loss_that_is_not_finite_fails_its_step_and_the_next_one_begins(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        model = await world.model(await world.session())
        engine = world.engines[0]
        engine.is_finite = False
        failed = await world.done("/forward_backward", passed(model, 1, [0.0, 1.0]))
        assert failed["category"] == "user" and "not finite" in failed["error"]
        engine.is_finite = True
        assert "not finite" in (await world.done("/forward_backward", passed(model, 2, [0.0, 1.0])))["error"]
        assert "not finite" in (await world.done("/optim_step", stepped(model, 3)))["error"]
        assert engine.updates == 0 and engine.calls[-2:] == ["discard", "begin"]
        assert (await world.done("/forward_backward", passed(model, 4, [0.0, 1.0])))["metrics"]
        assert (await world.done("/optim_step", stepped(model, 5)))["metrics"] and engine.updates == 1


async def test_what_was_saved_is_loaded_with_its_moments_or_without(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        session = await world.session()
        model = await world.model(session)
        await world.done("/optim_step", stepped(model, 1))
        save = {"model_id": model, "path": "a", "seq_id": 2, "ttl_seconds": 3600, "user_metadata": {"renderer": "x"}}
        saved = await world.done("/save_weights", save)
        assert saved["path"] == f"tinker://{model}/weights/a"
        taken = await world.done("/save_weights", {**save, "seq_id": 3})
        assert "is there already" in taken["error"]
        await world.done("/optim_step", stepped(model, 4))
        load = {"session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
        loaded = await world.done("/load_weights", load)
        assert loaded["model_id"] == f"{session}:train:1" and world.engines[1].updates == 1
        assert world.engines[1].calls == [("moments", "m"), "begin"]
        again = await world.done("/load_weights", {"model_id": model, "seq_id": 5, "path": saved["path"], "optimizer": False})
        assert again["path"] == saved["path"] and world.engines[0].calls[-1] == "close"
        assert world.engines[2].updates == 1 and world.engines[2].calls == ["begin"]
        missing = await world.done(
            "/load_weights", {"model_id": model, "seq_id": 6, "path": "tinker://a/weights/b", "optimizer": True}
        )
        assert "no checkpoint" in missing["error"]
        assert (await world.done("/optim_step", stepped(model, 7)))["metrics"]  # the model is what it was
        run = (await world.client.get(f"/training_runs/{model}")).json()
        assert run["last_checkpoint"]["tinker_path"] == saved["path"] and run["is_lora"] and run["lora_rank"] == 8
        assert run["last_checkpoint"]["expires_at"] and run["last_checkpoint"]["user_metadata"] == {"renderer": "x"}
        info = await world.post("/weights_info", {"tinker_path": saved["path"]})
        assert info == {"base_model": "base", "is_lora": True, "lora_rank": 8}
        assert (await world.client.delete(f"/training_runs/{model}/checkpoints/weights/a")).status_code == 200
        assert (await world.client.get(f"/training_runs/{model}/checkpoints")).json() == {"checkpoints": []}


async def test_a_sampler_has_the_weights_of_the_moment_at_which_it_was_made(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        session = await world.session()
        model = await world.model(session)
        base = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
        of_base = (await world.post("/create_sampling_session", base))["sampling_session_id"]
        samplers = []
        for number in (1, 2):
            await world.done("/optim_step", stepped(model, 2 * number - 1))
            save = {"model_id": model, "seq_id": 2 * number, "sampling_session_seq_id": number}
            samplers.append((await world.done("/save_weights_for_sampler", save))["sampling_session_id"])
        named = await world.done("/save_weights_for_sampler", {"model_id": model, "seq_id": 5, "path": "b"})
        of_name = {"session_id": session, "sampling_session_seq_id": 9, "model_path": named["path"]}
        samplers.append((await world.post("/create_sampling_session", of_name))["sampling_session_id"])
        asked = {"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, "sampling_params": {"max_tokens": 2}, "num_samples": 2}
        drawn = {}
        for sampler in (*samplers, of_base, samplers[0]):
            future = await world.post("/asample", {**asked, "sampling_session_id": sampler, "seq_id": 4})
            assert future["sample_sequence_ids"] == [f"{sampler}:4:0", f"{sampler}:4:1"]
            drawn[sampler] = [sequence["tokens"] for sequence in (await world.result(future))["sequences"]]
        assert list(drawn.values()) == [[[2, 4]] * 2, [[3, 4]] * 2, [[3, 4]] * 2, [[0, 4]] * 2]
        seeded = {**asked, "sampling_session_id": of_base, "seq_id": 5, "sampling_params": {"max_tokens": 2, "seed": 3}}
        assert (await world.done("/asample", seeded))["sequences"][0]["tokens"] == [0, 0]
        assert (await world.client.get(f"/samplers/{samplers[2]}")).json()["model_path"] == named["path"]
        failed = await world.done("/asample", {**seeded, "seq_id": 6, "sampling_params": {"max_tokens": 21}})
        assert failed == {"error": "too many tokens", "category": "user"}
        longest = {**seeded, "seq_id": 7, "prompt": {"chunks": [{"tokens": [1] * 32}]}}
        assert "has 1 to 31 tokens here" in (await world.post("/asample", longest, 400))["error"]["message"]


async def test_a_checkpoints_files_are_fetched_by_links_that_end(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        model = await world.model(await world.session())
        saved = await world.done("/save_weights_external", {"model_id": model, "path": "out", "seq_id": 1})
        assert saved["path"] == f"tinker://{model}/external_weights/out" and saved["size_bytes"] > 0
        at = f"/training_runs/{model}/checkpoints/external_weights/out"
        found = (await world.client.get(f"{at}/external_weights_urls")).json()
        assert sorted(found["urls"]) == ["adapter_config.json", "tokenizer.json", "weights"] and found["expires"]
        archive = await world.client.get(f"{at}/archive")
        assert archive.status_code == 302 and archive.headers["Expires"].endswith("GMT")
        world.client.headers.pop("X-API-Key")
        assert (await world.client.get(found["urls"]["weights"])).content == b"0"
        whole = await world.client.get(archive.headers["Location"])
        with tarfile.open(fileobj=io.BytesIO(whole.content)) as made:
            assert made.getnames() == ["adapter_config.json", "tokenizer.json", "weights"]
        assert (await world.client.post(found["urls"]["weights"], content=b"1")).status_code == 405
        assert (await world.client.get(found["urls"]["weights"].replace("/tickets/", "/tickets/x"))).status_code == 404
        world.now = routes.LINK_SECONDS
        assert (await world.client.get(found["urls"]["weights"])).status_code == 404
        world.client.headers["X-API-Key"] = world.key
        encrypted = {"model_id": model, "path": "b", "seq_id": 2, "age_encryption_recipients": ["age1x"]}
        assert "age_encryption_recipients" in (await world.post("/save_weights_external", encrypted, 422))["error"]["message"]


async def test_an_archive_goes_when_its_link_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as world:
        model = await world.model(await world.session())
        await world.done("/save_weights", {"model_id": model, "path": "a", "seq_id": 1})
        at = f"/training_runs/{model}/checkpoints/weights/a/archive"
        links = [(await world.client.get(at)).headers["Location"]]
        monkeypatch.setattr(routes, "LINK_SECONDS", 0.01)
        links.append((await world.client.get(at)).headers["Location"])
        files = [tmp_path / "state" / "downloads" / link.rpartition("/")[2] for link in links]
        await until(lambda: not files[1].exists())
        assert files[0].exists() and (await world.client.get(links[0])).status_code == 200, "its own link is good"


async def test_what_was_written_of_a_checkpoint_goes_when_its_save_fails_or_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as world:
        session = await world.session()
        model, begun = await world.model(session), asyncio.Event()
        save = world.engines[0].save

        async def full(path: Path) -> None:
            await save(path)
            raise OSError("no space left on device")

        async def for_ever(path: Path) -> None:
            await save(path)
            begun.set()
            await asyncio.Event().wait()

        world.engines[0].save = full  # type: ignore[method-assign]
        failed = await world.done("/save_weights", {"model_id": model, "path": "a", "seq_id": 1})
        assert failed["error"] == "no space left on device"
        assert not list((tmp_path / "state" / "checkpoints").glob("*/*/*"))
        world.engines[0].save = for_ever  # type: ignore[method-assign]
        await world.post("/save_weights", {"model_id": model, "path": "a", "seq_id": 2})
        await asyncio.wait_for(begun.wait(), patience(10))
        await world.post(f"/sessions/{session}/finish", {})
        assert not list((tmp_path / "state" / "checkpoints").glob("*/*/*"))


async def test_samples_that_nobody_wants_any_more_are_not_drawn(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        session = await world.session()
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
        sampler = (await world.post("/create_sampling_session", body))["sampling_session_id"]
        world.rollout.may_go.clear()
        asked = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 2}, "sampling_session_id": sampler}
        future = await world.post("/asample", {**asked, "seq_id": 0})
        await world.post("/cancel_future", {"request_id": future["request_id"]})
        assert (await world.result(future))["error"] == "the request was cancelled"


async def test_a_session_that_ends_takes_its_models_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_file, "SWEEP_SECONDS", 0.02)
    async with opened(tmp_path, models=2, session_seconds=0.3) as world:
        first, second = await world.session(), await world.session()
        models = [await world.model(session) for session in (first, second)]
        full = await world.post("/create_model", {"session_id": first, "model_seq_id": 7, "base_model": "base"}, 400)
        assert "holds 2 models" in full["error"]["message"]
        await world.post(f"/sessions/{first}/finish", {"reason": {"type": "success"}})
        await world.post("/session_heartbeat", {"session_id": first}, 410)
        await world.post("/optim_step", stepped(models[0], 1), 410)
        assert world.engines[0].calls[-1] == "close"
        deadline = time.monotonic() + patience(10)
        for _ in range(20):  # one that is alive stays
            await world.post("/session_heartbeat", {"session_id": second})
            await asyncio.sleep(0.02)
        while world.sessions.all() or world.engines[1].calls[-1] != "close":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await world.model(await world.session())


def make_stale(world: World, session: str) -> None:
    world.sessions._sessions[session].seen -= 1000


async def test_a_client_that_ends_its_session_while_another_one_is_swept_does_not_end_the_sweeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_file, "SWEEP_SECONDS", 0.02)
    async with opened(tmp_path, session_seconds=100.0) as world:
        first, second, third = [await world.session() for _ in range(3)]
        await world.model(first)
        closing, may_go = asyncio.Event(), asyncio.Event()

        async def close() -> None:
            closing.set()
            await may_go.wait()

        world.engines[0].close = close  # type: ignore[method-assign]
        for session in (first, second, third):
            make_stale(world, session)
        await asyncio.wait_for(closing.wait(), patience(10))
        await world.post(f"/sessions/{second}/finish", {})
        await world.post("/session_heartbeat", {"session_id": third})
        fourth = await world.session()
        make_stale(world, fourth)
        may_go.set()
        await until(lambda: fourth not in world.sessions._sessions)
        assert [session.session_id for session in world.sessions.all()] == [third], "it has sent something"


async def test_a_model_that_cannot_be_closed_keeps_nothing_of_its_session_and_no_other_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions_file, "SWEEP_SECONDS", 0.02)
    async with opened(tmp_path, session_seconds=100.0) as world:
        first, second = await world.session(), await world.session()
        for number in range(2):
            await world.model(first, number)

        async def close() -> None:
            raise RuntimeError("the device is gone")

        world.engines[0].close = close  # type: ignore[method-assign]
        for session in (first, second):
            make_stale(world, session)
        await until(lambda: not world.sessions.all() and world.engines[1].calls[-1] == "close")
        assert not [one for one in (f"{first}:train:{number}:0" for number in range(2)) if one in world.sessions.results]
        assert "the device is gone" in caplog.text and first in caplog.text


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_an_engine_whose_state_is_not_loaded_is_closed(tmp_path: Path, *, is_cancelled: bool) -> None:
    async with opened(tmp_path) as world:
        session = await world.session()
        model = await world.model(session)
        saved = await world.done("/save_weights", {"model_id": model, "path": "a", "seq_id": 1})
        loading, make = asyncio.Event(), world.sessions._context.make_engine

        async def load_state(folder: Path) -> None:
            loading.set()
            if is_cancelled:
                await asyncio.Event().wait()
            raise OSError("the disk is gone")

        def made(folder: Path | None, adapter: LoraConfig | None) -> Training:
            engine = make(folder, adapter)
            engine.load_state = load_state  # type: ignore[method-assign]
            return engine  # type: ignore[return-value]

        world.sessions._context = replace(world.sessions._context, make_engine=made)
        other = await world.session()
        load = {"session_id": other, "model_seq_id": 0, "path": saved["path"], "optimizer": True}
        future = await world.post("/load_weights", load)
        await asyncio.wait_for(loading.wait(), patience(10))
        if is_cancelled:
            await world.post(f"/sessions/{other}/finish", {})
        else:
            assert (await world.result(future))["error"] == "the disk is gone"
        assert world.engines[1].calls == ["close"]


async def test_an_engine_that_is_made_too_late_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go = threading.Event(), threading.Event()
    async with opened(tmp_path) as world:
        make = world._make

        def slowly(folder: Path | None, adapter: LoraConfig | None) -> Training:
            begun.set()
            may_go.wait(patience(10))
            return make(folder, adapter)

        monkeypatch.setattr(world.sessions, "_context", replace(world.sessions._context, make_engine=slowly))
        session = await world.session()
        await world.post("/create_model", {"session_id": session, "model_seq_id": 0, "base_model": "base"})
        await until(begun.is_set)
        await world.post(f"/sessions/{session}/finish", {})
        may_go.set()
        deadline = time.monotonic() + patience(10)
        while not world.engines or world.engines[0].calls != ["close"]:
            assert time.monotonic() < deadline, "an engine is left"
            await asyncio.sleep(0.01)


async def test_mistakes_are_sentences(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        session = await world.session()
        model = await world.model(session)
        for path, body, status, sentence in (
            ("/create_model", {"session_id": session, "model_seq_id": 5, "base_model": "other"}, 400, "no model 'other' here"),
            ("/create_model", {"session_id": "nobody", "model_seq_id": 5, "base_model": "base"}, 410, "no such session"),
            ("/forward_backward", passed(model, 0, [0.0, 1.0]), 400, "has the number 1"),
            ("/forward_backward", {"model_id": model}, 400, "forward_backward_input"),
            ("/optim_step", {"model_id": model, "seq_id": 1, "optimizer_params": {"type": "dimuon"}}, 422, "adam_params"),
            ("/optim_step", stepped(f"{session}:train:9", 1), 404, "no model"),
            ("/asample", {"prompt": {"chunks": []}, "sampling_params": {}}, 400, "sampling_session_id"),
        ):
            message = (await world.post(path, body, status))["error"]["message"]
            assert sentence in message, message
        answer = await world.client.post(
            "/forward_backward", content=b"\x0a\xff", headers={"Content-Type": "application/x-protobuf"}
        )
        assert answer.status_code == 400 and "no protobuf message" in answer.json()["error"]["message"]
        answer = await world.client.post("/forward_backward", content=b"x", headers={"Content-Encoding": "zstd"})
        assert answer.status_code == 415
        failed = await world.done("/forward_backward", passed(model, 1, [0.0, 1.0], loss="dro"))
        assert failed["category"] == "user" and "no loss 'dro'" in failed["error"]
        assert messages.METADATA_BYTES == 1 << 16


async def test_a_model_has_the_adapter_that_was_asked_for(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        session = await world.session()
        await world.model(session)
        asked = {"session_id": session, "base_model": "base"}
        part = {"rank": 4, "seed": 7, "train_mlp": False, "train_unembed": False}
        await world.done("/create_model", {**asked, "model_seq_id": 1, "lora_config": part})
        await world.done("/create_model", {**asked, "model_seq_id": 2})  # of nothing: all weights
        assert [engine.adapter for engine in world.engines] == [
            LoraConfig(rank=8), LoraConfig(rank=4, train_mlp=False, train_unembed=False, seed=7), None
        ]  # fmt: skip
        infos = [await world.post("/get_info", {"model_id": f"{session}:train:{n}"}) for n in range(3)]
        assert [(info["is_lora"], info["lora_rank"]) for info in infos] == [(True, 8), (True, 4), (False, None)]
        neither = {"rank": 4, "train_mlp": False, "train_attn": False}
        body = {**asked, "model_seq_id": 3, "lora_config": neither}
        assert "set train_attn or train_mlp" in str(await world.post("/create_model", body, 400))
        body = {**asked, "model_seq_id": 3, "lora_config": {"rank": 257}}
        assert "adapters have rank 256 at most here" in str(await world.post("/create_model", body, 400))


async def test_a_server_may_train_all_weights_instead(tmp_path: Path) -> None:
    async with opened(tmp_path, trains_whole_weights=True) as world:
        model = await world.model(await world.session())
        assert world.engines[0].adapter is None and not (await world.post("/get_info", {"model_id": model}))["is_lora"]
        assert (await world.client.get("/get_server_capabilities")).json()["training"] == "full_weights"
