"""Routes of a service's keys, `/v1/keys`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from asyncflow.service.app import needs
from asyncflow.service.keys import KeyRing, Scope
from asyncflow.service.routes.bodies import Body, Confirmation, Name


class MakeKey(Body):
    name: Name
    scope: Scope
    expires_seconds: Annotated[float, Field(gt=0, le=1e10)] | None = None
    """Seconds from now until the key ends; without it the key has no end."""


class KeySecret(BaseModel):
    secret: str


class KeyFacts(BaseModel):
    name: str
    scope: Scope
    expires: float | None
    """Unix time."""


def add_keys(router: APIRouter, keys: KeyRing) -> None:
    """Add the routes of these keys."""

    @router.get("/keys", tags=["keys"], dependencies=[needs("admin")])
    async def all_keys() -> list[KeyFacts]:
        """The keys, without their secrets."""
        return [KeyFacts(name=key.name, scope=key.scope, expires=key.expires) for key in keys.all]

    @router.post("/keys", tags=["keys"], dependencies=[needs("admin")])
    async def make_key(body: MakeKey) -> KeySecret:
        """Make a key. Its secret is told this once."""
        expires = None if body.expires_seconds is None else keys.clock() + body.expires_seconds
        return KeySecret(secret=keys.add(body.name, body.scope, expires).secret)

    @router.delete("/keys/{name}", tags=["keys"], dependencies=[needs("admin")])
    async def remove_key(name: Name) -> Confirmation:
        """Remove a key: it is refused from now on."""
        keys.remove(name)
        return Confirmation(message=f"the key {name} is removed")
