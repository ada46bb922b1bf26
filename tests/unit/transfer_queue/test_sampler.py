"""Samplers over a real table: who gets what, who waits, and how even the rounds of ranks are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from asyncflow.registry import build
from asyncflow.transfer_queue.leases import Lease, Want
from asyncflow.transfer_queue.loader.token_balanced import balance
from asyncflow.transfer_queue.sampler import SAMPLERS
from asyncflow.transfer_queue.sampler.base import Sampler
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.transfer_queue.table import Table
from asyncflow.types import Column, GroupMeta, Interval

BITS = 3
WHOLE = TaskSpec("train", ("out",))
PARTIAL = TaskSpec("reward", ("out",), ("reward",), whole_groups=False)
SCHEMA = Schema((Column("out", "int32", ragged=True, counts_tokens=True), Column("reward", "float32")), (WHOLE, PARTIAL), BITS)


def sampler(name: str, **options: int) -> Sampler:
    return build("sampler", name, options, SAMPLERS)


def add(table: Table, tokens: Sequence[Sequence[int]], *, first: int = 0, step: int = 0) -> None:
    """Ready groups `first`, `first + 1`, ... of rows with these tokens."""
    metas = [GroupMeta(first + i, len(weights), step, Interval(0, 9)) for i, weights in enumerate(tokens)]
    table.admit(metas, 0)
    table.notify(SCHEMA.rows_of(metas), SCHEMA.mask(["out"]), np.array([n for of in tokens for n in of], np.int64), 0.0)


def table_of(spec: TaskSpec, *tokens: Sequence[int]) -> Table:
    table = Table(spec, SCHEMA, "now")
    add(table, tokens)
    return table


def serve(table: Table, chosen: Sampler, *wants: tuple[str, Want]) -> dict[int, Lease]:
    """As a controller does: each pick is handed out as soon as it comes."""
    served: dict[int, Lease] = {}
    for position, pick in chosen.assign(table, wants):
        assert position not in served and pick
        served[position] = table.hand_out(wants[position][0], 0.0, pick)
    return served


def rows(served: dict[int, Lease]) -> dict[int, list[list[int]]]:
    return {position: lease.rows for position, lease in served.items()}


def ended(table: Table, step: int) -> Table:
    table.end_partition(step)
    return table


# -- oldest and whole_groups ----------------------------------------------------------------------------------------------------


def test_the_oldest_request_gets_the_oldest_rows_and_the_next_what_is_left() -> None:
    table = table_of(PARTIAL, [1, 1], [1, 1], [1, 1])
    wants = [("a", Want(rows=3)), ("b", Want(rows=2)), ("c", Want(rows=9)), ("d", Want(rows=1))]
    assert rows(serve(table, sampler("oldest"), *wants)) == {0: [[0, 1], [8]], 1: [[9], [16]], 2: [[17]]}


def test_a_request_that_nothing_suits_does_not_hold_up_those_behind_it() -> None:
    table = table_of(PARTIAL, [1])
    assert rows(serve(table, sampler("oldest"), ("a", Want(rows=1, partition=5)), ("b", Want(rows=1, installed=0)))) == {1: [[0]]}


@pytest.mark.parametrize("name", ["oldest", "shortest_queue", "whole_groups"])
def test_a_request_waits_for_as_many_rows_as_it_needs_unless_its_step_has_ended(name: str) -> None:
    table = table_of(WHOLE, [1, 1], [1, 1])
    want = Want(rows=9, at_least=5, partition=0)
    assert serve(table, sampler(name), ("a", want)) == {}
    add(table, [[1, 1]], first=5)
    assert rows(serve(table, sampler(name), ("a", want))) == {0: [[0, 1], [8, 9], [40, 41]]}
    add(table, [[1, 1]], first=6)
    assert serve(table, sampler(name), ("a", want)) == {}
    assert rows(serve(ended(table, 0), sampler(name), ("a", want))) == {0: [[48, 49]]}


def test_whole_groups_refuses_a_task_that_may_split_them() -> None:
    with pytest.raises(ValueError, match="'reward'"):
        sampler("whole_groups").check(PARTIAL, Want(rows=1))
    table = table_of(WHOLE, [1, 1], [1, 1])
    assert rows(serve(table, sampler("whole_groups"), ("a", Want(rows=1)))) == {0: [[0, 1]]}


# -- shortest_queue -------------------------------------------------------------------------------------------------------------


def test_each_group_goes_to_the_worker_with_the_fewest_tokens_outstanding() -> None:
    """Worker a holds 50 tokens, b none; what b gets now counts at once."""
    table = table_of(WHOLE, [50])
    serve(table, sampler("oldest"), ("a", Want(groups=1)))
    add(table, [[30], [30], [15], [1]], first=1)
    served = serve(table, sampler("shortest_queue"), ("a", Want(groups=9)), ("b", Want(groups=9)))
    assert rows(served) == {0: [[24]], 1: [[8], [16], [32]]}
    assert table.leases.outstanding("a")[1] == 65 and table.leases.outstanding("b")[1] == 61


def test_tokens_count_before_rows() -> None:
    table = table_of(WHOLE, [100], [1, 1, 1])
    serve(table, sampler("oldest"), ("a", Want(groups=1)), ("b", Want(groups=1)))
    add(table, [[5]], first=2)
    assert rows(serve(table, sampler("shortest_queue"), ("a", Want(groups=1)), ("b", Want(groups=1)))) == {1: [[16]]}


def test_where_no_tokens_are_counted_rows_are_and_ties_go_to_the_oldest_request() -> None:
    table = table_of(WHOLE, [0, 0, 0], [0], [0], [0], [0])
    served = serve(table, sampler("shortest_queue"), ("b", Want(groups=9)), ("a", Want(groups=9)))
    assert rows(served) == {0: [[0, 1, 2], [32]], 1: [[8], [16], [24]]}


@pytest.mark.parametrize(
    ("spec", "want", "expected"),
    [
        (WHOLE, Want(rows=3), [[0, 1]]),
        (WHOLE, Want(rows=4), [[0, 1], [8, 9]]),
        (WHOLE, Want(tokens=25), [[0, 1]]),
        (WHOLE, Want(tokens=1), [[0, 1]]),
        (WHOLE, Want(groups=2), [[0, 1], [8, 9]]),
        (PARTIAL, Want(rows=3), [[0, 1], [8]]),
        (PARTIAL, Want(tokens=35), [[0, 1], [8]]),
        (PARTIAL, Want(tokens=1), [[0]]),
        (PARTIAL, Want(groups=1), [[0, 1]]),
    ],
)
def test_the_limits_hold_over_all_that_a_request_gets(spec: TaskSpec, want: Want, expected: list[list[int]]) -> None:
    table = table_of(spec, [10, 10], [10, 10], [10, 10])
    assert rows(serve(table, sampler("shortest_queue"), ("a", want))) == {0: expected}


# -- token_balanced -------------------------------------------------------------------------------------------------------------


def of_ranks(ranks: int, **want: int) -> list[tuple[str, Want]]:
    return [(f"w{rank}", Want(rank=rank, **want)) for rank in range(ranks)]


def test_a_round_waits_for_a_request_of_every_rank_for_the_same_partition() -> None:
    table = table_of(WHOLE, [1], [2], [3], [4])
    chosen = sampler("token_balanced", ranks=2)
    first, second = of_ranks(2, groups=1, partition=0)
    other = ("w1", Want(rank=1, groups=1, partition=1))
    assert serve(table, chosen, first, first, other) == {}
    assert sorted(serve(table, chosen, first, first, other, second)) == [0, 3]
    assert sorted(serve(table, chosen, first, first, second, second)) == [0, 2]  # one group each is left, for one round
    add(table, [[5], [6], [7], [8]], first=9)
    assert sorted(serve(table, chosen, first, first, second, second)) == [0, 1, 2, 3]


def test_a_round_waits_until_there_is_enough_for_all_unless_the_step_has_ended() -> None:
    table = table_of(PARTIAL, [7], [1], [4])
    wants, chosen = of_ranks(2, rows=2, partition=0), sampler("token_balanced", ranks=2)
    assert serve(table, chosen, *wants) == {}
    served = serve(ended(table, 0), chosen, *wants)
    assert sorted(row for lease in served.values() for row in lease.indices) == [0, 8, 16]
    assert sorted(table.leases.outstanding(f"w{rank}")[1] for rank in range(2)) == [5, 7]
    add(table, [[3]], first=7)
    assert len(serve(table, chosen, *wants)) == 1  # a rank that would get nothing is not served


def test_a_request_without_a_count_or_of_a_rank_that_is_not_is_refused() -> None:
    chosen = sampler("token_balanced", ranks=2)
    chosen.check(WHOLE, Want(groups=1, rank=1))
    with pytest.raises(ValueError, match="rank 2"):
        chosen.check(WHOLE, Want(groups=1, rank=2))
    with pytest.raises(ValueError, match="limit its rows or its groups"):
        chosen.check(WHOLE, Want(tokens=5))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("sigma", [0.5, 1.0])
@pytest.mark.parametrize("spec", [WHOLE, PARTIAL])
def test_ranks_get_equal_weights_of_lognormal_rows(spec: TaskSpec, sigma: float, ranks: int) -> None:
    """A group of 8 rows, or 8 rows, for each rank. Over 60 rounds of a stream the time that ranks take together (the heaviest of
    each round) is at most 5% more than the mean's, and so it is in nine rounds of ten; what is held back comes at the end."""
    rng = np.random.default_rng(ranks)
    table, chosen = Table(spec, SCHEMA, "now"), sampler("token_balanced", ranks=ranks)
    size = 8 if spec is WHOLE else 1
    num_groups, admitted, heaviest, mean = ranks * (1 if spec is WHOLE else 8), 0, 0.0, 0.0
    rounds: list[float] = []
    for _ in range(60):
        num_new = num_groups + (256 if not admitted else 0)
        add(table, rng.lognormal(6, sigma, (num_new, size)).astype(int).tolist(), first=admitted)
        admitted += num_new
        served = serve(table, chosen, *of_ranks(ranks, rows=8))
        assert [len(served[rank].indices) for rank in range(ranks)] == [8] * ranks
        weights = [table.leases.outstanding(f"w{rank}")[1] for rank in range(ranks)]
        heaviest, mean = heaviest + max(weights), mean + sum(weights) / ranks
        rounds.append(max(weights) * ranks / sum(weights))
        done = np.sort([row for lease in served.values() for row in lease.indices])
        table.notify(done, SCHEMA.mask(spec.outputs), None, 0.0)
    assert heaviest / mean <= 1.05 and np.quantile(rounds, 0.9) <= 1.05
    left = sum(len(group.rows) for group in table.ready.peek(Want(rows=1), admitted))
    table.end_partition(0)
    while table.ready.available(Want(rows=1), 1):  # those that were held back come at the end
        served = serve(table, chosen, *of_ranks(ranks, rows=8))
        left -= sum(len(lease.indices) for lease in served.values())
    assert left == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_tail_of_a_step_is_partitioned_evenly(ranks: int) -> None:
    """Nothing to choose among, all rows go: where rows are not longer than a rank's share, swaps make it even."""
    rng = np.random.default_rng(0)
    worst = []
    for _ in range(40):
        weights = rng.lognormal(6, 0.5, ranks * 8).astype(int).tolist()
        bins = balance(weights, ranks, 8)
        assert sorted(i for bin_ in bins for i in bin_) == list(range(ranks * 8)) and {len(bin_) for bin_ in bins} == {8}
        loads = [sum(weights[i] for i in bin_) for bin_ in bins]
        worst.append(max(loads) * ranks / sum(loads))
    assert max(worst) <= 1.02


def test_the_oldest_items_are_in_the_round_however_odd_they_are() -> None:
    weights = [1, 1000, 1, 1000] + [50] * 60
    assert {0, 1, 2, 3} <= {i for bin_ in balance(weights, 2, 4) for i in bin_}
