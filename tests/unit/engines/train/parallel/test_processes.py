"""Ranks of a test: after one that has died or said nothing, the next call has new ones."""

import os
import time

import pytest

from tests.unit.engines.train.parallel.processes import Processes, RankFailed, end_itself


def number(first: int) -> int:
    return first + int(os.environ["RANK"])


def late_at_zero() -> str:
    """An answer of rank 0 that comes when nobody waits for it any more."""
    time.sleep(1.0 if os.environ["RANK"] == "0" else 0.0)
    return "late"


def dead_at_one() -> None:
    if os.environ["RANK"] == "1":
        end_itself()


def test_the_call_after_a_silence_or_a_death_has_its_own_answers() -> None:
    ranks = Processes(2)
    try:
        with pytest.raises(RankFailed, match="rank 0 has said nothing"):
            ranks.run(late_at_zero, seconds=0.0)
        assert ranks.run(number, 10) == [10, 11]
        with pytest.raises(RankFailed, match="rank 1 has died"):
            ranks.run(dead_at_one)
        assert ranks.run(number, 20) == [20, 21]
    finally:
        ranks.close()
