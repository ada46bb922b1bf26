"""The web application of a service: every route but `/health` is behind a gate.

    request --> key? --> rate, bytes --> body, whole --> repeated? --> route --> audit line --> answer
                401      429            408 411 413     the old answer

consumes: requests
waits for: bodies, no longer than they may take; routes
is unblocked by: clients; the run
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Final

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import ValidationError

from asyncflow.service.keys import Key, KeyRing, Scope
from asyncflow.service.limits import ByteBudget, Callers, Denied, Limits
from asyncflow.service.reference import HEADERS, reference_page
from asyncflow.service.repeats import HEADER, MAX_ID, Repeats, WholeAnswer
from asyncflow.service.tickets import PREFIX as TICKETS
from asyncflow.service.tickets import Tickets, ticket_routes
from asyncflow.types import RunError, UserError

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
HEALTH: Final = "/health"
LOOKS: Final = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""
REPEATS_BYTES: Final = 32 << 20
LARGE_REPEATS_BYTES: Final = 256 << 20
MAX_MESSAGE: Final = 2_000
"""Characters of an error's sentence at most."""


class AuditLog:
    """Audit log: a line of JSON for each request that could change something: when, whose key, which route, the answer's status."""

    def __init__(self, path: Path | None) -> None:
        """Open the file `path` to append to it. None: no log is kept."""
        self._file: IO[bytes] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = path.open("ab", buffering=0)

    def note(self, line: Mapping[str, Any]) -> None:
        """Write a line with these fields. Does nothing if no log is kept."""
        if self._file is not None:
            self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePaths:
    """Paths whose requests a gate does not treat as all others."""

    streamed: tuple[str, ...] = ()
    """Beginnings of paths whose requests have bodies that are read as they come, by routes that put them into files."""
    looks: tuple[str, ...] = ()
    """Paths whose POST requests change nothing."""
    public: tuple[str, ...] = ()
    """Paths that need no key, beside `/health`."""
    at_once: tuple[str, ...] = ()
    """Paths whose requests are answered whether what is behind the gate is ready or not."""


