"""How deep the tests go. `make test` runs what finds most faults in a few minutes; `make test-deep` runs everything.

@deep                        a test that only the deep suite runs
in_gate("a", of=[...])       parameters: these always, the others only in the deep suite
few(20, 2000)                so many seeds or examples in the gate, so many in the deep suite
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

IS_DEEP = os.environ.get("ASYNCFLOW_TESTS") == "deep"
IS_SMOKE = os.environ.get("ASYNCFLOW_TESTS") == "smoke"
"""Smoke tests of a suite with an environment of its own: those marked deep, too, with as few seeds or examples as in the gate."""
deep = pytest.mark.deep
T = TypeVar("T")


def few(in_gate: T, in_deep: T) -> T:
    """A number of seeds, rounds or examples, or whatever else there may be less of."""
    return in_deep if IS_DEEP else in_gate


def in_gate(*chosen: Any, of: Iterable[Any]) -> list[Any]:
    """Parameters of a test, in their order: those not chosen are left for the deep suite. Raises `ValueError` for a stranger."""
    every = list(of)
    if strangers := [one for one in chosen if one not in every]:
        raise ValueError(f"{strangers} are none of {every}")
    return [one if one in chosen else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=deep) for one in every]
