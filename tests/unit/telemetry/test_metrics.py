import math

import numpy as np
import pytest

from asyncflow.telemetry.idle import active_seconds, busy_and_idle, computing_seconds, idle_ratios, tokens_within
from asyncflow.telemetry.metrics import DEFINITIONS, GroupFigures, StepMetrics, StepTimes, definitions_table, metric_key
from asyncflow.telemetry.spans import Recorder, Span
from tests.unit.telemetry.synthetic_run import figures


def lane(worker: str, task: str, start: float, end: float, cause: str = "", tokens: int = 0, is_lane: bool = True) -> Span:
    return Span(worker=worker, task=task, start=start, end=end, cause=cause, tokens=tokens, is_lane=is_lane)


SPANS = [
    lane("rollout/0", "generate", 0, 6, tokens=600),
    lane("rollout/0", "wait", 6, 10, "weights"),
    lane("rollout/1", "generate", 2, 8, tokens=300),
    lane("rollout/1", "wait", 8, 10, "prompts"),
    lane("trainer/0", "wait", 0, 4, "rows"),
    lane("trainer/0", "forward_backward", 4, 7),
    lane("trainer/0", "optim_step", 7, 8),
    lane("trainer/0", "wait", 8, 14, "rows"),
    lane("rollout/0", "fetch", 1, 9, is_lane=False, tokens=99),
    Span(worker="rollout/0", task="decode_step", start=2, end=3, is_lane=False, rows=9, tokens=99, calls=2, drafts=5, accepted=4),
    Span(worker="rollout/1", task="decode_step", start=9, end=10, is_lane=False, rows=9, tokens=99, calls=2, drafts=3, accepted=2),
    Span(
        worker="rollout/1", task="decode_step", start=9.5, end=11, is_lane=False, rows=9, tokens=99, calls=2, drafts=3, accepted=3
    ),
]


def group(rewards: list[float], lengths: list[int], cut: list[bool], stale: list[int], prompt: int) -> GroupFigures:
    return figures(
        prompt_length=prompt,
        rewards=np.array(rewards, np.float32),
        response_lengths=np.array(lengths),
        truncated=np.array(cut, np.uint8),
        staleness=np.array(stale),
        logical_tokens=sum(lengths) + len(lengths) * prompt,
    )


def losses(loss_sum: float, tokens: int, logical: int, physical: int, metrics: dict[str, float]) -> GroupFigures:
    return figures(loss_sum=loss_sum, computed_tokens=tokens, logical_tokens=logical, physical_tokens=physical, metrics=metrics)


def full_step() -> StepMetrics:
    metrics = StepMetrics()
    metrics.add_group(group([1, 0], [10, 20], [False, True], [0, 0], 5))
    metrics.add_group(group([1, 1], [30, 40], [False, False], [2, 1], 10))
    metrics.add_group(group([0, 0, 0, 0], [10, 10, 10, 10], [False] * 4, [0] * 4, 7))
    metrics.add_losses(losses(6.0, 30, 40, 35, {"policy/kl": 3.0, "policy/entropy": 30.0}))
    metrics.add_losses(losses(-2.0, 70, 90, 80, {"policy/kl": 7.0, "policy/entropy": 70.0}))
    metrics.add_update(grad_norm=2.0, learning_rate=1e-3, normaliser=100, fill_tokens=10)
    metrics.count_rows(dead=1, redelivered=3)
    return metrics


def test_passes_of_helpers_count_as_far_as_they_are_in_the_step():
    spans = [
        Span(worker="trainer/0", task="helper_pass", start=s, end=e, is_lane=False) for s, e in ((0, 2), (3, 5), (4, 6), (9, 9.5))
    ]
    assert StepMetrics().row(StepTimes(started=1.0, committed=5.5), 2, spans)["perf/helper_seconds"] == 1.0 + 2.0 + 1.5
    assert "perf/helper_seconds" not in StepMetrics().row(StepTimes(started=6.0, committed=9.0), 2, spans)


