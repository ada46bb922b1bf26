"""The report of a run: one HTML page that needs nothing else, no network either.

    config.yaml  metrics.jsonl  eval.jsonl  spans.jsonl  samples.jsonl  --> write_report --> report.html

Any of the files may be missing or end in half a line: the page shows what there is, of a run that goes on or that was killed.
Prompts and responses are a model's output, so they are never trusted: the template escapes them, data for the charts is JSON that
cannot end its script element, and the page's own policy refuses every script but the two it came with, and every request.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from asyncflow.run_dir import CONFIG_FILE, EVAL_FILE, SAMPLES_FILE, UNSCORED_FILE
from asyncflow.telemetry.attribution import REASONS, attributed
from asyncflow.telemetry.certificate import read_certificate
from asyncflow.telemetry.charts import MetricRow, accuracy_keys, metric_charts
from asyncflow.telemetry.gantt import BarKind, colours_of, gantt_chart, state_of, step_ends
from asyncflow.telemetry.hub import UnscoredResponse
from asyncflow.telemetry.idle import Activity, busy_and_idle, idle_of_pools
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import SPANS_FILE, read_lines, read_spans, worker_order
from asyncflow.telemetry.trackers import METRICS_FILE
from asyncflow.types import UserError

REPORT_FILE: Final = "report.html"

_TEMPLATE: Final = "report.html.j2"
_SAMPLES_PER_STEP: Final = 4
_MOST_TOKENS: Final = 400  # of a turn that are shown
_LONGEST_TEXT: Final = 2_000


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run's directory and return its path.

    Raises `UserError` when the directory does not exist, or a file holds a line (not the last) that is not what it should be.
    """
    if not run_dir.is_dir():
        raise UserError(f"There is no run directory {run_dir}.")
    config = _read_config(run_dir / CONFIG_FILE)
    rows = read_rows(run_dir / METRICS_FILE)
    evaluations = read_rows(run_dir / EVAL_FILE)
    spans = attributed(read_spans(run_dir / SPANS_FILE))
    charts = metric_charts(rows, evaluations)
    page = page_template(_TEMPLATE).render(
        style=page_style(),
        name=_run_name(config, run_dir),
        facts=_facts(config, spans),
        certificate=certificate.line if (certificate := read_certificate(run_dir)) is not None else "",
        figures=_figures(rows, evaluations, spans),
        num_steps=len(rows),
        charts=charts,
        activities=_activities(spans),
        mean_step=_mean_step(spans),
        planned=_planned(config, rows, spans),
        samples=_samples(read_rows(run_dir / SAMPLES_FILE)),
        unscored=_unscored(run_dir / UNSCORED_FILE),
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else "",
        num_spans=len(spans),
        chart_data=script_json({"charts": charts, "gantt": gantt_chart(spans)}),
        plotly_js=Markup(get_plotlyjs()),
        nonce=secrets.token_urlsafe(16),
    )
    path = run_dir / REPORT_FILE
    path.write_text(page, encoding="utf-8")
    return path


def page_template(name: str) -> Template:
    """Template of this room for pages that show text of a model: everything is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(resources.files("asyncflow.telemetry").joinpath(name).read_text(encoding="utf-8"))


def page_style() -> Markup:
    """Style sheet of all pages."""
    return Markup(resources.files("asyncflow.telemetry").joinpath("page.css").read_text(encoding="utf-8"))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file, each an object with an integer `step`; none when the file is missing.

    A half-written last line is left out. A `UserError` names any other line that is no such row.
    """
    rows = list(read_lines(path, dict[str, Any], "a JSON object"))
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("step"), int):
            raise UserError(f"{path} line {number} has no integer 'step'.")
    return rows


def script_json(content: object) -> Markup:
    """JSON for a `<script type="application/json">` element: no character in it can end the element or start a comment."""
    text = msgspec.json.encode(content).decode()
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from error
    return config if isinstance(config, dict) else {}


