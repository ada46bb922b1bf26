"""A run's folder: its final model is there whole, or the one before it is."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from asyncflow import run_dir as run_dir_file
from asyncflow.run_dir import CRITIC_DIR, EVAL_FILE, METRICS_FILE, MODEL_DIR, RunDir
from asyncflow.types import UserError
from tests.killing import in_a_process, killed_at

WRITES = [(Path, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir")]


def save(folder: RunDir, version: int, name: str = MODEL_DIR, *, says_so: bool = False) -> None:
    with folder.saving_model(name, version=version if says_so else None) as partial:
        (partial / "more").mkdir(parents=True, exist_ok=True)
        (partial / "more" / "weights").write_text(f"weights {version}")


def weights(folder: RunDir, name: str = MODEL_DIR) -> str:
    return (folder.path / name / "more" / "weights").read_text()


def test_a_model_says_of_how_many_steps_it_is_until_another_takes_its_place(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    assert folder.model_version is None and folder.model_id() is None
    save(folder, 3)
    assert folder.model_version is None
    folder.note_model(3)
    before = folder.model_id()
    assert folder.model_version == 3 and before is not None
    save(folder, 4)
    assert weights(folder) == "weights 4" and folder.model_version is None and folder.model_id() != before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_critic_is_saved_as_the_model_is_and_says_at_once_of_how_many_steps(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    assert folder.critic_version is None
    for version in (3, 4):
        save(folder, version, CRITIC_DIR, says_so=True)
        assert weights(folder, CRITIC_DIR) == f"weights {version}" and folder.critic_version == version
    assert folder.model_version is None and [path.name for path in tmp_path.iterdir()] == ["critic"]
    (tmp_path / "critic.partial").mkdir()
    folder.forget_partial_models()
    assert [path.name for path in tmp_path.iterdir()] == ["critic"]


def started(path: Path) -> RunDir:
    """Folder of a run that has failed before its first step."""
    folder = RunDir(path)
    folder.claim("run: {}")
    (path / "logs").mkdir()
    for name in (METRICS_FILE, EVAL_FILE):  # opened, and nothing written
        (path / name).touch()
    return folder


def test_a_run_that_made_no_step_makes_room_for_the_next_one(tmp_path: Path) -> None:
    folder = started(tmp_path / "run")
    folder.check(may_overwrite=False)
    folder.claim("run: {}")
    assert not (folder.path / "logs").exists()


@pytest.mark.parametrize(
    "left", ["metrics.jsonl", "checkpoints/step-000004/done", "model/weights", "critic/weights", "set-aside-1/x"]
)
def test_what_a_run_has_made_is_not_removed_unasked(tmp_path: Path, left: str) -> None:
    folder = started(tmp_path / "run")
    (folder.path / left).parent.mkdir(parents=True, exist_ok=True)
    (folder.path / left).write_text("{}")
    with pytest.raises(UserError, match="holds an earlier run: resume it by --resume"):
        folder.check(may_overwrite=False)
    folder.check(may_overwrite=True)


def test_a_folder_of_somebody_elses_is_not_called_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    for may_overwrite in (True, False):
        with pytest.raises(UserError, match=r"is not empty, and no run wrote it, so it is not overwritten: give another run\.name"):
            RunDir(tmp_path).check(may_overwrite=may_overwrite)


def test_a_block_that_fails_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    save(folder, 3)
    with pytest.raises(OSError, match="full"), folder.saving_model() as partial:
        partial.mkdir()
        raise OSError("full")
    assert weights(folder) == "weights 3"


def test_files_and_folders_are_flushed_before_the_name_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()
    monkeypatch.setattr(run_dir_file, "sync_file", lambda path: done.append(str(path.relative_to(tmp_path))))
    monkeypatch.setattr(run_dir_file, "sync_folder", lambda path: done.append(str(path.relative_to(tmp_path))))
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append("rename"), rename(path, to))[1])
    save(RunDir(tmp_path), 3)
    assert done == ["model.partial/more/weights", "model.partial/more", "model.partial", "rename", "."]


def save_and_be_killed(folder: RunDir, name: str, number: int, is_before: bool) -> None:
    killed_at(WRITES, number, is_before)
    save(folder, 4, name, says_so=name == CRITIC_DIR)


@pytest.mark.parametrize("name", [MODEL_DIR, CRITIC_DIR])
@pytest.mark.parametrize("is_before", [True, False])
def test_killed_at_each_write_one_of_the_two_models_is_left_whole(tmp_path: Path, is_before: bool, name: str) -> None:
    for number in range(20):
        folder = RunDir(tmp_path / str(number))
        save(folder, 3, name, says_so=name == CRITIC_DIR)
        status = in_a_process(lambda folder=folder, number=number: save_and_be_killed(folder, name, number, is_before))
        folder.restore_models()
        if os.WIFEXITED(status):
            assert number >= 5 and weights(folder, name) == "weights 4"
            return
        assert os.WTERMSIG(status) == signal.SIGKILL and weights(folder, name) in ("weights 3", "weights 4")
        assert name == MODEL_DIR or weights(folder, name) == f"weights {folder.critic_version}"
        save(folder, 5, name)
        assert weights(folder, name) == "weights 5"
    raise AssertionError("saving does not end")


def claim_and_be_killed(folder: RunDir, number: int, is_before: bool) -> None:
    killed_at([*WRITES, (Path, "touch"), (Path, "mkdir")], number, is_before)
    folder.claim("of the next run")


@pytest.mark.parametrize("is_before", [True, False])
def test_killed_at_each_write_while_it_is_made_anew_the_folder_stays_known_for_the_runs(tmp_path: Path, is_before: bool) -> None:
    """As long as anything is left, by its configuration as well."""
    for number in range(30):
        folder = RunDir(tmp_path / str(number))
        folder.claim("of this run")
        for name in ("checkpoints", "logs", "zones"):
            (folder.path / name).mkdir()
            (folder.path / name / "file").touch()
        for name in ("eval.jsonl", "metrics.jsonl"):
            (folder.path / name).touch()
        before = folder.path.stat()
        status = in_a_process(lambda folder=folder, number=number: claim_and_be_killed(folder, number, is_before))
        if os.WIFEXITED(status):
            assert number > 8 and sorted(path.name for path in folder.path.iterdir()) == [".asyncflow-run", "config.yaml"]
            assert (folder.path / "config.yaml").read_text() == "of the next run" and folder.path.stat().st_mode == before.st_mode
            return
        assert os.WTERMSIG(status) == signal.SIGKILL and folder.is_run()
        assert (folder.path / "config.yaml").exists() or not {"metrics.jsonl", "eval.jsonl"} & {*os.listdir(folder.path)}
    raise AssertionError("making it anew does not end")


def test_what_is_set_aside_has_a_number_of_its_own_also_where_an_earlier_one_was_removed(tmp_path: Path) -> None:
    folder, names = RunDir(tmp_path), []
    for _ in range(4):
        folder.model.mkdir()
        aside = folder.set_aside()
        assert aside is not None and (aside / MODEL_DIR).is_dir()
        names.append(aside.name)
        if len(names) == 2:
            (tmp_path / "set-aside-1" / MODEL_DIR).rmdir()
            (tmp_path / "set-aside-1").rmdir()
    assert names == [f"set-aside-{number}" for number in (1, 2, 3, 4)]
