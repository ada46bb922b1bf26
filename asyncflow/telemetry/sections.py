"""Sections of the pages about a run: the same figures and tables for the report, the live page and the comparison.

RunReader --> figures, activities, mean step, plan beside the run, samples --> templates
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from asyncflow.telemetry.attribution import REASONS
from asyncflow.telemetry.charts import MetricRow, accuracy_keys
from asyncflow.telemetry.gantt import BarKind, colours_of
from asyncflow.telemetry.hub import UnscoredResponse
from asyncflow.telemetry.idle import WAIT, Activity
from asyncflow.telemetry.run_reader import RunReader
from asyncflow.telemetry.situation import IN_ORDER, SeenWorker
from asyncflow.telemetry.span_index import SpanIndex
from asyncflow.telemetry.trace import worker_order
from asyncflow.telemetry.why import Waiting, causes

_SAMPLES_PER_STEP: Final = 4
_MOST_TOKENS: Final = 400  # of a turn that are shown
_LONGEST_TEXT: Final = 2_000
_QUEUE_STATES: Final = ("ready", "leased", "done", "dead", "filtered", "redelivered")


def choice(value: object) -> str:
    """A configured choice in words: its name, or the path that it comes from."""
    if isinstance(value, Mapping):
        return str(next((value[key] for key in ("name", "path", "model") if value.get(key)), ""))
    return str(value or "")


def facts(run: RunReader) -> list[tuple[str, str]]:
    """The line below the title: what ran, and on how many workers."""
    pools: dict[str, int] = {}
    for worker in worker_order(run.spans.workers):
        pool = worker.split("/")[0]
        pools[pool] = pools.get(pool, 0) + 1
    workers = ", ".join(f"{count} x {pool}" for pool, count in pools.items() if pool != "driver")
    facts = [(key, choice(run.config.get(key))) for key in ("schedule", "algorithm", "model", "data", "cluster")]
    return [(key, value) for key, value in [*facts, ("workers", workers)] if value]


def figures(run: RunReader) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the tiles."""
    rows, evaluations = run.rows, run.evaluations
    tiles = [("steps", str(len(rows)), "")]
    wall = run.wall or sum(row.get("perf/step_seconds") or 0.0 for row in rows)
    if wall:
        tiles.append(("wall time", duration(wall), ""))
    for key in accuracy_keys(evaluations)[:2]:
        known = [row for row in evaluations if row.get(key) is not None]
        remark = f"{known[0][key]:.1%} at step {known[0]['step']}" if len(known) > 1 else ""
        tiles.append((f"final {key.replace('/', ', ')}", f"{known[-1][key]:.1%}", remark))
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    if rewards:
        tiles.append(("last mean reward", f"{rewards[-1]:.3f}", f"{rewards[0]:.3f} at first"))
    # The first step pays for start-up, so it says nothing of the speed of the others.
    speeds = [row["perf/tpspd"] for row in rows[1:] or rows if row.get("perf/tpspd") is not None]
    if speeds:
        tiles.append(("mean TPSPD", f"{sum(speeds) / len(speeds):,.1f}", "without the first step" if len(rows) > 1 else ""))
    exposed = [row["perf/exposed_weights"] for row in rows[1:] or rows if row.get("perf/exposed_weights") is not None]
    if exposed:
        tiles.append(("mean exposed weights", f"{sum(exposed) / len(exposed):.2%}", "of rollout workers' and trainers' time"))
    busy = [row["perf/cores_busy"] for row in rows[1:] or rows if row.get("perf/cores_busy") is not None]
    given = [row["perf/threads"] for row in rows if row.get("perf/threads") is not None]
    if busy:
        tiles.append(("mean cores busy", f"{sum(busy) / len(busy):.0%}", ""))
    if given:
        tiles.append(("most threads / cores", f"{max(given):.2f}", "more workers than cores" if max(given) > 1 else "at one time"))
    return tiles


