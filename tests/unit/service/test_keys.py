"""KeyRing: made once, for their owner alone, with a scope and an end."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from asyncflow.service.keys import SCOPES, KeyRing
from asyncflow.types import UserError


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_first_start_makes_a_key_for_the_owner_alone_and_the_next_one_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "service" / "keys.json"
    keys = KeyRing.open(path, Clock())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (key,) = KeyRing.open(path, Clock()).all
    assert key == keys.all[0] and key.scope == "admin" and len(key.secret) > 40
    assert keys.find(key.secret) == key and keys.find(key.secret[:-1]) is None and keys.find("") is None


def test_a_key_ends_at_its_time(tmp_path: Path) -> None:
    clock = Clock()
    keys = KeyRing.open(tmp_path / "keys.json", clock)
    key = keys.add("guest", "read", expires=1010.0)
    assert not keys.is_over(key)
    clock.now = 1010.0
    assert keys.is_over(key) and not keys.is_over(keys.all[0])


def test_scopes_are_a_ladder(tmp_path: Path) -> None:
    keys = KeyRing.open(tmp_path / "keys.json", Clock())
    made = [keys.add("read", "read"), keys.add("drive", "drive")]
    may = {key.name: [scope for scope in SCOPES if key.may(scope)] for key in made}
    assert may == {"read": ["read"], "drive": ["read", "drive"]} and keys.all[0].may("admin")


def test_a_removed_key_is_not_found_and_the_last_one_that_makes_keys_stays(tmp_path: Path) -> None:
    keys = KeyRing.open(tmp_path / "keys.json", Clock())
    guest = keys.add("guest", "drive")
    with pytest.raises(UserError, match="'guest' already"):
        keys.add("guest", "read")
    keys.remove("guest")
    assert keys.find(guest.secret) is None and KeyRing.open(keys.path, Clock()).find(guest.secret) is None
    with pytest.raises(UserError, match="the last one that may make keys"):
        keys.remove("admin")
    with pytest.raises(UserError, match="no key 'guest'"):
        keys.remove("guest")


def test_files_that_are_no_keys_or_that_others_may_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    KeyRing.open(path, Clock())
    path.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        KeyRing.open(path, Clock())
    path.write_text('{"keys": [{"name": 3}]}')
    path.chmod(0o600)
    with pytest.raises(UserError, match="holds no keys"):
        KeyRing.open(path, Clock())
