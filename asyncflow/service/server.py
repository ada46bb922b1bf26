"""The HTTP server of a service: uvicorn on loopback, on a private unix socket, or by TLS.

consumes: connections
waits for: requests under way, when it stops, for `GRACE_SECONDS`
is unblocked by: their answers
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvicorn

from asyncflow.service.limits import Limits, limited
from asyncflow.transport.credentials import self_signed
from asyncflow.types import UserError

GRACE_SECONDS: Final = 3
BACKLOG: Final = 2048
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Listen:
    """Place where a service listens: a unix socket, or host and port (0: any)."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Listen:
        """Read `HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`. Raises `UserError`."""
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(Path(text.removeprefix("unix:")))
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise UserError(f"--listen {text} is no place to listen at: take HOST:PORT, such as 127.0.0.1:8321, or unix:PATH")
        return cls(None, host, int(port))

    @property
    def is_private(self) -> bool:
        """Whether only processes of this machine can connect."""
        if self.path is not None or self.host in LOOPBACK:
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False


class HttpServer:
    """A web application, served in the event loop in which it is started."""

    def __init__(self, app: Callable[..., Any], listen: Listen, limits: Limits, certificate: Path | None = None) -> None:
        """`certificate`: PEM file with certificate and key, for TLS. Raises `UserError` for an address that other machines reach
        and none."""
        if certificate is None and not listen.is_private:
            raise UserError(
                f"--listen {listen.host}:{listen.port} can be reached from other machines, so it needs TLS: give --certificate "
                f"FILE (PEM, certificate and key), or --self-signed, or listen at 127.0.0.1 or unix:PATH"
            )
        self._listen = listen
        config = uvicorn.Config(
            app,
            http=limited(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GRACE_SECONDS,
            reset_contextvars=True,
        )
        config.load()
        if certificate is not None:
            config.ssl = tls(certificate)
        self._has_tls = certificate is not None
        self._server = _QuietServer(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen. Returns the address, as a client takes it. Raises `UserError` where that cannot be."""
        bound = _bound(self._listen)
        self._serving = asyncio.create_task(self._server.serve([bound]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()
        if self._listen.path is not None:
            return f"unix:{self._listen.path}"
        host = f"[{self._listen.host}]" if ":" in self._listen.host else self._listen.host
        return f"{'https' if self._has_tls else 'http'}://{host}:{bound.getsockname()[1]}"

    async def stop(self) -> None:
        """Take no more connections, and end when what is under way has been answered, or `GRACE_SECONDS` later."""
        if self._serving is None:
            return
        self._server.should_exit = True
        await self._serving
        self._serving = None
        if self._listen.path is not None:
            self._listen.path.unlink(missing_ok=True)


class _QuietServer(uvicorn.Server):
    """uvicorn without hands on the process's signals, which are the run's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bound(listen: Listen) -> socket.socket:
    try:
        if listen.path is not None:
            listen.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _remove_dead(listen.path)
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)  # the socket is its owner's alone from the start
            try:
                bound.bind(str(listen.path))
            finally:
                os.umask(before)
        else:
            family, _, _, _, address = socket.getaddrinfo(
                listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            bound = socket.socket(family, socket.SOCK_STREAM)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
    except OSError as error:
        where = listen.path or f"{listen.host}:{listen.port}"
        raise UserError(f"nothing can listen at {where}: {error.strerror or error}") from error
    bound.setblocking(False)
    return bound


def _remove_dead(path: Path) -> None:
    """Remove the socket of a process that is gone."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
            try:
                trial.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def tls(certificate: Path) -> ssl.SSLContext:
    """Context of a server with this certificate and key. Raises `UserError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate)
    except ssl.SSLError as error:
        raise UserError(f"the certificate {certificate} cannot be used: it must hold a certificate and its key, as PEM") from error
    except OSError as error:
        raise UserError(f"the certificate {certificate} cannot be read: {error.strerror}") from error
    return context


def make_self_signed(path: Path, host: str) -> Path:
    """File with a certificate for this host and its key (PEM, mode 0600), made unless it is there. Clients trust it by a copy of
    the certificate beside it, `.crt`, which is returned."""
    public = path.with_suffix(".crt")
    if path.exists() and public.exists():
        return public
    secret, shown = self_signed("asyncflow service", "localhost", host)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(secret + shown)
    public.write_bytes(shown)
    return public
