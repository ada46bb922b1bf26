"""Routes of the Tinker API under /api/v1, for the versions of the SDK that docs/tinker.md names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from asyncflow.service.app import misfits
from asyncflow.service.limits import Denied
from asyncflow.service.tickets import Tickets
from asyncflow.service.tinker import messages, protobuf
from asyncflow.service.tinker.checkpoint_store import KINDS, SCHEME, Checkpoint
from asyncflow.service.tinker.sessions import Sessions
from asyncflow.types import UserError

RETRIEVE_SECONDS: Final = 20.0
"""Seconds for which `retrieve_future` waits for an answer; the SDK then asks again."""
LINK_SECONDS: Final = 900.0
WHOLE_WEIGHTS: Final = (
    "This server trains all weights of the model, not an adapter: lora_config has no effect, and learning rates are those of full "
    "fine-tuning."
)
ADAPTERS: Final = "The output layer gets no adapter here: train_unembed has no effect."
"""Remark for clients at the beginning of a session."""
LOOKS: Final = tuple(
    f"/api/v1/{path}"
    for path in (
        "retrieve_future",
        "session_heartbeat",
        "get_info",
        "weights_info",
        "telemetry",
        "client/config",
        "client/dynamic_config",
    )
)
"""Paths whose POST requests change nothing, so that they leave no line in the audit log: results are asked for all the time."""
CLIENT_CONFIG: Final = {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False, "sample_max_concurrent_requests": 256}
LOSSES: Final = ("cross_entropy", "importance_sampling", "ppo", "cispo", "custom")


def routes(sessions: Sessions, tickets: Tickets) -> APIRouter:
    """All routes over these sessions. `tickets`: links to the files of checkpoints."""
    router = APIRouter(prefix="/api/v1", tags=["tinker"])
    _add_session_routes(router, sessions)
    _add_training_routes(router, sessions)
    _add_sampling_routes(router, sessions)
    _add_result_routes(router, sessions)
    _add_checkpoint_routes(router, sessions)
    _add_download_routes(router, sessions, tickets)
    return router


def _add_session_routes(router: APIRouter, sessions: Sessions) -> None:
    base = sessions.base
    training, message = ("full_weights", WHOLE_WEIGHTS) if sessions.trains_whole_weights else ("lora", ADAPTERS)

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.post("/client/config")
    async def client_config() -> dict[str, Any]:
        return CLIENT_CONFIG

    @router.post("/client/dynamic_config")
    async def client_dynamic_config() -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @router.post("/telemetry")
    async def telemetry() -> dict[str, str]:
        return {"status": "accepted"}  # and dropped

    @router.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        context = {"max_context_length": base.max_context, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": base.name, **context}], "training": training, "losses": LOSSES}

    @router.post("/create_session")
    async def create_session(request: messages.CreateSession) -> dict[str, Any]:
        return {"type": "create_session", "session_id": sessions.create_session(request), "info_message": message}

    @router.post("/session_heartbeat")
    async def heartbeat(request: messages.OfSession) -> dict[str, str]:
        sessions.session(request.session_id)
        return {"type": "session_heartbeat"}

    @router.get("/sessions")
    async def list_sessions(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        return {"sessions": _page([session.session_id for session in sessions.all()], limit, offset)}

    @router.get("/sessions/{session_id}")
    async def get_session(session_id: str) -> dict[str, Any]:
        session = sessions.session(session_id)
        given = session.request
        return {
            "training_run_ids": list(session.models),
            "sampler_ids": list(session.samplers),
            "user_metadata": given.user_metadata,
            "display_name": given.display_name,
        }

    @router.post("/sessions/{session_id}/finish")
    async def finish(session_id: str) -> dict[str, str]:
        await sessions.end_session(session_id)
        return {}


def _add_training_routes(router: APIRouter, sessions: Sessions) -> None:
    base = sessions.base

    @router.post("/create_model")
    async def create_model(request: messages.CreateModel) -> dict[str, Any]:
        return _future(sessions.create_model(request))

    @router.post("/get_info")
    async def get_info(request: messages.OfModel) -> dict[str, Any]:
        model = sessions.model(request.model_id)
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": base.name,
            "is_lora": model.is_lora,
            "lora_rank": model.rank if model.is_lora else None,
            "model_data": {"model_name": base.name, "tokenizer_id": base.name},
        }

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        return await _pass(sessions, request, is_forward_only=False)

    @router.post("/forward")
    async def forward(request: Request) -> dict[str, Any]:
        return await _pass(sessions, request, is_forward_only=True)

    @router.post("/optim_step")
    async def optim_step(request: messages.OptimStep) -> dict[str, Any]:
        return _accepted(sessions.optim_step, request)

    @router.post("/save_weights")
    async def save_weights(request: messages.SaveWeights) -> dict[str, Any]:
        return _accepted(sessions.save_weights, request)

    @router.post("/save_weights_external")
    async def save_weights_external(request: messages.SaveWeightsExternal) -> dict[str, Any]:
        return _accepted(partial(sessions.save_weights, kind="external_weights"), request)

    @router.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(request: messages.SaveWeightsForSampler) -> dict[str, Any]:
        return _accepted(sessions.save_weights_for_sampler, request)

    @router.post("/load_weights")
    async def load_weights(request: messages.LoadWeights) -> dict[str, Any]:
        return _accepted(sessions.load_weights, request)


def _add_sampling_routes(router: APIRouter, sessions: Sessions) -> None:
    @router.post("/create_sampling_session")
    async def create_sampling_session(request: messages.CreateSamplingSession) -> dict[str, Any]:
        return {"type": "create_sampling_session", "sampling_session_id": sessions.create_sampler(request)}

    @router.get("/samplers/{sampler_id}")
    async def get_sampler(sampler_id: str) -> dict[str, Any]:
        sampler = sessions.sampler(sampler_id)
        return {"sampler_id": sampler.sampler_id, "base_model": sessions.base.name, "model_path": sampler.path}

    @router.post("/asample")
    async def asample(request: messages.SamplingRequest) -> dict[str, Any]:
        request_id = _valid(sessions.sample, request)
        return {**_future(request_id), "sample_sequence_ids": [f"{request_id}:{i}" for i in range(request.num_samples)]}

    @router.post("/cancel_future")
    async def cancel_future(request: messages.CancelFuture) -> dict[str, Any]:
        sessions.cancel(request.request_id)
        return {}


def _add_result_routes(router: APIRouter, sessions: Sessions) -> None:
    @router.post("/retrieve_future")
    async def retrieve_future(asked: messages.RetrieveFuture, request: Request) -> Response:
        sessions.touch(asked.request_id)
        answer = await sessions.results.get(asked.request_id, RETRIEVE_SECONDS)
        if answer is None:
            again = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return Response(msgspec.json.encode(again), 408, media_type="application/json")
        takes_protobuf = protobuf.MEDIA_TYPE in request.headers.get("accept", "")
        if takes_protobuf and (content := await asyncio.to_thread(answer.protobuf)) is not None:
            return Response(content, media_type=protobuf.MEDIA_TYPE)
        content = await asyncio.to_thread(lambda: msgspec.json.encode(answer.json()))
        return Response(content, media_type="application/json")


def _add_checkpoint_routes(router: APIRouter, sessions: Sessions) -> None:
    store = sessions.store

    @router.post("/weights_info")
    async def weights_info(request: messages.WeightsInfo) -> dict[str, Any]:
        checkpoint = await asyncio.to_thread(store.find, request.tinker_path)
        record = checkpoint.record
        return {"base_model": record.base_model, "is_lora": record.is_lora, "lora_rank": record.rank}

    @router.get("/training_runs")
    async def training_runs(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        found = await asyncio.to_thread(store.all)
        alive = [model_id for session in sessions.all() for model_id in session.models]
        names = list(dict.fromkeys([*alive, *(checkpoint.model_id for checkpoint in reversed(found))]))
        runs = [_training_run(sessions, name, [one for one in found if one.model_id == name]) for name in names]
        return {"training_runs": _page(runs, limit, offset), "cursor": _cursor(limit, offset, len(runs))}

    @router.get("/training_runs/{model_id}")
    async def training_run(model_id: str) -> dict[str, Any]:
        found = await asyncio.to_thread(store.all, model_id)
        if not found:
            sessions.model(model_id)
        return _training_run(sessions, model_id, found)

    @router.get("/training_runs/{model_id}/checkpoints")
    async def checkpoints_of(model_id: str) -> dict[str, Any]:
        return {"checkpoints": [one.description() for one in await asyncio.to_thread(store.all, model_id)]}

    @router.get("/checkpoints")
    async def checkpoints(limit: int = 100, offset: int = 0) -> dict[str, Any]:
        found = [one.description() for one in reversed(await asyncio.to_thread(store.all))]
        return {"checkpoints": _page(found, limit, offset), "cursor": _cursor(limit, offset, len(found))}

    @router.delete("/training_runs/{model_id}/checkpoints/{kind}/{name}")
    async def delete(model_id: str, kind: str, name: str) -> dict[str, Any]:
        await asyncio.to_thread(store.delete, await _found(sessions, model_id, kind, name))
        return {}

    @router.put("/training_runs/{model_id}/checkpoints/{kind}/{name}/ttl")
    async def keep_for(model_id: str, kind: str, name: str, request: messages.KeepFor) -> dict[str, Any]:
        checkpoint = await _found(sessions, model_id, kind, name)
        await asyncio.to_thread(store.keep_for, checkpoint, request.ttl_seconds)
        return {}


def _add_download_routes(router: APIRouter, sessions: Sessions, tickets: Tickets) -> None:
    @router.get("/training_runs/{model_id}/checkpoints/{kind}/{name}/archive")
    async def archive(model_id: str, kind: str, name: str, request: Request) -> Response:
        checkpoint = await _found(sessions, model_id, kind, name)
        file = await asyncio.to_thread(sessions.store.archive, checkpoint)
        expires = datetime.now(UTC) + timedelta(seconds=LINK_SECONDS)
        location = _link(request, tickets, file)
        asyncio.get_running_loop().call_later(LINK_SECONDS, partial(file.unlink, missing_ok=True))
        return Response(status_code=302, headers={"Location": location, "Expires": expires.strftime("%a, %d %b %Y %H:%M:%S GMT")})

    @router.get("/training_runs/{model_id}/checkpoints/{kind}/{name}/external_weights_urls")
    async def urls(model_id: str, kind: str, name: str, request: Request) -> dict[str, Any]:
        checkpoint = await _found(sessions, model_id, kind, name)
        files = sorted(checkpoint.model.iterdir())
        expires = datetime.now(UTC) + timedelta(seconds=LINK_SECONDS)
        return {"urls": {file.name: _link(request, tickets, file) for file in files}, "expires": expires.isoformat()}


def _link(request: Request, tickets: Tickets, file: Path) -> str:
    return f"{str(request.base_url).rstrip('/')}{tickets.make(file, LINK_SECONDS)}"


async def _pass(sessions: Sessions, request: Request, *, is_forward_only: bool) -> dict[str, Any]:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Denied(415, "send the body as it is, without Content-Encoding")
    body = await request.body()
    is_protobuf = protobuf.MEDIA_TYPE in request.headers.get("content-type", "")

    def read() -> tuple[messages.PassRequest, bytes]:
        if is_protobuf:
            given = messages.pass_of_protobuf(body)
        else:
            given = messages.pass_of_json(messages.JsonPass.model_validate_json(body), is_forward_only=is_forward_only)
        return given, given.content()

    try:
        given, content = await asyncio.to_thread(read)
    except ValidationError as error:
        raise UserError(misfits(error)) from error
    except ValueError as error:
        raise UserError(str(error)) from error
    return _accepted(partial(sessions.do_pass, content=content), given)


def _accepted(call: Callable[[Any], str], request: Any) -> dict[str, Any]:
    return _future(_valid(call, request))


def _valid(call: Callable[[Any], Any], request: Any) -> Any:
    """Result of a call, whose `ValueError` is a mistake of the client's."""
    try:
        return call(request)
    except ValueError as error:
        raise UserError(str(error)) from error


