"""Recorded decode steps, by a recorder that computes again where a device would replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.devices import use_device
from asyncflow.engines.rollout import decoder as decoder_module
from asyncflow.engines.rollout import step_graphs
from asyncflow.engines.rollout.adapter_bank import INSTALLED
from asyncflow.engines.rollout.decoder import Decoder
from asyncflow.engines.rollout.decoder_weights import load_tensors
from asyncflow.engines.rollout.low_rank import AdapterRows
from asyncflow.engines.rollout.step_graphs import INSTALLED_EVERYWHERE, MOST_RECORDED, RECORDED_AFTER, StepGraphs
from asyncflow.model_folder import read_json
from tests.conftest import MODEL
from tests.contract.devices import needed_devices


class Recorder:
    """Takes the place of a device's. `graphs`: those that it records for; `replays`: how often one was replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, can_record: bool = True, breaks: bool = False) -> None:
        self.graphs: StepGraphs
        self.replays, self._breaks = 0, breaks
        monkeypatch.setattr(step_graphs, "recorder_of", lambda device: self if can_record else None)

    @contextmanager
    def recorded(self) -> Iterator[Recording]:
        if self._breaks:
            raise RuntimeError("out of memory")
        yield Recording(self)


class Recording:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def replay(self) -> None:
        """Compute the step again, from what lies in its inputs now."""
        self._recorder.replays += 1
        graphs = self._recorder.graphs
        ((shape, step),) = [(shape, step) for shape, step in graphs._recorded.items() if step.recording is self]
        step.output_NE.copy_(graphs.compute(step.inputs_NX.numpy(), (INSTALLED_EVERYWHERE,) * shape[1]))


def doubled(inputs_NX: Tensor, adapted: tuple[AdapterRows, ...]) -> Tensor:
    return inputs_NX[:, :1] * 2.0 + len(adapted)


class Doubled(Recorder):
    """A recorder of steps that compute `doubled`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: bool) -> None:
        super().__init__(monkeypatch, **options)
        self.graphs = StepGraphs(doubled, torch.device("cpu"))

    def check(self, first: int, rows: int, columns: int, adapted: tuple[AdapterRows, ...] = ()) -> None:
        inputs = np.arange(first, first + rows * columns).reshape(rows, columns)
        assert self.graphs(inputs, adapted).equal(doubled(torch.from_numpy(inputs), adapted))


def test_a_shape_that_comes_often_is_recorded_and_replayed_for_other_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Doubled(monkeypatch)
    for number in range(RECORDED_AFTER + 5):
        steps.check(10 * number, 4, 3)
    assert steps.replays == 5 and len(steps.graphs._recorded) == 1
    steps.check(0, 4, 5)
    steps.check(0, 4, 3, (INSTALLED_EVERYWHERE,))
    assert steps.replays == 5, "another number of blocks, or an adapter, is another step"


@pytest.mark.parametrize("can_record", [True, False])
def test_rows_with_adapters_that_come_and_go_are_computed(can_record: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Doubled(monkeypatch, can_record=can_record)
    others: list[Any] = [(AdapterRows(INSTALLED + 1),), (AdapterRows(INSTALLED, torch.arange(2), torch.arange(4)),)]
    for number in range(RECORDED_AFTER + 5):
        for adapted in others if can_record else [()]:
            steps.check(number, 4, 3, adapted)
    assert steps.replays == 0


def test_so_many_shapes_are_recorded_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Doubled(monkeypatch)
    for rows in range(1, MOST_RECORDED + 4):
        for number in range(RECORDED_AFTER + 2):
            steps.check(number, rows, 2)
    assert len(steps.graphs._recorded) == MOST_RECORDED


def test_where_recording_fails_steps_are_computed_and_it_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Doubled(monkeypatch, breaks=True)
    for number in range(2 * RECORDED_AFTER + 5):
        steps.check(number, 4, 3)
    assert steps.replays == 0 and len(caplog.records) == 1 and "out of memory" in caplog.text


def test_a_decoder_replays_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of other slots and lengths; slots of two rows; another version, installed between two replays."""
    monkeypatch.setattr(decoder_module, "CPU", "none")  # the cache of an accelerator, and its steps
    recorder, config, tensors = (
        Recorder(monkeypatch),
        DecoderConfig.from_fields(read_json(MODEL / "config.json")),
        load_tensors(MODEL),
    )
    recording, computing = (
        Decoder(config, num_slots=4, max_context=100, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2)
    )
    assert recording._recorded is not None and computing._recorded is not None
    recorder.graphs, computing._recorded[1]._recorder = recording._recorded[1], None
    rows = [([0, 1, 2, 3], [20, 20, 33, 9]), ([2, 2, 1, 0], [34, 35, 21, 21]), ([3, 0, 1, 1], [10, 22, 22, 23])]
    with torch.inference_mode():
        for number in range(12):
            slots, positions = (np.array(each) for each in rows[number % 3])
            wanted, made = np.array([1]) if number % 4 == 3 else None, []
            for decoder in (recording, computing):
                if number in (0, 8):
                    decoder.install({name: tensor * (1 + number / 80) for name, tensor in tensors.items()})
                if number == 0:
                    decoder.prefill([np.arange(5, 25), np.arange(5, 38), np.arange(5, 14)], [[0, 1], [2], [3]])
                made.append(decoder.decode(slots + 7 + number, positions, slots, wanted))
            torch.testing.assert_close(*made)
    assert recorder.replays >= 4 and not computing._recorded[1]._recorded


@pytest.mark.parametrize(("device", "count"), [("cuda", 1), ("cuda:1", 2)])
def test_a_device_replays(device: str, count: int) -> None:
    """What a thread records is of its own device."""
    needed_devices("cuda", count)
    use_device(torch.device(device))
    try:
        weight = torch.ones(1, device=device)
        graphs = StepGraphs(lambda inputs_NX, _: inputs_NX[:, :1] * weight, torch.device(device))
        with torch.inference_mode():
            for number in range(RECORDED_AFTER + 5):
                inputs = np.arange(number, number + 12).reshape(4, 3)
                weight.fill_(number)  # as an install
                assert graphs(inputs, ()).cpu().flatten().tolist() == (inputs[:, 0] * number).tolist()
        assert len(graphs._recorded) == 1
    finally:
        use_device(torch.device("cuda:0"))
