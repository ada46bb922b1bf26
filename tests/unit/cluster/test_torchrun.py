"""A rank that torchrun has started waits for its run's driver."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from asyncflow.cluster.torchrun import _wait_for_driver
from asyncflow.run_dir import control_socket


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_waits_for_as_long_as_the_driver_lives_and_says_so(
    ends: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may have a model to download, or a fork's checkpoint to copy. The file may be an earlier launch's meanwhile."""
    looks = itertools.count()
    (job := tmp_path / "job.json").write_text("earlier")

    def has_ended() -> bool:
        if next(looks) == 3 and not ends:
            job.write_text("launch")
            control_socket(tmp_path).touch()
        return ends and next(looks) > 3

    assert _wait_for_driver(has_ended, job, Path.read_text, "launch", 0.0) is not ends
    assert capsys.readouterr().out.count("has not begun the run") == 1
