"""KeyRing of a service: secrets with a name, a scope and perhaps an end, in one file that only its owner may open.

    read    look at the run             drive   change what it does: prompts, leases, experience, weights, steps
    admin   stop it, and make keys

Each scope has what the ones before it have.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from asyncflow.run_dir import replace
from asyncflow.types import UserError

Scope = Literal["read", "drive", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
PREFIX: Final = "af-"
"""Beginning of a new key, so that one which lies in the wrong place is recognised."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """Key of a client. `expires`: Unix time in seconds; None: it has no end."""

    name: str
    secret: str
    scope: Scope
    expires: float | None = None

    def may(self, scope: Scope) -> bool:
        """Whether the key has this scope, or one above it."""
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key]


class KeyRing:
    """The keys of one service. `open` makes them, or reads them from their file."""

    def __init__(self, path: Path, keys: list[Key], clock: Callable[[], float], prefix: str = PREFIX) -> None:
        """`clock`: Unix time in seconds. `prefix`: what new secrets begin with."""
        self.path, self.clock, self._prefix = path, clock, prefix
        self._set(keys)

    @classmethod
    def open(cls, path: Path, clock: Callable[[], float], prefix: str = PREFIX) -> KeyRing:
        """Read the keys of a file. At the first start make it (mode 0600), with one key `admin`.

        Raises `UserError` for a file that others may open, that holds no keys, or that cannot be made.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            made = cls(path, [], clock, prefix)
            made.add("admin", "admin")
            return made
        except OSError as error:
            raise UserError(f"the keys in {path} cannot be read: {error.strerror}") from error
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise UserError(f"the keys in {path} may be open to others than you: make the file yours alone (chmod 600)")
            try:
                found = msgspec.json.decode(file.read(), type=_KeyFile).keys
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise UserError(f"the file {path} holds no keys ({error}): remove it, and new ones are made") from error
        return cls(path, found, clock, prefix)

    @property
    def all(self) -> list[Key]:
        """All keys, in the order in which they were made."""
        return [key for _, key in self._keys]

    def find(self, secret: str) -> Key | None:
        """Key with this secret; None if there is none. Every key is compared, in constant time, so that the time taken tells
        nothing. It may have expired: `is_over` says so."""
        digest, found = _digest(secret), None
        for of_key, key in self._keys:
            if hmac.compare_digest(of_key, digest):
                found = key
        return found

    def is_over(self, key: Key) -> bool:
        """Whether a key has expired."""
        return key.expires is not None and self.clock() >= key.expires

    def add(self, name: str, scope: Scope, expires: float | None = None) -> Key:
        """Make a key and write it into the file. Raises `UserError` for a name that is taken."""
        if any(key.name == name for key in self.all):
            raise UserError(f"there is a key {name!r} already: remove it first, or take another name")
        key = Key(name=name, secret=self._prefix + secrets.token_urlsafe(32), scope=scope, expires=expires)
        self._write([*self.all, key])
        return key

    def remove(self, name: str) -> None:
        """Remove a key: it is refused from now on. Raises `UserError` for one that there is not, and for the last one that may
        make others."""
        left = [key for key in self.all if key.name != name]
        if len(left) == len(self._keys):
            raise UserError(f"there is no key {name!r}")
        if not any(key.scope == "admin" for key in left):
            raise UserError(f"the key {name!r} is the last one that may make keys: make another of scope admin first")
        self._write(left)

    def _write(self, keys: list[Key]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            before = os.umask(0o077)  # of the file that `replace` makes; nothing else runs meanwhile
            try:
                replace(self.path, msgspec.json.format(msgspec.json.encode(_KeyFile(keys))))
            finally:
                os.umask(before)
        except OSError as error:
            raise UserError(f"the keys cannot be written to {self.path}: {error.strerror}") from error
        self._set(keys)

    def _set(self, keys: list[Key]) -> None:
        self._keys = [(_digest(key.secret), key) for key in keys]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
