"""What a run's folder holds when it is resumed, and what may be other then."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncflow.config import Config, dump, parse
from asyncflow.loops.samples import PARTS_COLUMN, REFERENCE_COLUMN, RESPONSE_COLUMNS, Prompt, schema
from asyncflow.run.records.record import RecordState
from asyncflow.run.state.driver_state import DriverState, SavedPrompt, data_hash, read_driver, write_added, write_driver
from asyncflow.run.state.resume import MAY_CHANGE, check_fits, cut_back, to_be_kept, usable
from asyncflow.run_dir import RunDir
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import read_spans
from asyncflow.types import Batch, Ragged, RunError, UserError

TREE: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}}


def state(**changes: Any) -> DriverState:
    values = {"version": 2, "config": dump(parse(TREE)), "data": "hash", "position": 8, "pushed": [], "steps": {}}
    return DriverState(**{**values, "record": RecordState(), **changes})


def rows_of(*rows: int) -> Batch:
    """Completed rows, each of two tokens but the first, of one."""
    offsets = np.array([0, 1, *range(3, 2 * len(rows), 2)], np.int64)
    tokens = Ragged(np.arange(offsets[-1]), offsets)
    return Batch(np.array(rows, np.int64), np.array([], np.int64), {"response_ids": tokens, "reward": np.ones(len(rows), "f4")})


def test_the_drivers_part_comes_back_as_it_was(tmp_path: Path) -> None:
    steps = {2: {8: SavedPrompt([1, 2, 3], {"question": "é"}), 5: SavedPrompt([4], {})}, 3: {9: SavedPrompt([5], {"n": 1})}}
    written = state(steps=steps, pushed=[SavedPrompt([7], {})], record=RecordState(rows_dead=3, resumed_at=[1]))
    write_driver(tmp_path / "step", written, [rows_of(32, 33), rows_of(20)])
    found = read_driver(tmp_path / "step")
    assert found.state == written and found.record.resumed_at == [1, 2] and found.record.rows_dead == 3
    assert [*found.steps[2]] == [8, 5] and found.steps[2][8].ids.tolist() == [1, 2, 3]
    assert found.rows is not None and found.rows.indices.tolist() == [32, 33, 20]
    assert [tokens.tolist() for tokens in found.rows.ragged("response_ids")] == [[0], [1, 2], [0]]
    write_driver(tmp_path / "none", written, [])
    assert read_driver(tmp_path / "none").rows is None
    (tmp_path / "step" / "rows.afp").write_bytes((tmp_path / "step" / "rows.afp").read_bytes()[:-3])
    with pytest.raises(RunError, match="cannot be read"):
        read_driver(tmp_path / "step")


@pytest.mark.parametrize(
    ("steps", "is_whole", "expected"),
    [(5, None, [1, 2]), (5, False, [1, 2]), (5, True, [1]), (2, None, [1]), (2, False, [1, 2])],  # the last was resumed before
)
def test_rows_are_made_again_unless_an_attempt_has_lost_none_or_had_no_step_left(
    steps: int, is_whole: bool | None, expected: list[int], tmp_path: Path
) -> None:
    config = dump(parse({**TREE, "run": {"steps": steps}}))
    written = state(config=config, record=RecordState(resumed_at=[1], made_again_at=[1]))
    write_driver(tmp_path / "step", written, [])
    if is_whole is not None:
        write_added(tmp_path / "step.added", written, is_whole=is_whole)
    record = read_driver(tmp_path / "step", tmp_path / "step.added").record
    assert record.resumed_at == [1, 2] and record.made_again_at == expected


def test_rows_that_have_some_of_a_tasks_outputs_are_made_again_and_others_go_on() -> None:
    def with_columns(*names: str) -> Batch:
        return Batch(np.array([3], np.int64), np.empty(0, np.int64), {name: np.zeros(1, np.float32) for name in names})

    plain, parts = schema(1, 9.0, 2), schema(1, 9.0, 2, has_reward_parts=True)
    by_task = schema(1, 9.0, 2, ("rollout", "reward", "reference"), has_reward_parts=True)
    responses, scored = with_columns(*RESPONSE_COLUMNS), with_columns(*RESPONSE_COLUMNS, PARTS_COLUMN.name)
    assert usable(None, parts) is None
    assert usable(responses, plain) is responses and usable(scored, parts) is scored
    assert usable(responses, parts) is None  # as checkpoints had them once: the row waited for its parts for ever
    assert usable(responses, by_task) is None
    assert usable(scored, by_task) is scored  # the reference's log-probs are the next task's
    unscored = with_columns(*(name for name in RESPONSE_COLUMNS if name != "reward"))
    assert usable(unscored, by_task) is unscored and usable(unscored, plain) is None
    referred = with_columns(*RESPONSE_COLUMNS, REFERENCE_COLUMN.name)
    assert usable(referred, plain) is referred  # a column that this queue has not is left out of what is put into it


@pytest.mark.parametrize(
    "change",
    [
        {"run": {"steps": 200}},
        {"plan": {"train": {"dp": 2}}},
        {"rollout": {"num_workers": 2}},
        {"telemetry": {"fingerprints": True}},
        {"checkpoint": {"every_steps": 3}},
        {"weight_sync": {"name": "collective"}},
        {"weight_sync": {"path": "f.py:Mine", "options": {"every": 3}}},
        {"queue": {"num_units": 2, "samplers": {"train": "oldest"}}},
    ],
)
def test_what_may_change(change: dict[str, Any]) -> None:
    check_fits(parse({**TREE, **change}), state(), "hash")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"path": "other"}}, "model.path was 'm' .* and is 'other' now"),
        ({"data": {"path": "other"}}, "data.path"),
        ({"run": {"seed": 7}}, "run.seed was 0 .* and is 7 now: a run is resumed as it began"),
        ({"algorithm": {"name": "grpo", "clip_low": 0.3}}, "algorithm.options"),
        ({"schedule": "delayed"}, "schedule.name"),
        ({"train": {"accumulate": "exact"}}, "train.accumulate"),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature"),
        ({"weight_sync": {"dtype": "bfloat16"}}, "weight_sync.dtype"),
        ({"run": {"steps": 1}}, "run.steps is 1, and 2 steps are done"),
    ],
)
def test_what_may_not(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_fits(parse({**TREE, **change}), state(), "hash")


def test_other_data_under_the_same_name() -> None:
    prompts = [Prompt(np.array([1, 2]), {"question": "a"}), Prompt(np.array([3]), {"question": "b"})]
    assert data_hash(prompts) == data_hash(prompts) != data_hash(prompts[::-1])
    with pytest.raises(UserError, match="holds other prompts"):
        check_fits(parse(TREE), state(), "another hash")


def test_every_key_that_may_change_is_one() -> None:
    for key in MAY_CHANGE:
        section: Any = Config
        for part in key.split("."):
            assert part in section.model_fields, key
            section = section.model_fields[part].annotation


def write_lines(path: Path, lines: list[Any]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def test_files_are_cut_back_to_the_committed_steps_and_again_changes_nothing(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "reward/mean": 0.5} for step in range(5)])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "rew')  # killed in the middle of a line
    write_lines(tmp_path / "fingerprints.jsonl", [{"step": step} for step in range(5)])
    write_lines(tmp_path / "fingerprints-1.jsonl", [{"step": step} for step in range(5)])
    write_lines(tmp_path / "eval.jsonl", [{"step": version} for version in (0, 2, 4)])
    samples = [("train", 1, 9), ("train", 2, 32), ("train", 2, 36), ("eval", 0, 1), ("eval", 1, 2), ("eval", 2, 3), ("eval", 4, 4)]
    write_lines(tmp_path / "samples.jsonl", [{"purpose": p, "step": s, "row": row} for p, s, row in samples])
    write_lines(tmp_path / "tokens.jsonl", [{"row": row, "step": step} for row, step in ((9, 1), (32, 2))])
    write_lines(tmp_path / "unscored.jsonl", [{"kind": "timeout"}, {"kind": "raised"}])
    whole = (tmp_path / "unscored.jsonl").read_bytes()
    (tmp_path / "unscored.jsonl").write_bytes(whole + b'{"kind": "ra')
    spans = [
        Span(worker="trainer/0", task="optim_step", start=3.0, end=4.0, step=1),
        Span(worker="rollout/0", task="generate", start=3.5, end=6.0, version=1),
        Span(worker="rollout/0", task="generate_group", start=3.0, end=3.5, step=2, is_lane=False),
        Span(worker="trainer/0", task="publish", start=4.0, end=5.0, step=1),
        Span(worker="trainer/0", task="wait", start=5.0, end=7.0, cause="rows"),
        Span(worker="trainer/0", task="optim_step", start=7.0, end=8.0, step=2),
    ]
    write_lines(tmp_path / "spans.jsonl", spans)
    for name in ("certificate.json", "report.html", "trace.json", "control.sock"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    write_driver(tmp_path / "step", state(), [rows_of(32)])
    resumed = read_driver(tmp_path / "step")
    for now in (100.0, 200.0):
        cut_back(tmp_path, resumed, now)

        def steps(name: str) -> list[int]:
            return [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()]

        assert steps("tokens.jsonl") == [1]  # row 32 is yet to be trained
        assert [steps(name) for name in ("metrics.jsonl", "fingerprints.jsonl", "fingerprints-1.jsonl")] == [[0, 1]] * 3
        assert steps("eval.jsonl") == [0, 2]
        assert (tmp_path / "unscored.jsonl").read_bytes() == whole
        kept = [json.loads(line)["row"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
        assert kept == [9, 32, 1, 3]  # row 32 was completed and goes on; nobody finished evaluation 1
        assert [(span.task, span.start - now, span.end - now) for span in read_spans(tmp_path / "spans.jsonl")] == [
            ("optim_step", -2.0, -1.0),
            ("generate", -1.5, 0.0),
            ("publish", -1.0, 0.0),
        ]
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".jsonl"))
    assert left == ["model", "step"]  # the model stays until there is another


@pytest.mark.parametrize(("noted", "expected"), [(1, 1), (2, 2), (3, None)])
def test_a_run_that_goes_back_from_its_end_has_not_ended(tmp_path: Path, noted: int, expected: int | None) -> None:
    """Its end wrote no checkpoint: it goes back, and may be killed between the checkpoint of its last step and its model."""
    folder = RunDir(tmp_path)
    for model in (folder.model, folder.critic):
        model.mkdir()
    folder.note_model(noted)
    shutil.copytree(folder.model, folder.critic, dirs_exist_ok=True)
    write_driver(tmp_path / "step", state(), [rows_of(32)])
    resumed = read_driver(tmp_path / "step")
    assert resumed.state.version == 2
    for _ in range(2):
        cut_back(tmp_path, resumed, 100.0)
        assert folder.model_version == folder.critic_version == expected and folder.model.is_dir()


def test_a_line_that_was_torn_on_a_full_disk_keeps_no_run_from_going_on(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "eval.jsonl"):
        (tmp_path / name).write_bytes(b'{"step":0}\n{"st{"step":1}\n{"step":1}\n')
    write_driver(tmp_path / "step", state(), [rows_of(32)])
    cut_back(tmp_path, read_driver(tmp_path / "step"), 100.0)
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == b'{"step":0}\n{"step":1}\n'


def test_going_back_takes_no_more_memory_for_more_steps(tmp_path: Path) -> None:
    write_driver(tmp_path / "step", state(), [rows_of(32)])
    resumed, lines = read_driver(tmp_path / "step"), 4000
    row = {"step": 1, **{f"perf/number-{number}": 1.5 for number in range(20)}}
    sample = {"purpose": "train", "step": 1, "row": 9, "response": "a" * 200}
    for name, line in (("metrics.jsonl", row), ("fingerprints.jsonl", row), ("samples.jsonl", sample), ("tokens.jsonl", row)):
        write_lines(tmp_path / name, [line] * lines)
    span = Span(worker="trainer/0", task="optim_step", start=3.0, end=4.0, step=1)
    write_lines(tmp_path / "spans.jsonl", [*[msgspec.structs.replace(span, start=3.0 + i, end=4.0 + i) for i in range(lines)]])
    size = (tmp_path / "metrics.jsonl").stat().st_size
    tracemalloc.start()
    cut_back(tmp_path, resumed, 100.0)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(read_spans(tmp_path / "spans.jsonl")) == lines and (tmp_path / "metrics.jsonl").stat().st_size == size
    assert most < size / 4, f"{most} bytes at once, and a file of metrics has {size}"


def test_what_was_added_to_a_checkpoint_takes_its_place(tmp_path: Path) -> None:
    before = state(pushed=[SavedPrompt([7], {})], steps={2: {8: SavedPrompt([1], {})}})
    write_driver(tmp_path / "step", before, [])
    added = tmp_path / "step.added"
    assert read_driver(tmp_path / "step", added).state == before
    more = state(position=9, pushed=[SavedPrompt([7], {}), SavedPrompt([8], {})], steps={3: {9: SavedPrompt([2], {})}})
    write_added(added, more)
    assert read_driver(tmp_path / "step", added).state == more and read_driver(tmp_path / "step").state == before
    write_added(added, more, is_whole=True)
    assert read_driver(tmp_path / "step", added).state == more
    added.write_bytes(added.read_bytes()[:-1])
    with pytest.raises(RunError, match="cannot be read"):
        read_driver(tmp_path / "step", added)


def test_what_somebody_may_miss(tmp_path: Path) -> None:
    def kept(**changes: Any) -> str:
        return to_be_kept(parse({**TREE, "run": {"dir": str(tmp_path), "name": "test"}, **changes}))

    run_dir = RunDir(tmp_path / "test")
    assert not kept()
    run_dir.claim(dump(parse(TREE)))
    (run_dir.path / "metrics.jsonl").write_text('{"step": 0, "rew')  # not a row yet
    other = {"rollout": {"temperature": 0.5}}
    assert not kept(**other)
    write_lines(run_dir.path / "metrics.jsonl", [{"step": 0}])
    assert not kept() and not kept(checkpoint={"every_steps": 3})  # made again
    assert kept(**other) == ("the metrics of an earlier run, and rollout.temperature was 1.0 when this run began and is 0.5 now")
    for content in (b"run: [", b"\xff", b"run: {steps: many}"):
        (run_dir.path / "config.yaml").write_bytes(content)
        assert kept().startswith("the metrics of an earlier run, which cannot be told from another one (")
    (run_dir.path / "config.yaml").unlink()
    assert "config.yaml cannot be read" in kept()
    run_dir.claim(dump(parse(TREE)))
    run_dir.critic.mkdir()
    assert not kept() and kept(**other).startswith("the model of an earlier run, and rollout.temperature was 1.0")
    run_dir.critic.rename(run_dir.model)
    assert not kept() and kept(**other).startswith("the model of an earlier run, and rollout.temperature was 1.0")
