"""The state machine of a task: by equality, and against a model of a few dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncflow.loops.samples import BEHIND_TRAINING
from asyncflow.transfer_queue.leases import DeadRow, Lease, StaleToken, Token, Want
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.transfer_queue.table import RowState, Table
from asyncflow.types import Array, Column, GroupMeta, Interval
from tests import builders
from tests.depth import few

meta = partial(builders.meta, low=0, high=9)

BITS = 2
WHOLE = TaskSpec("train", ("a", "b"), lease_seconds=10, max_failures=3)
PARTIAL = TaskSpec("rollout", ("prompt",), ("out",), whole_groups=False, lease_seconds=10, max_failures=3)
COLUMNS = tuple(Column(name, "int32") for name in ("a", "b", "other", "prompt", "out"))
EVERYTHING = 1 << 30
SIZES = [1, 16, 17, 300]
"""Rows of a batch: one, the most that go one by one, the fewest that go through numpy, and many."""


def schema_of(spec: TaskSpec, bits: int = BITS) -> Schema:
    return Schema(COLUMNS, (WHOLE, PARTIAL) if spec.name in ("train", "rollout") else (WHOLE, spec), bits)


def rows(group: int, size: int = 2) -> list[int]:
    return [(group << BITS) + sample for sample in range(size)]


def ids(indices: Iterable[int]) -> Array:
    return np.array(list(indices), np.int64)


def notify(
    table: Table, indices: Iterable[int], columns: Sequence[str], now: float = 0.0, tokens: Sequence[int] | None = None
) -> list[int]:
    weights = np.array(tokens, np.int32) if tokens is not None else None
    return table.notify(ids(indices), schema_of(table.spec).mask(columns), weights, now)


def table_of(spec: TaskSpec, *metas: GroupMeta, ready: bool = True) -> Table:
    table = Table(spec, schema_of(spec), "now")
    table.admit(metas, 0)
    if ready:
        for m in metas:
            notify(table, rows(m.group, m.size), spec.reads)
    return table


def any_lease(table: Table, worker: str = "w", now: float = 0.0, **want: int | None) -> Lease | None:
    pick = table.ready.take(Want(**({"groups": 1} | want)))
    return table.hand_out(worker, now, pick) if pick is not None else None


def lease(table: Table, worker: str = "w", now: float = 0.0, **want: int) -> Lease:
    found = any_lease(table, worker, now, **want)
    assert found is not None
    return found


def numbers(found: Lease) -> list[int]:
    return [m.group for m in found.groups]


def counts(table: Table) -> tuple[int, int, int, int, int, int]:
    """Waiting, ready, leased, done, dead, filtered."""
    now = table.counts()
    return now["waiting"], now["ready"], now["leased"], now["done"], now["dead"], now["filtered"]


# -- what makes a row ready -----------------------------------------------------------------------------------------------------


def test_a_row_is_ready_when_all_the_columns_that_the_task_reads_are_there() -> None:
    table = table_of(WHOLE, meta(0), ready=False)
    assert any_lease(table) is None
    notify(table, rows(0), ["b"])
    assert any_lease(table) is None
    notify(table, rows(0), ["a", "other"])
    assert lease(table).rows == [rows(0)]


def test_a_task_of_whole_groups_waits_for_the_last_row_and_another_does_not() -> None:
    whole, partial = table_of(WHOLE, meta(0), ready=False), table_of(PARTIAL, meta(0), ready=False)
    notify(whole, rows(0)[:1], WHOLE.reads)
    notify(partial, rows(0)[:1], PARTIAL.reads)
    assert any_lease(whole) is None
    assert lease(partial).rows == [[0]]
    notify(whole, rows(0)[1:], WHOLE.reads)
    notify(partial, rows(0)[1:], PARTIAL.reads)
    assert lease(whole).rows == [[0, 1]]
    assert lease(partial).rows == [[1]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", [WHOLE, PARTIAL])
def test_batches_of_every_size_do_the_same(spec: TaskSpec, size: int) -> None:
    """One group per row, over more than one page, told of in disorder and twice."""
    schema = schema_of(spec, 0)
    table = Table(spec, schema, "now")
    first = (1 << 12) - size // 2
    table.admit([meta(first + i, size=1) for i in range(size)], 3)
    table.admit([meta(first + i, size=1, step=9) for i in range(size)], 4)
    table.notify(ids([0, *range(first, first + size), 1 << 40]), schema.mask(spec.reads[:-1]), None, 0)
    assert counts(table) == (size, 0, 0, 0, 0, 0)
    backwards = [*range(first + size - 1, first - 1, -1)] * 2
    tokens = np.array([*range(size)] + [100] * size)
    assert table.notify(ids(backwards), schema.mask(spec.reads), tokens, 0) == []
    assert counts(table) == (0, size, 0, 0, 0, 0)
    assert table.ready.available(Want(rows=1), EVERYTHING) == size and table.ready.available(Want(rows=1), 1) == 1
    assert table.rows_of(3).tolist() == [*range(first, first + size)] and not len(table.rows_of(4))
    found = lease(table, rows=size, groups=0)
    assert found.indices == [*range(first, first + size)] and found.units == [3] * size
    weight = sum(max(100, i) for i in range(size))
    assert table.leases.outstanding("w") == (size, weight)
    for _ in range(2):
        table.notify(ids(backwards), 0, np.maximum(tokens, 100) + 7, 0)
        assert table.leases.outstanding("w") == (size, weight + 7 * size)
    assert table.notify(ids(backwards), schema.mask(spec.outputs), None, 0) == [*range(first, first + size)]
    assert counts(table) == (0, 0, 0, size, 0, 0) and table.leases.outstanding("w") == (0, 0)
    table.drop(ids([5, *backwards]))
    assert counts(table) == (0, 0, 0, 0, 0, 0) and table.counts()["done_total"] == size
    assert not table._pages._pages and not table._pages._kinds and table.state_of(first) is None


def test_the_lowest_priority_goes_first_and_then_the_lowest_partition() -> None:
    evaluations = [meta(6, step=0, topic="eval"), meta(3, step=2, low=2, topic="eval")]
    table = table_of(PARTIAL, meta(7, step=1), *evaluations, meta(5, step=0), meta(4, step=0, low=1))
    assert numbers(lease(table, groups=9)) == [5, 7, 6, 4, 3]


def test_evaluations_may_come_behind_all_of_training() -> None:
    evaluations = [GroupMeta(8 + v, 2, v, Interval(v, v), "eval", BEHIND_TRAINING) for v in range(2)]
    table = table_of(PARTIAL, *evaluations, meta(5, step=7, low=6), meta(4, step=6, low=6))
    assert [lease.groups[0].group for lease in iter(lambda: any_lease(table), None)] == [4, 5, 8, 9]


def test_an_evaluation_goes_behind_the_training_rows_of_all_steps_that_its_version_may_make() -> None:
    steps = [meta(step, step=step, low=max(0, step - 2), high=step) for step in range(5)]  # of versions step - 2 to step
    evaluations = [meta(10 + version, step=version, low=version, high=version, topic="eval") for version in range(2)]
    table = table_of(PARTIAL, *evaluations, *reversed(steps))
    assert [group.group for group in table.ready.peek(Want(groups=1, installed=0), 9)] == [0, 1, 2, 10]
    assert [group.group for group in table.ready.peek(Want(groups=1, installed=1), 9)] == [1, 2, 3, 11]
    assert [group.group for group in table.ready.peek(Want(groups=1, partition=1), 9)] == [1, 11]
    table.narrow(0, 1)  # it keeps its place
    assert [group.group for group in table.ready.peek(Want(groups=1), 9)] == [0, 1, 2, 10, 3, 11, 4]


def test_groups_of_one_kind_go_in_the_order_in_which_they_became_ready() -> None:
    table = table_of(WHOLE, meta(0), meta(1), meta(2), ready=False)
    for group in (2, 0, 1):
        notify(table, rows(group), WHOLE.reads)
    assert [group.group for group in table.ready.peek(Want(groups=1), 9)] == [2, 0, 1]
    assert numbers(lease(table, groups=2)) == [2, 0]
    assert numbers(lease(table, groups=2)) == [1]


def test_only_groups_that_the_installed_version_may_generate_are_leased() -> None:
    table = table_of(PARTIAL, meta(0, step=3, low=2, high=3), meta(1, step=4, low=4, high=4))
    assert any_lease(table, groups=9, installed=1) is None
    assert any_lease(table, groups=9, installed=5) is None
    assert table.ready.available(Want(groups=1, installed=4), EVERYTHING) == 2
    assert numbers(lease(table, groups=9, installed=4)) == [1]
    assert numbers(lease(table, groups=9, installed=2)) == [0]


def test_a_group_that_is_narrowed_goes_to_no_older_version_whoever_has_it() -> None:
    table = table_of(PARTIAL, meta(0), meta(1), meta(2))
    held = lease(table, installed=0)
    assert numbers(held) == [0]
    for group in (0, 1, 7):  # one in somebody's hands, one that is ready, one that nobody knows
        table.narrow(group, 3)
    table.narrow(1, 2)  # no version comes back
    assert numbers(lease(table, installed=0)) == [2]
    table.give_back(held.token)
    assert table.counts()["redelivered"] == 0
    assert any_lease(table, installed=2) is None
    assert numbers(lease(table, groups=9, installed=3)) == [1, 0]
    table.drop(ids(rows(0) + rows(1) + rows(2)))
    assert counts(table) == (0, 0, 0, 0, 0, 0)


def test_a_lease_of_one_step_takes_no_other() -> None:
    table = table_of(WHOLE, meta(0, step=0), meta(1, step=1), meta(2, step=2))
    assert table.ready.available(Want(groups=1, partition=1), EVERYTHING) == 2
    assert numbers(lease(table, groups=9, partition=1)) == [1]
    assert any_lease(table, groups=9, partition=1) is None


def test_a_task_of_one_topic_does_not_know_the_other() -> None:
    spec = TaskSpec("trained", ("a",), topic="train")
    table = Table(spec, schema_of(spec), "now")
    table.admit([meta(0, topic="eval"), meta(1)], 0)
    notify(table, rows(0) + rows(1), ["a"])
    assert numbers(lease(table, groups=9)) == [1]
    assert table.counts()["leased"] == 2


# -- limits ---------------------------------------------------------------------------------------------------------------------


def test_a_want_without_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a limit"):
        table_of(WHOLE, meta(0)).ready.take(Want())


def weighed(spec: TaskSpec, *tokens: Sequence[int]) -> Table:
    """Ready groups 0, 1, ... of rows with these tokens."""
    table = Table(spec, schema_of(spec), "now")
    for group, weights in enumerate(tokens):
        table.admit([meta(group, size=len(weights))], 0)
        notify(table, rows(group, len(weights)), spec.reads, tokens=weights)
    return table


@pytest.mark.parametrize(
    ("want", "whole", "partial"),
    [
        (Want(rows=5), [[0, 1], [4, 5]], [[0, 1], [4, 5], [8]]),
        (Want(rows=4), [[0, 1], [4, 5]], [[0, 1], [4, 5]]),
        (Want(rows=1), [[0, 1]], [[0]]),
        (Want(tokens=15), [[0, 1]], [[0, 1], [4]]),
        (Want(tokens=20), [[0, 1], [4, 5]], [[0, 1], [4, 5]]),
        (Want(tokens=1), [[0, 1]], [[0]]),
        (Want(groups=2, rows=3), [[0, 1]], [[0, 1], [4]]),
        (Want(groups=1, rows=9, tokens=99), [[0, 1]], [[0, 1]]),
        (Want(groups=9), [[0, 1], [4, 5], [8, 9]], [[0, 1], [4, 5], [8, 9]]),
    ],
)
def test_a_lease_stops_at_the_first_of_its_limits(want: Want, whole: list[list[int]], partial: list[list[int]]) -> None:
    """Whole groups are not split; at least a row or a group comes, however many tokens it has."""
    for spec, expected in ((WHOLE, whole), (PARTIAL, partial)):
        table = weighed(spec, [5, 5], [5, 5], [5, 5])
        pick = table.ready.take(want)
        assert pick is not None and [chosen for _, chosen in pick] == expected
        rest = table.ready.take(Want(rows=99))
        assert sorted(row for _, chosen in pick + (rest or []) for row in chosen) == [0, 1, 4, 5, 8, 9]


def test_large_groups_are_taken_whole_and_in_parts() -> None:
    for spec in (WHOLE, PARTIAL):
        table = Table(spec, schema_of(spec, 6), "now")
        table.admit([meta(0, size=40), meta(1, size=40)], 0)
        table.notify(ids([*range(40), *range(64, 104)]), schema_of(spec, 6).mask(spec.reads), None, 0)
        found = lease(table, groups=0, rows=50)
        assert [len(chosen) for chosen in found.rows] == ([40] if spec is WHOLE else [40, 10])
        assert table.ready.available(Want(rows=1), 999) == 80 - len(found.indices)
        assert table.expire(10) == [1]
        assert lease(table, groups=0, rows=50).indices == found.indices


def test_tokens_are_totals_and_are_counted_for_who_holds_the_rows() -> None:
    table = weighed(PARTIAL, [5, 7])
    notify(table, rows(0), [], tokens=[5, 3])
    taken = lease(table)
    assert table.leases.outstanding("w") == (2, 12) and table.leases.outstanding("nobody") == (0, 0)
    notify(table, [1, 1], [], tokens=[8, 9])
    assert table.leases.outstanding("w") == (2, 14)
    notify(table, [1], ["out"], tokens=[20])
    assert table.leases.outstanding("w") == (1, 5)
    table.fail(taken.token, [0], "x", 0)
    assert table.leases.outstanding("w") == (0, 0)


def test_groups_chosen_out_of_turn_are_not_handed_out_again_and_leave_nothing_behind() -> None:
    table = table_of(WHOLE, *[meta(group) for group in range(5)])
    assert table.ready.take_exactly([3, 1]) == [(3, rows(3)), (1, rows(1))]
    for group in (3, 99):
        with pytest.raises(ValueError, match=f"group {group} is not ready"):
            table.ready.take_exactly([0, group])
    back = table.hand_out("w", 0, table.ready.take_exactly([2]))
    table.fail(back.token, rows(2), "again", 0)
    assert [group.group for group in table.ready.peek(Want(rows=1), 9)] == [2, 0, 4]
    assert numbers(lease(table, groups=9)) == [2, 0, 4]
    assert not table._pages.queues._active
    for group in range(10, 5010):  # what is ready never runs out, yet the entries left behind do not pile up
        table.admit([meta(group)], 0)
        notify(table, rows(group), WHOLE.reads)
        if group > 10:
            table.ready.take_exactly([group])
    assert sum(len(kind.chunks) and kind.num_entries for kind in table._pages._kinds.values()) < 2000
    assert numbers(lease(table, groups=9)) == [10]


def test_rows_chosen_out_of_turn() -> None:
    table = weighed(PARTIAL, [1, 1], [2, 2])
    assert table.ready.take_rows([5, 0]) == [(1, [5]), (0, [0])]
    with pytest.raises(ValueError, match="not ready"):
        table.ready.take_rows([1, 5])
    assert [(g.group, g.rows, g.tokens) for g in table.ready.peek(Want(rows=1), 9)] == [(0, [1], [1]), (1, [4], [2])]
    whole = weighed(WHOLE, [1, 1])
    with pytest.raises(ValueError, match="without the rest"):
        whole.ready.take_rows([0])
    assert whole.ready.take_rows([0, 1]) == [(0, [0, 1])]


# -- what ends a row ------------------------------------------------------------------------------------------------------------


def test_outputs_make_a_row_done_and_the_last_one_ends_the_lease() -> None:
    table = table_of(PARTIAL, meta(0))
    taken = lease(table)
    assert notify(table, [0], ["out"]) == [0]
    assert table.leases.holders() == {"w": 1}
    assert notify(table, [1], ["out"]) == [1]
    assert table.leases.holders() == {} and counts(table) == (0, 0, 0, 2, 0, 0) and table.counts()["redelivered"] == 0
    with pytest.raises(StaleToken, match="is over"):
        table.leases.renew(taken.token, 1)
    assert table.expire(1e9) == []


def test_a_task_without_outputs_is_done_by_its_mark() -> None:
    table = table_of(WHOLE, meta(0))
    lease(table)
    assert notify(table, rows(0), ["done/rollout"]) == []
    assert notify(table, rows(0), ["done/train"]) == [0, 1]


def test_repeated_notices_change_nothing() -> None:
    table = table_of(PARTIAL, meta(0))
    table.admit([meta(0, size=4, step=9)], 1)
    notify(table, rows(0), PARTIAL.reads)
    taken = lease(table, groups=9)
    assert (taken.rows, taken.groups, taken.units) == ([rows(0)], [meta(0)], [0])
    notify(table, rows(0), PARTIAL.reads)
    assert any_lease(table) is None
    assert notify(table, rows(0), ["out"]) == [0, 1]
    assert notify(table, rows(0), ["out"]) == [] and table.counts()["done_total"] == 2
    notify(table, [99, 1000], ["prompt"])
    assert any_lease(table) is None


@pytest.mark.parametrize("mark", ["dead", "filtered"])
@pytest.mark.parametrize("size", [1, 20])
def test_marked_rows_are_out_whatever_their_state(mark: str, size: int) -> None:
    """Waiting, ready, picked, leased and done, in batches that go one by one and through numpy."""
    schema = schema_of(PARTIAL, 5)
    table = Table(PARTIAL, schema, "now")
    table.admit([meta(group, size=size) for group in range(5)], 0)
    of = [[(group << 5) + sample for sample in range(size)] for group in range(5)]
    table.notify(ids(of[1] + of[2] + of[3] + of[4]), schema.mask(["prompt"]), None, 0)
    table.notify(ids(of[4]), schema.mask(["out"]), None, 0)
    taken = table.hand_out("w", 0, table.ready.take_exactly([2]))
    pick = table.ready.take_exactly([3])
    everything = ids([row for rows_ in of for row in rows_])
    assert table.notify(everything, schema.mask([mark]), None, 0) == []
    assert table.counts()[mark] == table.counts()[f"{mark}_total"] == 5 * size == sum(counts(table))
    with pytest.raises(StaleToken):
        table.leases.renew(taken.token, 0)
    assert table.hand_out("w", 0, pick).rows == [] and table.leases.holders() == {}
    assert any_lease(table) is None and table.ready.available(Want(rows=1), 1) == 0
    table.notify(everything, schema.mask(["prompt", "out"]), None, 0)
    assert table.counts()[mark] == 5 * size


def test_marked_rows_do_not_hold_the_rest_of_their_group_up() -> None:
    table = table_of(WHOLE, meta(0, size=4), ready=False)
    notify(table, [0, 2], WHOLE.reads)
    notify(table, [1], ["filtered"])
    assert any_lease(table) is None
    notify(table, [3], ["dead"])
    assert lease(table).rows == [[0, 2]]


def test_a_final_failure_is_the_last_one_at_once() -> None:
    table = table_of(PARTIAL, meta(0))
    taken = lease(table)
    assert table.fail(taken.token, [0], "for good", 0, is_final=True) == [DeadRow(0, 0, "for good")]
    assert table.state_of(0) is RowState.DEAD and table.counts()["redelivered"] == 0
    assert table.fail(taken.token, [0], "again", 0, is_final=True) == []


def test_a_row_is_delivered_again_until_its_kth_failure_and_then_dead_with_that_error() -> None:
    table = table_of(PARTIAL, meta(0))
    for attempt in range(2):
        taken = lease(table)
        assert taken.most_deliveries == attempt and 0 in taken.rows[0]
        assert table.fail(taken.token, [0], f"error {attempt}", 0) == []
    taken = lease(table)
    assert table.fail(taken.token, [0], "the last one", 0) == [DeadRow(0, 0, "the last one")]
    assert table.state_of(0) is RowState.DEAD and table.dead == {0: "the last one"}
    assert any_lease(table) is None
    assert counts(table) == (0, 0, 1, 0, 1, 0) and table.counts()["redelivered"] == 2
    assert notify(table, [0], ["dead", "out"]) == [] and table.counts()["dead_total"] == 1
    table.drop(ids([0]))
    assert table.dead == {}


def test_a_lease_says_how_often_each_of_its_rows_had_been_delivered() -> None:
    table = table_of(PARTIAL, meta(0))
    taken = lease(table)
    table.fail(taken.token, [1], "x", 0)
    table.expire(10)
    again = lease(table)
    assert again.rows == [[0, 1]] and again.deliveries == [[1, 1]]
    table.fail(again.token, [1], "x", 10)
    notify(table, [0], ["out"], 10)
    third = lease(table, now=10)
    assert (third.rows, third.deliveries, third.most_deliveries) == ([[1]], [[2]], 2)


def test_failing_rows_that_are_not_held_changes_nothing() -> None:
    table = table_of(PARTIAL, meta(0), meta(1))
    taken = lease(table)
    assert table.fail(taken.token, rows(1), "not mine", 0) == []
    assert table.fail(taken.token, [0, 0], "once", 0) == []
    assert lease(table, groups=9).groups == [meta(0), meta(1)]


def test_expiry_delivers_again_without_limit_and_counts_no_failure() -> None:
    table = table_of(WHOLE, meta(0))
    for attempt in range(20):
        now = attempt * 10.0
        taken = lease(table, now=now)
        assert taken.most_deliveries == attempt
        assert table.leases.next_deadline == now + 10
        assert table.expire(now + 9.9) == []
        assert table.expire(now + 10.0) == [taken.token.lease]
    assert table.leases.next_deadline is None and table.counts()["expired"] == 40
    taken = lease(table)
    assert table.fail(taken.token, rows(0), "first failure", 200) == [] and table.counts()["redelivered"] == 42


def test_renewing_puts_the_deadline_off() -> None:
    table = table_of(WHOLE, meta(0))
    taken = lease(table, now=0)
    for now in range(1000):
        table.leases.renew(taken.token, now / 125)
    table.leases.renew(taken.token, 8)
    assert table.leases.next_deadline == 18
    assert table.expire(12) == []
    assert table.expire(18) == [taken.token.lease]
    with pytest.raises(StaleToken):
        table.leases.renew(taken.token, 18)


def test_what_a_worker_held_is_delivered_again_when_it_goes() -> None:
    table = table_of(WHOLE, meta(0), meta(1), meta(2), meta(3))
    gone, alive, more = lease(table, "gone", groups=2), lease(table, "alive"), lease(table, "gone")
    assert table.abandon("nobody") == []
    assert table.abandon("gone") == [gone.token.lease, more.token.lease]
    assert table.leases.holders() == {"alive": 2} and table.counts()["expired"] == 0
    assert numbers(lease(table, groups=9)) == [0, 1, 3]
    table.check(alive.token, rows(2))
    with pytest.raises(StaleToken):
        table.check(gone.token, rows(0))


def test_redelivered_groups_go_first() -> None:
    table = table_of(WHOLE, meta(0), meta(1), meta(2))
    taken = lease(table)
    table.fail(taken.token, rows(0), "again", 0)
    assert numbers(lease(table, groups=9)) == [0, 1, 2]


def test_a_large_lease_is_delivered_again_in_its_order() -> None:
    table = Table(WHOLE, schema_of(WHOLE), "now")
    some = [meta(group) for group in range(2040, 2060)]  # over two pages
    table.admit([*some, meta(9000)], 0)
    notify(table, [row for m in some for row in rows(m.group)], WHOLE.reads)
    taken = lease(table, groups=20)
    notify(table, rows(9000), WHOLE.reads)
    assert table.expire(10) == [taken.token.lease] and table.counts()["expired"] == 40
    assert numbers(lease(table, groups=99)) == [*range(2040, 2060), 9000]


def test_rows_that_are_done_do_not_hold_the_rest_of_their_group_up() -> None:
    table = table_of(WHOLE, meta(0))
    taken = lease(table)
    table.fail(taken.token, [1], "again", 0)
    assert any_lease(table) is None
    notify(table, [0], ["done/train"])
    assert lease(table).rows == [[1]]


def test_stale_tokens_are_refused() -> None:
    table = table_of(WHOLE, meta(0), meta(1))
    taken = lease(table)
    other = Token("train", "an earlier incarnation", taken.token.lease)
    for token in (other, Token("train", "now", 99)):
        for use in (lambda t: table.leases.renew(t, 0), lambda t: table.fail(t, [0], "x", 0), lambda t: table.check(t, [0])):
            with pytest.raises(StaleToken):
                use(token)
    table.check(taken.token, rows(0))
    with pytest.raises(StaleToken, match="does not hold row 4"):
        table.check(taken.token, [0, 4])
    table.expire(10)
    with pytest.raises(StaleToken, match="is over"):
        table.check(taken.token, rows(0))


def test_a_lease_holds_no_row_that_is_done_or_dropped() -> None:
    table = table_of(PARTIAL, meta(0, size=3))
    taken = lease(table)
    notify(table, [0], ["out"])
    with pytest.raises(StaleToken, match="row 0"):
        table.check(taken.token, [0])
    table.drop(ids([1]))
    with pytest.raises(StaleToken, match="row 1"):
        table.check(taken.token, [1])
    table.check(taken.token, [2])


def test_a_row_given_back_and_leased_again_is_not_the_first_lease_s_any_more() -> None:
    table = table_of(PARTIAL, meta(0))
    first = lease(table)
    table.fail(first.token, [0], "x", 0)
    second = lease(table, "other")
    assert table.fail(first.token, [0], "x", 0) == [] and table.state_of(0) is RowState.LEASED
    assert table.abandon("w") == [first.token.lease]
    table.check(second.token, [0])
    assert table.leases.holders() == {"other": 1}


def test_dropping_the_rows_that_are_missing_makes_the_rest_of_the_group_ready() -> None:
    table = table_of(WHOLE, meta(0, size=4), ready=False)
    notify(table, [0, 2], WHOLE.reads)
    table.drop(ids([1]))
    assert any_lease(table) is None
    table.drop(ids([3, 3, 77]))
    assert lease(table).rows == [[0, 2]]


@pytest.mark.parametrize("size", [2, 20])
def test_a_group_that_was_dropped_and_is_admitted_again_begins_anew(size: int) -> None:
    schema = schema_of(WHOLE, 5)
    table = Table(WHOLE, schema, "now")
    table.admit([meta(0, size=size), meta(1)], 0)  # group 1 keeps the page
    of_0 = ids(range(size))
    table.notify(of_0, schema.mask(WHOLE.reads), np.full(size, 9), 0)
    table.fail(lease(table).token, of_0.tolist(), "x", 0)
    lease(table)
    table.drop(of_0)
    table.admit([meta(0, size=size)], 0)
    assert counts(table) == (size + 2, 0, 0, 0, 0, 0)
    table.notify(of_0, schema.mask(WHOLE.reads[:1]), None, 0)
    assert any_lease(table) is None
    table.notify(of_0, schema.mask(WHOLE.reads), None, 0)
    for failure in range(3):
        again = lease(table)
        assert again.most_deliveries == failure and table.leases.outstanding("w") == (size, 0)
        assert len(table.fail(again.token, of_0.tolist(), "x", 0)) == (size if failure == 2 else 0)


def test_what_a_dropped_group_left_in_a_queue_does_not_stand_for_its_successor_of_another_step() -> None:
    table = table_of(WHOLE, meta(0), meta(1))
    table.drop(ids(rows(0)))
    table.admit([meta(0, step=1)], 0)
    notify(table, rows(0), WHOLE.reads)
    assert numbers(lease(table, groups=9, partition=0)) == [1]
    assert lease(table, groups=9, partition=1).groups == [meta(0, step=1)]


@pytest.mark.parametrize("num_groups", [5, 40])
def test_groups_of_different_sizes_admitted_together_have_the_rows_that_they_have(num_groups: int) -> None:
    metas = [meta(2048 - 3 + group, size=1 + group % 4) for group in range(num_groups)]
    table = table_of(WHOLE, *metas)
    assert table.rows_of(0).tolist() == schema_of(WHOLE).rows_of(metas).tolist()
    assert lease(table, groups=99).groups == metas


def test_a_group_vanishes_with_its_last_row_even_where_it_waited_or_was_leased() -> None:
    table = table_of(WHOLE, meta(0), meta(1), meta(2))
    taken = lease(table)
    table.drop(ids(rows(0) + rows(1)))
    of_2 = lease(table, groups=9)
    assert numbers(of_2) == [2]
    assert table.expire(10) == [of_2.token.lease]
    with pytest.raises(StaleToken):
        table.leases.renew(taken.token, 10)
    assert counts(table) == (0, 2, 0, 0, 0, 0) and table.counts()["redelivered"] == 2


def test_nothing_is_left_behind_by_many_steps() -> None:
    """A request looks at queue heads: those of steps that are over must not pile up."""
    table = Table(WHOLE, schema_of(WHOLE), "now")
    for step in range(500):
        table.admit([meta(step * 100, step=step)], 0)
        notify(table, rows(step * 100), WHOLE.reads)
        lease(table, partition=step, now=step * 0.001)
        notify(table, rows(step * 100), ["done/train"])
        table.drop(ids(rows(step * 100)))
        table.expire(step * 0.001)
    inside = table._pages
    left = [inside.queues._active, inside._kinds, inside.queues._kind_of, inside._pages, table.leases._held, table.leases._loads]
    assert [len(kept) for kept in left] == [0] * 6
    assert table.leases.next_deadline is None


def test_the_oldest_ready_row_tells_how_long_it_has_waited() -> None:
    table = table_of(WHOLE, meta(0), meta(1), meta(2, step=1), ready=False)
    assert table.ready.waiting_seconds(5) == 0
    notify(table, rows(2), WHOLE.reads, 1)
    notify(table, rows(0), WHOLE.reads, 2)
    notify(table, rows(1), WHOLE.reads, 7)
    assert table.ready.waiting_seconds(10) == 9
    lease(table, partition=1, now=10)
    assert table.ready.waiting_seconds(10) == 8
    taken = lease(table, now=10)
    assert table.ready.waiting_seconds(10) == 3
    table.fail(taken.token, rows(0), "x", 11)
    assert table.ready.waiting_seconds(12) == 5  # though a row that was given back goes first


def test_a_request_is_over_when_its_step_has_ended_or_the_table_is_closed() -> None:
    table = table_of(WHOLE, meta(0))
    table.end_partition(1)
    over = [Want(groups=1, partition=1), Want(groups=1, partition=0), Want(groups=1)]
    assert [table.is_over(want) for want in over] == [True, False, False]
    table.is_closed = True
    assert all(table.is_over(want) for want in over)


def test_a_request_for_a_partition_that_has_ended_gets_what_is_ready_and_then_nothing() -> None:
    table = table_of(WHOLE, meta(0, step=0), meta(1, step=1))
    first, second = (Want(groups=1, partition=partition) for partition in (0, 1))
    table.end_partition(0)
    assert table.is_over(first) and not table.has_nothing_left(first)
    assert numbers(lease(table, partition=0)) == [0] and numbers(lease(table, partition=1)) == [1]
    assert table.has_nothing_left(first) and not table.has_nothing_left(second)  # there may be more


def test_what_is_ready_is_known_by_the_last_version_that_may_make_it() -> None:
    table = table_of(PARTIAL, meta(0, high=0), meta(1, low=0, high=2, topic="eval"), meta(2, step=2, low=1, high=2), ready=False)
    versions = (-1, 0, 1, 2, 3)
    assert [table.ready.for_none_after(v) for v in versions] == [0] * 5
    assert [table.ready.last_version(v) for v in versions] == [None] * 5
    for group in range(3):
        notify(table, rows(group), PARTIAL.reads)
    assert [table.ready.for_none_after(v) for v in versions] == [0, 2, 2, 6, 6]
    assert [table.ready.last_version(v) for v in versions] == [0, 0, 2, 2, None]
    taken = lease(table, rows=1, installed=0)
    assert taken.indices == [0]  # one of a group's rows: the other is in nobody's hands yet
    assert table.ready.for_none_after(0) == 1 and table.ready.last_version(0) == 0
    other = lease(table, rows=1, installed=0)
    assert table.ready.for_none_after(0) == 0 and table.ready.last_version(0) == 2
    notify(table, taken.indices, PARTIAL.writes)
    table.abandon("w")
    assert other.indices == [1] and table.ready.for_none_after(0) == 1 and table.ready.last_version(-1) == 0


def test_the_rows_of_a_unit_are_those_that_it_would_tell_of() -> None:
    table = Table(WHOLE, schema_of(WHOLE), "now")
    table.admit([meta(2000), meta(1)], 0)
    table.admit([meta(2), meta(2000)], 1)
    notify(table, rows(1), ["done/train"])
    table.drop(ids([4]))
    assert (table.rows_of(0).tolist(), table.rows_of(1).tolist()) == ([5, 8000, 8001], [8, 9])
    assert not len(table.rows_of(2)) and table.rows_of(2).dtype == np.int64


class TableAgainstModel(RuleBasedStateMachine):
    """A row is a set of columns, leases are dictionaries: everything else follows by the definitions.

    Groups of up to 300 rows, some of them on two pages: batches go one by one and through numpy.
    """

    whole = True

    def __init__(self) -> None:
        super().__init__()
        self.spec = TaskSpec("t", ("a", "b"), ("out",), whole_groups=self.whole, lease_seconds=10, max_failures=2)
        self.schema = schema_of(self.spec, 9)
        self.table = Table(self.spec, self.schema, "now")
        self.now = 0.0
        self.metas: dict[int, GroupMeta] = {}
        self.columns: dict[int, set[str]] = {}  # of the rows that are known
        self.tokens: dict[int, int] = {}
        self.failures: dict[int, int] = {}
        self.deliveries: dict[int, int] = {}
        self.leases: dict[Token, tuple[set[int], float, str]] = {}
        self.redelivered = 0

    def end(self, row: int) -> str | None:
        return next((end for end in ("dead", "filtered", "out") if end in self.columns[row]), None)

    def rows(self, group: int) -> list[int]:
        return [row for row in range(group << 9, (group << 9) + self.metas[group].size) if row in self.columns]

    def held(self) -> set[int]:
        return {row for taken, _, _ in self.leases.values() for row in taken}

    def leasable(self, group: int, held: set[int]) -> list[int]:
        live = [row for row in self.rows(group) if self.end(row) is None]
        free = [row for row in live if row not in held and self.columns[row] >= {"a", "b"}]
        return [] if self.whole and free != live else free

    def some(self, choose: st.DataObject, among: Iterable[int]) -> list[int]:
        """All, or one, or a part in disorder that repeats a row."""
        ordered = sorted(among)
        kind = choose.draw(st.sampled_from(["all", "all", "one", "part"])) if ordered else "all"
        if kind == "all":
            return ordered
        start = choose.draw(st.integers(0, len(ordered) - 1))
        return [ordered[start]] if kind == "one" else [ordered[start], *ordered[: start + 1 : 2]]

    def settle_leases(self) -> None:
        """Rows that are done, dead, filtered or dropped leave their lease; one without rows is over."""
        for token, (taken, deadline, worker) in list(self.leases.items()):
            left = {row for row in taken if row in self.columns and self.end(row) is None}
            if left:
                self.leases[token] = left, deadline, worker
            else:
                del self.leases[token]

    def give_back(self, token: Token, lost: Iterable[int]) -> None:
        taken, deadline, worker = self.leases.pop(token)
        self.redelivered += len(set(lost))
        if left := taken - set(lost):
            self.leases[token] = left, deadline, worker

    def one_lease(self, choose: st.DataObject) -> Token:
        return choose.draw(st.sampled_from(sorted(self.leases, key=lambda token: token.lease)))

    @rule(
        sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=3),
        step=st.integers(0, 1),
        low=st.integers(0, 1),
        topic=st.sampled_from(["train", "eval"]),
        columns=st.sampled_from([["a", "b"], ["a", "b"], ["a"], []]),
        tokens=st.sampled_from([None, 3]),
    )
    def put(self, sizes: list[int], step: int, low: int, topic: str, columns: list[str], tokens: int | None) -> None:
        first = len(self.metas)
        new = [meta(first + i, size=n, step=step, low=low, high=low + 1, topic=topic) for i, n in enumerate(sizes)]
        self.metas |= {m.group: m for m in new}
        self.table.admit(new, 0)
        added = self.schema.rows_of(new)
        self.columns |= {row: set(columns) for row in added.tolist()}
        self.tokens |= dict.fromkeys(added.tolist(), tokens or 0)
        weights = np.full(len(added), tokens) if tokens is not None else None
        assert self.table.notify(added, self.schema.mask(columns), weights, self.now) == []

    @precondition(lambda self: self.metas)
    @rule(
        choose=st.data(),
        columns=st.sampled_from([["a"], ["b"], ["a", "b"], ["a", "b"], ["out"], ["a", "b", "out"], ["filtered"], ["dead"]]),
        tokens=st.sampled_from([None, 2, 5]),
    )
    def notify(self, choose: st.DataObject, columns: list[str], tokens: int | None) -> None:
        known = {row for group in choose.draw(st.sets(st.sampled_from(sorted(self.metas)), min_size=1)) for row in self.rows(group)}
        chosen = [*self.some(choose, known), 1 << 50]
        weights = np.full(len(chosen), tokens) if tokens is not None else None
        before = {row for row in known if self.end(row)}
        news = self.table.notify(ids(chosen), self.schema.mask(columns), weights, self.now)
        for row in known & set(chosen):
            self.columns[row] |= set(columns)
            self.tokens[row] = max(self.tokens[row], tokens or 0)
        assert news == sorted(row for row in known - before if self.end(row) == "out")
        self.settle_leases()

    @rule(
        limits=st.sampled_from(
            [{"groups": 1}, {"groups": 3}, {"rows": 20}, {"rows": 1}, {"tokens": 60}, {"groups": 2, "rows": 310}]
        ),
        installed=st.sampled_from([None, None, None, 0, 1, 2]),
        step=st.sampled_from([None, None, None, 0, 1]),
        worker=st.sampled_from(["w0", "w1"]),
    )
    def lease(self, limits: dict[str, int], installed: int | None, step: int | None, worker: str) -> None:
        held = self.held()
        ready = {
            group: free
            for group, m in self.metas.items()
            if (installed is None or installed in m.interval)
            and step in (None, m.partition)
            and (free := self.leasable(group, held))
        }
        want = Want(installed=installed, partition=step, **limits)
        assert self.table.ready.available(want, EVERYTHING) == sum(map(len, ready.values()))
        assert {g.group: g.rows for g in self.table.ready.peek(want, EVERYTHING)} == ready
        pick = self.table.ready.take(want)
        if pick is None:
            assert not ready
            return
        taken = self.table.hand_out(worker, self.now, pick)
        order = [(m.priority, m.partition) for m in taken.groups]
        best = sorted((self.metas[g].priority, self.metas[g].partition) for g in ready)
        assert order == best[: len(order)]
        whole = [found == ready[m.group] for m, found in zip(taken.groups, taken.rows, strict=True)]
        assert all(whole) if self.whole else all(whole[:-1])
        assert all(
            m == self.metas[m.group] and set(found) <= set(ready[m.group])
            for m, found in zip(taken.groups, taken.rows, strict=True)
        )
        weight = sum(self.tokens[row] for row in taken.indices)
        unit = taken.rows[0] if self.whole else taken.indices[:1]
        fits = len(taken.indices) <= (want.rows or EVERYTHING) and weight <= (want.tokens or EVERYTHING)
        assert len(taken.groups) <= (want.groups or EVERYTHING) and (fits or taken.indices == unit)
        if "groups" in limits and len(limits) == 1:
            assert len(taken.groups) == min(limits["groups"], len(ready))
        assert taken.deliveries == [[self.deliveries.get(row, 0) for row in found] for found in taken.rows]
        for row in taken.indices:
            self.deliveries[row] = self.deliveries.get(row, 0) + 1
        self.leases[taken.token] = set(taken.indices), self.now + 10, worker

    @precondition(lambda self: self.leases)
    @rule(choose=st.data())
    def complete(self, choose: st.DataObject) -> None:
        chosen = self.some(choose, self.leases[self.one_lease(choose)][0])
        assert self.table.notify(ids(chosen), self.schema.mask(["out"]), None, self.now) == sorted(set(chosen))
        for row in chosen:
            self.columns[row].add("out")
        self.settle_leases()

    @precondition(lambda self: self.leases)
    @rule(choose=st.data())
    def fail(self, choose: st.DataObject) -> None:
        token = self.one_lease(choose)
        chosen = self.some(choose, self.leases[token][0])
        dead = self.table.fail(token, [*chosen, 1 << 50], "why", self.now)
        for row in set(chosen):
            self.failures[row] = self.failures.get(row, 0) + 1
        expected = {row for row in chosen if self.failures[row] == 2}
        assert {(letter.row, letter.error) for letter in dead} == {(row, "why") for row in expected}
        for row in expected:
            self.columns[row].add("dead")
        self.give_back(token, set(chosen) - expected)
        self.settle_leases()

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        assert self.table.leases.next_deadline == min((deadline for _, deadline, _ in self.leases.values()), default=None)
        over = [token for token, (_, deadline, _) in self.leases.items() if deadline <= self.now]
        assert set(self.table.expire(self.now)) == {token.lease for token in over}
        for token in over:
            self.give_back(token, self.leases[token][0])
            with pytest.raises(StaleToken):
                self.table.leases.renew(token, self.now)

    @precondition(lambda self: self.leases)
    @rule(choose=st.data())
    def renew(self, choose: st.DataObject) -> None:
        token = self.one_lease(choose)
        self.table.leases.renew(token, self.now)
        self.leases[token] = (self.leases[token][0], self.now + 10, self.leases[token][2])

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def abandon(self, worker: str) -> None:
        over = [token for token, (_, _, w) in self.leases.items() if w == worker]
        assert set(self.table.abandon(worker)) == {token.lease for token in over}
        for token in over:
            self.give_back(token, self.leases[token][0])

    @precondition(lambda self: self.columns)
    @rule(choose=st.data())
    def drop(self, choose: st.DataObject) -> None:
        group = choose.draw(st.sampled_from(sorted({row >> 9 for row in self.columns})))
        chosen = self.some(choose, self.rows(group))
        self.table.drop(ids([*chosen, 1 << 50]))
        for row in set(chosen):
            del self.columns[row]
        self.settle_leases()

    @rule(step=st.integers(0, 2))
    def end_partition(self, step: int) -> None:
        self.table.end_partition(step)
        assert self.table.is_over(Want(groups=1, partition=step)) and not self.table.is_over(Want(groups=1))

    @invariant()
    def what_is_ready_is_known_by_its_last_version(self) -> None:
        held = self.held()
        ready = [m.interval.high for group, m in self.metas.items() for _ in self.leasable(group, held)]
        for version in range(4):
            assert self.table.ready.for_none_after(version) == sum(high <= version for high in ready)
            assert self.table.ready.last_version(version) == min((high for high in ready if high >= version), default=None)

    @invariant()
    def every_row_is_accounted_for(self) -> None:
        held = self.held()
        ends = {"out": RowState.DONE, "dead": RowState.DEAD, "filtered": RowState.FILTERED}
        states = dict[int, RowState]()
        for row, columns in self.columns.items():
            end = self.end(row)
            ready = RowState.READY if columns >= {"a", "b"} else RowState.WAITING
            states[row] = ends[end] if end else RowState.LEASED if row in held else ready
        assert {row: self.table.state_of(row) for row in self.columns} == states
        found = [*states.values()]
        order = [RowState.WAITING, RowState.READY, RowState.LEASED, RowState.DONE, RowState.DEAD, RowState.FILTERED]
        assert counts(self.table) == tuple(found.count(state) for state in order)
        assert self.table.counts()["redelivered"] == self.redelivered
        assert self.table.rows_of(0).tolist() == sorted(self.columns)
        for worker in ("w0", "w1"):
            of = [row for taken, _, w in self.leases.values() if w == worker for row in taken]
            assert self.table.leases.outstanding(worker) == (len(of), sum(self.tokens[row] for row in of))
            assert self.table.leases.holders().get(worker, 0) == len(of)
        assert sum(len(taken) for taken, _, _ in self.leases.values()) == len(held)


class PartialTableAgainstModel(TableAgainstModel):
    whole = False


TestWholeGroups = TableAgainstModel.TestCase
TestPartialGroups = PartialTableAgainstModel.TestCase
TestWholeGroups.settings = TestPartialGroups.settings = settings(
    max_examples=few(16, 80), stateful_step_count=30, deadline=None, derandomize=True, database=None
)
