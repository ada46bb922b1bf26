"""Parquet files, saved data sets and folders, through `datasets` itself, and what is asked of the Hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from asyncflow.data.datasets import load_rows
from asyncflow.types import UserError
from tests.patience import patience

datasets = pytest.importorskip("datasets")

ROWS = [{"question": f"q{i}", "answer": str(i), "meta": {"level": i, "tags": ["a", "b"]}, "none": None} for i in range(5)]


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of a test's own, and no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def read(path: Path | str, **asked: Any) -> list[dict[str, Any]]:
    return load_rows(str(path), seed=0, split="train", **asked)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    assert read(path) == ROWS and read(path, limit=2) == ROWS[:2]


def test_what_is_no_parquet_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(UserError, match=r"a\.parquet is no Parquet file"):
        read(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"b\.parquet cannot be read"):
        read(tmp_path / "b.parquet")


def test_a_saved_data_set(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert read(tmp_path / "one") == ROWS and read(tmp_path / "one", named="whatever", limit=3) == ROWS[:3]


def test_a_saved_data_set_of_several_splits(tmp_path: Path) -> None:
    splits = {"train": datasets.Dataset.from_list(ROWS[:3]), "test": datasets.Dataset.from_list(ROWS[3:])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "several")
    assert read(tmp_path / "several") == ROWS[:3] and read(tmp_path / "several", named="test") == ROWS[3:]
    with pytest.raises(UserError, match=r"several has no split 'dev', but train, test: name one by data\.split"):
        read(tmp_path / "several", named="dev")


def test_a_folder_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    datasets.Dataset.from_list(ROWS[:3]).to_parquet(str(folder / "train-00000.parquet"))
    datasets.Dataset.from_list(ROWS[3:]).to_parquet(str(folder / "test-00000.parquet"))
    assert read(folder) == ROWS[:3] and read(folder, named="test", limit=1) == ROWS[3:4]


def test_an_empty_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"the data set .*empty cannot be read: "):
        read(tmp_path / "empty")


def test_what_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*arguments: Any) -> Any:
        asked.append(arguments)
        return datasets.DatasetDict(test=datasets.Dataset.from_list(ROWS))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("openai/gsm8k", named="test", subset="main") == ROWS
    assert asked == [("openai/gsm8k", "main")]


def test_a_hub_that_cannot_be_reached_is_said_in_a_sentence() -> None:
    with pytest.raises(UserError, match="the data set nobody/nothing is no file or folder here, and cannot be had") as caught:
        read("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` would try ten times, for half a minute; of the cache it is asked all the same."""
    asked = []

    def load_dataset(*arguments: Any) -> Any:
        asked.append(datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError("Offline mode is enabled")

    def unreachable(*arguments: Any, **options: Any) -> Any:
        raise OSError("Name or service not known")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(HfApi, "dataset_info", unreachable)
    with pytest.raises(UserError, match="from the Hugging Face Hub: it cannot be reached, and the cache has no such data set"):
        read("nobody/nothing")
    assert asked == [True] and not datasets.config.HF_HUB_OFFLINE


def test_a_name_that_the_hub_does_not_have_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: Any, **options: Any) -> Any:
        raise RepositoryNotFoundError("404", response=Mock())

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("it is asked again"))
    monkeypatch.setattr(HfApi, "dataset_info", unknown)
    with pytest.raises(UserError, match=r"it has none of this name, or none that your token \(HF_TOKEN\) may read"):
        read("nobody/nothing")


def test_reading_brings_no_torch_along(tmp_path: Path) -> None:
    """The driver does without."""
    import subprocess

    path = tmp_path / "one"
    datasets.Dataset.from_list(ROWS).save_to_disk(path)
    code = (
        "import sys; from asyncflow.data.datasets import load_rows; "
        f"rows = load_rows({str(path)!r}, seed=0, split='train'); print(len(rows), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(60), check=True)
    assert done.stdout.split() == ["5", "False"]
