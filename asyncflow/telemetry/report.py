"""The report of a run: one HTML page that needs nothing else, no network either.

    config.yaml  metrics.jsonl  eval.jsonl  spans.jsonl  samples.jsonl  --> write_report --> report.html

Any of the files may be missing or end in half a line: the page shows what there is, of a run that goes on or that was killed.
Prompts and responses are a model's output, so they are never trusted: the template escapes them, data for the charts is JSON that
cannot end its script element, and the page's own policy refuses every script but the two it came with, and every request.
"""

from __future__ import annotations

import functools
import secrets
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec
import yaml
from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from asyncflow.telemetry import sections
from asyncflow.telemetry.charts import metric_charts
from asyncflow.telemetry.run_reader import RunReader

REPORT_FILE: Final = "report.html"

_TEMPLATE: Final = "report.html.j2"


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run's directory and return its path.

    Raises `UserError` when the directory does not exist, or a file holds a line (not the last) that is not what it should be.
    """
    run = RunReader(run_dir)
    run.read_all()
    page = page_with_charts(
        _TEMPLATE,
        {"charts": metric_charts(run.rows, run.evaluations), "gantt": run.spans.chart()},
        name=run.name,
        facts=sections.facts(run),
        certificate=run.certificate.line if run.certificate is not None else "",
        figures=sections.figures(run),
        num_steps=len(run.rows),
        activities=sections.activities(run.spans),
        mean_step=sections.mean_step(run.spans),
        planned=sections.planned(run),
        samples=sections.first_and_last_samples(run.samples),
        unscored=sections.unscored(run.unscored),
        config=yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else "",
        num_spans=run.spans.num_spans,
    )
    path = run_dir / REPORT_FILE
    path.write_text(page, encoding="utf-8")
    return path


def page_with_charts(template: str, chart_data: object, **content: object) -> str:
    """A page with charts of this data, for `charts.js` and `gantt.js`, which needs nothing else."""
    return page_template(template).render(
        style=page_style(),
        chart_data=script_json(chart_data),
        plotly_js=Markup(get_plotlyjs()),
        page_js=Markup(_text("charts.js") + _text("gantt.js")),
        nonce=secrets.token_urlsafe(16),
        **content,
    )


@functools.cache
def page_template(name: str) -> Template:
    """Template of this room for pages that show text of a model: everything is escaped."""
    environment = Environment(
        loader=FunctionLoader(_text), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)


def page_style() -> Markup:
    """Style sheet of all pages."""
    return Markup(_text("page.css"))


def script_json(content: object) -> Markup:
    """JSON for a `<script type="application/json">` element: no character in it can end the element or start a comment."""
    text = msgspec.json.encode(content).decode()
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _text(name: str) -> str:
    return resources.files("asyncflow.telemetry").joinpath(name).read_text(encoding="utf-8")