def test_cores_count_by_threads_of_what_computes():
    lane = [
        ("trainer/0", "forward_backward", 0, 4),
        ("trainer/0", "wait", 4, 9),
        ("rollout/0", "generate", 2, 8),
        ("rollout/1", "load", 0, 9),
    ]
    spans = [Span(worker=worker, task=task, start=start, end=end) for worker, task, start, end in lane]
    spans += [Span(worker="trainer/0", task="helper_pass", start=s, end=e, is_lane=False) for s, e in ((0, 3), (8, 9))]
    assert computing_seconds(spans, 1.0, 6.0, lambda worker: 1 + worker.startswith("trainer")) == 2 * 3 + 4 + 2 * 2
    assert computing_seconds(spans, 8.5, 20.0, lambda worker: 1) == 0.5


def test_a_hand_worked_step():
    times = StepTimes(started=0.0, committed=10.0, could_generate=0.5, train_began=4.0)
    row = full_step().row(times, 4, SPANS)
    expected = {
        "reward/mean": 3 / 8,
        "reward/std": math.sqrt(3 / 8 * 5 / 8),
        "reward/zero_std_groups": 2,
        "response_length/mean": 140 / 8,
        "response_length/std": math.sqrt(950 / 8),
        "response_length/clipped_ratio": 1 / 8,
        "policy/kl": 0.1,
        "policy/entropy": 1.0,
        "policy/grad_norm": 2.0,
        "policy/loss": 4 / 100,
        "policy/learning_rate": 1e-3,
        "policy/skipped_updates": 0,
        "policy/non_finite_micro_batches": 0,
        "staleness/mean": 3 / 8,
        "staleness/max": 2,
        # (5 + 10) + (5 + 20) + (10 + 30) + (10 + 40) + 4 * (7 + 10) = 198 logical tokens, 10 s, 4 devices.
        "perf/tpspd": 198 / 40,
        "perf/step_seconds": 10.0,
        "perf/train_startup_seconds": 3.5,
        # 900 tokens while at least one worker generated: 0 to 8.
        "perf/rollout_tokens_per_second": 900 / 8,
        "perf/drafted_tokens": 8,
        "perf/accepted_drafts_ratio": 6 / 8,
        # 130 logical tokens in 4 s of forward_backward and optim_step.
        "perf/train_tokens_per_second": 130 / 4,
        "perf/physical_tokens_ratio": (115 + 10) / 130,
        "perf/fill_ratio": 10 / (115 + 10),
        "perf/idle_ratio/rollout/0": 0.4,
        "perf/idle_ratio/rollout/1": 0.25,
        "perf/idle_ratio/trainer/0": 0.6,
        "perf/exposed_weights": 4 / 28,
        "rows/trained": 8,
        "rows/zero_advantage": 0,
        "rows/dead": 1,
        "rows/unscored": 0,
        "rows/skipped": 0,
        "rows/degenerate": 0,
        "rows/surplus": 0,
        "rows/empty": 0,
        "rows/redelivered": 3,
    }
    assert row == pytest.approx(expected)
    order = list(DEFINITIONS)
    positions = [order.index(metric_key(name)) for name in row]
    assert positions == sorted(positions)


def test_what_is_not_known_is_left_out():
    row = StepMetrics().row(StepTimes(started=1.0, committed=1.0), 2, [])
    assert row == {
        "reward/zero_std_groups": 0,
        "policy/skipped_updates": 0,
        "policy/non_finite_micro_batches": 0,
        "perf/step_seconds": 0.0,
        "rows/trained": 0,
        "rows/zero_advantage": 0,
        "rows/dead": 0,
        "rows/unscored": 0,
        "rows/skipped": 0,
        "rows/degenerate": 0,
        "rows/surplus": 0,
        "rows/empty": 0,
        "rows/redelivered": 0,
    }


def test_equal_float32_rewards_count_as_a_group_without_signal():
    rewards = [0.1, 0.1, 0.1]
    metrics = StepMetrics()
    metrics.add_group(group(rewards, [1] * 3, [False] * 3, [0] * 3, 1))
    assert metrics.row(StepTimes(started=0, committed=1), 1, [])["reward/zero_std_groups"] == 1