def duration(seconds: float) -> str:
    """12.3 s, 4 min 5 s, 2 h 3 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def activities(spans: SpanIndex) -> list[dict[str, Any]]:
    """Per worker: its wall seconds and what they went to, busy first, each with label, colour, seconds and share of the wall."""
    # Of all kinds, so that an unknown task has the colour here that it has in the Gantt chart.
    colours = colours_of(spans.frame.kinds) if spans.frame is not None else {}
    shown = []
    for worker, activity in spans.activities().items():
        busy = activity.busy_seconds / activity.wall if activity.wall else 0.0
        shown.append({"worker": worker, "wall": activity.wall, "busy": busy, "parts": _parts(activity, colours)})
    return shown


def _parts(activity: Activity, colours: Mapping[BarKind, str]) -> list[dict[str, Any]]:
    states = [(BarKind(task), seconds) for task, seconds in activity.busy.items()]
    states.sort(key=lambda item: -item[1])
    states += sorted(((BarKind(cause, True), seconds) for cause, seconds in activity.idle.items()), key=lambda item: -item[1])
    shown = [(state.label, colours[state], state.is_wait, seconds) for state, seconds in states]
    missing = activity.unrecorded_seconds
    if missing > 1e-3 * activity.wall:
        shown.append(("not recorded", "transparent", False, missing))
    return [
        {"label": label, "colour": colour, "wait": is_wait, "seconds": seconds, "share": seconds / activity.wall}
        for label, colour, is_wait, seconds in shown
    ]


def mean_step(spans: SpanIndex) -> dict[str, Any]:
    """Seconds of a step on the lane of each worker, mean over all steps but the first, which loads; {} without any.

    `seconds` of the step; `columns`: their names; `rows`: worker, and its seconds by column, which add up to the step's.
    """
    ends = [end for _, end in spans.steps]
    if len(ends) < 2:
        return {}
    count, start, end = len(ends) - 1, ends[0], ends[-1]
    found = spans.activities(start, end)
    rows = []
    for worker in worker_order(spans.workers):
        activity = found.get(worker, Activity())
        parts = [activity.busy_seconds, *(activity.idle.get(reason, 0.0) for reason in REASONS)]
        rows.append((worker, [part / count for part in (*parts, end - start - sum(parts))]))
    columns = ["busy", *REASONS, "not recorded"]
    shown = [i for i in range(len(columns)) if any(seconds[i] > 1e-6 for _, seconds in rows)]
    return {
        "count": count,
        "seconds": (end - start) / count,
        "columns": [columns[i] for i in shown],
        "rows": [(worker, [seconds[i] for i in shown]) for worker, seconds in rows],
    }


def idle_of_pools(found: Mapping[str, Activity]) -> dict[str, dict[str, float]]:
    """Pool -> reason -> share of its workers' recorded time that they waited for this reason, mean over the workers."""
    pools: dict[str, list[dict[str, float]]] = {}
    for worker, activity in found.items():
        recorded = activity.busy_seconds + activity.idle_seconds
        if recorded:
            shares = {reason: seconds / recorded for reason, seconds in activity.idle.items()}
            pools.setdefault(worker.partition("/")[0], []).append(shares)
    return {
        pool: {reason: sum(one.get(reason, 0.0) for one in shares) / len(shares) for reason in sorted(set[str]().union(*shares))}
        for pool, shares in pools.items()
    }


def planned(run: RunReader) -> list[tuple[str, str, str, str]]:
    """Predictions of the run's plan beside what was measured after the first step: name, predicted, measured, and the error of the
    prediction. Empty without a plan, or without a second step."""
    plan = run.config.get("plan")
    predicted = plan.get("predicted") if isinstance(plan, Mapping) else None
    ends, later = [end for _, end in run.spans.steps], [row for row in run.rows[1:] if row.get("perf/step_seconds")]
    if not predicted or len(ends) < 2 or not later:
        return []
    seconds = sum(row["perf/step_seconds"] for row in later)
    tokens = sum((row.get("perf/tpspd") or 0.0) * row["perf/step_seconds"] for row in later)
    shown = [
        (name, f"{expected:,.4g}", f"{seen:,.4g}", f"{expected / seen - 1:+.0%}" if seen else "")
        for name, expected, seen in (
            ("seconds of a step", predicted["step_seconds"], seconds / len(later)),
            ("TPSPD", predicted["tpspd"], tokens / seconds),
        )
    ]
    idle = idle_of_pools(run.spans.activities(ends[0], ends[-1]))
    for pool, expected in predicted["busy"].items():
        if pool in idle:
            busy = 1 - sum(idle[pool].values())
            shown.append((f"busy share of {pool}", f"{expected:.1%}", f"{busy:.1%}", f"{100 * (expected - busy):+.1f} points"))
    return shown


