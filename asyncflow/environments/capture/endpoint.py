"""The endpoint: OpenAI's interface on loopback, with a key for each episode.

consumes: requests with an episode's key
waits for: the engine's answer to each
is unblocked by: the engine; the episode's end, which refuses what still waits
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from asyncflow.environments.capture.episode import CapturedEpisode
from asyncflow.environments.capture.wire import ModelAnswer, RefusedCall, event, read_request

MAX_REQUEST_BYTES: Final = 16 << 20
GRACE_SECONDS: Final = 1


class CaptureEndpoint:
    """HTTP server of a rollout worker, in its event loop."""

    def __init__(self) -> None:
        self._episodes: dict[str, CapturedEpisode] = {}
        self.base_url = ""
        routes = [
            Route("/v1/chat/completions", partial(self._serve, is_chat=True), methods=["POST"]),
            Route("/v1/completions", partial(self._serve, is_chat=False), methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        app = Starlette(routes=routes, exception_handlers={RefusedCall: _refused})
        config = uvicorn.Config(
            app, lifespan="off", log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=GRACE_SECONDS
        )
        self._server = _CaptureServer(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen on loopback; then `base_url` is what a client takes."""
        bound = socket.create_server(("127.0.0.1", 0))
        bound.setblocking(False)
        self._serving = asyncio.create_task(self._server.serve([bound]), name="capture endpoint")
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()
        self.base_url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"

    @contextlib.contextmanager
    def serving(self, episode: CapturedEpisode) -> Iterator[str]:
        """The key by which the episode's program is served, until the context ends."""
        key = secrets.token_urlsafe(24)
        self._episodes[key] = episode
        try:
            yield key
        finally:
            del self._episodes[key]

    async def stop(self) -> None:
        """Take no more connections, and end."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._serving = None

    async def _models(self, http: HttpRequest) -> Response:
        self._episode(http)
        return JSONResponse(
            {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "asyncflow"}]}
        )

    async def _serve(self, http: HttpRequest, *, is_chat: bool) -> Response:
        episode = self._episode(http)
        request = read_request(await _body(http), is_chat=is_chat)
        answer = await episode.answer(request)
        if not request.stream:
            return JSONResponse(answer.whole())
        return StreamingResponse(_events(answer), media_type="text/event-stream")

    def _episode(self, http: HttpRequest) -> CapturedEpisode:
        _, _, key = http.headers.get("authorization", "").partition(" ")
        if (episode := self._episodes.get(key)) is None:
            raise RefusedCall(401, "invalid_api_key", "the key belongs to no episode that is under way")
        return episode


class _CaptureServer(uvicorn.Server):
    """uvicorn without hands on the process's signals, which are the run's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _body(http: HttpRequest) -> bytes:
    """The request's body. Raises `RefusedCall` as soon as it is, or says that it will be, too large."""
    too_large = RefusedCall(413, "too_large", f"a request has at most {MAX_REQUEST_BYTES} bytes")
    if int(http.headers.get("content-length", 0)) > MAX_REQUEST_BYTES:
        raise too_large
    body = bytearray()
    async for piece in http.stream():  # in chunks it says no length
        body += piece
        if len(body) > MAX_REQUEST_BYTES:
            raise too_large
    return bytes(body)


async def _events(answer: ModelAnswer) -> AsyncIterator[bytes]:
    for piece in answer.pieces():
        yield event(piece)
    yield event(None)


async def _refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RefusedCall)
    return JSONResponse(error.body, status_code=error.status)
