import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from asyncflow.cli.watch import compare
from asyncflow.telemetry.compare import RunsCompared, write_comparison
from asyncflow.telemetry.run_reader import RunReader
from tests.report_page import Page

_spec = importlib.util.spec_from_file_location("synthetic_run", Path(__file__).with_name("synthetic_run.py"))
synthetic_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic_run)


def run(folder: Path, *, seed: int, reward: float, rate: float = 1e-4) -> RunReader:
    synthetic_run.write_run(folder)
    config = {"run": {"name": folder.name, "seed": seed}, "train": {"learning_rate": rate, "note": synthetic_run.HOSTILE}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [json.loads(line) | {"reward/mean": reward} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = RunReader(folder)
    reader.read_all()
    return reader


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        "a": run(folder / "a", seed=1, reward=0.25),
        "b": run(folder / "b", seed=2, reward=0.75),
        "c": run(folder / "c", seed=1, reward=1.0, rate=1e-3),
    }


def test_runs_that_differ_in_their_seed_are_one_curve_with_their_spread(runs):
    charts = {chart["title"]: chart["traces"] for chart in RunsCompared(runs).charts}
    low, high, seeds, other = charts["Reward"]
    assert (low["y"][0], high["y"][0], high["fill"]) == (0.25, 0.75, "tonexty")
    assert (seeds["name"], seeds["y"][0], seeds["x"]) == ("a and 1 more seed", 0.5, list(range(10)))
    assert (other["name"], other["y"][0]) == ("c", 1.0)
    assert [trace["name"] for trace in charts["Evaluation: accuracy"] if trace["showlegend"]] == ["a and 1 more seed", "c"]


def test_settings_that_differ_and_waits_stand_side_by_side(runs):
    comparison = RunsCompared(runs)
    assert comparison.differences == [("run.seed", ["1", "2", "1"]), ("train.learning_rate", ["0.0001", "0.0001", "0.001"])]
    idle = dict(comparison.idle)
    assert idle["rollout: interval"][0] == idle["rollout: interval"][2] != ""
    assert dict(comparison.figures)["mean reward"] == ["0.25", "0.75", "1"]


def test_the_page_needs_nothing_else_and_runs_no_text_of_a_run(runs, tmp_path):
    page = Page(write_comparison({"</script><script>x": runs["a"], "c": runs["c"]}, tmp_path / "compare.html"))
    assert page.sources == [] and page.tags.count("script") == 3
    assert "</script><script>x" in page.text and "train.learning_rate" in page.text


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path, capsys):
    for number, name in enumerate(("a", "b", "other/a")):
        run(tmp_path / name, seed=number, reward=0.5, rate=1e-4 * (number + 1))
    for others, names in ((["b"], ["a", "b"]), (["other/a"], [str(tmp_path / "a"), str(tmp_path / "other/a")])):
        page = tmp_path / f"{len(names[0])}.html"
        compare([tmp_path / "a", *(tmp_path / name for name in others)], page)
        assert capsys.readouterr().out == f"{page}\n"
        assert all(f">{name}<" in page.read_text() for name in names)
