import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from asyncflow.control import SCHEDULES
from asyncflow.engines.costs import Costs
from asyncflow.simulation.run import simulate
from asyncflow.telemetry.gantt import BARS_IN_VIEW, step_ends
from asyncflow.telemetry.idle import busy_and_idle, idle_of_pools
from asyncflow.telemetry.report import script_json, write_report
from asyncflow.telemetry.run_reader import read_rows
from asyncflow.telemetry.sections import duration
from asyncflow.telemetry.trace import SpanLog, write_trace
from asyncflow.types import UserError
from tests.builders import every_task_apart
from tests.report_page import Page, check_chart

_spec = importlib.util.spec_from_file_location("synthetic_run", Path(__file__).with_name("synthetic_run.py"))
synthetic_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic_run)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    synthetic_run.write_run(path)
    return path


def test_the_page_shows_the_run_and_needs_nothing_else(run_dir):
    page = Page(write_report(run_dir))
    assert page.sources == []
    assert "link" not in page.tags and "img" not in page.tags and "iframe" not in page.tags
    for words in ("tiny arithmetic <b>run</b>", "periodic", "grpo", "models/tiny-arithmetic", "2 x rollout, 1 x trainer", "61.0%"):
        assert words in page.text
    chart = page.chart_data()
    titles = [card["title"] for card in chart["charts"]]
    assert titles[:2] == ["Reward", "Evaluation accuracy"]
    assert {"KL from the reference", "Gradient norm", "Idle share of each worker", "Seconds"} <= set(titles)
    reward = chart["charts"][0]["traces"]
    assert [len(trace["x"]) for trace in reward] == [10, 10, 10]
    assert len(chart["gantt"]["steps"]) == 10
    assert chart["gantt"]["lanes"] == ["rollout/0", "rollout/1", "trainer/0", "driver"]


def test_model_output_cannot_become_markup(run_dir):
    path = write_report(run_dir)
    page = Page(path)
    # The page's own three: its data, plotly.js, the charts. Only the latter two run, by a nonce that no model can know.
    assert page.tags.count("script") == 3
    assert [("nonce" in attrs, attrs.get("type")) for attrs, _ in page.scripts] == [
        (False, "application/json"),
        (True, None),
        (True, None),
    ]
    assert synthetic_run.HOSTILE in page.text
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', path.read_text()).group(1)
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert "unsafe-eval" not in policy


def test_hostile_names_cannot_leave_the_data_element(tmp_path):
    log = SpanLog(tmp_path / "spans.jsonl")
    log.append(synthetic_run.Span(worker="</script><script>alert(1)</script>", task="<!--<script>", start=0, end=1))
    log.close()
    page = Page(write_report(tmp_path))
    assert page.tags.count("script") == 3
    assert page.chart_data()["gantt"]["lanes"] == ["</script><script>alert(1)</script>"]
    # "<!--<script " alone would swallow the element's end, so that no "<" may be left at all.
    assert not set("<>&") & set(script_json(["</script>", "<!--<script ", "&lt;"]))


def test_busy_and_idle_add_up_to_wall_within_a_hundredth(run_dir):
    spans = synthetic_run.make_spans(10)
    page = Page(write_report(run_dir))
    for worker in ("rollout/0", "rollout/1", "trainer/0"):
        activity = busy_and_idle(spans, worker)
        assert activity.busy_seconds + activity.idle_seconds == pytest.approx(activity.wall, rel=0.01)
        assert f"{100 * activity.busy_seconds / activity.wall:.1f}% busy" in page.text


def test_the_mean_step_of_every_worker_adds_up_to_the_step(run_dir):
    page = Page(write_report(run_dir))
    step, rows = page.mean_step()
    assert "mean over 9" in page.text and next(iter(rows["trainer/0"])) == "busy"
    assert {"busy", "data", "interval", "weights"} < set(rows["trainer/0"])
    for worker in ("rollout/0", "rollout/1", "trainer/0"):
        parts = dict(rows[worker])
        whole = parts.pop("sum")
        assert whole == pytest.approx(step, abs=2e-3)
        assert sum(parts.values()) == pytest.approx(whole, abs=0.001 * len(parts))


@pytest.mark.parametrize("mode", SCHEDULES)
def test_a_simulated_run_leaves_the_chart_in_virtual_seconds(mode, tmp_path):
    config = every_task_apart(mode, steps=4)
    simulated = simulate(config, costs=Costs(), run_dir=tmp_path / "run")
    assert not simulated.violations
    seconds = check_chart(tmp_path / "run", ["rollout/0", "rollout/1", "reference/0", "reward/0", "trainer/0"], 4)
    assert seconds == pytest.approx(sum(simulated.rows[step]["perf/step_seconds"] for step in (1, 2, 3)) / 3, abs=2e-3)


