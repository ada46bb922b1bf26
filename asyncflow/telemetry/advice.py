"""Advice about a run in words, from its own numbers: what it spends its time on, what teaches it nothing, and what would help.

Each piece of advice is a finding with its figures, and what may be done about it, with a bound on what that brings where arithmetic
gives one. Bounds assume that work spreads evenly and that nothing else becomes the slower half. Where it is a change of the
configuration, the planner can say what it brings (`asyncflow plan --from RUN CHANGE`). It has no costs of environments, or of
other ways of the weights; and no number says what learning would gain.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from asyncflow.telemetry.attribution import ENVIRONMENTS, INTERVAL, SLOWEST, WEIGHTS
from asyncflow.telemetry.charts import MetricRow
from asyncflow.telemetry.idle import Activity
from asyncflow.telemetry.metrics import LARGE_MISMATCH
from asyncflow.telemetry.run_reader import RunReader
from asyncflow.telemetry.sections import choice, idle_of_pools

_STEPS: Final = 20
"""Newest steps that the advice is about; the run's first one, which loads, is never among them."""
_MUCH_IDLE: Final = 0.15
_MANY: Final = 0.25
_MANY_CLIPPED: Final = 0.3
_LITTLE_ENTROPY: Final = 0.1
_LARGE_EXPOSED: Final = 0.05
_CLEARLY_SLOWER: Final = 1.25
_IDLE_CORES: Final = 0.8
_WAITING_MODES: Final = ("synchronous", "periodic")
_STREAMING: Final = "bounded"


class Advice(NamedTuple):
    """Piece of advice. `change`: the override of the configuration (`key.path=value`) that it is about, if it is one."""

    words: str
    change: str = ""


def advice(run: RunReader) -> list[Advice]:
    """Advice, the most costly thing first; none before the second step."""
    ends, rows = [end for _, end in run.spans.steps][-_STEPS - 1 :], run.rows[1:][-_STEPS:]
    if not rows:
        return []
    found = _about_rows(rows, run.rows, run.config)
    if len(ends) > 1:
        found = _about_time(run.spans.activities(ends[0], ends[-1]), (ends[-1] - ends[0]) / (len(ends) - 1), run.config) + found
    return found


def _about_time(activities: Mapping[str, Activity], step_seconds: float, config: Mapping[str, Any]) -> list[Advice]:
    """Advice about halves that wait for one another."""
    notes = _Notes()
    idle = idle_of_pools(activities)
    busy = {pool: 1 - sum(shares.values()) for pool, shares in idle.items()}
    if "rollout" not in busy or "trainer" not in busy:
        return []
    count = {pool: sum(worker.partition("/")[0] == pool for worker in activities) for pool in ("rollout", "trainer")}
    schedule = choice(config.get("schedule"))
    slower, faster = ("trainer", "rollout") if busy["trainer"] >= busy["rollout"] else ("rollout", "trainer")
    overlapped = max(busy.values()) * step_seconds
    waits = idle["rollout"].get(INTERVAL, 0.0) + idle["rollout"].get(WEIGHTS, 0.0)
    if schedule in _WAITING_MODES and waits > _MUCH_IDLE:
        notes.add(
            f"Rollout workers wait {waits:.0%} of their time for the update and its weights: with schedule=delayed they would "
            f"generate the next step meanwhile, for at best {overlapped:.3g} s a step instead of {step_seconds:.3g} s.",
            change="schedule=delayed",
        )
    if busy[slower] > _CLEARLY_SLOWER * busy[faster]:
        work = {pool: busy[pool] * step_seconds * count[pool] for pool in count}
        total = sum(count.values())
        splits = {n: max(work[slower] / n, work[faster] / (total - n)) for n in range(1, total)}
        best, change = min(splits, key=lambda n: splits[n]), ""
        words = (
            f"The {slower} is the slower half by {busy[slower] / max(busy[faster], 1e-9):.1f}: it is busy {busy[slower]:.0%} of "
        )
        words += f"the time, {'a ' if count[faster] == 1 else ''}{faster} {busy[faster]:.0%}."
        if best != count[slower] and splits[best] < 0.95 * step_seconds:
            words += f" {best} of the {total} workers for it instead of {count[slower]}, if devices can change sides, would make a "
            words += f"step of at best {splits[best]:.3g} s instead of {step_seconds:.3g} s."
        elif slower == "rollout" and not _may_have(count["rollout"] + 1, config):
            words += " Another worker for it would have no prompt of a step: train.prompts_per_step is as many."
        elif idle[faster].get(SLOWEST, 0.0) < _MUCH_IDLE:
            change = f"rollout.num_workers={count['rollout'] + 1}" if slower == "rollout" else ""
            words += f" Another worker for it brings at best {work[slower] / (count[slower] + 1):.3g} s of its work a step."
        else:
            words += " Another worker for it would not hide the last group of its steps, which is told of below."
        notes.add(words, change)
    if (tail := idle["trainer"].get(SLOWEST, 0.0) + idle["rollout"].get(SLOWEST, 0.0)) > _MUCH_IDLE:
        streams = schedule == _STREAMING
        ways = "or more prompts a step" if streams else f"more prompts a step, or schedule={_STREAMING}"
        notes.add(
            f"The last group of a step keeps others waiting for {tail:.0%} of a worker's time: shorter responses "
            f"(rollout.max_new_tokens), {ways} hide such stragglers, for at best "
            f"{max(overlapped, (1 - tail) * step_seconds):.3g} s a step instead of {step_seconds:.3g} s.",
            change="" if streams else f"schedule={_STREAMING}",
        )
    if (environments := idle["rollout"].get(ENVIRONMENTS, 0.0)) > _MUCH_IDLE:
        notes.add(
            f"Rollout workers wait {environments:.0%} of their time for environments: more episodes at once (episodes.at_once) "
            f"fill it, for at best {environments * step_seconds:.3g} s less of a step's {step_seconds:.3g} s.",
        )
    return notes


