"""How deep the tests go. `make test` runs what finds most faults in a few minutes; `make test-deep` runs everything.

@deep                        a test that only the deep suite runs
in_gate("a", of=[...])       parameters: these always, the others only in the deep suite
few(20, 2000)                so many seeds or examples in the gate, so many in the deep suite

Of a full product of three parameters or more the gate takes what has every pair of values (`pairwise`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
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


def pairwise(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """All tests, but of one with three parameters or more only those cases that have each two values which some case has together.
    Which ones these are, depends on their order alone."""
    cases = defaultdict[str, dict[pytest.Item, set[tuple[object, object]]]](dict)
    for item in items:
        cases[item.nodeid.partition("[")[0]][item] = set(combinations(_values(item), 2))
    kept = set[pytest.Item]()
    for pairs_of in cases.values():
        kept.update(item for item, pairs in pairs_of.items() if not pairs)
        left = set[tuple[object, object]]().union(*pairs_of.values())
        while left:
            item = max(pairs_of, key=lambda each: len(pairs_of[each] & left))
            kept.add(item)
            left -= pairs_of[item]
    return kept


def _values(item: pytest.Item) -> list[object]:
    """What a case has of each parameter of its test, as something that is equal where it is the same; names that are parametrized
    together are one parameter."""
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    together = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [each.replace(",", " ").split() if isinstance(each, str) else list(each) for each in together]
    alone = [[name] for name in params if not any(name in each for each in names)]
    return [tuple((name, id(params[name])) for name in each if name in params) for each in [*names, *alone]]
