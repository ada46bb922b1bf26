import json
import struct
import subprocess
import sys
import types
from pathlib import Path

import pytest

from asyncflow.telemetry.tensorboard import TensorBoardTracker, cut_events, masked_crc32c
from asyncflow.telemetry.trackers import JsonlTracker, make_trackers
from asyncflow.types import UserError
from tests.patience import patience


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_holds_exactly_one_row_per_step_as_soon_as_it_is_logged(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(3):
        tracker.log(step, {"reward/mean": step / 2, "policy/grad_norm": float("nan")})
        assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == list(range(step + 1))
    tracker.close()
    assert rows_of(tmp_path / "metrics.jsonl")[2] == {"step": 2, "reward/mean": 1.0, "policy/grad_norm": None}


def test_a_resumed_run_goes_on_in_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for steps in (range(2), range(2, 5)):
        tracker = JsonlTracker(path)
        for step in steps:
            tracker.log(step, {"from": steps[0]})
        tracker.close()
    assert rows_of(path) == [{"step": step, "from": 0 if step < 2 else 2} for step in range(5)]


def test_masked_crc32c_is_that_of_the_standard():
    # CRC-32C of "123456789" is 0xE3069283; then TFRecord's mask.
    crc = 0xE3069283
    assert masked_crc32c(b"123456789") == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(path: Path) -> list[bytes]:
    content, events, at = path.read_bytes(), [], 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        assert struct.unpack_from("<I", content, at + 8)[0] == masked_crc32c(content[at : at + 8])
        event = content[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", content, at + 12 + length)[0] == masked_crc32c(event)
        events.append(event)
        at += 16 + length
    return events


def test_tensorboard_files_are_read_back_by_tensorboards_own_messages(tmp_path):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    from tensorboardX.crc32c import crc32c

    assert crc32c(b"123456789") == 0xE3069283
    tracker = TensorBoardTracker(tmp_path / "tensorboard", clock=lambda: 1234.5)
    tracker.log(3, {"reward/mean": 0.25, "perf/tpspd": 1e6})
    tracker.log(300, {"reward/mean": 0.5})
    tracker.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert "tfevents" in path.name
    head, first, second = (event_pb2.Event.FromString(event) for event in records(path))
    assert head.file_version == "brain.Event:2"
    assert (first.step, first.wall_time) == (3, 1234.5)
    assert {value.tag: value.simple_value for value in first.summary.value} == {"reward/mean": 0.25, "perf/tpspd": 1e6}
    assert (second.step, second.summary.value[0].simple_value) == (300, 0.5)


def test_event_files_are_cut_back_to_the_steps_that_are_kept(tmp_path):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    for began, steps in ((1000.0, (0, 1, 200)), (2000.0, (200, 201))):
        tracker = TensorBoardTracker(tmp_path, clock=lambda began=began: began)
        for step in steps:
            tracker.log(step, {"reward/mean": began})
        tracker.close()
    torn = max(tmp_path.iterdir())
    torn.write_bytes(torn.read_bytes()[:-3])  # killed while it wrote

    def steps_of(path: Path) -> list[int]:
        return [event_pb2.Event.FromString(event).step for event in records(path)][1:]

    cut_events(tmp_path, 1000)
    assert [steps_of(path) for path in sorted(tmp_path.iterdir())] == [[0, 1, 200], [200]]
    cut_events(tmp_path, 200)
    assert [steps_of(path) for path in sorted(tmp_path.iterdir())] == [[0, 1], []]
    cut_events(tmp_path / "nothing", 200)


def test_the_trackers_do_not_import_torch(tmp_path):
    program = (
        "import sys; from pathlib import Path; from asyncflow.telemetry.trackers import make_trackers\n"
        "import asyncflow.telemetry.report, asyncflow.telemetry.trace, asyncflow.telemetry.metrics\n"
        f"made = make_trackers(['jsonl', 'tensorboard'], Path({str(tmp_path)!r}), {{}}, 'r')\n"
        "for tracker in made.values(): tracker.log(0, {'a': 1.0}); tracker.close()\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=patience(60))


def test_unknown_trackers_and_a_missing_wandb_are_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no tracker 'mlflow'"):
        make_trackers(["jsonl", "mlflow"], tmp_path / "run", {}, "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install asyncflow-rl\[wandb\]"):
        make_trackers(["wandb"], tmp_path, {}, "run")


def test_wandb_gets_rows_and_leaves_its_mode_to_the_environment(tmp_path, monkeypatch):
    calls: list[tuple] = []
    run = types.SimpleNamespace(log=lambda row, step: calls.append(("log", row, step)), finish=lambda: calls.append(("finish",)))
    fake = types.SimpleNamespace(init=lambda **options: calls.append(("init", options)) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    (tracker,) = make_trackers(["wandb", "wandb"], tmp_path, {"schedule": "periodic"}, "seven").values()
    tracker.log(4, {"reward/mean": 1.0})
    tracker.close()
    options = {"project": "mine", "name": "seven", "dir": str(tmp_path), "config": {"schedule": "periodic"}}
    assert calls == [("init", options), ("log", {"reward/mean": 1.0}, 4), ("finish",)]
