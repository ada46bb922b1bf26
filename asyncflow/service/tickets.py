"""Tickets: links to one file each, good for some minutes, for programs that fetch a file and have no key.

The client that asks for a link has a key; the link itself is the secret. It may be fetched any number of times until it is over.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from fastapi.responses import FileResponse

PREFIX: Final = "/tickets/"
LARGEST_NUMBER: Final = 10_000
"""Tickets that are good at the same time; older ones end."""


class Tickets:
    """Tickets of one service. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._files: OrderedDict[str, tuple[Path, float]] = OrderedDict()

    def make(self, file: Path, seconds: float) -> str:
        """Path of a link to this file, good for so many seconds."""
        secret = secrets.token_urlsafe(32)
        self._files[secret] = file, self._clock() + seconds
        if len(self._files) > LARGEST_NUMBER:
            self._files.popitem(last=False)
        return f"{PREFIX}{secret}/{file.name}"

    def find(self, path: str) -> Path | None:
        """File that a link leads to; None if there is no such link, or it is over."""
        secret = path.removeprefix(PREFIX).partition("/")[0]
        file, end = self._files.get(secret, (None, 0.0))
        if file is not None and self._clock() >= end:
            del self._files[secret]
            return None
        return file


def ticket_routes(tickets: Tickets) -> APIRouter:
    """Route by which files are fetched. The gate lets only good tickets through."""
    router = APIRouter()

    @router.get(f"{PREFIX}{{secret}}/{{name}}", response_class=FileResponse)
    async def fetch(secret: str, name: str) -> FileResponse:
        file = tickets.find(f"{PREFIX}{secret}")
        assert file is not None, "the gate has looked"
        return FileResponse(file, media_type="application/octet-stream")

    return router
