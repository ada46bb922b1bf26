"""The numbers of a step: what each one means, exactly, and how it is made.

    groups --------+
    their losses --+--> StepMetrics --> one row (name -> number) --> trackers
    optim steps ---+        ^
    times, spans -----------+

`DEFINITIONS` is the only place that says what a metric is. A loss may add sums of its own, by name: means over loss tokens; or
maxima over them, by names that end in `/max`.
A number that cannot be known (a mean over nothing, a rate over no time) is left out of the row: never a 0 that was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import numpy as np

from asyncflow.own_metrics import MetricSums, add, means
from asyncflow.telemetry.attribution import exposed_weights
from asyncflow.telemetry.idle import active_seconds, helper_passes, idle_ratios, tokens_within
from asyncflow.telemetry.spans import Span
from asyncflow.types import Array, is_maximum

TRAIN_TASKS: Final = ("forward_backward", "optim_step")
ROLLOUT_TASK: Final = "generate"

DEFINITIONS: Final[dict[str, str]] = {
    "reward/mean": "Mean reward over the scored rows of the step.",
    "reward/std": "Standard deviation (divisor n) of those rewards, over rows, not over group means.",
    "reward/<name>": "Mean of what the scorer of this name gave, before its weight, over those of these rows for which it gave "
    "anything; only where the reward has several parts.",
    "reward/zero_std_groups": "Number of groups whose rewards are all equal: they have no advantage and teach nothing.",
    "response_length/mean": "Mean response length in tokens, the end token included, over the same rows as the rewards.",
    "response_length/std": "Standard deviation (divisor n) of those lengths, over rows.",
    "response_length/clipped_ratio": "Share of those rows that were cut off at the largest length (0 to 1).",
    "episode/turns/mean": "Mean number of the policy's turns in an episode, over the same rows; only, as the next seven, in a run "
    "with an environment.",
    "episode/turns/largest": "Largest such number.",
    "episode/tool_calls": "Tools that the step's episodes called.",
    "episode/tool_failures": "Calls among these that failed.",
    "episode/observed_tokens": "Tokens of observations in the step's episodes: they are in the context and not in the loss.",
    "episode/sampled_tokens": "Tokens that the policy sampled in them.",
    "episode/environment_seconds": "Mean seconds that an episode spent in its environment.",
    "episode/timeouts": "Episodes that the environment's deadline ended.",
    "policy/kl": "Estimated KL divergence (k3), in nats, mean over loss tokens: of the policy from the reference; "
    "without one, of the old policy from the policy (0 by construction while they are the same).",
    "policy/rollout_kl": "Estimated KL divergence of the engine that sampled from the policy (k3), in nats, mean over loss tokens: "
    "what staleness and the difference of the two engines amount to.",
    "policy/rollout_logprob_difference": "Mean absolute difference of the rollout engine's log-probs from the policy's, in nats, "
    "over the same tokens: `mismatch/logprob_difference` with what staleness adds.",
    "policy/entropy": "Entropy of the policy's token distribution, in nats, mean over loss tokens.",
    "policy/clip_ratio": "Share of loss tokens whose probability ratio was clipped (0 to 1).",
    "policy/grad_norm": "Norm of the gradient before clipping, mean over the step's updates, skipped ones left out.",
    "policy/loss": "Sum of the unnormalised losses / sum of the normalisers of the step's updates.",
    "policy/learning_rate": "Learning rate of the step's last update.",
    "policy/skipped_updates": "Number of updates skipped: a loss or the gradient was not finite, or nothing was left to train on.",
    "policy/non_finite_micro_batches": "Number of micro-batches left out because the loss or a log-prob was not finite.",
    "importance_weight/mean": "Importance weight w (old policy / engine that sampled) after truncation or masking, mean over loss "
    "tokens. Logged, as the next three, where the algorithm corrects by such weights.",
    "importance_weight/max": "Largest such ratio over loss tokens (of whole responses, if that is the level), before truncation or "
    "masking.",
    "importance_weight/outside_ratio": "Share of loss tokens whose importance weight was truncated, or masked to 0 (0 to 1).",
    "importance_weight/effective_sample_ratio": "Effective sample size of the weights, (sum w)^2 / sum w^2, divided by the loss "
    "tokens: 1 when all weights are equal.",
    "critic/loss": "The critic's loss, as `policy/loss`. Logged, as the others of its kind, where the algorithm has a critic.",
    "critic/grad_norm": "Norm of the critic's gradient, as `policy/grad_norm`.",
    "critic/learning_rate": "Learning rate of the critic's last update in the step.",
    "critic/skipped_updates": "Number of the critic's updates skipped, as `policy/skipped_updates`.",
    "critic/value": "Mean over loss tokens of the values that the step's advantages were made from.",
    "critic/return": "Mean over loss tokens of the returns that the critic was trained on.",
    "critic/clip_ratio": "Share of loss tokens whose value was clipped in the loss (0 to 1).",
    "critic/explained_variance": "1 - Var(return - value) / Var(return) over loss tokens: 1 where the values foretell everything, "
    "0 or less where a constant would do as well. Left out where all returns are equal.",
    "mismatch/logprob_difference": "Mean absolute difference of the rollout engine's log-probs from the train engine's own, in "
    "nats, over the loss tokens of rows of staleness 0: both engines had the same version, so all of it is arithmetic and "
    "rounding. Left out, as the next, where the step has no such row, as under `delayed` after the first step; "
    "`policy/rollout_kl` and `policy/rollout_logprob_difference` are there in every step, over all rows.",
    "mismatch/kl": "Estimated KL divergence (k3), in nats, of the rollout engine from the train engine, mean over the same tokens.",
    "staleness/mean": "Mean over trained rows of (step - oldest policy version that made a token of the row).",
    "staleness/max": "Largest such difference.",
    "perf/tpspd": "Logical tokens trained in the step (every response with its prompt, once) / (perf/step_seconds x all devices, "
    "rollout included). Rows that are left out for having no gradient (`train.skip_zero_advantages`) do not count.",
    "perf/step_seconds": "Seconds from the previous step's commit (at first: the first admission) to this step's commit.",
    "perf/train_startup_seconds": "Seconds from the moment the step's first group could be generated (admitted, weights installed) "
    "to the step's first forward_backward.",
    "perf/rollout_tokens_per_second": "Response tokens generated in the step / seconds of the step in which at least one rollout "
    "worker was generating.",
    "perf/drafted_tokens": "Draft tokens that rollout engines verified in the step (`rollout.engine.speculation`), as far as they "
    "have told it when the row is written.",
    "perf/accepted_drafts_ratio": "Share of these that were right (0 to 1): tokens that cost no step of their own.",
    "perf/train_tokens_per_second": "Logical tokens of the step's micro-batches / seconds of the step in which at least one "
    "trainer was in forward_backward or optim_step.",
    "perf/physical_tokens_ratio": "Tokens computed / logical tokens, over the step's micro-batches: below 1 where prompts are "
    "shared, above 1 where there is padding.",
    "perf/fill_ratio": "Tokens computed for nothing / tokens computed: what brought a pipeline's micro-batches to one length, and "
    "what stood where a data-parallel group had no micro-batch.",
    "perf/idle_ratio/<worker>": "Share of the worker's recorded time in the step that it spent waiting (0 to 1).",
    "perf/helper_seconds": "Seconds that helpers of the trainer and the critic computed in the step, added up over them "
    "(`train.helpers`). "
    "Left out where none did.",
    "perf/cores_busy": "Cores that workers computed on in the step, on average (lanes that do not wait, load or save, and helpers' "
    "passes, by their numbers of threads) / the machine's cores: above 1 where more threads compute than there are cores. For runs "
    "whose workers share one machine's cores, without `rollout.num_threads: auto`.",
    "perf/threads": "Most threads that workers were given to compute with at one time since the step before / the machine's cores: "
    "above 1 only where there are more workers than cores, since each has a first one. For runs whose workers share one machine's "
    "cores.",
    "perf/exposed_weights": "Share of the recorded time of rollout workers and trainers in the step, of all of them together, in "
    "which they do nothing but install weights or wait for weights (0 to 1). A rollout worker waits for weights from the update "
    "that makes them until it installs them. A trainer waits for them while its ranks gather them, while they are still copied and "
    "hashed when it is to change them, and until the first group of its step is begun with them. Publishing beside "
    "forward_backward is not exposed. A wait that goes on at the commit counts from the commit on.",
    "rows/trained": "Rows that the step's updates were computed from.",
    "rows/zero_advantage": "Rows of these that were not computed, since the advantages of their micro-batch were all 0 "
    "(`train.skip_zero_advantages`): they count in the normaliser, and their gradient is 0. Means over loss tokens are then over "
    "the other rows.",
    "rows/dead": "Rows that failed for good (dead letters), not trained.",
    "rows/unscored": "Rows that could not be scored, in all of their attempts: failed (and in `rows/dead`), or trained with "
    "`reward.value_on_failure`.",
    "rows/skipped": "Rows about which no scorer had anything to say (None): failed, and in `rows/dead`.",
    "rows/degenerate": "Rows of groups whose rewards were all equal, in whose place other prompts were taken (dynamic sampling).",
    "rows/surplus": "Rows of prompts that were taken to be chosen from and not needed: they come again in the next step.",
    "rows/empty": "Trained rows without a loss token (all masked): they add no gradient and do not count in the normaliser.",
    "rows/redelivered": "Rows handed out again because a lease failed or expired; each time counts. Not those that evaluators had.",
    "queue/ready/<task>": "Rows ready for the task, when the row of metrics is written.",
    "queue/leased/<task>": "Rows handed out and not done, at that moment.",
    "queue/done/<task>": "Rows that the task has done since the run began.",
    "queue/dead/<task>": "Rows that failed for good, as the task has seen them, since the run began.",
    "queue/filtered/<task>": "Rows taken out on purpose, as the task has seen them, since the run began.",
    "queue/redelivered/<task>": "Rows handed out again since the run began; each time counts.",
    "queue/oldest_ready_seconds/<task>": "For how long the task's oldest ready row has been ready, at that moment.",
    "queue/rows": "Rows on all storage units, at that moment.",
    "queue/stored_bytes": "Bytes of their values.",
    "queue/admission_wait_seconds": "Seconds that admissions have waited for room since the run began, over all of them.",
    "weights/version_bytes": "Bytes of the version that was published last: of a whole model, or of a low-rank adapter.",
    "weights/attested": "Share (0 to 1) of the versions' tensors given to rollout workers, when the row is written, that their "
    "engines have shown, after their last installs, to generate with. Only once one has been given any, of a trainer that "
    "promises what engines will have.",
    "run/num_resumes": "Number of times that the run has been resumed from a checkpoint; only where it has been.",
    "own/<name>": "Metric of the user's own: mean over what `log_metric` was given, in `advantages` for the step's groups, and "
    "by scorers of the responses that were begun for the step.",
    "memory/rss_bytes/<worker>": "Resident memory of the worker's process, in bytes, as last reported to the driver.",
}

HOW_ROWS_END: Final = ("trained", "zero_advantage", "dead", "unscored", "skipped", "degenerate", "surplus", "empty", "redelivered")
MISMATCHES: Final = ("mismatch/logprob_difference", "mismatch/kl")
LARGE_MISMATCH: Final = 0.01
"""Limit of `mismatch/kl`, in nats: two engines that compute the same model stay far below it, also in bfloat16."""
LARGE_ROLLOUT_KL: Final = 0.1
"""Limit of `policy/rollout_kl`, in nats, where no row is fresh: a version or two of learning stay far below it."""

FAMILIES: Final = {name[: name.index("<")]: name for name in DEFINITIONS if "<" in name}
"""Prefixes of the metrics of which every worker, or every task of the queue, has its own, with the key that defines them."""


def metric_key(name: str) -> str:
    """The key of `DEFINITIONS` that defines the metric `name`: a worker's own number is defined once for all workers."""
    if name in DEFINITIONS:
        return name
    return next((key for prefix, key in FAMILIES.items() if name.startswith(prefix)), name)


