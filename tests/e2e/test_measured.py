"""A configuration that is measured on this machine: real runs, and what is predicted from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.config import parse
from asyncflow.planner.measured import means, measure, what_if
from asyncflow.planner.pieces import read_run
from tests.depth import in_gate


@pytest.mark.parametrize("dp", in_gate(1, of=(1, 2)))
def test_a_short_run_tells_what_everything_costs(small: Callable[..., dict[str, Any]], tmp_path: Path, dp: int) -> None:
    folder = tmp_path / "runs" / "measured"
    found = measure(parse(small(plan={"train": {"dp": dp}}, schedule="delayed")), folder, steps=5)
    costs, rows = found.costs, read_run(folder)[2]
    assert sorted(rows) == [0, 1, 2, 3, 4] and found.step_seconds == pytest.approx(means(rows).step_seconds)
    assert {each.name for each in found.residuals} >= {
        "decode_step",
        "forward_backward",
        "optim_step",
        "publish",
        "fetch",
        "install",
    }
    assert costs.weight_bytes > 1_000_000 and 10 < costs.lengths.prompt < 60 and 1 < costs.lengths.response_median < 60
    assert costs.contention is not None and costs.decode_step(16, 500) > 0 < costs.forward_backward(200)
    assert (folder.parent / "measured-one-rank").exists() == (dp == 2)
    twice = what_if(folder, ["train.prompts_per_step=16"])
    assert twice.measured.step_seconds < twice.predicted.step_seconds < 10 * twice.measured.step_seconds
    for change in ("schedule=bounded", "rollout.max_new_tokens=96"):  # of the advice
        assert 0 < what_if(folder, [change]).predicted.step_seconds < 10 * twice.measured.step_seconds
