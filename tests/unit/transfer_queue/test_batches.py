"""Batches taken apart for units, and put together again in the order of a lease."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.transfer_queue.batches import WireBatch, concatenate, take
from asyncflow.transfer_queue.schema import Schema
from asyncflow.types import Batch, Column, Ragged
from tests.depth import few

BITS = 2
SCHEMA = Schema(
    (
        Column("prompt", "int64", ragged=True, per="group"),
        Column("temperature", "float32", per="group"),
        Column("ids", "int16", ragged=True, shape=(2,)),
        Column("image", "uint8", shape=(2, 3)),
    ),
    (),
    BITS,
)


def batch(rows: list[int], groups: list[int] | None = None) -> Batch:
    """Row r has r % 3 ids."""
    groups = list(dict.fromkeys(row >> BITS for row in rows)) if groups is None else groups
    lengths = [row % 3 for row in rows]
    ids = np.repeat(np.array(rows, np.int16), lengths)[:, None] + np.array([0, 100], np.int16)
    columns = {
        "prompt": Ragged.from_arrays([np.full(group % 4, group) for group in groups], "int64"),
        "temperature": np.array(groups, np.float32),
        "ids": Ragged(ids, np.cumsum([0, *lengths])),
        "image": np.array(rows, np.uint8)[:, None, None] + np.arange(6, dtype=np.uint8).reshape(2, 3),
    }
    return Batch(np.array(rows, np.int64), np.array(groups, np.int64), columns)


def same(found: Batch, wanted: Batch) -> None:
    assert found.indices.tolist() == wanted.indices.tolist() and found.groups.tolist() == wanted.groups.tolist()
    assert set(found.columns) == set(wanted.columns)
    for name, values in found.columns.items():
        other = wanted.columns[name]
        if isinstance(values, Ragged):
            assert isinstance(other, Ragged) and values.offsets.tolist() == other.offsets.tolist()
            assert values.offsets.dtype == np.int64
            values, other = values.values, other.values
        assert isinstance(other, np.ndarray) and values.dtype == other.dtype and values.shape == other.shape
        assert values.tobytes() == other.tobytes()


def test_a_part_has_the_rows_and_the_groups_asked_for() -> None:
    whole = batch([0, 1, 4, 5, 13, 8])
    same(take(SCHEMA, whole, np.array([5, 1, 4]), np.array([2, 0, 3])), batch([8, 1, 13], [3, 0, 2]))
    same(take(SCHEMA, whole, np.arange(0), np.array([1])), batch([], [1]))


def test_all_of_it_is_not_copied() -> None:
    whole = batch([0, 4, 5])
    assert take(SCHEMA, whole, np.arange(3), np.arange(2)) is whole
    assert take(SCHEMA, whole, np.array([0, 2, 1]), np.arange(2)) is not whole
    assert concatenate(SCHEMA, [whole], whole.indices, whole.groups) is whole


@settings(max_examples=few(20, 100), deadline=None)
@given(st.lists(st.integers(0, 80), min_size=1, unique=True), st.integers(1, 4), st.randoms())
def test_apart_by_units_and_together_again_is_the_same(rows: list[int], num_units: int, random: object) -> None:
    whole = batch(rows)
    parts = []
    for unit in range(num_units):
        of_unit = np.flatnonzero((whole.indices >> BITS) % num_units == unit)
        random.shuffle(of_unit)  # type: ignore[attr-defined]
        groups = np.flatnonzero(whole.groups % num_units == unit)
        if len(of_unit):
            parts.append(take(SCHEMA, whole, of_unit, groups))
    random.shuffle(parts)  # type: ignore[attr-defined]
    same(concatenate(SCHEMA, parts, whole.indices, whole.groups), whole)


@pytest.mark.parametrize("rows", [[], [6], [0, 1, 5]])
def test_a_batch_in_a_message_is_the_batch(rows: list[int]) -> None:
    whole = batch(rows)
    wire = WireBatch.of(whole)
    same(wire.batch(), whole)
    assert len(wire.values) == len(whole.columns) and wire.layout.dtype == np.int64


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ([], []),
        ([1], []),
        ([1, 0], []),
        ([0, 1], []),
        ([-1, 0], []),
        ([0, 0, 7], []),
        ([0, 0], ["a"]),
        ([0, 0, 2, 0], ["a"]),
        ([0, 0, 0, 0], ["a", "a"]),
        ([0, 0, 0, 0], ["a"]),
    ],
)
def test_a_message_whose_layout_is_none_is_refused(layout: list[int], names: list[str]) -> None:
    with pytest.raises(ValueError, match="a batch w"):
        WireBatch(np.array(layout, np.int64), names, [np.zeros(0)] * len(names)).batch()
    with pytest.raises(ValueError, match="a batch without a layout"):
        WireBatch(np.zeros(2), [], []).batch()
