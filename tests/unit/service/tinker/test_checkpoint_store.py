"""Checkpoints by their paths: whole or not there, kept as long as was said."""

import time
from pathlib import Path

import pytest

from asyncflow.service.tinker.checkpoint_store import CheckpointStore, Record
from asyncflow.types import UserError


def saved(store: CheckpointStore, name: str, content: str = "a", *, overwrite: bool = False, seconds: int | None = None) -> str:
    partial = store.begin("s:train:0", "weights", name, overwrite=overwrite)
    (partial / "model").mkdir()
    (partial / "model" / "file").write_text(content)
    now = time.time()
    expires, metadata = None if seconds is None else now + seconds, {"renderer": "x"}
    record = Record(base_model="m", rank=8, is_lora=True, created=now, expires=expires, user_metadata=metadata)
    return store.commit("s:train:0", "weights", name, record).path


def test_a_checkpoint_is_there_when_it_is_whole_and_outlives_the_server(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    store.begin("s:train:0", "weights", "half", overwrite=False)
    path = saved(store, "first")
    assert path == "tinker://s:train:0/weights/first"
    again = CheckpointStore(tmp_path, 2)
    assert [one.path for one in again.all()] == [path] and not list(tmp_path.rglob("*.partial"))
    found = again.find(path)
    assert (found.model / "file").read_text() == "a" and found.record.base_model == "m"
    description = found.description()
    assert description["checkpoint_id"] == "weights/first" and description["checkpoint_type"] == "training"
    assert description["size_bytes"] == 1 and description["user_metadata"] == {"renderer": "x"}
    again.delete(found)
    with pytest.raises(UserError, match="no checkpoint 'tinker://s:train:0/weights/first' here"):
        again.find(path)


def test_a_name_is_taken_once_unless_it_is_overwritten(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    path = saved(store, "first")
    with pytest.raises(UserError, match="is there already"):
        saved(store, "first", "b")
    before = store.find(path).model
    saved(store, "first", "b", overwrite=True)
    assert store.find(path).model != before and not before.exists()
    assert (store.find(path).model / "file").read_text() == "b"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\x00", ".hidden", "x" * 129, "a.partial"])
def test_a_name_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path, 2)
    with pytest.raises(UserError, match="is no name"):
        store.begin("s:train:0", "weights", name, overwrite=False)
    for path in (f"tinker://s:train:0/weights/{name}", f"tinker://{name}/weights/first", f"file://{name}", "tinker://a/other/b"):
        with pytest.raises(UserError, match="no checkpoint"):
            store.find(path)


def test_a_checkpoint_goes_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, 2)
    path, other = saved(store, "short", seconds=100), saved(store, "long", seconds=100)
    store.keep_for(store.find(other), None)
    now = time.time()
    monkeypatch.setattr("asyncflow.service.tinker.checkpoint_store.time.time", lambda: now + 101)
    with pytest.raises(UserError, match="no checkpoint"):
        store.find(path)
    assert [one.path for one in store.all("s:train:0")] == [other] and not (
        tmp_path / "checkpoints/s:train:0/weights/short"
    ).exists()


def test_the_newest_snapshots_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    folders = [store.begin_snapshot("s:train:0", number) for number in (8, 9, 10)]
    store.trim_snapshots("s:train:0")
    assert [folder.exists() for folder in folders] == [False, True, True]
    store.forget_snapshots("s:train:0")
    assert not any(folder.exists() for folder in folders)