def _about_rows(rows: Sequence[MetricRow], every: Sequence[MetricRow], config: Mapping[str, Any]) -> list[Advice]:
    """Advice about what is learnt from."""
    notes = _Notes()
    mean = _means(rows)
    groups, without = _option(config, "train", "prompts_per_step"), mean("reward/zero_std_groups")
    if groups and without is not None and without > _MANY * groups:
        change = "" if _option(config, "train", "skip_zero_advantages") else "train.skip_zero_advantages=auto"
        spared = f"up to {without / groups:.0%} of the training, if the loss has no KL term and no entropy bonus"
        notes.add(
            f"{without:.0f} of {groups} groups a step have no signal: all their rewards are equal. "
            + (f"{change} spares {spared}; " if change else "")
            + "algorithm=dapo takes other prompts in their place; or choose prompts that are neither too easy nor too hard.",
            change=change,
        )
    if (cut := mean("response_length/clipped_ratio")) is not None and cut > _MANY:
        longest, length = _option(config, "rollout", "max_new_tokens"), mean("response_length/mean")
        has_turns = bool(config.get("environment"))  # an episode may also be cut off by its turns
        is_known = longest and length and not has_turns
        notes.add(
            f"{cut:.0%} of the responses are cut off at {longest} tokens"
            + (f", {min(1.0, cut * longest / length):.0%} of all tokens among them" if is_known else "")
            + ": raise rollout.max_new_tokens, or reward short ones, and at best all of them come to an end of their own, instead "
            f"of {1 - cut:.0%}.",
            change=f"rollout.max_new_tokens={2 * longest}" if is_known else "",
        )
    cores_busy, workers = mean("perf/cores_busy"), _option(config, "rollout", "num_workers")
    if cores_busy is not None and cores_busy < _IDLE_CORES and workers and _may_have(workers + 1, config):
        notes.add(
            f"The machine's cores are busy {cores_busy:.0%} of the time: with rollout.num_workers={workers + 1} more of them "
            f"generate at once, and train while nothing is left to generate (train.helpers).",
            change=f"rollout.num_workers={workers + 1}",
        )
    if (exposed := mean("perf/exposed_weights")) is not None and exposed > _LARGE_EXPOSED:
        seconds = mean("perf/step_seconds")
        of_step = f", on average {exposed * seconds:.2g} s of a step of {seconds:.3g} s" if seconds else ""
        notes.add(
            f"Weights take {exposed:.1%} of the workers' time{of_step}: another way (weight_sync.name), or training an adapter, "
            f"saves so much at most.",
        )
    if (clipped := mean("policy/clip_ratio")) is not None and clipped > _MANY_CLIPPED:
        notes.add(f"{clipped:.0%} of the tokens are clipped: a lower learning rate, or fewer epochs, keeps the policy nearer.")
    if (mismatch := mean("mismatch/kl")) is not None and mismatch > LARGE_MISMATCH:
        notes.add(f"Rollout and trainer disagree on one and the same version (mismatch/kl {mismatch:.3g}): compare their dtypes.")
    entropies = [row["policy/entropy"] for row in every if row.get("policy/entropy") is not None]
    if len(entropies) > 5 and entropies[0] > 0 and statistics.fmean(entropies[-3:]) < _LITTLE_ENTROPY * entropies[0]:
        notes.add(
            f"The policy's entropy has fallen from {entropies[0]:.3g} to {entropies[-1]:.3g} nats: it hardly explores any more: "
            f"a higher clip (algorithm=dapo), a lower learning rate or a KL term keeps more of it.",
        )
    for key, words in (("rows/unscored", "could not be scored (see below why)"), ("rows/dead", "failed for good")):
        if (lost := sum(row.get(key) or 0 for row in rows)) > 0:
            notes.add(f"{lost:.0f} responses of the last {len(rows)} steps {words}.")
    return notes


class _Notes(list[Advice]):
    def add(self, words: str, change: str = "") -> None:
        """Add a piece of advice, from its fields."""
        self.append(Advice(words, change))


def _means(rows: Sequence[MetricRow]) -> Callable[[str], float | None]:
    def mean(key: str) -> float | None:
        known = [row[key] for row in rows if row.get(key) is not None]
        return statistics.fmean(known) if known else None

    return mean


def _may_have(workers: int, config: Mapping[str, Any]) -> bool:
    """Whether a run may have so many rollout workers: each has a prompt of a step, or the run is refused."""
    prompts = _option(config, "train", "prompts_per_step")
    return prompts is None or workers <= prompts


def _option(config: Mapping[str, Any], section: str, key: str) -> Any:
    found = config.get(section)
    return found.get(key) if isinstance(found, Mapping) else None
