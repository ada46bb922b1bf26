"""A step's fingerprint tells every bit of what was trained, and nothing of a run that keeps none."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from asyncflow.engines.base import MicroBatchResult
from asyncflow.telemetry.batches import StepLogs
from asyncflow.telemetry.fingerprints import FINGERPRINTS_FILE, FingerprintLog, StepPrint, fingerprints_file, read_fingerprints
from asyncflow.types import Batch, Ragged, RunError

NO_ADVANTAGES = np.zeros(2, np.float32)


class Engine:
    async def fingerprint(self) -> Mapping[str, str]:
        return {"weights/w": "aa", "optimizer/w/step": "bb"}


def group(number: int, **changes: np.ndarray) -> Batch:
    """Two rows of 2 and 1 tokens."""
    columns = {
        "response_ids": np.array([5, 6, 7]),
        "rollout_logprobs": np.array([-0.5, -1.5, -2.5], np.float32),
        "reward": np.array([1.0, 0.1], np.float32),
    } | changes
    offsets = np.array([0, 2, 3])
    ragged = {name: Ragged(columns[name], offsets) for name in ("response_ids", "rollout_logprobs")}
    spans = Ragged(np.array([0, 4, 0, 4]), np.array([0, 2, 4]))
    return Batch(np.array([2 * number, 2 * number + 1]), np.array([number]), {**columns, **ragged, "version_spans": spans})


def results(*losses: float) -> list[MicroBatchResult]:
    return [MicroBatchResult(loss, 3, 9, logprob_differences=(i, i / 8)) for i, loss in enumerate(losses)]


def written(path: Path, *groups: tuple[Batch, list[MicroBatchResult]]) -> StepPrint:
    log = FingerprintLog(path)
    for batch, told in groups:
        log.group(batch, told, NO_ADVANTAGES)
    asyncio.run(log.step(4, Engine()))
    return read_fingerprints(path)[-1]


def test_a_line_holds_what_was_trained_in_the_order_of_training(tmp_path: Path) -> None:
    step = written(tmp_path / "f.jsonl", (group(7), results(0.1, -2.0)), (group(3), results(float("nan"))))
    assert (step.step, [g.group for g in step.groups]) == (4, [7, 3])
    first = step.groups[0]
    assert [row.row for row in first.rows] == [14, 15] and first.rows[0].spans == [0, 4]
    assert first.rows[0].response == hashlib.sha256(np.array([5, 6]).tobytes()).hexdigest()
    assert first.rows[1].logprobs == hashlib.sha256(np.float32(-2.5).tobytes()).hexdigest()
    assert float.fromhex(first.rows[1].reward) == np.float32(0.1) and [float.fromhex(x) for x in first.losses] == [0.1, -2.0]
    assert step.groups[1].losses == ["nan"]
    assert step.tensors == {"weights/w": "aa", "optimizer/w/step": "bb"}
    assert (step.loss_tokens, step.equal_tokens, float.fromhex(step.logprob_difference)) == (9, 1, 0.125)


@pytest.mark.parametrize("column", ["response_ids", "rollout_logprobs", "reward"])
def test_one_bit_of_one_row_changes_its_fingerprint_alone(tmp_path: Path, column: str) -> None:
    batch = group(0)
    values = batch.columns[column]
    changed = (values.values if isinstance(values, Ragged) else values).copy()
    changed.view(np.uint8)[0] ^= 1
    before, after = (written(tmp_path / "f.jsonl", (b, results(0.5))) for b in (batch, group(0, **{column: changed})))
    assert before.groups[0].rows[0] != after.groups[0].rows[0] and before.groups[0].rows[1] == after.groups[0].rows[1]


async def test_steps_follow_each_other_and_a_skipped_one_may_be_empty(tmp_path: Path) -> None:
    log = FingerprintLog(tmp_path / "f.jsonl")
    log.group(group(0), results(0.5), NO_ADVANTAGES)
    await log.step(0, Engine())
    await log.step(1, Engine())
    steps = read_fingerprints(tmp_path / "f.jsonl")
    assert [(s.step, len(s.groups), s.loss_tokens) for s in steps] == [(0, 1, 3), (1, 0, 0)]


async def test_without_a_log_nothing_is_kept_and_no_engine_is_asked(tmp_path: Path) -> None:
    class Silent:
        async def fingerprint(self) -> Mapping[str, str]:
            raise AssertionError("asked")

    log = StepLogs()
    log.group(group(0), results(0.5), NO_ADVANTAGES)
    await log.step(0, Silent())
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("content", [None, b'{"step": 0, "gro', b'{"step": 0}\n'])
def test_a_missing_or_damaged_file_is_said(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "f.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunError, match="holds no fingerprints"):
        read_fingerprints(path)


async def test_ranks_are_joined_by_step_also_where_a_run_went_on_with_more_of_them_or_fewer(tmp_path: Path) -> None:
    """Two ranks for steps 0 and 1, one for 2, three for 3."""
    ranks_of_steps = [(0, 2), (1, 2), (2, 1), (3, 3)]
    for step, num_ranks in ranks_of_steps:
        for rank in range(num_ranks):
            log = FingerprintLog(tmp_path / fingerprints_file(rank))
            log.group(group(10 * step + rank), results(0.5), NO_ADVANTAGES)
            await log.step(step, Engine())
    steps = read_fingerprints(tmp_path / FINGERPRINTS_FILE)
    assert [(s.step, [g.group for g in s.groups]) for s in steps] == [(0, [0, 1]), (1, [10, 11]), (2, [20]), (3, [30, 31, 32])]
    assert [s.loss_tokens for s in steps] == [6, 6, 3, 9]
