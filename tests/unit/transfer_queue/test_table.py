"""The state machine of a task: by equality, and against a model of a few dictionaries."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncflow.transfer_queue.table import DeadRow, Lease, StaleToken, Table, TaskSpec, Token
from asyncflow.types import GroupMeta, Interval

BITS = 2
WHOLE = TaskSpec("train", ("a", "b"), lease_seconds=10, max_failures=3)
PARTIAL = TaskSpec("rollout", ("prompt",), ("out",), whole_groups=False, lease_seconds=10, max_failures=3)


def meta(group: int, *, size: int = 2, step: int = 0, low: int = 0, high: int = 9, purpose: str = "train") -> GroupMeta:
    return GroupMeta(group, size, step, Interval(low, high), purpose)


def rows(group: int, size: int = 2) -> list[int]:
    return [(group << BITS) + sample for sample in range(size)]


def table_of(spec: TaskSpec, *metas: GroupMeta, ready: bool = True) -> Table:
    table = Table(spec, "now", BITS)
    table.admit(metas)
    if ready:
        for m in metas:
            table.notify(rows(m.group, m.size), list(spec.reads))
    return table


def lease(table: Table, worker: str = "w", now: float = 0.0, groups: int = 1, **choice: int) -> Lease:
    found = table.lease(worker, now, groups=groups, **choice)
    assert found is not None
    return found


def test_a_row_is_ready_when_all_the_columns_that_the_task_reads_are_there() -> None:
    table = table_of(WHOLE, meta(0), ready=False)
    assert table.lease("w", 0, groups=1) is None
    table.notify(rows(0), ["b"])
    assert table.lease("w", 0, groups=1) is None
    table.notify(rows(0), ["a", "other"])
    assert lease(table).rows == [rows(0)]


def test_a_task_of_whole_groups_waits_for_the_last_row_and_another_does_not() -> None:
    whole, partial = table_of(WHOLE, meta(0), ready=False), table_of(PARTIAL, meta(0), ready=False)
    whole.notify(rows(0)[:1], WHOLE.reads)
    partial.notify(rows(0)[:1], PARTIAL.reads)
    assert whole.lease("w", 0, groups=1) is None
    assert lease(partial).rows == [[0]]
    whole.notify(rows(0)[1:], WHOLE.reads)
    partial.notify(rows(0)[1:], PARTIAL.reads)
    assert lease(whole).rows == [[0, 1]]
    assert lease(partial).rows == [[1]]


def test_the_lowest_step_goes_first_and_training_before_evaluation() -> None:
    evaluations = [meta(6, step=0, purpose="eval"), meta(3, step=2, purpose="eval")]
    table = table_of(PARTIAL, meta(7, step=1), *evaluations, meta(5, step=0), meta(4, step=0, low=1))
    assert [m.group for m in lease(table, groups=9).groups] == [5, 4, 6, 7, 3]


def test_groups_of_one_kind_go_in_the_order_in_which_they_became_ready() -> None:
    table = table_of(WHOLE, meta(0), meta(1), meta(2), ready=False)
    for group in (2, 0, 1):
        table.notify(rows(group), WHOLE.reads)
    assert [m.group for m in lease(table, groups=2).groups] == [2, 0]
    assert [m.group for m in lease(table, groups=2).groups] == [1]


def test_only_groups_that_the_installed_version_may_generate_are_leased() -> None:
    table = table_of(PARTIAL, meta(0, step=3, low=2, high=3), meta(1, step=4, low=4, high=4))
    assert table.lease("w", 0, groups=9, installed=1) is None
    assert table.lease("w", 0, groups=9, installed=5) is None
    assert [m.group for m in lease(table, groups=9, installed=4).groups] == [1]
    assert [m.group for m in lease(table, groups=9, installed=2).groups] == [0]


def test_a_lease_of_one_step_takes_no_other() -> None:
    table = table_of(WHOLE, meta(0, step=0), meta(1, step=1))
    assert [m.group for m in lease(table, groups=9, step=1).groups] == [1]
    assert table.lease("w", 0, groups=9, step=1) is None


def test_a_task_of_one_purpose_does_not_know_the_other() -> None:
    spec = TaskSpec("train", ("a",), purpose="train")
    table = Table(spec, "now", BITS)
    table.admit([meta(0, purpose="eval"), meta(1)])
    table.notify(rows(0) + rows(1), ["a"])
    assert [m.group for m in lease(table, groups=9).groups] == [1]
    assert table.counts()["leased"] == 2


def test_outputs_make_a_row_done_and_settling_ends_the_lease() -> None:
    table = table_of(PARTIAL, meta(0))
    taken = lease(table)
    assert table.notify([0], ["out"]) == [0]
    table.settle(taken.token, [0])
    assert table.holders() == {"w": 1}
    assert table.notify([1], ["out"]) == [1]
    table.settle(taken.token, [1])
    assert table.holders() == {} and table.counts() == {"waiting": 0, "ready": 0, "leased": 0, "done": 2, "redelivered": 0}
    with pytest.raises(StaleToken, match="is over"):
        table.renew(taken.token, 1)
    assert table.expire(1e9) == 0


def test_a_task_without_outputs_is_done_by_its_mark() -> None:
    table = table_of(WHOLE, meta(0))
    lease(table)
    assert table.notify(rows(0), ["done/rollout"]) == []
    assert table.notify(rows(0), ["done/train"]) == [0, 1]


def test_repeated_notices_change_nothing() -> None:
    table = table_of(PARTIAL, meta(0))
    table.admit([meta(0, size=4, step=9)])
    table.notify(rows(0), PARTIAL.reads)
    taken = lease(table, groups=9)
    assert (taken.rows, taken.groups) == ([rows(0)], [meta(0)])
    table.notify(rows(0), PARTIAL.reads)
    assert table.lease("w", 0, groups=1) is None
    assert table.notify(rows(0), ["out"]) == [0, 1]
    assert table.notify(rows(0), ["out"]) == [] and table.num_done == 2
    table.notify([99, 1000], ["prompt"])
    assert table.lease("w", 0, groups=1) is None


def test_a_row_is_delivered_again_until_its_kth_failure_and_then_dead_with_that_error() -> None:
    table = table_of(PARTIAL, meta(0))
    for attempt in range(2):
        taken = lease(table)
        assert taken.attempt == attempt and 0 in taken.rows[0]
        assert table.fail(taken.token, [0], f"error {attempt}") == []
    taken = lease(table)
    assert table.fail(taken.token, [0], "the last one") == [DeadRow(0, 0, "the last one")]
    assert table.lease("w", 0, groups=1) is None
    assert table.counts()["leased"] == 1 and table.num_redelivered == 2


def test_failing_rows_that_are_not_held_changes_nothing() -> None:
    table = table_of(PARTIAL, meta(0), meta(1))
    taken = lease(table)
    assert table.fail(taken.token, rows(1), "not mine") == []
    assert table.fail(taken.token, [0, 0], "once") == []
    assert lease(table, groups=9).groups == [meta(0), meta(1)]


def test_expiry_delivers_again_without_limit_and_counts_no_failure() -> None:
    table = table_of(WHOLE, meta(0))
    for attempt in range(20):
        now = attempt * 10.0
        assert lease(table, now=now).attempt == attempt
        assert table.expire(now + 9.9) == 0
        assert table.expire(now + 10.0) == 2
    taken = lease(table)
    assert table.fail(taken.token, rows(0), "first failure") == [] and table.num_redelivered == 42


def test_renewing_puts_the_deadline_off() -> None:
    table = table_of(WHOLE, meta(0))
    taken = lease(table, now=0)
    table.renew(taken.token, 8)
    assert table.expire(12) == 0
    assert table.expire(18) == 2
    with pytest.raises(StaleToken):
        table.renew(taken.token, 18)


def test_what_a_worker_held_is_delivered_again_when_it_goes() -> None:
    table = table_of(WHOLE, meta(0), meta(1), meta(2))
    gone, alive = lease(table, "gone", groups=2), lease(table, "alive")
    assert table.abandon("gone") == 4
    assert table.holders() == {"alive": 2}
    assert sorted(m.group for m in lease(table, groups=9).groups) == [0, 1]
    table.check(alive.token, rows(2))
    with pytest.raises(StaleToken):
        table.check(gone.token, rows(0))


def test_redelivered_groups_go_first() -> None:
    table = table_of(WHOLE, meta(0), meta(1), meta(2))
    taken = lease(table)
    table.fail(taken.token, rows(0), "again")
    assert [m.group for m in lease(table, groups=9).groups] == [0, 1, 2]


def test_rows_that_are_done_do_not_hold_the_rest_of_their_group_up() -> None:
    table = table_of(WHOLE, meta(0))
    taken = lease(table)
    table.fail(taken.token, [1], "again")
    assert table.lease("w", 0, groups=1) is None
    table.notify([0], ["done/train"])
    assert lease(table).rows == [[1]]


def test_stale_tokens_are_refused() -> None:
    table = table_of(WHOLE, meta(0), meta(1))
    taken = lease(table)
    other = Token("train", "an earlier incarnation", taken.token.lease)
    for token in (other, Token("train", "now", 99)):
        for use in (lambda t: table.renew(t, 0), lambda t: table.fail(t, [0], "x"), lambda t: table.check(t, [0])):
            with pytest.raises(StaleToken):
                use(token)
    table.settle(other, rows(0))
    table.check(taken.token, rows(0))
    with pytest.raises(StaleToken, match="does not hold row 4"):
        table.check(taken.token, [0, 4])
    table.expire(10)
    with pytest.raises(StaleToken, match="is over"):
        table.check(taken.token, rows(0))


def test_a_lease_holds_no_row_that_is_done_or_dropped() -> None:
    table = table_of(PARTIAL, meta(0))
    taken = lease(table)
    table.notify([0], ["out"])
    with pytest.raises(StaleToken, match="row 0"):
        table.check(taken.token, [0])
    table.drop([1])
    with pytest.raises(StaleToken, match="row 1"):
        table.check(taken.token, [1])


def test_dropping_the_rows_that_are_missing_makes_the_rest_of_the_group_ready() -> None:
    table = table_of(WHOLE, meta(0, size=4), ready=False)
    table.notify([0, 2], WHOLE.reads)
    table.drop([1])
    assert table.lease("w", 0, groups=1) is None
    table.drop([3, 3, 77])
    assert lease(table).rows == [[0, 2]]


def test_a_group_vanishes_with_its_last_row_even_where_it_waited_or_was_leased() -> None:
    table = table_of(WHOLE, meta(0), meta(1), meta(2))
    taken = lease(table)
    table.drop(rows(0) + rows(1))
    assert [m.group for m in lease(table, groups=9).groups] == [2]
    assert table.expire(10) == 2  # of group 2 alone
    with pytest.raises(StaleToken):
        table.renew(taken.token, 10)
    assert table.counts() == {"waiting": 0, "ready": 2, "leased": 0, "done": 0, "redelivered": 2}


def test_nothing_is_left_behind_by_many_steps() -> None:
    """A request looks at queue heads: those of steps that are over must not pile up."""
    table = Table(WHOLE, "now", BITS)
    for step in range(50):
        table.admit([meta(step, step=step)])
        table.notify(rows(step), WHOLE.reads)
        taken = lease(table, step=step, now=step * 100.0)
        table.notify(rows(step), ["done/train"])
        table.settle(taken.token, rows(step))
        table.drop(rows(step))
        table.expire(step * 100.0)
    left = [table._queues, table._groups, table._leases, table._expiry]
    assert [len(kept) for kept in left] == [0, 0, 0, 0] and len(table._deadlines) <= 1


class TableAgainstModel(RuleBasedStateMachine):
    """Rows as (state, failures) in one dictionary, leases as (rows, deadline) in another."""

    whole = True

    def __init__(self) -> None:
        super().__init__()
        self.spec = TaskSpec("t", ("a", "b"), ("out",), whole_groups=self.whole, lease_seconds=10, max_failures=2)
        self.table = Table(self.spec, "now", BITS)
        self.now = 0.0
        self.metas: dict[int, GroupMeta] = {}
        self.columns: dict[int, set[str]] = {}  # of live rows that are not done
        self.failures: dict[int, int] = {}
        self.done: set[int] = set()
        self.gone: set[int] = set()
        self.leases: dict[Token, tuple[set[int], float, str]] = {}

    def held(self) -> list[int]:
        return [row for taken, _, _ in self.leases.values() for row in taken if row in self.columns]

    def leasable(self, group: int) -> list[int]:
        """The rows of a group that may be handed out now, by the definition."""
        held = self.held()
        live = [row for row in rows(group, self.metas[group].size) if row in self.columns]
        free = [row for row in live if row not in held and self.columns[row] >= {"a", "b"}]
        return [] if self.whole and free != live else free

    def some(self, choose: st.DataObject, among: Iterable[int]) -> list[int]:
        """Often all of them, or one."""
        ordered = sorted(among)
        whole, one = st.just(set(ordered)), st.sampled_from(ordered).map(lambda row: {row})
        return sorted(choose.draw(whole | one | st.sets(st.sampled_from(ordered))))

    def one_lease(self, choose: st.DataObject) -> Token:
        return choose.draw(st.sampled_from(sorted(self.leases, key=lambda token: token.lease)))

    @rule(
        size=st.integers(1, 4),
        step=st.integers(0, 1),
        low=st.integers(0, 1),
        purpose=st.sampled_from(["train", "eval"]),
        columns=st.sampled_from([["a", "b"], ["a", "b"], ["a"], []]),
    )
    def put(self, size: int, step: int, low: int, purpose: str, columns: list[str]) -> None:
        group = len(self.metas)
        self.metas[group] = meta(group, size=size, step=step, low=low, high=low + 1, purpose=purpose)
        self.columns |= {row: set(columns) for row in rows(group, size)}
        self.table.admit([self.metas[group]])
        assert self.table.notify(rows(group, size), columns) == []

    @precondition(lambda self: self.metas)
    @rule(choose=st.data(), columns=st.sampled_from([["a"], ["b"], ["a", "b"], ["a", "b"]]))
    def notify(self, choose: st.DataObject, columns: list[str]) -> None:
        m = self.metas[choose.draw(st.sampled_from(sorted(self.metas)))]
        chosen = self.some(choose, rows(m.group, m.size))
        assert self.table.notify(chosen, columns) == []
        for row in self.columns.keys() & set(chosen):
            self.columns[row] |= set(columns)

    @rule(
        groups=st.integers(1, 3),
        installed=st.sampled_from([None, None, None, 0, 1, 2]),
        step=st.sampled_from([None, None, None, 0, 1]),
    )
    def lease(self, groups: int, installed: int | None, step: int | None) -> None:
        ready = {
            group: free
            for group, m in self.metas.items()
            if (free := self.leasable(group)) and (installed is None or installed in m.interval) and step in (None, m.step)
        }
        worker = f"w{len(self.leases) % 2}"
        taken = self.table.lease(worker, self.now, groups=groups, installed=installed, step=step)
        if taken is None:
            assert not ready
            return
        assert len(taken.groups) == min(groups, len(ready))
        for m, found in zip(taken.groups, taken.rows, strict=True):
            assert found == ready[m.group]
        order = [(m.step, m.purpose != "train") for m in taken.groups]
        best = sorted((self.metas[g].step, self.metas[g].purpose != "train") for g in ready)
        assert order == best[: len(order)]
        assert not set(taken.indices) & set(self.held()) and not set(taken.indices) & (self.done | self.gone)
        self.leases[taken.token] = (set(taken.indices), self.now + 10, worker)

    @precondition(lambda self: self.leases)
    @rule(choose=st.data())
    def complete(self, choose: st.DataObject) -> None:
        token = self.one_lease(choose)
        chosen = self.some(choose, self.leases[token][0])
        news = self.table.notify(chosen, ["out"])
        self.table.settle(token, chosen)
        assert set(news) == self.columns.keys() & set(chosen)
        for row in news:
            del self.columns[row]
            self.done.add(row)
        self.forget(token, chosen)

    @precondition(lambda self: self.leases)
    @rule(choose=st.data())
    def fail(self, choose: st.DataObject) -> None:
        token = self.one_lease(choose)
        chosen = self.some(choose, self.leases[token][0])
        dead = self.table.fail(token, chosen, "why")
        expected = set()
        for row in self.columns.keys() & set(chosen):
            self.failures[row] = self.failures.get(row, 0) + 1
            if self.failures[row] == 2:
                expected.add(row)
                del self.columns[row]
                self.gone.add(row)
        assert {letter.row for letter in dead} == expected and all(letter.error == "why" for letter in dead)
        self.forget(token, chosen)

    def forget(self, token: Token, chosen: list[int]) -> None:
        taken, deadline, worker = self.leases.pop(token)
        if left := taken - set(chosen):
            self.leases[token] = (left, deadline, worker)

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        over = [token for token, (_, deadline, _) in self.leases.items() if deadline <= self.now]
        lost = [row for token in over for row in self.leases.pop(token)[0]]
        assert self.table.expire(self.now) == len(self.columns.keys() & set(lost))
        for token in over:
            with pytest.raises(StaleToken):
                self.table.renew(token, self.now)

    @precondition(lambda self: self.leases)
    @rule(choose=st.data())
    def renew(self, choose: st.DataObject) -> None:
        token = self.one_lease(choose)
        self.table.renew(token, self.now)
        self.leases[token] = (self.leases[token][0], self.now + 10, self.leases[token][2])

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def abandon(self, worker: str) -> None:
        lost = [row for token, (taken, _, w) in list(self.leases.items()) if w == worker for row in self.leases.pop(token)[0]]
        assert self.table.abandon(worker) == len(self.columns.keys() & set(lost))

    @precondition(lambda self: self.columns or self.done)
    @rule(choose=st.data())
    def drop(self, choose: st.DataObject) -> None:
        group = choose.draw(st.sampled_from(sorted({row >> BITS for row in self.columns.keys() | self.done})))
        chosen = self.some(choose, [row for row in self.columns.keys() | self.done if row >> BITS == group])
        self.table.drop(chosen)
        for row in chosen:
            self.columns.pop(row, None)
            self.done.discard(row)
            self.gone.add(row)

    @invariant()
    def every_row_is_accounted_for(self) -> None:
        held = set(self.held())
        free = self.columns.keys() - held
        ready = {row for row in free if self.columns[row] >= {"a", "b"}}
        counts = self.table.counts()
        assert (counts["done"], counts["leased"], counts["ready"], counts["waiting"]) == (
            len(self.done),
            len(held),
            len(ready),
            len(free - ready),
        )
        admitted = {row for m in self.metas.values() for row in rows(m.group, m.size)}
        assert admitted == self.columns.keys() | self.done | self.gone


class PartialTableAgainstModel(TableAgainstModel):
    whole = False


TestWholeGroups = TableAgainstModel.TestCase
TestPartialGroups = PartialTableAgainstModel.TestCase
TestWholeGroups.settings = TestPartialGroups.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
