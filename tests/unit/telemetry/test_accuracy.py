"""What rewards say: against brute force, tables and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from asyncflow.telemetry.accuracy import (
    Z_95,
    Interval95,
    Responses,
    effective_size,
    figures,
    is_correct,
    mean_interval,
    pass_at_k,
    pass_interval,
    powers_up_to,
    t_interval,
    t_quantile,
    wilson,
)
from tests.depth import in_gate


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


def interval_of(prompts: list[np.ndarray]) -> Interval95:
    interval = mean_interval(prompts)
    assert interval is not None
    return interval


def test_a_prompt_counts_once_however_often_it_was_asked() -> None:
    ones = [np.full(1, float(i < 30)) for i in range(100)]
    eights = [np.full(8, float(i < 30)) for i in range(100)]
    low, high = wilson(0.3, 100)
    assert interval_of(ones) == Interval95(low, high, "wilson")
    wider = interval_of(eights)
    assert wider.low == pytest.approx(low, abs=2e-3) and wider.high == pytest.approx(high, abs=2e-3)
    assert wider.low < low and wider.high > high, "how far prompts are apart is itself an estimate"
    spread = [np.array([1.0, 0, 0, 0, 1, 0, 0, 0, 1, 0])] * 100
    assert interval_of(spread).high - interval_of(spread).low == pytest.approx(high - low), "nothing is known of their spread"


def test_the_effective_size_by_hand() -> None:
    halves = np.array([0.5, 1.0] * 50)
    assert effective_size(halves, 400) == pytest.approx(0.1875 / (0.0625 * 100 / 99 / 100) * (Z_95 / 1.984217) ** 2)
    near = np.array([0.5, 0.5, 0.5, 0.625])
    assert effective_size(near, 32) == 32, "no more than there are responses, however near the means are to each other"
    assert effective_size(np.array([0.5, 0.5]), 8) == 2 and effective_size(np.array([0.25]), 8) == 1
    assert effective_size(np.array([1.0, 0.0, 0.0]), 3) == 3, "a response of each prompt is a trial"


@pytest.mark.parametrize("num_prompts", [2, 3, 7, 10, 30])
def test_equal_means_say_nothing_of_their_spread_whatever_their_last_bits(num_prompts: int) -> None:
    """The mean of ten times 1/12 is not 1/12 in float64, so their variance is not 0."""
    assert [effective_size(np.full(num_prompts, c / 12), 12 * num_prompts) for c in range(13)] == [num_prompts] * 13


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15, 29, 99, 1318])
def test_the_quantile_of_students_t_leaves_a_fortieth_above_it(degrees: int) -> None:
    """By Simpson's rule, over the density's half from 0 to the quantile."""
    x = np.linspace(0.0, t_quantile(degrees), 20_001)
    log_peak = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    density = np.exp(log_peak - (degrees + 1) / 2 * np.log1p(x**2 / degrees))
    area = (x[1] - x[0]) / 3 * (density[0] + density[-1] + 4 * density[1:-1:2].sum() + 2 * density[2:-1:2].sum())
    assert area == pytest.approx(0.475, abs=2e-6)


@pytest.mark.parametrize(("a", "b"), [(0.6, 1.4), (3.0, 3.0), (30.0, 30.0)])
@pytest.mark.parametrize("num_responses", in_gate(4, of=[4, 16]))
@pytest.mark.parametrize("num_prompts", [5, 10, 30, 80])
def test_an_interval_covers_the_truth_as_often_as_it_says(num_prompts: int, num_responses: int, a: float, b: float) -> None:
    """Prompts of different difficulty: beta-binomial, and the same with rewards of 0 and a half. With few prompts, too."""
    rng, truth, draws = np.random.default_rng(1), a / (a + b), 600
    hits = {"wilson": 0, "t": 0}
    for _ in range(draws):
        chances = rng.beta(a, b, size=num_prompts)
        prompts = [(rng.random(num_responses) < p).astype(float) for p in chances]
        interval = interval_of(prompts)
        hits["wilson"] += interval.method == "wilson" and interval.low <= truth <= interval.high
        halved = interval_of([rewards / 2 for rewards in prompts]) if np.concatenate(prompts).any() else Interval95(0.0, 0.0, "t")
        hits["t"] += halved.method == "t" and halved.low <= truth / 2 <= halved.high
    assert hits["wilson"] / draws >= 0.92 and hits["t"] / draws >= (0.92 if num_prompts > 5 else 0.88), hits
    assert num_prompts < 30 or all(count / draws <= 0.985 for count in hits.values()), hits


def test_the_interval_of_pass_at_k_by_hand() -> None:
    """Estimates 5/6, 1, 0 and 5/6: their mean is 2/3, its variance 22/108 / 4; 2/9 / (22/432) (1.96 / 3.182)^2 = 1.655 trials."""
    spread = pass_interval([(4, 2), (4, 4), (4, 0), (4, 2)], 2)
    assert spread == pytest.approx((0.139241, 0.961131), abs=2e-6)
    near = pass_interval([(8, 4), (8, 4), (8, 4), (8, 5)], 2)
    assert near == pytest.approx(wilson((3 * 11 + 12.5) / 14 / 4, 4)), "a prompt is one trial at most"
    assert pass_interval([(4, 4)] * 20, 2) == pytest.approx((0.8389, 1.0), abs=6e-5), "20 of 20 in Newcombe's table"
    assert pass_interval([(4, 0)] * 20, 4) == pytest.approx((0.0, 0.1611), abs=6e-5)
    assert pass_interval([(4, 1)], 4) == pytest.approx(wilson(1.0, 1)), "one prompt has one, too"


@pytest.mark.parametrize("responses_each", [[1] * 12, [4] * 12, [4, 3, 1] * 4])
def test_pass_at_1_of_rewards_of_0_and_1_has_the_means_interval(responses_each: list[int]) -> None:
    rng = np.random.default_rng(5)
    prompts = [(rng.random(n) < 0.4).astype(float) for n in responses_each]
    interval = interval_of(prompts)
    assert interval.method == "wilson"
    assert pass_interval([(len(p), int(p.sum())) for p in prompts], 1) == pytest.approx((interval.low, interval.high), abs=1e-12)


def chances_of(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "a tenth is never solved":
        return np.where(rng.random(size) < 0.1, 0.0, 0.9)
    return rng.beta(*map(float, kind.split()), size=size)


def truth_of(kind: str, k: int) -> float:
    """pass@k over all prompts of the kind."""
    if kind == "a tenth is never solved":
        return 0.9 * (1 - 0.1**k)
    a, b = map(float, kind.split())
    return 1 - math.prod((b + i) / (a + b + i) for i in range(k))


@pytest.mark.parametrize("kind", ["0.6 1.4", "3 3", "30 30", "0.2 0.2", "0.1 0.4", "8 1", "a tenth is never solved"])
@pytest.mark.parametrize("num_responses", [4, 16])
@pytest.mark.parametrize("num_prompts", [5, 10, 30, 80])
def test_the_interval_of_pass_at_k_covers_the_truth_as_often_as_it_says(num_prompts: int, num_responses: int, kind: str) -> None:
    """Of prompts whose chances are of a beta distribution, or 0.9 but for those that are never solved.

    Nearer to 0 or 1 than one prompt, Wilson's interval itself covers less for some truths (84% for 0.18 prompts).
    """
    rng, draws = np.random.default_rng(2), 400
    counts = rng.binomial(num_responses, chances_of(kind, draws * num_prompts, rng)).reshape(draws, num_prompts).tolist()
    for k in {2, 4, num_responses}:
        truth = truth_of(kind, k)
        intervals = [pass_interval([(num_responses, c) for c in of_draw], k) for of_draw in counts]
        covered = sum(low <= truth <= high for low, high in intervals) / draws
        is_near_an_end = num_prompts * min(truth, 1 - truth) < 1
        assert covered >= (0.82 if is_near_an_end else 0.92), (k, truth, covered)
        if k == num_responses and num_prompts >= 30 and not is_near_an_end:
            assert covered <= 0.99, (k, truth, covered)


def test_a_t_interval_by_hand() -> None:
    low, high = t_interval(np.array([1.0, 2.0, 3.0, 6.0]))
    assert (low, high) == pytest.approx((3.0 - 3.182446 * 2.160247 / 2, 3.0 + 3.182446 * 2.160247 / 2))
    assert t_interval(np.full(5, 0.7)) == pytest.approx((0.7, 0.7))


def test_one_prompt_says_nothing_of_others() -> None:
    low, high = wilson(0.5, 1)
    assert interval_of([np.array([1.0, 0.0])]) == Interval95(low, high, "wilson")
    assert mean_interval([np.array([0.5, 0.25])]) is None
    row = figures("sampled", [responses(0, [0.5, 0.25], [1, 1], [False, False])], correct_from=1.0, num_samples=2)
    assert row["accuracy/sampled"] == 0.375 and "interval/sampled/low" not in row
    assert row["pass@2/sampled"] == 0.0 and (row["interval/pass@2/sampled/low"], row["interval/pass@2/sampled/high"]) == wilson(
        0.0, 1
    )


def test_a_reward_is_compared_as_it_travels() -> None:
    """The float32 next to 0.7 is less than 0.7."""
    assert is_correct(np.array([0.7, 0.69], np.float32), 0.7).tolist() == [True, False]
    assert is_correct(np.array([0.7, 0.69], np.float32).tolist(), 0.7).tolist() == [True, False]
    row = figures("sampled", [responses(0, [0.7, 0.3], [1, 1], [False, False])], correct_from=0.7, num_samples=2)
    assert row["pass@1/sampled"] == 0.5


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
    for k, counts in ((1, [(4, 2), (4, 0), (3, 2)]), (2, [(4, 2), (4, 0), (3, 2)]), (4, [(4, 2), (4, 0)])):
        assert (row[f"interval/pass@{k}/sampled/low"], row[f"interval/pass@{k}/sampled/high"]) == pass_interval(counts, k)
    assert (row["num_responses/sampled"], row["response_length/sampled/max"], row["response_length/sampled/median"]) == (11, 30, 3)
    assert row["response_length/sampled/mean"] == pytest.approx(72 / 11) and row["clipped_ratio/sampled"] == pytest.approx(2 / 11)
    assert row["interval/sampled/low"] < row["accuracy/sampled"] < row["interval/sampled/high"]
    lenient = figures("sampled", prompts, correct_from=0.0, num_samples=4)
    assert lenient["pass@1/sampled"] == 1.0 and lenient["accuracy/sampled"] == row["accuracy/sampled"]
    assert lenient["interval/pass@1/sampled/low"] == wilson(1.0, 3)[0] > lenient["interval/sampled/low"]
    assert figures("sampled", [], correct_from=1.0, num_samples=4) == {}
