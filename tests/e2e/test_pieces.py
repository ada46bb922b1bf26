"""Pieces in a whole run: a helper computes some of its only pass, and of its updates, and the weights are those without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.engines.train.helpers import Helpers
from asyncflow.telemetry.idle import helper_passes
from asyncflow.telemetry.trace import read_spans
from asyncflow.threads import num_cores
from asyncflow.trainer import Trainer
from tests.conftest import merged
from tests.depth import in_gate
from tests.e2e.test_parallel import of_metric, prints
from tests.patience import patience

Small = Callable[..., dict[str, Any]]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compute thread begins a pass when its helper may compute, and leaves it the pieces. On a machine that has other work, the
    leave may come when a tiny pass is over."""
    compute, take = Helpers.compute, Helpers._take_pieces_until

    def wait(helpers: Helpers, is_over: Callable[[], bool]) -> None:
        with helpers._changed:
            assert helpers._changed.wait_for(is_over, patience(60))

    def compute_later(helpers: Helpers, *arguments: Any) -> list[Any]:
        wait(helpers, lambda: helpers.allowed > 0)
        return compute(helpers, *arguments)

    def take_later(helpers: Helpers, is_over: Callable[[], bool]) -> None:
        wait(helpers, lambda: not helpers._waiting or not helpers.allowed)
        take(helpers, is_over)

    monkeypatch.setattr(Helpers, "compute", compute_later)
    monkeypatch.setattr(Helpers, "_take_pieces_until", take_later)


@pytest.mark.skipif(num_cores() < 2, reason="no core is left for a helper")
@pytest.mark.parametrize("accumulate", in_gate("exact", of=["exact", "fp32"]))
def test_pieces_of_a_step_of_one_group_are_computed_beside_it_with_the_same_bits(
    small: Small, tmp_path: Path, patient: None, accumulate: str
) -> None:
    """One group a step has one pass: nothing but pieces is left for the helper, who may compute while nothing is generated."""
    for name, count in (("alone", 0), ("helped", 1)):
        sections = {
            "run": {"steps": 6, "name": name},
            "train": {"accumulate": accumulate, "prompts_per_step": 1, "skip_zero_advantages": False, "helpers": count},
        }
        config = small(cluster="inline", schedule="periodic", telemetry={"fingerprints": True}, **merged(sections, {}))
        with Trainer.from_config(config) as trainer:
            while trainer.step() is not None:
                pass
    alone, helped = tmp_path / "runs" / "alone", tmp_path / "runs" / "helped"
    assert [step.tensors for step in prints(alone)] == [step.tensors for step in prints(helped)]
    assert sum(of_metric(helped, "perf/helper_seconds")) > 0
    spans = list(read_spans(helped / "spans.jsonl"))
    passes = [span for span in spans if span.task == "forward_backward"]
    assert any(seconds > 0 for span in passes for _, seconds in helper_passes(spans, span.start, span.end))
