"""Which groups a step trains, where it wants those whose rewards vary."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.control.ledger import Candidates, Consumed, Decided, Ledger, StepTotals, TaskPlan, UpdatePlan, num_to_admit
from asyncflow.transfer_queue.leases import DeadRow
from asyncflow.types import GroupMeta
from tests.builders import meta
from tests.depth import few
from tests.unit.control.test_ledger import BITS, Service, consumed, dead, settled

SELECTED = ("rollout", "select", "values")


def candidates(count: int, wanted: int, *, has_places: bool = False) -> Candidates:
    """Groups 0, 1, ... of two rows each, the rows of group g being 2 g and 2 g + 1."""
    one = Candidates(wanted, has_places=has_places)
    for group in range(count):
        one.add(group, [2 * group, 2 * group + 1])
    return one


def certain(verdicts: list[bool | None], wanted: int, *, has_places: bool) -> dict[int, int]:
    """The members, with their places, that are the same however the undecided ones turn out, by trying all of it."""
    unknown = [group for group, verdict in enumerate(verdicts) if verdict is None]
    outcomes = []
    for guesses in itertools.product((False, True), repeat=len(unknown)):
        known = [dict(zip(unknown, guesses, strict=True)).get(group, verdict) for group, verdict in enumerate(verdicts)]
        members = [group for group, is_varied in enumerate(known) if is_varied][:wanted]
        outcomes.append({group: place if has_places else 0 for place, group in enumerate(members)})
    return {group: place for group, place in outcomes[0].items() if all(o.get(group) == place for o in outcomes)}


@settings(max_examples=few(60, 300), deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=8),
    st.integers(1, 4),
    st.booleans(),
    st.randoms(use_true_random=False),
    st.integers(1, 8),
)
def test_a_member_is_told_once_and_as_soon_as_it_is_certain(
    varies: list[bool], wanted: int, has_places: bool, chance: random.Random, at_once: int
) -> None:
    one = candidates(len(varies), wanted, has_places=has_places)
    order = chance.sample(range(len(varies)), len(varies))
    known: list[bool | None] = [None] * len(varies)
    told = dict[int, int]()
    out, left = list[int](), list[int]()
    for start in range(0, len(order), at_once):
        assert one.num_missing == max(0, wanted - sum(verdict is not False for verdict in known))
        for group in order[start : start + at_once]:
            one.decide(group, is_varied=varies[group])
            one.decide(group, is_varied=not varies[group])  # what is decided stays so
            known[group] = varies[group]
        was_settled, decided = one.num_left == 0, one.newly_decided()
        if was_settled or decided is None:
            assert decided is None
            assert was_settled or told == certain(known, wanted, has_places=has_places)
            continue
        assert not told.keys() & decided.members.keys()
        told |= decided.members
        out += decided.degenerate
        left += decided.left
        assert told == certain(known, wanted, has_places=has_places)
        assert decided.is_settled is (len(told) == wanted)
        if decided.is_settled:
            last = max(told)
            assert decided.surplus == [*range(last + 1, len(varies))]
            assert sorted({g for g in out if g < last}) == [g for g in range(last) if not varies[g]]
            assert decided.num_degenerate_rows == 2 * sum(not v for v in varies[:last])
            assert decided.num_surplus_rows == 2 * len(decided.surplus)
            gone = [g for g in range(len(varies)) if g not in told]
            assert sorted(left) == [row for g in gone for row in (2 * g, 2 * g + 1)]  # each once
    expected = [group for group, is_varied in enumerate(varies) if is_varied][:wanted]
    assert sorted(told) == expected and len(out) == len(set(out))


def test_a_candidate_is_a_member_before_those_before_it_are_decided_where_only_membership_matters() -> None:
    one = candidates(3, 2)
    one.decide(1, is_varied=True)
    decided = one.newly_decided()
    assert decided is not None and decided.members == {1: 0} and not decided.is_settled
    placed = candidates(3, 2, has_places=True)
    placed.decide(1, is_varied=True)
    assert placed.newly_decided() is None
    placed.decide(0, is_varied=False)
    decided = placed.newly_decided()
    assert decided is not None and decided.members == {1: 0} and decided.degenerate == [0] and decided.left == [0, 1]


def test_the_last_candidate_may_be_needed_and_may_not() -> None:
    one = candidates(3, 2)
    one.decide(2, is_varied=True)
    assert one.newly_decided() is None  # groups 0 and 1 may vary
    one.decide(0, is_varied=True)
    assert one.newly_decided() == Decided({0: 0}, [], [])
    one.decide(1, is_varied=False)
    assert one.newly_decided() == Decided({2: 0}, [1], [2, 3], is_settled=True, num_degenerate_rows=2)
    assert one.newly_decided() is None


def test_a_group_of_which_no_row_is_left_is_degenerate_and_its_rows_are_counted_elsewhere() -> None:
    one = candidates(2, 1)
    assert one.fail(0, 0) and not one.fail(0, 0)
    assert one.num_missing == 0 and one.newly_decided() is None
    one.decide(1, is_varied=True)
    assert one.fail(0, 1)
    assert one.newly_decided() == Decided({1: 0}, [0], [], is_settled=True)


def test_as_many_are_taken_as_are_missing_times_the_factor_rounded_up() -> None:
    assert [num_to_admit(4, 1.0), num_to_admit(4, 1.3), num_to_admit(1, 1.01), num_to_admit(3, 2.0)] == [4, 6, 2, 6]


# -- in the ledger ---------------------------------------------------------------------------------------------------------------


def choosing(count: int = 3, members: int = 2, by_step: tuple[str, ...] = (), **updates: int) -> Ledger:
    """A step opened with so many candidates, of two rows each."""
    ledger = Ledger(BITS, TaskPlan(SELECTED, by_step=by_step, chosen_by="select", num_members=members), UpdatePlan(**updates))
    ledger.open([meta(group) for group in range(count)])
    return ledger


def rows_of(*groups: int) -> list[int]:
    return [row for group in groups for row in (group << BITS, (group << BITS) + 1)]


def decide(ledger: Ledger, **varies: bool) -> list[tuple[int, Decided]]:
    """`g0=True`: group 0 varies."""
    for name, is_varied in varies.items():
        ledger.decide(int(name[1:]), is_varied=is_varied)
    return ledger.newly_decided()


def test_nothing_of_a_step_closes_before_its_members_are_known() -> None:
    ledger = choosing()
    assert decide(ledger, g0=True)[0][1].members == {0: 0}
    assert ledger.is_member(0) and not ledger.is_member(1)
    assert ledger.step_state(0).offer(0, 9) and not ledger.step_state(0).offer(1, 9)
    assert not ledger.step_state(0).is_taken()
    ledger.step_state(0).consume(consumed(*rows_of(0)))
    assert not ledger.is_consumed(0)
    with pytest.raises(ValueError, match="step 0 still waits for 1 of its members"):
        ledger.commit(0)
    assert ledger.missing() == [
        "train step 0: 1 members are not found yet, among 3 candidates, with 6 rows without a response",
    ]
    assert decide(ledger, g1=False, g2=True)[0][1].is_settled
    assert ledger.is_settled(0) and not ledger.step_state(0).is_taken()
    assert ledger.step_state(0).offer(2, 9) and ledger.step_state(0).is_taken()
    ledger.step_state(0).consume(consumed(*rows_of(2), tokens=7))
    assert ledger.is_consumed(0)
    assert ledger.commit(0) == [StepTotals(0, tokens=12, sequences=4, dead=0, non_finite_rows=[])]
    assert ledger._step_of_group == {} and ledger.missing() == []


def test_tasks_behind_the_choice_wait_for_it_and_see_members_alone() -> None:
    ledger = choosing(by_step=("values",))
    assert [ledger.tasks.task_before(task) for task in ("select", "values", "train")] == ["rollout", "select", "values"]
    ledger.done("rollout", rows_of(0, 1, 2))
    assert [ledger.is_done(task, 0) for task in SELECTED] == [True, False, False]
    decide(ledger, g0=True, g1=False)
    ledger.done("select", rows_of(0))
    ledger.done("values", rows_of(0))
    assert [ledger.is_done(task, 0) for task in SELECTED] == [True, False, False]  # another member is to come
    assert ("values", 0) not in ledger.ended()
    decide(ledger, g2=True)
    assert [ledger.is_done(task, 0) for task in SELECTED] == [True, False, False]
    ledger.done("select", rows_of(2))
    assert [ledger.is_done(task, 0) for task in SELECTED] == [True, True, False]
    ledger.done("values", rows_of(2))
    assert [ledger.is_done(task, 0) for task in SELECTED] == [True, True, True]
    assert ("values", 0) in ledger.ended()


def test_weights_are_not_changed_while_members_of_theirs_are_to_be_found() -> None:
    ledger = choosing(2)
    ledger.done("rollout", rows_of(0, 1))
    decide(ledger, g0=False, g1=True)
    assert ledger.unfinished(0) == ledger.to_come(0) == 1 and ledger.unfinished(-1) == 0
    candidates = ledger.lacking(0)
    assert candidates is not None and (candidates.num_missing, candidates.num_varied) == (1, 1)
    ledger.add_candidates([meta(2)])
    assert ledger.lacking(0) is None and ledger.unfinished(0) == 3 and ledger.num_groups(0) == 3
    ledger.done("rollout", rows_of(2))
    decide(ledger, g2=True)
    assert ledger.unfinished(0) == 0
    with pytest.raises(ValueError, match="step 0 takes no more candidates"):
        ledger.add_candidates([meta(3)])


def test_surplus_leaves_its_step_and_nothing_is_known_of_it_then() -> None:
    ledger = choosing(4)
    ((_, decided),) = decide(ledger, g3=False, g0=True, g1=True)
    assert decided.surplus == [2, 3] and sorted(decided.left) == rows_of(2, 3)
    assert [ledger.knows(group) for group in range(4)] == [True, True, False, False] and ledger.groups() == {0: [0, 1]}
    assert ledger.unfinished(0) == 4 and ledger.num_groups(0) == 2
    ledger.fail(dead(*rows_of(2)))
    ledger.decide(2, is_varied=True)
    ledger.begun([2], 0)
    ledger.done("rollout", rows_of(0, 1, 2))
    assert ledger.newly_decided() == [] and ledger._begun == {} and ledger.is_done("rollout", 0)
    for group in (0, 1):
        ledger.step_state(0).consume(consumed(*rows_of(group)))
    assert ledger.commit(0)[0].dead == 0


def test_rows_that_have_failed_leave_candidates_and_members() -> None:
    ledger = choosing()
    ledger.fail(dead(0, 4, 5, 5))  # one of group 0, all of group 1
    ((_, decided),) = decide(ledger, g0=True)
    assert decided.members == {0: 0} and decided.degenerate == [1] and decided.left == []
    with pytest.raises(ValueError, match="row 0 is not an open member"):
        ledger.step_state(0).consume(consumed(0, 1))
    decide(ledger, g2=True)
    ledger.fail([DeadRow(2, 8, "by a task that only members pass")])
    ledger.step_state(0).consume(consumed(1))
    ledger.step_state(0).consume(consumed(9))
    assert ledger.commit(0) == [StepTotals(0, 10, 2, 4, [])]


def test_mini_batches_are_neighbours_among_the_members() -> None:
    ledger = choosing(7, 4, mini_batches=2)
    decide(ledger, g1=True)
    assert not ledger.is_member(1)  # it may be the second or the first
    decide(ledger, g0=False, g2=False, g3=True, g4=True, g6=True, g5=True)
    for update, (first, second) in enumerate(((1, 3), (4, 5))):
        for group in (first, second):
            ledger.step_state(0).consume(consumed(*rows_of(group)), update=update)
        assert ledger.is_consumed(0, update=update)


def test_a_round_is_not_cut_short_while_more_members_may_come() -> None:
    ledger = choosing(3, 3, num_ranks=2)
    state = ledger.step_state(0)

    def given() -> list[list[int] | None]:
        state.give_out()
        return [state.round_of_rank(rank, 1) for rank in range(2)]

    for rank in range(2):
        state.updates["train"][0].ask(rank, 1)
    decide(ledger, g0=True, g1=True, g2=False)
    for group in range(2):
        state.offer(group, 9)
    assert given() == [None, None] and [state.round_of_rank(rank, 0) for rank in range(2)] == [[0], [1]]
    ledger.add_candidates([meta(3)])
    assert given() == [None, None] and not state.is_given_out()  # one more is to be found
    decide(ledger, g3=True)
    state.offer(3, 9)
    assert given() == [[3], []] and state.is_given_out()


def test_an_evaluation_has_no_candidates() -> None:
    ledger = choosing()
    ledger.open([meta(9, topic="eval")])
    ledger.decide(9, is_varied=False)
    ledger.step_state(0, "eval").consume_evaluation(rows_of(9))
    assert ledger.ended() == [("eval", 0)] and ledger.newly_decided() == []


async def test_the_service_says_when_more_are_needed_and_what_has_become_certain() -> None:
    made = Service(tasks=TaskPlan(SELECTED, chosen_by="select", num_members=2))
    decided: list[tuple[int, Decided]] = []
    made.service.on_decided = lambda *told: decided.append(told)
    await made.service.open([meta(0), meta(1), GroupMeta(9, 1, 0, meta(0).interval, "eval")])
    wanted = asyncio.create_task(made.service.wanted(0))
    assert not await settled(wanted)
    made.service.decide(0, is_varied=False)
    candidates = await wanted
    assert candidates is not None and candidates.num_missing == 1
    await made.service.add_candidates([meta(2)])
    wanted = asyncio.create_task(made.service.wanted(0))
    assert not await settled(wanted)
    made.service.decide(1, is_varied=True)
    made.service.fail(dead(8))
    assert not await settled(wanted)
    made.service.fail(dead(9))
    assert (await wanted) is not None
    await made.service.add_candidates([meta(3)])
    made.service.decide(3, is_varied=True)
    assert await made.service.wanted(0) is None
    assert [(step, one.is_settled, [*one.members], one.degenerate) for step, one in decided] == [
        (0, False, [], [0]),
        (0, False, [1], []),
        (0, False, [], [2]),
        (0, True, [3], []),
    ]
    made.service.stop()
    assert await made.service.wanted(0) is None


def test_what_is_consumed_has_to_be_a_member() -> None:
    ledger = choosing()
    one: Consumed = consumed(*rows_of(0))
    with pytest.raises(ValueError, match="row 0 is not an open member of step 0"):
        ledger.step_state(0).consume(one)
