"""Requests to a service: repeated under their id where an answer was lost, for as long as there is patience.

    a call of the client's --request--> the service --> its answer, checked
                           <--OutOfReach-- nothing, from the first failure on, for `patience_seconds`

blocks at: the service
is unblocked by: its answer; the connection's end; `ANSWER_SECONDS`, in which nothing comes
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import xxhash

from asyncflow.types import RunError, UserError

PAUSE_SECONDS = 0.2
CHUNK_BYTES = 1 << 20
MAX_CONNECTIONS = 256
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 3700.0
"""Longest time that the service takes to answer a request; how long it waits for something is said in the request."""


class RunOver(RunError):
    """Error for what a run that is over cannot do any more."""


class OutOfReach(RunError):
    """Error for a service that cannot be reached, for as long as a client has patience."""


@dataclass(frozen=True, slots=True)
class ServiceAnswer:
    """Whole answer of a service."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class RepeatedRequests:
    """Requests to one service, for an event loop."""

    def __init__(self, address: str, key: str, trusted: ssl.SSLContext | None, patience_seconds: float) -> None:
        """See `AsyncClient`."""
        self.address, self._trusted, self._patience_seconds = address, trusted, patience_seconds
        self._path = address.removeprefix("unix:") if address.startswith("unix:") else None
        self._headers = {"Authorization": f"Bearer {key}"}
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Hang up."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def get(self, path: str) -> Any:
        return msgspec.json.decode((await self.request("GET", path)).content)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return msgspec.json.decode((await self.request("POST", path, body)).content)

    def _session(self) -> aiohttp.ClientSession:
        """Connections to the service, made with the first request: they are of the event loop that runs then."""
        if self._http is None:
            made = (
                aiohttp.TCPConnector(limit=MAX_CONNECTIONS, ssl=self._trusted or True)
                if self._path is None
                else aiohttp.UnixConnector(self._path, limit=MAX_CONNECTIONS)
            )
            self._http = aiohttp.ClientSession(
                connector=made,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._http

    def _url(self, path: str) -> str:
        return f"{'http://run' if self._path is not None else self.address.rstrip('/')}{path}"

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, file: Path | None = None
    ) -> ServiceAnswer:
        """Answer of the service to a request with this body, or the bytes of a file. A request whose answer was lost, or for which
        there was no room, is repeated under its id.

        Raises `UserError` for what it refuses, `RunError` for what cannot be done now.
        """
        deadline, headers, content = math.inf, {}, None
        if method != "GET":
            headers["Idempotency-Key"] = uuid.uuid4().hex
        if body is not None:
            headers["Content-Type"], content = "application/json", msgspec.json.encode(body)
        while True:
            begun = asyncio.get_running_loop().time()
            try:
                with contextlib.ExitStack() as opened:
                    sent = content if file is None else opened.enter_context(file.open("rb"))
                    async with self._session().request(
                        method, self._url(path), data=sent, headers=headers, allow_redirects=False
                    ) as got:
                        answer = ServiceAnswer(got.status, got.headers, await got.read())
            except (aiohttp.ClientError, TimeoutError) as error:
                gone = OutOfReach(f"the service at {self.address} cannot be reached: {_why(error)}")
                took = asyncio.get_running_loop().time() - begun
                if took > self._patience_seconds and not isinstance(error, TimeoutError):  # it was under way, for as long again
                    deadline = math.inf
                deadline = await self._wait(deadline, gone, error)
            else:
                if answer.status != 429:
                    return _checked(answer)
                deadline = await self._wait(deadline, RunError(_message(answer)), seconds=_pause(answer))

    async def _wait(
        self, deadline: float, failure: RunError, cause: Exception | None = None, *, seconds: float = PAUSE_SECONDS
    ) -> float:
        """Wait before a request is repeated. Returns when patience with it is over: it begins with the first failure, however long
        the request was under way before. Raises `failure` where it is over by then."""
        now = asyncio.get_running_loop().time()
        deadline = min(deadline, now + self._patience_seconds)
        if now + seconds > deadline:
            raise failure from cause
        await asyncio.sleep(seconds)
        return deadline

    async def download(self, path: str, target: Path) -> None:
        """A file, in pieces; one whose hash the service says is checked. One that was cut off, or for which there was no room, is
        fetched again.

        Raises `RunError` where it is not whole.
        """
        deadline, partial = math.inf, target.with_name(f"{target.name}.partial")
        while True:
            digest = xxhash.xxh3_128()
            try:
                async with self._session().get(self._url(path), allow_redirects=False) as got:
                    if got.status < 400:
                        with partial.open("wb") as file:
                            async for part in got.content.iter_chunked(CHUNK_BYTES):
                                file.write(part)
                                digest.update(part)
                        break
                    answer = ServiceAnswer(got.status, got.headers, await got.read())
            except (aiohttp.ClientError, TimeoutError) as error:
                gone = OutOfReach(f"{path} could not be fetched from {self.address}: {_why(error)}")
                deadline = await self._wait(deadline, gone, error)
            else:
                if answer.status != 429:
                    _checked(answer)
                deadline = await self._wait(deadline, RunError(_message(answer)), seconds=_pause(answer))
        if got.headers.get("X-Hash", digest.hexdigest()) != digest.hexdigest():
            raise RunError(f"{path} came as something else: its version was replaced meanwhile")
        partial.replace(target)


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _message(answer: ServiceAnswer) -> str:
    with contextlib.suppress(msgspec.DecodeError, LookupError, TypeError):
        return str(msgspec.json.decode(answer.content)["error"]["message"])
    return answer.content.decode(errors="replace")[:500] or f"status {answer.status}"


def _pause(answer: ServiceAnswer) -> float:
    """Seconds after which a request for which there was no room is welcome."""
    return float(answer.headers.get("Retry-After", PAUSE_SECONDS))


def _checked(answer: ServiceAnswer) -> ServiceAnswer:
    if answer.status < 400:
        return answer
    if answer.status in (400, 401, 403, 404, 413, 422):
        raise UserError(_message(answer))
    if answer.status == 410:
        raise RunOver(_message(answer))
    raise RunError(_message(answer))