def definitions_table() -> str:
    """`DEFINITIONS` as a Markdown table."""
    return "\n".join(["| metric | definition |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in DEFINITIONS.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Moments of one step, in seconds of the clock that the spans use.

    `started`: the previous step's commit (at first: the first admission). `committed`: this step's commit.
    `could_generate`: when the step's first group was admitted and a worker could hold weights for it.
    `train_began`: the start of the step's first forward_backward. The last two are None when they never happened.
    """

    started: float
    committed: float
    could_generate: float | None = None
    train_began: float | None = None


class EpisodeFigures(msgspec.Struct, frozen=True):
    """Figures of the episodes of a trained group of R rows."""

    num_turns: np.ndarray  # int64 [R]
    num_observed: int  # tokens
    num_sampled: int
    tool_calls: int
    tool_failures: int
    seconds: np.ndarray  # float32 [R], in the environment
    num_timed_out: int


class GroupFigures(msgspec.Struct, frozen=True):
    """Figures of a trained group of R rows, that metrics are made of."""

    prompt_length: int
    rewards: np.ndarray  # float32 [R]
    response_lengths: np.ndarray  # int64 [R]
    truncated: np.ndarray  # uint8 [R]
    staleness: np.ndarray  # int64 [R], versions
    num_spans: np.ndarray  # int64 [R], policy versions that made the response
    loss_sum: float
    computed_tokens: int  # loss tokens whose loss was computed: what `metrics` are sums over
    logical_tokens: int  # of what was computed
    physical_tokens: int
    metrics: Mapping[str, float]
    left_out: int = 0  # rows that were not computed
    reward_parts: np.ndarray = msgspec.field(default_factory=partial(np.empty, 0, np.float32))  # [R * parts], where they are kept
    own_metrics: Mapping[str, tuple[int, float]] = {}  # the algorithm's (own_metrics.py)
    episodes: EpisodeFigures | None = None


class StepMetrics:
    """Collects what is known of one step, in any order, and yields its row. Pure: no clock, no files."""

    def __init__(self) -> None:
        self._groups: list[GroupFigures] = []  # scored ones, each once
        self._losses: list[GroupFigures] = []  # those whose gradients were added, once for each epoch
        self._reward_parts: dict[str, list[Array]] = {}
        self._logical_tokens = self._physical_tokens = self._fill_tokens = 0
        self._non_finite = self._skipped = 0
        self._grad_norms: list[float] = []
        self._learning_rate: float | None = None
        self._normaliser = 0.0
        self._rows = dict.fromkeys((f"rows/{how}" for how in HOW_ROWS_END), 0)
        self._scorers: MetricSums = {}

    def add_group(self, group: GroupFigures) -> None:
        """Add a scored group of the step, without its rows that are dead. A `ValueError` when its arrays' lengths differ."""
        sizes = {len(array) for array in (group.rewards, group.response_lengths, group.truncated, group.staleness)}
        if len(sizes) != 1:
            raise ValueError(f"a group's arrays have different lengths: {sorted(sizes)}")
        if num_rows := sizes.pop():
            self._groups.append(group)
            self._rows["rows/trained"] += num_rows

    def add_losses(self, group: GroupFigures, *, is_finite: bool = True) -> None:
        """Add the losses of a group whose gradient was computed: of its `metrics` each becomes a mean over the step's
        `computed_tokens` (`LossSums`). With `is_finite` False nothing was accumulated: its tokens enter no mean."""
        self._logical_tokens += group.logical_tokens
        self._physical_tokens += group.physical_tokens
        if is_finite:
            self._losses.append(group)
        else:
            self._non_finite += 1

    def add_update(
        self, *, grad_norm: float, learning_rate: float, normaliser: float, is_skipped: bool = False, fill_tokens: int = 0
    ) -> None:
        """Add an `optim_step`, with the number that its gradient sums were divided by, and the tokens that filled up its rounds."""
        self._fill_tokens += fill_tokens
        self._normaliser += normaliser
        if is_skipped:
            self._skipped += 1
        else:
            self._learning_rate = learning_rate
            self._grad_norms.append(grad_norm)

    def add_reward_parts(self, parts: Mapping[str, Array]) -> None:
        """Add the rewards of each scorer for the rows of a group, by name; NaN: none."""
        for name, rewards in parts.items():
            self._reward_parts.setdefault(name, []).append(rewards[~np.isnan(rewards)].astype(np.float64))

    def add_scorers(self, own_metrics: MetricSums) -> None:
        """Add the scorers' own metrics. Those that the algorithm names likewise are one with them."""
        add(self._scorers, own_metrics)

    def count_rows(self, **counts: int) -> None:
        """Rows that never reached `add_group`, rows without loss tokens, and redeliveries, by the second half of their metric's
        name; a `KeyError` for one that there is not."""
        for how, count in counts.items():
            self._rows[f"rows/{how}"] += count

    def row(self, times: StepTimes, num_devices: float, spans: Sequence[Span]) -> dict[str, float | int]:
        """The step's row, in the order of `DEFINITIONS`.

        `num_devices` counts all of them, rollout included, on average over the step. `spans`, as `attributed` returns them, covers
        [times.started, times.committed] as far as it has arrived; rates need `tokens` on the `generate` spans, counted with
        `Recorder.add`.
        """
        own = dict(self._scorers)
        for group in self._groups:
            add(own, group.own_metrics)
        found = {
            **self._reward_row(),
            **self._policy_row(),
            **self._perf_row(times, num_devices, spans),
            **self._rows,
            **means(own),
        }
        order = {name: position for position, name in enumerate(DEFINITIONS)}
        return dict(sorted(found.items(), key=lambda item: (order.get(metric_key(item[0]), len(order)), item[0])))

    def _reward_row(self) -> dict[str, float | int]:
        # Not std == 0: rounding can leave a tiny deviation among equal numbers.
        num_equal = sum(bool(np.max(group.rewards) == np.min(group.rewards)) for group in self._groups)
        row: dict[str, float | int] = {"reward/zero_std_groups": num_equal}
        if not self._groups:
            return row
        rewards, lengths, truncated, staleness = (
            np.concatenate([getattr(group, name) for group in self._groups])
            for name in ("rewards", "response_lengths", "truncated", "staleness")
        )
        rewards = rewards.astype(np.float64)
        row["reward/mean"], row["reward/std"] = float(rewards.mean()), float(rewards.std())
        given = {name: np.concatenate(each) for name, each in self._reward_parts.items()}
        row |= {f"reward/{name}": float(each.mean()) for name, each in given.items() if len(each)}
        row["response_length/mean"], row["response_length/std"] = float(lengths.mean()), float(lengths.std())
        row["response_length/clipped_ratio"] = float(truncated.astype(bool).mean())
        row["staleness/mean"], row["staleness/max"] = float(staleness.mean()), int(staleness.max())
        return row | self._episode_row()

    @property
    def num_timed_out(self) -> int:
        """Number of rows whose environment missed its deadline."""
        return sum(group.episodes.num_timed_out for group in self._groups if group.episodes is not None)

    def _episode_row(self) -> dict[str, float | int]:
        episodes = [group.episodes for group in self._groups if group.episodes is not None]
        if not episodes:
            return {}
        turns, seconds = (np.concatenate([getattr(each, name) for each in episodes]) for name in ("num_turns", "seconds"))
        return {
            "episode/turns/mean": float(turns.mean()),
            "episode/turns/largest": int(turns.max()),
            "episode/tool_calls": sum(each.tool_calls for each in episodes),
            "episode/tool_failures": sum(each.tool_failures for each in episodes),
            "episode/observed_tokens": sum(each.num_observed for each in episodes),
            "episode/sampled_tokens": sum(each.num_sampled for each in episodes),
            "episode/environment_seconds": float(seconds.mean()),
            "episode/timeouts": self.num_timed_out,
        }

    def critic_row(self) -> dict[str, float | int]:
        """Metrics of a step's training of a critic."""
        row = {name.replace("policy/", "critic/"): value for name, value in self._policy_row().items()}
        row.pop("critic/non_finite_micro_batches", None)
        error, square = row.pop("critic/error", 0.0), row.pop("critic/error_square", 0.0)
        variance = row.pop("critic/return_square", 0.0) - row.get("critic/return", 0.0) ** 2
        if variance > 0:
            row["critic/explained_variance"] = 1 - (square - error**2) / variance
        return row

    def _policy_row(self) -> dict[str, float | int]:
        row: dict[str, float | int] = {
            "policy/skipped_updates": self._skipped,
            "policy/non_finite_micro_batches": self._non_finite,
        }
        sums: dict[str, float] = {}
        for group in self._losses:
            for name, total in group.metrics.items():
                sums[name] = max(sums.get(name, total), total) if is_maximum(name) else sums.get(name, 0.0) + total
        if tokens := sum(group.computed_tokens for group in self._losses):
            row.update({name: total if is_maximum(name) else total / tokens for name, total in sums.items()})
            # Of rows of staleness 0 alone, so their means are over other tokens than those above.
            mismatch_tokens = sums.get("mismatch/tokens", 0.0)
            row.pop("mismatch/tokens", None)
            for name in MISMATCHES:
                if row.pop(name, None) is not None and mismatch_tokens:
                    row[name] = sums[name] / mismatch_tokens
            square = row.pop("importance_weight/square", 0.0)
            if square:
                row["importance_weight/effective_sample_ratio"] = row["importance_weight/mean"] ** 2 / square
        if self._normaliser:
            row["policy/loss"] = sum(group.loss_sum for group in self._losses) / self._normaliser
        if self._grad_norms:
            row["policy/grad_norm"] = float(np.mean(self._grad_norms))
        if self._learning_rate is not None:
            row["policy/learning_rate"] = self._learning_rate
        return row

    def _perf_row(self, times: StepTimes, num_devices: float, spans: Sequence[Span]) -> dict[str, float | int]:
        start, end = times.started, times.committed
        row: dict[str, float | int] = {"perf/step_seconds": end - start}
        if end > start:
            trained_tokens = sum(group.logical_tokens for group in self._groups)
            row["perf/tpspd"] = trained_tokens / ((end - start) * num_devices)
        if times.could_generate is not None and times.train_began is not None:
            row["perf/train_startup_seconds"] = times.train_began - times.could_generate
        if self._logical_tokens:
            computed = self._physical_tokens + self._fill_tokens
            row["perf/physical_tokens_ratio"] = computed / self._logical_tokens
            row["perf/fill_ratio"] = self._fill_tokens / max(computed, 1)
        rollout_seconds = active_seconds(spans, [ROLLOUT_TASK], start, end)
        if rollout_seconds:
            row["perf/rollout_tokens_per_second"] = tokens_within(spans, ROLLOUT_TASK, start, end) / rollout_seconds
        steps = [span for span in spans if span.drafts and start < span.end <= end]
        if drafts := sum(span.drafts for span in steps):
            row["perf/drafted_tokens"] = drafts
            row["perf/accepted_drafts_ratio"] = sum(span.accepted for span in steps) / drafts
        train_seconds = active_seconds(spans, TRAIN_TASKS, start, end)
        if train_seconds:
            row["perf/train_tokens_per_second"] = self._logical_tokens / train_seconds
        if helped := sum(seconds for _, seconds in helper_passes(spans, start, end)):
            row["perf/helper_seconds"] = helped
        if (exposed := exposed_weights(spans, start, end)) is not None:
            row["perf/exposed_weights"] = exposed
        row.update({f"perf/idle_ratio/{worker}": ratio for worker, ratio in idle_ratios(spans, start, end).items()})
        return row
