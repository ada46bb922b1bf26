"""What a unit has: rows, the columns that are there, those being written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.transfer_queue.index import PAGE_BITS, Index
from asyncflow.types import GroupMeta, Interval
from tests.depth import few

PAGE = 1 << PAGE_BITS
A, B, C = 1, 2, 4


def meta(group: int, size: int = 4) -> GroupMeta:
    return GroupMeta(group, size, 0, Interval(0, 0))


def array(*rows: int) -> np.ndarray:
    return np.array(rows, np.int64)


def write(index: Index, rows: Sequence[int], mask: int) -> list[bool]:
    claimed = index.claim(array(*rows), mask)
    index.settle(array(*rows)[claimed], mask, is_written=True)
    return claimed.tolist()


def has(index: Index, row: int) -> int:
    """The columns of a row that is there."""
    for rows, mask, _ in index.records():
        if row in rows.tolist():
            return mask
    raise KeyError(row)


def test_groups_are_admitted_once() -> None:
    index = Index(2)
    assert index.admit([meta(1), meta(2, 3), meta(1)]) == [meta(1), meta(2, 3)]
    assert index.admit([meta(2, 3), meta(0)]) == [meta(0)]
    assert index.num_rows == 11 and index.rows_of([2, 1, 9]).tolist() == [8, 9, 10, 4, 5, 6, 7]
    assert index.present(array(11, 10, 3, 99, 1 << 50)).tolist() == [10, 3]


@pytest.mark.parametrize(
    ("bits", "group", "size"), [(14, 1, 3 * PAGE + 5), (14, 0, PAGE), (13, 3, PAGE + 1), (2, PAGE // 4 - 1, 4)]
)
def test_a_group_may_fill_several_pages(bits: int, group: int, size: int) -> None:
    index = Index(bits)
    index.admit([meta(group, size)])
    first = group << bits
    rows = np.arange(first, first + size, dtype=np.int64)
    assert index.num_rows == size and np.array_equal(index.rows_of([group]), rows)
    assert not len(index.present(array(first - 1, first + size)))
    assert index.claim(rows, A).all()
    index.settle(rows, A, is_written=True)
    assert index.claim_groups([group], B) == [True]
    index.settle_groups([group], B, is_written=True)
    assert index.first_without(rows, A | B) is None
    index.add_tokens(rows, np.arange(size))
    assert np.array_equal(index.tokens(rows), np.arange(size))
    told = list(index.records())
    assert np.array_equal(np.concatenate([r for r, _, _ in told]), rows) and {mask for _, mask, _ in told} == {A | B}
    dropped, gone = index.drop(rows[1:])
    assert np.array_equal(dropped, rows[1:]) and gone == [] and index.num_rows == 1
    assert [r.tolist() for r, _, _ in index.records()] == [[first]] and len(index._pages) == 1
    assert index.drop(rows)[1] == [meta(group, size)] and not index._pages and index.num_rows == 0


def test_rows_of_several_pages_in_any_order_keep_their_own() -> None:
    index = Index(2)
    groups = [0, PAGE // 4, 3 * PAGE, 1 << 45]
    index.admit([meta(group) for group in groups])
    rows = array(*(4 * group + i for i in (2, 0) for group in reversed(groups)))
    index.add_tokens(rows, np.arange(len(rows)))
    assert index.tokens(rows).tolist() == list(range(8)) and index.tokens(rows[::-1]).tolist() == list(range(8))[::-1]
    assert write(index, rows[:3].tolist(), A) == [True] * 3
    assert index.claim(rows, A).tolist() == [False] * 3 + [True] * 5
    assert index.present(rows).tolist() == rows.tolist()


def test_a_column_is_claimed_by_one_and_written_or_released() -> None:
    index = Index(2)
    index.admit([meta(0)])
    assert index.claim(array(0, 1, 9), A | B).tolist() == [True, True, False]
    assert index.is_claimed(array(3, 1), B, [], 0) and not index.is_claimed(array(3, 1), C, [], 0)
    assert not index.is_claimed(array(3, 9), A, [0], A)
    assert index.claim(array(1, 2), B | C).tolist() == [False, True]
    assert index.first_without(array(0), A) == (0, A)  # claimed is not there
    index.settle(array(0), A | B, is_written=True)
    index.settle(array(1), A | B, is_written=False)
    assert index.claim(array(0, 1), B).tolist() == [False, True]
    assert index.first_without(array(0, 1), A | B) == (1, A | B)
    assert not index.is_claimed(array(0), A | B | C, [], 0)


def test_the_columns_of_a_group_are_those_of_its_rows() -> None:
    index = Index(2)
    index.admit([meta(0), meta(1)])
    assert index.claim_groups([0, 1, 7], A) == [True, True, False]
    assert index.claim_groups([0], A | B) == [False] and index.is_claimed(array(), 0, [5, 0], A)
    index.drop(array(2))
    index.settle_groups([0], A, is_written=True)
    index.settle_groups([1], A, is_written=False)
    assert index.claim_groups([0, 1], A) == [False, True]
    assert [has(index, row) for row in (0, 1, 3, 4)] == [A, A, A, 0]
    assert index.first_without(array(0, 2), A) == (2, A)  # the one that has gone
    assert {mask: metas for metas, mask in index.group_records()} == {A: [meta(0)], 0: [meta(1)]}


def test_what_is_dropped_while_it_is_written_does_not_come_back() -> None:
    index = Index(2)
    index.admit([meta(0)])
    index.claim(array(0, 1), A)
    index.claim_groups([0], B)
    assert index.drop(array(0, 9))[0].tolist() == [0]
    index.settle(array(0, 1), A, is_written=True)
    assert index.present(array(0, 1)).tolist() == [1]
    index.drop(array(1, 2, 3))
    index.settle_groups([0], B, is_written=True)
    assert index.num_rows == 0 and not index.metas and not list(index.records()) and not list(index.group_records())
    index.admit([meta(0)])
    assert has(index, 0) == 0 and index.claim(array(0), A).tolist() == [True] and index.tokens(array(0)).tolist() == [0]


def test_the_last_row_of_a_group_takes_it_along() -> None:
    index = Index(2)
    index.admit([meta(0), meta(1)])
    dropped, gone = index.drop(array(0, 1, 4, 5, 77))
    assert dropped.tolist() == [0, 1, 4, 5] and gone == []
    dropped, gone = index.drop(array(0, 7, 6, 2))
    assert dropped.tolist() == [7, 6, 2] and gone == [meta(1)] and index.num_rows == 1


Change = tuple[str, list[int], int]


@settings(max_examples=few(30, 150), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "fail", "drop", "admit"]), st.lists(st.integers(0, 47), unique=True), st.integers(1, 7))
    ),
)
def test_it_does_what_a_dictionary_does(changes: list[Change]) -> None:
    """12 groups across the border of two pages."""
    first = 4 * (PAGE // 4 - 6)
    index = Index(2)
    index.admit([meta(first // 4 + group) for group in range(12)])
    model = {first + i: 0 for i in range(48)}
    for kind, numbers, mask in changes:
        rows = [first + number for number in numbers]
        if kind == "drop":
            dropped, _ = index.drop(array(*rows))
            assert dropped.tolist() == [row for row in rows if row in model]
            model = {row: there for row, there in model.items() if row not in rows}
        elif kind == "admit":
            here = {row // 4 for row in model}
            assert [m.group for m in index.admit([meta(first // 4 + n // 4) for n in numbers])] == list(
                dict.fromkeys(row // 4 for row in rows if row // 4 not in here)
            )
            model |= {4 * (row // 4) + i: 0 for row in rows if row // 4 not in here for i in range(4)}
        else:
            free = index.claim(array(*rows), mask)
            assert free.tolist() == [row in model and not model[row] & mask for row in rows]
            index.settle(array(*rows)[free], mask, is_written=kind == "write")
            if kind == "write":
                model |= {row: model[row] | mask for row, is_free in zip(rows, free.tolist(), strict=True) if is_free}
        assert {int(row): there for found, there, _ in index.records() for row in found} == model
        assert index.num_rows == len(model) and set(index.metas) == {row // 4 for row in model}
