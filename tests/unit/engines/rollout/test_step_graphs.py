"""Recorded decode steps, by a recorder that computes again where a device would replay."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncflow.engines.rollout import step_graphs
from asyncflow.engines.rollout.adapter_bank import INSTALLED
from asyncflow.engines.rollout.low_rank import AdapterRows
from asyncflow.engines.rollout.step_graphs import RECORDED_AFTER, StepGraphs
from tests.contract.devices import needed_devices

EVERYWHERE = AdapterRows(INSTALLED)


def doubled(inputs_NX: Tensor, adapted: tuple[AdapterRows, ...]) -> Tensor:
    return inputs_NX[:, :1] * 2.0 + len(adapted)


class Counted:
    """`StepGraphs` over `doubled`, with the numbers of calls and of replays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, can_record: bool) -> None:
        self.calls = self.replays = 0
        recorder = (lambda: (Recording(self), nullcontext())) if can_record else None
        monkeypatch.setattr(step_graphs, "step_recorder", lambda device: recorder)
        self.graphs = StepGraphs(self._compute, torch.device("cpu"))

    def _compute(self, inputs_NX: Tensor, adapted: tuple[AdapterRows, ...]) -> Tensor:
        self.calls += 1
        return doubled(inputs_NX, adapted)

    def check(self, first: int, rows: int, columns: int, adapted: tuple[AdapterRows, ...] = ()) -> None:
        inputs = np.arange(first, first + rows * columns).reshape(rows, columns)
        assert self.graphs(inputs, adapted).equal(doubled(torch.from_numpy(inputs), adapted))


class Recording:
    def __init__(self, counted: Counted) -> None:
        self._counted = counted

    def replay(self) -> None:
        """What was recorded, from what lies in its inputs now."""
        self._counted.replays += 1
        for (_, num_adapters), recorded in self._counted.graphs._recorded.items():
            if recorded.graph is self:
                recorded.output_NE.copy_(doubled(recorded.inputs_NX, (EVERYWHERE,) * num_adapters))


def test_a_shape_that_comes_often_is_recorded_and_replayed_for_other_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, can_record=True)
    for number in range(RECORDED_AFTER + 5):
        counted.check(10 * number, 4, 3)
    assert (counted.calls, counted.replays) == (RECORDED_AFTER + 1, 5), "the recording itself computes nothing on a device"
    counted.check(0, 4, 5)
    counted.check(0, 4, 3, (EVERYWHERE,))
    assert counted.calls == RECORDED_AFTER + 3, "another number of blocks, or an adapter, is another step"


@pytest.mark.parametrize("can_record", [True, False])
def test_rows_with_adapters_that_come_and_go_are_computed(can_record: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, can_record=can_record)
    others: list[Any] = [(AdapterRows(INSTALLED + 1),), (AdapterRows(INSTALLED, torch.arange(2), torch.arange(4)),)]
    for number in range(RECORDED_AFTER + 5):
        for adapted in others if can_record else [()]:
            counted.check(number, 4, 3, adapted)
    assert counted.replays == 0


def test_a_device_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    needed_devices("cuda")
    weight = torch.ones(1, device="cuda")
    graphs = StepGraphs(lambda inputs_NX, _: inputs_NX[:, :1] * weight, torch.device("cuda"))
    with torch.inference_mode():
        for number in range(RECORDED_AFTER + 5):
            inputs = np.arange(number, number + 12).reshape(4, 3)
            weight.fill_(number)  # as an install
            assert graphs(inputs, ()).cpu().flatten().tolist() == (inputs[:, 0] * number).tolist()
    assert len(graphs._recorded) == 1
