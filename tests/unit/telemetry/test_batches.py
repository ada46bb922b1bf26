"""Batches that were trained on, to files and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from asyncflow.telemetry.batches import BATCHES_DIR, BatchLog, StepLogs, joined, kept_steps, read_batch
from asyncflow.telemetry.tokens import TokenLog
from asyncflow.types import Batch, Ragged, RunError


class Engine:
    async def fingerprint(self) -> Mapping[str, str]:
        return {"weights/w": "00"}


def group(number: int, lengths: list[int]) -> Batch:
    """A leased group: its ragged columns may begin in the middle of a frame."""
    rows = np.array([number * 8 + i for i in range(len(lengths))], np.int64)
    values = np.arange(3 + sum(lengths), dtype=np.int64) + 100 * number
    offsets = 3 + np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    columns = {
        "prompt_ids": Ragged.from_arrays([np.arange(number + 1)], "int64"),
        "response_ids": Ragged(values, offsets),
        "reward": np.linspace(0, 1, len(lengths), dtype=np.float32),
        "truncated": np.zeros(len(lengths), np.uint8),
    }
    return Batch(rows, np.array([number], np.int64), columns)


async def write(log: BatchLog, step: int, *groups: Batch) -> None:
    for each in groups:
        log.group(each, [], np.zeros(len(each), np.float32))
    await log.step(step, Engine())


async def test_a_batch_comes_back_as_it_was_trained(tmp_path: Path) -> None:
    log = BatchLog(tmp_path, 2, rank=0, first=0)
    groups = [group(5, [2, 0, 4]), group(3, [1, 1])]
    await write(log, 7, *groups, groups[0])  # again, in a later epoch
    batch = read_batch(tmp_path, 7)
    assert batch.groups.tolist() == [5, 3] and batch.indices.tolist() == [40, 41, 42, 24, 25]
    assert [ids.tolist() for ids in batch.ragged("response_ids")] == [
        ids.tolist() for g in groups for ids in g.ragged("response_ids")
    ]
    assert [ids.tolist() for ids in batch.ragged("prompt_ids")] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
    assert batch.dense("reward").dtype == np.float32 and batch.dense("truncated").dtype == np.uint8
    assert batch.dense("reward").tolist() == [0.0, 0.5, 1.0, 0.0, 1.0]


async def test_the_newest_steps_stay(tmp_path: Path) -> None:
    log = BatchLog(tmp_path, 2, rank=0, first=0)
    for step in range(5):
        await write(log, step, group(step, [1]))
    assert kept_steps(tmp_path) == [3, 4]
    (tmp_path / BATCHES_DIR / "step-000009.partial").touch()
    assert kept_steps(tmp_path) == [3, 4]


async def test_nothing_is_kept_unless_asked_for(tmp_path: Path) -> None:
    await write(BatchLog(tmp_path, 0, rank=0, first=0), 0, group(0, [1]))
    assert not (tmp_path / BATCHES_DIR).exists() and kept_steps(tmp_path) == []


async def test_ranks_write_their_own_and_are_read_together(tmp_path: Path) -> None:
    logs = [BatchLog(tmp_path, 9, rank=rank, first=0) for rank in range(2)]
    for rank, number in ((1, 4), (0, 2)):
        await write(logs[rank], 3, group(number, [2, 1]))
    assert read_batch(tmp_path, 3).groups.tolist() == [2, 4]
    assert sorted(read_batch(tmp_path, 3).indices.tolist()) == [16, 17, 32, 33]
    await write(BatchLog(tmp_path, 1, rank=1, first=0), 4, group(1, [1]))
    assert read_batch(tmp_path, 3).groups.tolist() == [2, 4], "the first rank removes what is to go"
    await write(BatchLog(tmp_path, 1, rank=0, first=4), 4, group(0, [1]))
    assert kept_steps(tmp_path) == [4] and read_batch(tmp_path, 4).groups.tolist() == [0]


async def test_an_attempt_with_fewer_ranks_leaves_nothing_of_those_that_are_gone(tmp_path: Path) -> None:
    """A batch would else be joined from two lineages, and have groups twice."""
    logs = [BatchLog(tmp_path, 2, rank=rank, first=0) for rank in range(3)]
    for step in range(4):
        for rank in (2, 0, 1):
            await write(logs[rank], step, group(10 * step + rank, [1]))
    assert read_batch(tmp_path, 3).groups.tolist() == [30, 31, 32]
    second = BatchLog(tmp_path, 2, rank=0, first=3)
    assert kept_steps(tmp_path) == [2], "what the others had of step 3 is gone, too"
    await write(second, 3, group(30, [1]), group(31, [1]), group(32, [1]))
    assert read_batch(tmp_path, 3).groups.tolist() == [30, 31, 32] and read_batch(tmp_path, 2).groups.tolist() == [20, 21, 22]
    assert kept_steps(tmp_path) == [2, 3]
    await write(second, 4, group(40, [1]))
    assert kept_steps(tmp_path) == [3, 4] and not [*(tmp_path / BATCHES_DIR).glob("step-000002*")]


async def test_a_resumed_attempt_forgets_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    log = BatchLog(tmp_path, 9, rank=0, first=0)
    for step in range(4):
        await write(log, step, group(step, [1]))
    BatchLog(tmp_path, 9, rank=0, first=2)
    assert kept_steps(tmp_path) == [0, 1]


def test_what_is_not_there_or_damaged_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no batch of step 3"):
        read_batch(tmp_path, 3)
    (tmp_path / BATCHES_DIR).mkdir()
    (tmp_path / BATCHES_DIR / "step-000003.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ")
    with pytest.raises(RunError, match=r"step-000003\.safetensors cannot be read"):
        read_batch(tmp_path, 3)


async def test_several_logs_are_told_the_same(tmp_path: Path) -> None:
    logs = StepLogs(TokenLog(lambda row: None, lambda row: False), BatchLog(tmp_path, 1, rank=0, first=0))
    logs.group(group(1, [2]), [], np.zeros(1, np.float32))
    await logs.step(0, Engine())
    assert kept_steps(tmp_path) == [0]


def test_joining_one_leaves_it(tmp_path: Path) -> None:
    one = group(2, [1, 3])
    assert [ids.tolist() for ids in joined([one]).ragged("response_ids")] == [ids.tolist() for ids in one.ragged("response_ids")]