def workers_now(run: RunReader) -> list[dict[str, Any]]:
    """State of each worker: as a run that goes on says of itself, or as its last spans say. Cells of a table, as text."""
    if run.is_live and run.situation is not None:
        by_name = {worker.name: worker for worker in run.situation.workers}
        return [_worker_now(by_name[name]) for name in worker_order(by_name)]
    states, versions = run.spans.last_states(), run.spans.served_versions()
    rss = run.rows[-1] if run.rows else {}
    return [
        {
            "name": name,
            "waits": states[name][0] == WAIT,
            "does": states[name][1] or states[name][0],
            "since": f"{duration(states[name][3] - states[name][2])}, until {duration(states[name][3])}",
            "version": str(versions.get(name, "-")),
            "memory": f"{rss[key] / 1e6:,.0f} MB" if rss.get(key := f"memory/rss_bytes/{name}") else "-",
        }
        for name in worker_order(states)
    ]


def _worker_now(worker: SeenWorker) -> dict[str, Any]:
    return {
        "name": worker.name,
        "waits": worker.task == WAIT,
        "does": worker.cause or worker.task or "has not reported yet",
        "since": duration(worker.seconds) if worker.silence is not None else "-",
        "version": "-" if worker.serving is None else str(worker.serving),
        "memory": f"{worker.rss_bytes / 1e6:,.0f} MB" if worker.rss_bytes else "-",
    }


def waits_now(run: RunReader) -> list[Waiting]:
    """The graph of waits, now or when the run ended; empty of one that has ended in order."""
    return [] if run.situation is None or run.situation.ended == IN_ORDER else causes(run.situation)


def queue_now(run: RunReader) -> dict[str, Any]:
    """Rows of each task, by state: now, or when the last step was committed. `columns` and `rows`; {} without any."""
    if run.is_live and run.situation is not None:
        counts = run.situation.queue
    else:
        counts = {}
        for key, value in (run.rows[-1] if run.rows else {}).items():
            kind, _, task = key.removeprefix("queue/").partition("/")
            if key.startswith("queue/") and task and kind in _QUEUE_STATES and value is not None:
                counts.setdefault(task, {})[kind] = int(value)
    columns = sorted({kind for of_task in counts.values() for kind in of_task})
    rows = [(task, [of_task.get(kind, 0) for kind in columns]) for task, of_task in counts.items()]
    return {"columns": columns, "rows": rows} if rows else {}


def first_and_last_samples(rows: Sequence[MetricRow]) -> list[dict[str, Any]]:
    """A few samples of the first and of the last step that has any."""
    steps = sorted({row["step"] for row in rows})
    chosen = []
    for step in dict.fromkeys(steps[:1] + steps[-1:]):
        of_step = {row.get("group", number): row for number, row in enumerate(rows) if row["step"] == step}  # one of each prompt
        for row in list(of_step.values())[:_SAMPLES_PER_STEP]:
            reward = row.get("reward")
            chosen.append(
                {
                    "step": step,
                    "prompt": shortened(row.get("prompt")),
                    "response": shortened(row.get("response")),
                    "reward": f"{reward:.3g}" if isinstance(reward, int | float) else "",
                    "turns": turns(row.get("turns")),
                }
            )
    return chosen


def unscored(responses: Iterable[UnscoredResponse]) -> list[dict[str, str]]:
    """The first responses that could not be scored, a few of each kind."""
    found: Counter[str] = Counter()
    shown = []
    for each in responses:
        found[each.kind] += 1
        if found[each.kind] <= _SAMPLES_PER_STEP:
            texts = {"prompt": each.prompt, "response": each.response, "why": each.trace or each.error}
            shown.append({"kind": each.kind} | {name: shortened(text) for name, text in texts.items()})
    return shown


def turns(kept: object) -> list[dict[str, Any]]:
    """An episode's turns: who said what, each token with what a pointer on it shows."""
    turns_shown = []
    for turn in kept if isinstance(kept, list) else ():
        notes = [f"p = {math.exp(logprob):.3g}, in the loss" for logprob in turn.get("logprobs", ())]
        texts = turn["texts"][:_MOST_TOKENS]
        shown = zip(texts, notes or ["observed, not in the loss"] * len(texts), strict=False)
        called = f", {turn['tool_calls']} tools called, {turn['tool_failures']} failed" if turn.get("tool_calls") else ""
        reward = "" if turn.get("reward") is None else f", reward {turn['reward']:.3g}"
        turns_shown.append({"by": turn["by"], "about": turn["by"] + called + reward, "tokens": list(shown)})
    return turns_shown


def shortened(text: object) -> str:
    """Text as a page shows it; "" for None."""
    shown = "" if text is None else str(text)
    return shown if len(shown) <= _LONGEST_TEXT else f"{shown[:_LONGEST_TEXT]} ... ({len(shown):,} characters)"