def _future(request_id: str) -> dict[str, Any]:
    return {"request_id": request_id}


def _training_run(sessions: Sessions, model_id: str, found: list[Checkpoint]) -> dict[str, Any]:
    last = {kind: next((one for one in reversed(found) if one.kind == kind), None) for kind in KINDS}
    model = next((models[model_id] for models in (one.models for one in sessions.all()) if model_id in models), None)
    trained = model or found[-1].record
    seen = found[-1].record.created if model is None else model.last_request
    return {
        "training_run_id": model_id,
        "base_model": found[-1].record.base_model if found else sessions.base.name,
        "model_owner": "asyncflow",
        "is_lora": trained.is_lora,
        "lora_rank": trained.rank if trained.is_lora else None,
        "last_request_time": datetime.fromtimestamp(seen, UTC).isoformat(),
        "last_checkpoint": (one := last["weights"]) and one.description(),
        "last_sampler_checkpoint": (two := last["sampler_weights"]) and two.description(),
    }


async def _found(sessions: Sessions, model_id: str, kind: str, name: str) -> Checkpoint:
    return await asyncio.to_thread(sessions.store.find, f"{SCHEME}{model_id}/{kind}/{name}")


def _page(items: list[Any], limit: int, offset: int) -> list[Any]:
    return items[max(0, offset) :][: max(0, limit)]


def _cursor(limit: int, offset: int, total: int) -> dict[str, int]:
    return {"limit": limit, "offset": offset, "total_count": total}
