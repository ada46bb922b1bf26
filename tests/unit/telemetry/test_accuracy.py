"""What rewards say: against brute force, tables and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from asyncflow.telemetry.accuracy import (
    Responses,
    bootstrap,
    effective_size,
    figures,
    mean_interval,
    pass_at_k,
    powers_up_to,
    wilson,
)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_correct_one(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_pass_at_k_is_unbiased_where_guessing_from_the_share_is_not() -> None:
    """A prompt that is solved with probability p: the mean over many draws of 4 responses is 1 - (1 - p)^2, not that of c / n."""
    p, k, n = 0.3, 2, 4
    expected = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    plugged_in = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * (1 - (1 - c / n) ** k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k) and plugged_in < expected - 0.01


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_what_cannot_be_estimated_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(n, c, k)


def test_pass_at_k_of_many_responses_is_a_number() -> None:
    assert 0.9 < pass_at_k(1024, 10, 256) < 1.0


@pytest.mark.parametrize(
    ("correct", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718), (20, 20, 0.8389, 1.0)],
)
def test_wilson_is_as_printed_by_newcombe(correct: int, trials: int, low: float, high: float) -> None:
    """Newcombe 1998, Statistics in Medicine 17, table I, method 3."""
    assert wilson(correct / trials, trials) == pytest.approx((low, high), abs=6e-5)


def test_a_prompt_counts_once_however_often_it_was_asked() -> None:
    ones = [np.full(1, float(i < 30)) for i in range(100)]
    eights = [np.full(8, float(i < 30)) for i in range(100)]
    assert mean_interval(ones) == mean_interval(eights)
    low, high = wilson(0.3, 100)
    assert (mean_interval(ones).low, mean_interval(ones).high, mean_interval(ones).method) == (low, high, "wilson")
    spread = [np.array([1.0, 0, 0, 0, 1, 0, 0, 0, 1, 0])] * 100
    assert mean_interval(spread).high - mean_interval(spread).low == pytest.approx(high - low), "nothing is known of their spread"
    halves = [np.array([1.0, 0.0]), np.array([1.0, 1.0])] * 50
    assert effective_size(np.array([r.mean() for r in halves])) == pytest.approx(100 * 0.1875 / 0.0625)


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Prompts of different difficulty, 4 responses each: beta-binomial, mean 0.3."""
    rng = np.random.default_rng(1)
    hits = {"wilson": 0, "bootstrap": 0}
    for _ in range(400):
        chances = rng.beta(0.6, 1.4, size=80)
        prompts = [rng.binomial(1, p, size=4).astype(float) for p in chances]
        interval = mean_interval(prompts)
        hits["wilson"] += interval.method == "wilson" and interval.low <= 0.3 <= interval.high
        halved = mean_interval([rewards / 2 for rewards in prompts])
        hits["bootstrap"] += halved.method == "bootstrap" and halved.low <= 0.15 <= halved.high
    assert all(0.91 <= count / 400 <= 0.985 for count in hits.values()), hits


def test_a_bootstrap_is_the_same_twice_and_knows_the_standard_error() -> None:
    means = np.random.default_rng(3).normal(2.0, 1.0, size=400)
    low, high = bootstrap(means)
    assert (low, high) == bootstrap(means)
    assert (high - low) / 2 == pytest.approx(1.96 * means.std() / 20, rel=0.08) and low < means.mean() < high
    assert bootstrap(np.full(5, 0.7)) == pytest.approx((0.7, 0.7))


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_k_doubles_up_to_all(n: int, ks: list[int]) -> None:
    assert powers_up_to(n) == ks


def responses(prompt: int, rewards: list[float], lengths: list[int], truncated: list[bool]) -> Responses:
    return Responses(prompt, np.array(rewards, np.float32), np.array(lengths), np.array(truncated))


def test_the_figures_of_three_prompts_by_hand() -> None:
    prompts = [
        responses(0, [1, 0, 1, 0], [4, 6, 8, 10], [False, False, False, True]),
        responses(1, [0, 0, 0, 0], [2, 2, 2, 2], [False] * 4),
        responses(2, [1, 1, 0], [3, 3, 30], [False, False, True]),  # one could not be scored
    ]
    row = figures("sampled", prompts, correct_from=1.0, num_samples=4)
    assert row["accuracy/sampled"] == pytest.approx((0.5 + 0 + 2 / 3) / 3)
    assert row["pass@1/sampled"] == pytest.approx((0.5 + 0 + 2 / 3) / 3)
    assert row["pass@2/sampled"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert row["pass@4/sampled"] == pytest.approx((1 + 0) / 2), "of the prompts that have four"
    assert (row["num_responses/sampled"], row["response_length/sampled/max"], row["response_length/sampled/median"]) == (11, 30, 3)
    assert row["response_length/sampled/mean"] == pytest.approx(72 / 11) and row["clipped_ratio/sampled"] == pytest.approx(2 / 11)
    assert row["interval/sampled/low"] < row["accuracy/sampled"] < row["interval/sampled/high"]
    lenient = figures("sampled", prompts, correct_from=0.0, num_samples=4)
    assert lenient["pass@1/sampled"] == 1.0 and lenient["accuracy/sampled"] == row["accuracy/sampled"]
    assert figures("sampled", [], correct_from=1.0, num_samples=4) == {}