def _run_name(config: Mapping[str, Any], run_dir: Path) -> str:
    run = config.get("run")
    name = run.get("name") if isinstance(run, Mapping) else run
    return str(name or run_dir.resolve().name)


def _choice(value: object) -> str:
    """A configured choice in words: its name, or the path that it comes from."""
    if isinstance(value, Mapping):
        return str(next((value[key] for key in ("name", "path", "model") if value.get(key)), ""))
    return str(value or "")


def _facts(config: Mapping[str, Any], spans: Sequence[Span]) -> list[tuple[str, str]]:
    """The line below the title: what ran, and on how many workers."""
    pools: dict[str, int] = {}
    for worker in worker_order(span.worker for span in spans):
        pool = worker.split("/")[0]
        pools[pool] = pools.get(pool, 0) + 1
    workers = ", ".join(f"{count} x {pool}" for pool, count in pools.items() if pool != "driver")
    facts = [(key, _choice(config.get(key))) for key in ("schedule", "algorithm", "model", "data", "cluster")]
    return [(key, value) for key, value in [*facts, ("workers", workers)] if value]


def _figures(rows: Sequence[MetricRow], evaluations: Sequence[MetricRow], spans: Sequence[Span]) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the tiles."""
    figures = [("steps", str(len(rows)), "")]
    wall = max((span.end for span in spans), default=0.0) - min((span.start for span in spans), default=0.0)
    wall = wall or sum(row.get("perf/step_seconds") or 0.0 for row in rows)
    if wall:
        figures.append(("wall time", duration(wall), ""))
    for key in accuracy_keys(evaluations)[:2]:
        known = [row for row in evaluations if row.get(key) is not None]
        remark = f"{known[0][key]:.1%} at step {known[0]['step']}" if len(known) > 1 else ""
        figures.append((f"final {key.replace('/', ', ')}", f"{known[-1][key]:.1%}", remark))
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    if rewards:
        figures.append(("last mean reward", f"{rewards[-1]:.3f}", f"{rewards[0]:.3f} at first"))
    # The first step pays for start-up, so it says nothing of the speed of the others.
    speeds = [row["perf/tpspd"] for row in rows[1:] or rows if row.get("perf/tpspd") is not None]
    if speeds:
        figures.append(("mean TPSPD", f"{sum(speeds) / len(speeds):,.1f}", "without the first step" if len(rows) > 1 else ""))
    exposed = [row["perf/exposed_weights"] for row in rows[1:] or rows if row.get("perf/exposed_weights") is not None]
    if exposed:
        figures.append(("mean exposed weights", f"{sum(exposed) / len(exposed):.2%}", "of rollout workers' and trainers' time"))
    return figures


def duration(seconds: float) -> str:
    """12.3 s, 4 min 5 s, 2 h 3 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _activities(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Per worker: its wall seconds and what they went to, busy first, each with label, colour, seconds and share of the wall."""
    by_worker: dict[str, list[Span]] = {}
    for span in spans:
        if span.is_lane:
            by_worker.setdefault(span.worker, []).append(span)
    # Of all spans, so that an unknown task has the colour here that it has in the Gantt chart.
    colours = colours_of(state_of(span) for span in spans)
    activities = []
    for worker in worker_order(by_worker):
        activity = busy_and_idle(by_worker[worker], worker)
        busy = activity.busy_seconds / activity.wall if activity.wall else 0.0
        activities.append({"worker": worker, "wall": activity.wall, "busy": busy, "parts": _parts(activity, colours)})
    return activities


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


def _mean_step(spans: Sequence[Span]) -> dict[str, Any]:
    """Seconds of a step on the lane of each worker, mean over all steps but the first, which loads; {} without any.

    `seconds` of the step; `columns`: their names; `rows`: worker, and its seconds by column, which add up to the step's.
    """
    ends = [end for _, end in step_ends(spans, 0.0)]
    if len(ends) < 2:
        return {}
    count, start, end = len(ends) - 1, ends[0], ends[-1]
    rows = []
    for worker in worker_order(span.worker for span in spans if span.is_lane):
        activity = busy_and_idle(spans, worker, start, end)
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


def _planned(config: Mapping[str, Any], rows: Sequence[MetricRow], spans: Sequence[Span]) -> list[tuple[str, str, str, str]]:
    """What the plan of the run predicted beside what was measured after the first step: name, predicted, measured, and the error of
    the prediction. Empty without a plan, or without a second step."""
    plan = config.get("plan")
    predicted = plan.get("predicted") if isinstance(plan, Mapping) else None
    ends, later = [end for _, end in step_ends(spans, 0.0)], [row for row in rows[1:] if row.get("perf/step_seconds")]
    if not predicted or len(ends) < 2 or not later:
        return []
    seconds = sum(row["perf/step_seconds"] for row in later)
    tokens = sum((row.get("perf/tpspd") or 0.0) * row["perf/step_seconds"] for row in later)
    shown = [
        (name, f"{told:,.4g}", f"{seen:,.4g}", f"{told / seen - 1:+.0%}" if seen else "")
        for name, told, seen in (
            ("seconds of a step", predicted["step_seconds"], seconds / len(later)),
            ("TPSPD", predicted["tpspd"], tokens / seconds),
        )
    ]
    idle = idle_of_pools(spans, ends[0], ends[-1])
    for pool, told in predicted["busy"].items():
        if pool in idle:
            busy = 1 - idle[pool]
            shown.append((f"busy share of {pool}", f"{told:.1%}", f"{busy:.1%}", f"{100 * (told - busy):+.1f} points"))
    return shown


def _samples(rows: Sequence[MetricRow]) -> list[dict[str, Any]]:
    """A few samples of the first and of the last step that has any."""
    steps = sorted({row["step"] for row in rows})
    chosen = []
    for step in dict.fromkeys(steps[:1] + steps[-1:]):
        for row in [row for row in rows if row["step"] == step][:_SAMPLES_PER_STEP]:
            reward = row.get("reward")
            chosen.append(
                {
                    "step": step,
                    "prompt": shortened(row.get("prompt")),
                    "response": shortened(row.get("response")),
                    "reward": f"{reward:.3g}" if isinstance(reward, int | float) else "",
                    "turns": _turns(row.get("turns")),
                }
            )
    return chosen


def _unscored(path: Path) -> list[dict[str, str]]:
    """The first responses that could not be scored, a few of each kind."""
    found: Counter[str] = Counter()
    shown = []
    for each in read_lines(path, UnscoredResponse, "a response that could not be scored"):
        found[each.kind] += 1
        if found[each.kind] <= _SAMPLES_PER_STEP:
            texts = {"prompt": each.prompt, "response": each.response, "why": each.trace or each.error}
            shown.append({"kind": each.kind} | {name: shortened(text) for name, text in texts.items()})
    return shown


def _turns(kept: object) -> list[dict[str, Any]]:
    """An episode's turns: who said what, each token with what a pointer on it shows."""
    turns = []
    for turn in kept if isinstance(kept, list) else ():
        notes = [f"p = {math.exp(logprob):.3g}, in the loss" for logprob in turn.get("logprobs", ())]
        texts = turn["texts"][:_MOST_TOKENS]
        shown = zip(texts, notes or ["observed, not in the loss"] * len(texts), strict=False)
        called = f", {turn['tool_calls']} tools called, {turn['tool_failures']} failed" if turn.get("tool_calls") else ""
        reward = "" if turn.get("reward") is None else f", reward {turn['reward']:.3g}"
        turns.append({"by": turn["by"], "about": turn["by"] + called + reward, "tokens": list(shown)})
    return turns


def shortened(text: object) -> str:
    """Text as a page shows it; "" for None."""
    shown = "" if text is None else str(text)
    return shown if len(shown) <= _LONGEST_TEXT else f"{shown[:_LONGEST_TEXT]} ... ({len(shown):,} characters)"
