import importlib.util
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from asyncflow.telemetry.run_reader import GrowingLines, RunReader
from asyncflow.telemetry.sections import queue_now, workers_now
from asyncflow.telemetry.situation import SeenWorker, Situation, write_situation

_spec = importlib.util.spec_from_file_location("synthetic_run", Path(__file__).with_name("synthetic_run.py"))
synthetic_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic_run)


def lines(*numbers: int) -> str:
    return "".join(json.dumps({"step": number}) + "\n" for number in numbers)


def steps(found: list[dict[str, int]]) -> list[int]:
    return [row["step"] for row in found]


@pytest.fixture
def growing(tmp_path):
    return GrowingLines(tmp_path / "metrics.jsonl", dict, "a JSON object")


def test_a_half_written_line_is_read_once_it_is_whole(growing):
    assert growing.read() == ([], False)
    growing.path.write_text(lines(0) + '{"step": 1')
    assert steps(growing.read()[0]) == [0]
    assert growing.read() == ([], False)
    with growing.path.open("a") as file:
        file.write("7}\n" + lines(18))
    found, is_anew = growing.read()
    assert steps(found) == [17, 18] and not is_anew


def test_what_is_read_is_not_read_again(growing):
    growing.path.write_text(lines(*range(100)))
    assert steps(growing.read(most_bytes=200)[0])[0] == 0
    seen = [0]
    while found := growing.read(most_bytes=200)[0]:
        assert found[0]["step"] > seen[-1]
        seen += steps(found)
    assert seen[-1] == 99 and growing.num_unread_bytes == 0


def test_a_line_longer_than_a_piece_is_read_whole(growing):
    growing.path.write_text(json.dumps({"step": 0, "text": "x" * 5_000}) + "\n" + lines(1))
    assert steps(growing.read(most_bytes=100)[0] + growing.read(most_bytes=100)[0]) == [0, 1]


def test_a_file_that_a_resumed_run_cuts_back_is_read_from_its_beginning(growing):
    growing.path.write_text(lines(0, 1, 2, 3))
    growing.read()
    replaced = growing.path.with_suffix(".partial")
    replaced.write_text(lines(0, 1))
    replaced.replace(growing.path)
    found, is_anew = growing.read()
    assert steps(found) == [0, 1] and is_anew
    # Cut back in place, and grown past where the reader was, before it looks again.
    with growing.path.open("r+") as file:
        file.truncate(len(lines(0)))
        file.seek(0, os.SEEK_END)
        file.write(lines(7, 8, 9))
    found, is_anew = growing.read()
    assert steps(found) == [0, 7, 8, 9] and is_anew


def test_a_damaged_line_is_counted_and_passed_over(growing):
    growing.path.write_text(lines(0) + "\0\0\n" + lines(1))
    assert steps(growing.read()[0]) == [0, 1] and growing.num_damaged == 1


def test_a_copied_run_that_is_read_in_pieces_is_the_run(tmp_path):
    synthetic_run.write_run(tmp_path / "run")
    whole = RunReader(tmp_path / "run")
    whole.read_all()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = RunReader(tmp_path / "copy")
    copy.refresh_rows()
    while copy.refresh_spans(most_bytes=4_000):
        assert copy.wall == pytest.approx(whole.wall)  # its newest spans are there from the first look on
    assert copy.rows == whole.rows and copy.evaluations == whole.evaluations and copy.samples == whole.samples
    for name, activity in whole.spans.activities().items():
        assert copy.spans.activities()[name].idle == pytest.approx(activity.idle)
        assert copy.spans.activities()[name].busy == pytest.approx(activity.busy)
    with (tmp_path / "copy" / "spans.jsonl").open("a") as file:
        file.write('{"worker": "rollo')  # the run was killed
    assert not copy.refresh_spans() and copy.share_of_spans_read == 1


def test_the_newest_spans_of_a_large_file_are_shown_before_the_others_are_read(tmp_path):
    synthetic_run.write_run(tmp_path)
    run = RunReader(tmp_path)
    run.refresh_spans(most_bytes=4_000)
    assert run.share_of_spans_read < 0.5
    part = run.part(run.wall - 5, run.wall, 2_500)
    assert max(part["levels"][0]["start"]) > run.wall - 5
    assert part["lanes"][0] == "rollout/0"


def test_a_resumed_run_is_shown_without_the_steps_that_it_makes_again(tmp_path):
    spans = synthetic_run.write_run(tmp_path)
    run = RunReader(tmp_path)
    run.refresh_rows()
    run.refresh_spans()
    assert len(run.rows) == len(run.spans.steps) == 10
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(rows[:4]))
    written = (tmp_path / "spans.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "spans.jsonl").write_text("".join(written[: len(spans) // 3]))
    run.refresh_rows()
    run.refresh_spans()
    assert len(run.rows) == 4 and len(run.spans.steps) < 5


def situation(**more) -> Situation:
    known = {"run": "r", "time": time.time(), "pid": 1, "host": "h", "committed": 3, "steps": 9, "idle": 0.5}
    return Situation(**{**known, **more})


def test_a_run_is_live_as_long_as_it_says_so(tmp_path):
    synthetic_run.write_run(tmp_path)
    run = RunReader(tmp_path)
    run.refresh_rows()
    assert not run.is_live
    worker = SeenWorker(name="rollout/0", task="wait", cause="weights", seconds=65.0, silence=0.1, serving=4, rss_bytes=5_000_000)
    write_situation(tmp_path, situation(queue={"rollout": {"ready": 5}}, workers=[worker]))
    assert run.refresh_rows() and run.is_live
    assert queue_now(run) == {"columns": ["ready"], "rows": [("rollout", [5])]}
    told = {"name": "rollout/0", "waits": True, "does": "weights", "since": "1 min 5 s", "version": "4", "memory": "5 MB"}
    assert workers_now(run) == [told]
    assert not run.refresh_rows()
    write_situation(tmp_path, situation(time=time.time() - 3600))
    assert run.refresh_rows() and not run.is_live
    write_situation(tmp_path, situation(ended="no room"))
    run.refresh_rows()
    assert not run.is_live
    (tmp_path / "now.json").write_text("{")
    run.refresh_rows()
    assert not run.is_live


def test_of_a_run_that_was_killed_the_last_spans_say_what_its_workers_did(tmp_path):
    synthetic_run.write_run(tmp_path)
    run = RunReader(tmp_path)
    run.read_all()
    found = {worker["name"]: worker for worker in workers_now(run)}
    assert list(found) == ["rollout/0", "rollout/1", "trainer/0", "driver"]
    assert found["rollout/0"]["waits"] and found["rollout/0"]["does"] == "stop" and found["rollout/0"]["version"] == "10"
    assert found["rollout/0"]["memory"].endswith("MB")