class Gate:
    """ASGI application before another one: nothing of a request without a valid key reaches that.

    `tickets`: links that need no key, if there are any. `ready` is waited for before a request is answered.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        *,
        keys: KeyRing,
        limits: Limits,
        audit: AuditLog,
        paths: GatePaths,
        tickets: Tickets | None,
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._app, self._keys, self._limits, self._audit, self._tickets = app, keys, limits, audit, tickets
        self._ready, self._at_once = ready, frozenset(paths.at_once)
        self._streamed, self._looks, self._public = paths.streamed, frozenset(paths.looks), frozenset((HEALTH, *paths.public))
        self._budget, self._callers = ByteBudget(limits.buffered_bytes), Callers(limits, time.monotonic)
        self._repeats = Repeats(REPEATS_BYTES, LARGE_REPEATS_BYTES)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Request, or the application's life."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})
        try:
            if scope["type"] != "http":
                raise Denied(426, "this service speaks HTTP alone")
            await self._request(scope, receive, send)
        except Denied as refused:
            await _answer(scope, send, refused)

    async def _request(self, scope: Any, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if scope["path"] in self._public:
            if _length(headers):
                raise Denied(413, "nothing is expected here")
            await self._app(scope, receive, send)
            return
        if self._tickets is not None and scope["path"].startswith(TICKETS):
            self._check_ticket(scope, headers)
            await self._app(scope, receive, send)
            return
        key = self._key(scope, headers)
        if (connection := scope["state"].get("connection")) is not None:
            connection.proven()
        scope["state"]["key"] = key
        is_change = scope["method"] not in LOOKS and scope["path"] not in self._looks
        if not key.may("drive" if is_change else "read"):
            raise Denied(403, f"the key {key.name!r} may {key.scope} and nothing else")
        self._callers.enter(key.name)
        began, status = time.monotonic(), 0
        try:
            self._check_length(scope, headers)
            if self._ready is not None and scope["path"] not in self._at_once:
                await self._ready()
            if not is_change:
                await self._with_body(scope, headers, receive, send)
                return

            async def noted(message: Any) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            await self._once(key, scope, headers, receive, noted)
        except Denied as refused:
            status = refused.status
            raise
        finally:
            self._callers.leave(key.name)
            if is_change:
                self._note(scope, key, headers, status, time.monotonic() - began)

    def _key(self, scope: Any, headers: Mapping[bytes, bytes]) -> Key:
        """Valid key of a request. Raises `Denied`."""
        secret = _secret(headers, is_look=scope["method"] in LOOKS)
        key = None if secret is None else self._keys.find(secret)
        if key is not None and not self._keys.is_over(key):
            return key
        self._callers.refuse(_address(scope))
        ask = {"WWW-Authenticate": 'Bearer realm="asyncflow", Basic realm="asyncflow"'}
        if key is not None:
            raise Denied(401, "this key has expired: ask for another", ask)
        why = "no key: send it as Authorization: Bearer KEY" if secret is None else "this key is not known"
        raise Denied(401, why, ask)

    def _check_ticket(self, scope: Any, headers: Mapping[bytes, bytes]) -> None:
        """Raises `Denied` for a link that is not good."""
        assert self._tickets is not None
        if scope["method"] not in LOOKS or _length(headers):
            raise Denied(405, "a link is there to be fetched")
        if self._tickets.find(scope["path"]) is None:
            self._callers.refuse(_address(scope))
            raise Denied(404, "this link leads nowhere: it is over, or was never made; ask for another")
        if (connection := scope["state"].get("connection")) is not None:
            connection.proven()

    async def _once(self, key: Key, scope: Any, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> None:
        """A request that changes something; one that was made before gets the answer that there was."""
        if (given := headers.get(HEADER)) is None:
            await self._with_body(scope, headers, receive, send)
            return
        if not 0 < len(given) <= MAX_ID:
            raise Denied(400, f"the request id has {len(given)} bytes: take 1 to {MAX_ID}")
        request = (key.name, scope["method"], scope["path"], scope["query_string"].decode("latin-1"), given.decode("latin-1"))
        if (before := await self._repeats.begin(request)) is not None:
            await self._skip(headers, receive)
            await send({**before.start, "headers": [*before.start["headers"], (b"idempotency-replayed", b"true")]})
            await send({"type": "http.response.body", "body": before.body})
            return
        start: Any = None
        parts: list[bytes] = []

        async def kept(message: Any) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            else:
                parts.append(message.get("body", b""))
            await send(message)

        try:
            await self._with_body(scope, headers, receive, kept)
        finally:
            has_effect = start is not None and start["status"] < 300
            self._repeats.end(request, WholeAnswer(start, b"".join(parts)) if has_effect else None)

    def _is_streamed(self, scope: Any) -> bool:
        return bool(self._streamed) and scope["path"].startswith(self._streamed)

    def _check_length(self, scope: Any, headers: Mapping[bytes, bytes]) -> None:
        """Raises `Denied` for a body that is too long, or of a length that is not said."""
        length, most = _length(headers), self._limits.streamed_bytes if self._is_streamed(scope) else self._limits.body_bytes
        if length > most:
            raise Denied(413, f"{length} bytes are more than the {most} that a request may have here")

    async def _with_body(self, scope: Any, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> None:
        """Read the request's body, for which there is room, and have the request answered."""
        length = _length(headers)
        if self._is_streamed(scope):
            await self._as_it_comes(scope, self._paced(receive, length), send)
            return
        if not length:
            await self._app(scope, receive, send)
            return
        self._budget.take(length)
        try:
            body = await self._read(headers, receive)
            if body is None:
                return  # nobody is there any more
            has_come = False

            async def whole() -> Any:
                nonlocal has_come
                if has_come:
                    return await receive()
                has_come = True
                return {"type": "http.request", "body": body, "more_body": False}

            await self._app(scope, whole, send)
        finally:
            self._budget.give_back(length)

    async def _as_it_comes(self, scope: Any, receive: Receive, send: Send) -> None:
        """Have a request answered that reads its body itself. Where it is answered before all of that is there, the connection
        ends: nobody reads the rest."""
        is_whole = False

        async def read() -> Any:
            nonlocal is_whole
            message = await receive()
            is_whole = not message.get("more_body", False)
            return message

        async def answered(message: Any) -> None:
            if message["type"] == "http.response.start" and not is_whole:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await self._app(scope, read, answered)

    async def _read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body; None if the client has gone. Raises `Denied` for one that is late."""
        length, parts = _length(headers), []
        paced = self._paced(receive, length)
        while True:
            message = await paced()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message["body"])
            if not message["more_body"]:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _skip(self, headers: Mapping[bytes, bytes], receive: Receive) -> None:
        """Read a body that nobody needs, so that the connection can go on, and keep nothing of it."""
        paced = self._paced(receive, _length(headers))
        while (await paced()).get("more_body", False):
            pass

    def _paced(self, receive: Receive, length: int) -> Receive:
        """The request's body under its deadline."""
        deadline = asyncio.get_running_loop().time() + self._limits.body_seconds(length)
        is_there = False

        async def paced() -> Any:
            nonlocal is_there
            if is_there:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                raise Denied(408, "the body came too slowly", {"Connection": "close"}) from error
            is_there = not message.get("more_body", False)
            return message

        return paced

    def _note(self, scope: Any, key: Key, headers: Mapping[bytes, bytes], status: int, seconds: float) -> None:
        self._audit.note(
            {
                "time": time.time(),
                "key": key.name,
                "client": _address(scope),
                "method": scope["method"],
                "path": scope["path"],
                "request": headers.get(HEADER, b"").decode("latin-1"),
                "status": status,
                "bytes": _length(headers),
                "seconds": round(seconds, 6),
            }
        )


