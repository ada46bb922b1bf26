"""Checks on what a run trains: oddities are logged, and too many of them end the run.

    RunRecord --groups, updates, rows without a reward, metrics--> TrainingChecks --log---> the terminal
                                                                        '-----fail--> the run's end

Said each time: rows without a token to train on, updates that are skipped. Said once: prompts that are not shared, engines that do
not compute the same, too many metrics of the user's own. Too much are rows of a step without a reward, beyond
`reward.max_failed_fraction` of it, and updates that are skipped in a row, from `train.max_skipped_updates` on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from asyncflow.control.ledger import Consumed, StepTotals, Update
from asyncflow.loops.score_batching import NO_REWARD
from asyncflow.own_metrics import MAX_NAMES, PREFIX
from asyncflow.run.context import RunContext
from asyncflow.telemetry.hub import UnscoredResponse
from asyncflow.telemetry.metrics import LARGE_MISMATCH, LARGE_ROLLOUT_KL, GroupFigures
from asyncflow.types import RunError

FIRST_FAILURES: Final = 8
FIRST_TIMEOUTS: Final = 3
"""Number of attempts to score, none of which has given a reward, that ends a run. Those that hang take a deadline each."""


class TrainingChecks:
    """Checks of one run.

    `skipped_in_a_row`: by task, the updates that were skipped since it last made one. `has_logged_unshared`: whether the log has
    that prompts are not shared.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        skipped_in_a_row: Mapping[str, int],
        has_logged_unshared: bool,
        reward_failures: Callable[[], Mapping[str, int]],
    ) -> None:
        """`skipped_in_a_row`, `has_logged_unshared`: as the attempt before this one left them. `reward_failures()`: attempts that
        failed so far, by kind."""
        self.skipped_in_a_row, self.has_logged_unshared = dict(skipped_in_a_row), has_logged_unshared
        self._config, self._shape, self._ledger = context.config, context.shape, context.ledger.ledger
        self._reward_failures, self._log, self._fail = reward_failures, context.log, context.background.fail
        self._rows: dict[tuple[str, int, int], list[int]] = {}  # by task, step and update, what that is to train
        self._num_unscored: Counter[int] = Counter()  # by step
        self._failed: Counter[str] = Counter()  # attempts to score, by kind
        self._max_failed = context.config.reward.max_failed_fraction
        self._has_logged_mismatch = self._has_logged_own = False
        self._has_trained = False  # in this attempt

    def consumed(self, task: str, step: int, update: int, rows: Sequence[int]) -> None:
        """Note the rows of a group that this update of the step trains."""
        self._rows.setdefault((task, step, update), []).extend(rows)

    def look_at_group(self, group: Consumed, figures: GroupFigures) -> None:
        """Look at a group that has been trained, in the first epoch."""
        if group.empty_rows:
            rows = ", ".join(map(str, group.empty_rows))
            self._log(f"rows without a token to train on, which train nothing and do not count in the normaliser: {rows}")
        self._look_at_sharing(len(group.rows), figures)

    def not_scored(self, step: int, count: int, error: str = "") -> None:
        """Count `count` more rows of the step that could not be scored; `error`: of the last one, if it is known. Too many of
        them end the run."""
        self._num_unscored[step] += count
        num_rows, most = self._ledger.num_groups(step) * self._shape.group_size, self._config.reward.max_failed_fraction
        if self._num_unscored[step] > most * num_rows:
            kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(self._reward_failures().items()))
            last = f"; the last one: {error.removeprefix(NO_REWARD)}" if error else ""
            self._fail(
                RunError(
                    f"{self._num_unscored[step]} of the {num_rows} rows of step {step} could not be scored, more than "
                    f"reward.max_failed_fraction={most:g} (attempts that failed so far: {kinds or 'not yet told'}): mend the "
                    f"scorer, or raise that{last}"
                )
            )

    def look_at_failure(self, response: UnscoredResponse, kept_in: Path, num_scored: int) -> None:
        """A response could not be scored, at one attempt. Says the first of each kind at once, and ends a run in which all of the
        first ones fail: nobody should wait for hours to see that. `num_scored`: responses that were."""
        if not self._failed[response.kind]:
            ways_out = {"timeout": ", or raise reward.deadline_seconds", "memory": ", or raise reward.memory_bytes"}
            ways_out["output"] = ", or raise reward.output_bytes"
            prompt = " ".join(response.prompt.split())
            self._log(
                f"a response to {prompt[:60]!r} could not be scored: {response.error}. The first ones that fail so are kept in "
                f"{kept_in}: mend the scorer{ways_out.get(response.kind, '')}"
            )
        self._failed[response.kind] += 1
        num_failed, num_late = self._failed.total(), self._failed["timeout"]
        has_scored = num_scored or self._ledger.committed
        if not has_scored and (num_failed >= FIRST_FAILURES or num_late >= FIRST_TIMEOUTS) and self._max_failed < 1:
            self._fail(
                RunError(
                    f"none of the first {num_failed} responses could be scored, the last one because {response.error}. "
                    f"They are in {kept_in}: mend the scorer (asyncflow reward tries it), or set reward.max_failed_fraction=1"
                )
            )

    def committed(self, task: str, of_updates: Sequence[StepTotals], updates: Sequence[Update]) -> None:
        """Look at a step that is final for one of the models. Says which of its updates were skipped, and why; too many in a row
        end the run."""
        for number, (totals, update) in enumerate(zip(of_updates, updates, strict=True)):
            rows = self._rows.pop((task, totals.step, number), [])
            self.skipped_in_a_row[task] = self.skipped_in_a_row[task] + 1 if update.is_skipped else 0
            self._has_trained |= not update.is_skipped
            if update.is_skipped:
                which = f"update {number + 1} of {len(updates)} of " if len(updates) > 1 else ""
                self._skipped(task, f"{which}step {totals.step}", totals, update, rows)

    def look_at_metrics(self, row: Mapping[str, float]) -> None:
        """Look at a step's metrics. Says once that the two engines do not compute the same, where they are to, and once that there
        are as many metrics of the user's own as a row can have."""
        if not self._has_logged_own and sum(name.startswith(PREFIX) for name in row) >= MAX_NAMES:
            self._has_logged_own = True
            self._log(f"a step has {MAX_NAMES} metrics of your own at most, and so many it has: other names are left out")
        if self._config.rollout.is_truncated:
            return  # the rollout engine's distribution is a part of the policy's
        has_fresh = "mismatch/kl" in row
        name, most = ("mismatch/kl", LARGE_MISMATCH) if has_fresh else ("policy/rollout_kl", LARGE_ROLLOUT_KL)
        divergence = row.get(name, 0.0)
        if self._has_logged_mismatch or not divergence > most:  # no number: other lines tell of that
            return
        self._has_logged_mismatch = True
        why = "though both have the same version's weights" if has_fresh else "more than a version or two of learning make of it"
        self._log(
            f"the rollout engine's log-probs are not the train engine's: {name} is {divergence:.2g} nats, above {most:g}, {why}; "
            f"set rollout.dtype, train.dtype and "
            f"weight_sync.dtype, which round them, to the same, or to float32; take out "
            f"what changes the rollout engine's arithmetic, such as quantisation; or correct for it by "
            f"algorithm.correction=truncated (docs/off_policy.md)"
        )

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _look_at_sharing(self, num_rows: int, figures: GroupFigures) -> None:
        """Say once that a shared prompt was not worth it, where it was asked for."""
        is_shared = figures.physical_tokens < figures.logical_tokens or not figures.logical_tokens  # or none of it was computed
        if self.has_logged_unshared or is_shared or self._shape.rows_per_micro_batch == 1 or num_rows == 1:
            return
        self.has_logged_unshared = True
        tokens = f"a prompt of {figures.prompt_length} tokens, {num_rows} responses of {figures.response_lengths.mean():.0f}"
        self._log(f"prompts are not shared where that saves less than a tenth of the tokens ({tokens})")

    def _skipped(self, task: str, which: str, totals: StepTotals, update: Update, rows: Sequence[int]) -> None:
        """`rows`: that were to be trained by the update."""
        is_policy, non_finite = task == self._ledger.tasks.policy, totals.non_finite_rows
        why = f"the gradient of {self._named(rows)} together was not finite"
        if non_finite:
            why = f"the loss of rows {', '.join(map(str, non_finite[:8]))} was not finite"
        if not update.normaliser:
            why = "nothing was left to train on"
        whose = "skipped, the weights" if is_policy else "skipped for the critic, whose weights"
        self._log(f"{which} is {whose} stay as they are: {why}")
        if not update.normaliser and totals.dead and not self._has_trained and self._max_failed < 1:
            self._fail(
                RunError(
                    f"all {totals.dead} rows of step {totals.step}, the first one, have failed: the messages above say why; mend "
                    f"that, or set reward.max_failed_fraction=1 to go on all the same"
                )
            )
        if self.skipped_in_a_row[task] >= self._config.train.max_skipped_updates:
            ways_out = "lower train.learning_rate, or look at these rows' rewards and log-probs"
            if not is_policy:
                ways_out = "lower train.critic.learning_rate, or look at these rows' rewards and values"
            if not update.normaliser:
                ways_out = "the messages above say why the rows failed"
            updates = "updates" if is_policy else "updates of the critic"
            message = f"{self.skipped_in_a_row[task]} {updates} in a row were skipped, the last because {why}; {ways_out}"
            self._fail(RunError(message))

    def _named(self, rows: Sequence[int]) -> str:
        """The first and the last one where they are of neighbouring groups; how many they are, where they are not."""
        groups = {row >> self._shape.group_bits for row in rows}
        are_neighbours = groups and max(groups) - min(groups) + 1 == len(groups)
        return f"rows {min(rows)} to {max(rows)}" if are_neighbours else f"its {len(rows)} rows"