def test_importance_weights_have_a_mean_a_maximum_and_an_effective_sample_size():
    metrics = StepMetrics()
    for weights in ([2.0, 0.5, 0.5], [1.0]):
        sums = {"mean": sum(weights), "square": sum(w * w for w in weights), "max": max(weights), "outside_ratio": 1.0}
        sums = {f"importance_weight/{name}": total for name, total in sums.items()}
        tokens = len(weights)
        metrics.add_losses(losses(0.0, tokens, 9, 9, sums))
    row = metrics.row(StepTimes(started=0, committed=1), 1, [])
    assert {name: value for name, value in row.items() if name.startswith("importance_weight/")} == {
        "importance_weight/mean": 1.0,
        "importance_weight/max": 2.0,
        "importance_weight/outside_ratio": 0.5,
        "importance_weight/effective_sample_ratio": pytest.approx(4**2 / (4 + 0.25 + 0.25 + 1) / 4),
    }
    assert set(row) <= set(DEFINITIONS)


def test_skipped_updates_and_non_finite_micro_batches_are_counted_and_enter_no_mean():
    metrics = full_step()
    metrics.add_losses(losses(math.nan, 5, 10, 10, {"policy/kl": math.nan}), is_finite=False)
    metrics.add_update(grad_norm=math.inf, learning_rate=2e-3, normaliser=100, is_skipped=True)
    row = metrics.row(StepTimes(started=0, committed=10), 4, SPANS)
    assert row["policy/skipped_updates"] == row["policy/non_finite_micro_batches"] == 1
    assert row["policy/kl"] == pytest.approx(0.1)
    assert row["policy/grad_norm"] == 2.0
    assert row["policy/loss"] == pytest.approx(4 / 200)
    assert row["perf/physical_tokens_ratio"] == pytest.approx(135 / 140)


def test_a_group_with_unequal_arrays_is_refused():
    with pytest.raises(ValueError, match="different lengths"):
        StepMetrics().add_group(group([1, 0], [10], [False], [0], 5))


def test_what_each_scorer_gave_is_a_mean_over_the_rows_for_which_it_gave_anything():
    metrics = StepMetrics()
    metrics.add_group(group([1, 0], [10, 10], [False, False], [0, 0], 5))
    metrics.add_reward_parts({"a": np.array([1.0, 0.0], np.float32), "b": np.array([np.nan, 0.5], np.float32)})
    metrics.add_reward_parts({"a": np.array([0.5], np.float32), "b": np.array([np.nan], np.float32)})
    metrics.add_reward_parts({"c": np.array([np.nan], np.float32)})
    metrics.count_rows(unscored=2, skipped=1)
    row = metrics.row(StepTimes(started=0.0, committed=10.0), 4, SPANS)
    assert (row["reward/a"], row["reward/b"], row["rows/unscored"], row["rows/skipped"]) == (0.5, 0.5, 2, 1)
    assert "reward/c" not in row and metric_key("reward/a") == "reward/<name>" and metric_key("reward/mean") == "reward/mean"


def test_every_metric_is_defined():
    table = definitions_table()
    assert table.count("\n") == len(DEFINITIONS) + 1
    row = full_step().row(StepTimes(started=0.0, committed=10.0, could_generate=0.5, train_began=4.0), 4, SPANS)
    added_by_others = {
        "policy/clip_ratio",
        "mismatch/kl",
        "mismatch/logprob_difference",
        "policy/rollout_kl",
        "policy/rollout_logprob_difference",
        "perf/helper_seconds",
        "perf/threads",
        "perf/cores_busy",
        "run/num_resumes",
        "weights/attested",
        "weights/version_bytes",
        "memory/rss_bytes/<worker>",
        "own/<name>",
        "reward/<name>",
    }
    added_by_others |= {name for name in DEFINITIONS if name.startswith(("queue/", "importance_weight/", "critic/", "episode/"))}
    assert {metric_key(name) for name in row} | added_by_others == set(DEFINITIONS)
    assert metric_key("memory/rss_bytes/rollout/0") == "memory/rss_bytes/<worker>"