def make_app(
    *,
    title: str,
    description: str,
    keys: KeyRing,
    limits: Limits,
    audit: AuditLog,
    paths: GatePaths = GatePaths(),
    tickets: Tickets | None = None,
    ready: Callable[[], Awaitable[None]] | None = None,
) -> FastAPI:
    """Web application with a gate, `/health`, and the API's description under `/docs` (a browser is asked for a key as password).

    Routes are added to it; those that take `needs("admin")` ask for that scope. `tickets`, `ready`: see `Gate`.
    """
    app = FastAPI(title=title, description=description, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, keys=keys, limits=limits, audit=audit, paths=paths, tickets=tickets, ready=ready)

    @app.get(HEALTH, summary="Whether the service answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(reference_page(app.openapi()), headers=HEADERS)

    async def failed(request: Request, error: Exception) -> Response:
        match error:
            case Denied():
                return _refusal(error)
            case RequestValidationError():
                return _refusal(Denied(422, misfits(error)))
            case UserError():
                return _refusal(Denied(400, str(error)))
            case _:
                return _refusal(Denied(409, str(error)))

    if tickets is not None:
        app.include_router(ticket_routes(tickets))
    for kind in (Denied, RequestValidationError, UserError, RunError):
        app.add_exception_handler(kind, failed)
    return app


def misfits(error: RequestValidationError | ValidationError) -> str:
    """First places of a request that do not fit its schema, and why, as one sentence."""
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:8])


def key_of(request: Request) -> Key:
    """Key of a request that has passed the gate."""
    return request.state.key


CallerKey = Annotated[Key, Depends(key_of)]
"""Parameter of a route: whose request it is."""


def needs(scope: Scope) -> Any:
    """Dependency of a route whose key must have this scope."""

    async def check(key: CallerKey) -> None:
        if not key.may(scope):
            raise Denied(403, f"this needs a key that may {scope}, and {key.name!r} may {key.scope}")

    return Depends(check)


def _secret(headers: Mapping[bytes, bytes], *, is_look: bool) -> str | None:
    """Secret that a request shows. As a password of a browser's, which sends it by itself, it counts for looking alone."""
    if (given := headers.get(b"x-api-key")) is not None:
        return given.decode("latin-1")
    kind, _, value = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic" and is_look:
        try:
            return base64.b64decode(value, validate=True).decode("latin-1").partition(":")[2]
        except binascii.Error:
            return ""
    return None


def _address(scope: Any) -> str:
    """Address of a request's client; "" where there is none, as at a unix socket."""
    client = scope.get("client")
    return client[0] if client else ""


def _length(headers: Mapping[bytes, bytes]) -> int:
    """Length of a request's body. Raises `Denied` where it is not said."""
    if b"transfer-encoding" in headers:
        raise Denied(411, "say the body's length (Content-Length)", {"Connection": "close"})
    return int(headers.get(b"content-length", b"0"))


def _refusal(refused: Denied) -> Response:
    why = str(refused).encode("utf-8", "replace").decode()[:MAX_MESSAGE]
    return JSONResponse({"error": {"message": why}}, refused.status, headers=refused.headers)


async def _answer(scope: Any, send: Send, refused: Denied) -> None:
    """Answer at the gate. The connection ends where a body is still to come: nobody reads that."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
    if has_body:
        refused.headers["Connection"] = "close"

    async def nothing() -> Any:
        return {"type": "http.disconnect"}

    await _refusal(refused)(scope, nothing, send)