def test_a_run_interrupted_at_its_first_step_still_shows_its_lanes(tmp_path):
    spans = synthetic_run.make_spans(1)[:6]
    log = SpanLog(tmp_path / "spans.jsonl")
    for span in spans:
        log.append(span)
    log.close()
    with (tmp_path / "spans.jsonl").open("a") as file:
        file.write('{"worker": "tr')
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/me')
    page = Page(write_report(tmp_path))
    assert "No steps yet" in page.text
    assert page.chart_data()["gantt"]["lanes"] != []
    assert "No spans were recorded" not in page.text


def test_an_empty_directory_makes_a_page_and_a_missing_one_a_sentence(tmp_path):
    page = Page(write_report(tmp_path))
    assert "No steps yet" in page.text and "No spans were recorded" in page.text
    write_trace(tmp_path)
    with pytest.raises(UserError, match="no run directory"):
        write_report(tmp_path / "absent")


def test_null_and_missing_numbers_leave_gaps_not_errors(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step":0,"reward/mean":null,"perf/tpspd":null}\n{"step":1,"reward/mean":0.5,"reward/std":null}\n'
    )
    (tmp_path / "eval.jsonl").write_text('{"step":0,"accuracy":null}\n{"step":1,"accuracy":0.5}\n')
    charts = {card["title"]: card["traces"] for card in Page(write_report(tmp_path)).chart_data()["charts"]}
    assert charts["Reward"][-1]["x"] == [1]
    assert charts["Evaluation accuracy"][0]["x"] == [1]
    assert "TPSPD: trained tokens per second per device" not in charts


def test_every_kind_of_accuracy_is_shown(tmp_path):
    rows = [{"step": step, "num_prompts": 8, "accuracy/greedy": 0.5 + step / 8, "accuracy/sampled": 0.25} for step in (0, 2)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report(tmp_path))
    assert "final accuracy, greedy 75.0% 50.0% at step 0" in page.text
    (chart,) = page.chart_data()["charts"]
    assert [(trace["name"], trace["y"]) for trace in chart["traces"]] == [
        ("accuracy/greedy", [0.5, 0.75]),
        ("accuracy/sampled", [0.25, 0.25]),
    ]


def test_lines_that_are_no_rows_are_named(tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"step": 0}\n[1]\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2 is not a JSON object"):
        read_rows(tmp_path / "eval.jsonl")
    (tmp_path / "eval.jsonl").write_text('{"epoch": 0}\n')
    with pytest.raises(UserError, match="line 1 has no integer 'step'"):
        read_rows(tmp_path / "eval.jsonl")


def test_a_long_run_is_drawn_in_levels(tmp_path):
    spans = synthetic_run.make_spans(900)
    assert len(spans) > 20_000
    log = SpanLog(tmp_path / "spans.jsonl")
    for span in spans:
        log.append(span)
    log.close()
    levels = Page(write_report(tmp_path)).chart_data()["gantt"]["levels"]
    assert levels[0]["resolution"] == 0
    assert len(levels[-1]["start"]) <= BARS_IN_VIEW < len(levels[0]["start"])


def test_durations_in_words():
    assert [duration(seconds) for seconds in (3.21, 245, 7380)] == ["3.2 s", "4 min 5 s", "2 h 3 min"]


def test_the_plan_stands_beside_what_the_run_measured(tmp_path):
    synthetic_run.write_run(tmp_path)
    assert "The plan beside the run" not in Page(write_report(tmp_path)).text
    rows = read_rows(tmp_path / "metrics.jsonl")[1:]
    seconds = sum(row["perf/step_seconds"] for row in rows) / len(rows)
    tokens = sum(row["perf/tpspd"] * row["perf/step_seconds"] for row in rows)
    predicted = {"step_seconds": 2 * seconds, "tpspd": tokens / seconds / len(rows) / 2, "busy": {"trainer": 1.0, "values": 0.5}}
    config = yaml.safe_load((tmp_path / "config.yaml").read_text()) | {"plan": {"predicted": predicted}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    text = Page(write_report(tmp_path)).text
    ends = [end for _, end in step_ends(synthetic_run.make_spans(10), 0.0)]
    busy = 1 - idle_of_pools(synthetic_run.make_spans(10), ends[0], ends[-1])["trainer"]
    told = re.sub(r"\s+", " ", text[text.index("The plan beside the run") :])
    assert f"{2 * seconds:.4g} {seconds:.4g} +100%" in told
    assert "-50%" in told
    assert f"busy share of trainer 100.0% {busy:.1%} {100 * (1 - busy):+.1f} points" in told
    assert "busy share of values" not in told  # no such pool has run


def test_busy_cores_are_shown_and_how_many_threads_there_were_at_most(tmp_path):
    rows = [
        {"step": step, "perf/cores_busy": 0.5 + step / 4, "perf/threads": threads} for step, threads in enumerate((1.0, 0.5, 0.75))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "mean cores busy 88% most threads / cores 1.00 at one time" in Page(write_report(tmp_path)).text
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "perf/threads": 1.5}) + "\n")  # of a run without the other
    text = Page(write_report(tmp_path)).text
    assert "most threads / cores 1.50 more workers than cores" in text and "cores busy" not in text