def test_a_critic_tells_how_much_of_the_returns_it_foretells():
    """Returns 1, 2, 3, 4 and values 1.5, 2, 3, 3.5: errors -0.5, 0, 0, 0.5, of variance 0.125 where the returns have 1.25."""
    metrics = StepMetrics()
    sums = {
        "critic/value": 10.0, "critic/return": 10.0, "critic/return_square": 30.0, "critic/error": 0.0,
        "critic/error_square": 0.5, "critic/clip_ratio": 1.0,
    }  # fmt: skip
    metrics.add_losses(losses(8.0, 4, 9, 9, sums))
    metrics.add_update(grad_norm=2.0, learning_rate=0.1, normaliser=4)
    row = metrics.critic_row()
    assert set(row) == {name for name in DEFINITIONS if name.startswith("critic/")}
    assert row["critic/explained_variance"] == pytest.approx(0.9)
    assert (row["critic/loss"], row["critic/value"], row["critic/clip_ratio"], row["critic/grad_norm"]) == (2.0, 2.5, 0.25, 2.0)
    metrics = StepMetrics()
    metrics.add_losses(losses(0.0, 2, 2, 2, dict.fromkeys(sums, 0.0)))
    assert "critic/explained_variance" not in metrics.critic_row()


def test_mismatches_are_means_over_the_tokens_of_rows_without_staleness():
    metrics = full_step()
    assert not [name for name in metrics.row(StepTimes(started=0, committed=10), 4, SPANS) if name.startswith("mismatch/")]
    for tokens, difference in ((0, 0.0), (10, 0.5), (30, 1.5)):
        sums = {"mismatch/tokens": tokens, "mismatch/logprob_difference": difference, "mismatch/kl": difference / 100}
        metrics.add_losses(losses(0.0, 60, 60, 60, sums))
        row = metrics.row(StepTimes(started=0, committed=10), 4, SPANS)
        assert "mismatch/tokens" not in row and ("mismatch/kl" in row) == (tokens > 0)
    assert row["mismatch/logprob_difference"] == pytest.approx(0.05) and row["mismatch/kl"] == pytest.approx(0.0005)


def test_idle_ratios_clip_to_the_interval_and_divide_by_what_is_recorded():
    assert idle_ratios(SPANS, 5, 9) == {"rollout/0": 0.75, "rollout/1": 0.25, "trainer/0": 0.25}
    # The rollout workers' later states have not arrived: 9 to 10 is all that is known of them.
    assert idle_ratios(SPANS, 9, 20) == {"rollout/0": 1.0, "rollout/1": 1.0, "trainer/0": 1.0}
    assert idle_ratios(SPANS, 50, 60) == {}


def test_active_seconds_is_a_union_and_tokens_are_shared_out_by_time():
    assert active_seconds(SPANS, ["generate"], 1, 7) == 6
    assert active_seconds(SPANS, ["fetch"], 0, 10) == 0
    assert active_seconds([lane("a", "t", 0, 1), lane("b", "t", 3, 4), lane("b", "t", 3, 3.5)], ["t"], 0, 10) == 2
    assert tokens_within(SPANS, "generate", 0, 3) == pytest.approx(300 + 50)


def test_busy_plus_idle_is_wall_through_the_recorder():
    now = [0.0]
    spans: list[Span] = []
    recorder = Recorder("trainer/0", lambda: now[0], spans.append)
    durations = np.random.default_rng(0).uniform(0.001, 0.2, 400).tolist()
    for i, seconds in enumerate(durations):
        if i % 3:
            with recorder.busy("forward_backward" if i % 5 else "optim_step", step=i):
                now[0] += seconds
        else:
            recorder.waiting("rows" if i % 2 else "step")
            now[0] += seconds
        recorder.off_lane("fetch", now[0] - 0.5)
    recorder.flush()
    activity = busy_and_idle(spans, "trainer/0")
    assert activity.wall == pytest.approx(sum(durations))
    assert activity.busy_seconds + activity.idle_seconds == pytest.approx(activity.wall, rel=0.01)
    assert set(activity.busy) == {"forward_backward", "optim_step"}
    assert {"rows", "step"} <= set(activity.idle)
    assert activity.unrecorded_seconds == pytest.approx(0, abs=1e-9)


def test_time_between_two_lives_of_a_worker_is_neither_busy_nor_idle():
    spans = [lane("rollout/0", "generate", 0, 4), lane("rollout/0", "wait", 6, 10, "prompts")]
    activity = busy_and_idle(spans, "rollout/0")
    assert (activity.wall, activity.busy_seconds, activity.idle_seconds, activity.unrecorded_seconds) == (10, 4, 4, 2)
    assert busy_and_idle(spans, "trainer/0").wall == 0
