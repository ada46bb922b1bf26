"""Checkpoints by their paths: whole or not there, kept as long as was said."""

import tarfile
import time
from pathlib import Path

import pytest

from asyncflow.service.tinker import checkpoint_store
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


def test_two_who_see_that_a_checkpoint_has_expired_both_find_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rename = CheckpointStore(tmp_path, 2), Path.rename
    path = saved(store, "short", seconds=0)

    def after_the_other(folder: Path, target: Path) -> Path:
        rename(folder, target.with_name("the-other"))
        return rename(folder, target)

    monkeypatch.setattr(Path, "rename", after_the_other)
    with pytest.raises(UserError, match="has expired"):
        store.find(path)


class CutOff(BaseException):
    """The server is killed."""


@pytest.mark.parametrize("error", [CutOff, OSError])
def test_a_checkpoint_is_there_until_the_one_that_replaces_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    store = CheckpointStore(tmp_path, 2)
    path, rename = saved(store, "first"), Path.rename

    def cut_off(folder: Path, target: Path) -> Path:
        if folder.name == "first.partial":
            raise error
        return rename(folder, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", cut_off)
        with pytest.raises(error):
            saved(store, "first", "b", overwrite=True)
    assert (store.find(path).model / "file").read_text() == "a"
    again = CheckpointStore(tmp_path, 2)
    assert (again.find(path).model / "file").read_text() == "a"
    assert [entry.name for entry in tmp_path.glob("checkpoints/*/*/*")] == ["first"]


@pytest.mark.parametrize("replacement", [True, False])
def test_a_server_that_was_killed_between_two_names_has_one_of_both_checkpoints(tmp_path: Path, replacement: bool) -> None:
    store = CheckpointStore(tmp_path, 2)
    path = saved(store, "first")
    (old := store.find(path).folder).rename(old.with_name("first.over"))
    if replacement:
        saved(store, "second", "b")
        old.with_name("second").rename(old)
    again = CheckpointStore(tmp_path, 2)
    assert (again.find(path).model / "file").read_text() == ("b" if replacement else "a")
    assert [entry.name for entry in tmp_path.glob("checkpoints/*/*/*")] == ["first"]


def test_a_checkpoint_that_was_deleted_in_part_is_not_there_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, 2)
    path = saved(store, "first")

    def cut_off(folder: Path, *, ignore_errors: bool) -> None:
        if folder.exists():
            raise CutOff

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_store.shutil, "rmtree", cut_off)
        with pytest.raises(CutOff):
            store.delete(store.find(path))
    assert CheckpointStore(tmp_path, 2).all() == [] and not list(tmp_path.glob("checkpoints/*/*/*"))


def test_archives_of_a_checkpoint_that_are_made_at_once_are_both_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, 2)
    checkpoint, add, made = store.find(saved(store, "first", "a" * 100_000)), tarfile.TarFile.add, list[Path]()

    def other_first(self: tarfile.TarFile, *arguments: str) -> None:
        monkeypatch.setattr(tarfile.TarFile, "add", add)
        made.append(store.archive(checkpoint))
        add(self, *arguments)

    monkeypatch.setattr(tarfile.TarFile, "add", other_first)
    made.append(store.archive(checkpoint))
    for file in made:
        with tarfile.open(file) as archive:
            content = archive.extractfile("file")
            assert archive.getnames() == ["file"] and content is not None and content.read() == b"a" * 100_000
    monkeypatch.setattr(tarfile.TarFile, "add", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.archive(checkpoint)
    assert sorted((tmp_path / "downloads").iterdir()) == sorted(made), "what was not finished is left"


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
