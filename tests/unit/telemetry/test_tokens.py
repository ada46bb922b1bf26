"""Trained responses token by token: what is kept of a step, and found again."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np

from asyncflow.engines.base import MicroBatchResult
from asyncflow.telemetry.tokens import MOST_TOKENS, TokenLog, TrainedTokens, read_tokens, token_versions
from asyncflow.types import Batch, Ragged


class Engine:
    async def fingerprint(self) -> dict[str, str]:
        return {}


def ragged(rows: list[list[float]], dtype: str) -> Ragged:
    return Ragged.from_arrays([np.array(row, dtype) for row in rows], dtype)


def group(*lengths: int) -> Batch:
    columns = {
        "response_ids": ragged([[5.0] * n for n in lengths], "int64"),
        "rollout_logprobs": ragged([[-0.123456789] * n for n in lengths], "float32"),
        "loss_mask": ragged([[1.0] * n for n in lengths], "uint8"),
        "version_spans": ragged([[0, 2, 1, 3] for _ in lengths], "int64"),
    }
    return Batch(np.arange(len(lengths)) + 16, np.array([2]), columns)


async def test_rows_with_figures_are_handed_over_when_the_step_is_trained_once_for_each_epoch(tmp_path: Path) -> None:
    kept: list[TrainedTokens] = []
    log = TokenLog(kept.append, lambda row: row > 16)
    told = MicroBatchResult(0.5, 2, 4, token_figures={17: {"ratio": [1.0, math.nan]}})
    advantages = ragged([[1.0] * 3, [0.5, -0.25], [0.0] * 4], "float32")
    for _ in range(2):
        log.group(group(3, 2, 4), [MicroBatchResult(0.5, 3, 4), told], advantages)
    assert kept == []
    await log.step(3, Engine())
    await log.step(4, Engine())
    first = TrainedTokens(17, 3, 0, 2, [5, 5], [-0.12346] * 2, [1, 1], [2, 3], {"ratio": [1.0, None]}, 0.125)
    of_no_loss = TrainedTokens(18, 3, 0, 4, advantage=0.0)  # it was not computed
    assert kept == [first, msgspec.structs.replace(first, epoch=1), of_no_loss]
    assert msgspec.json.encode(of_no_loss) == b'{"row":18,"step":3,"epoch":0,"length":4,"advantage":0.0}'
    (tmp_path / "tokens.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in kept))
    assert read_tokens(tmp_path, [17, 18, 1]) == kept and read_tokens(tmp_path, [1]) == read_tokens(tmp_path / "none", [17]) == []


async def test_of_a_long_response_only_the_first_tokens_are_kept() -> None:
    kept: list[TrainedTokens] = []
    log = TokenLog(kept.append, lambda row: False)
    length = MOST_TOKENS + 7
    log.group(group(length), [MicroBatchResult(0.5, 2, 4, token_figures={16: {"ratio": [1.0] * length}})], np.ones(1))
    await log.step(0, Engine())
    (row,) = kept
    assert row.length == length
    assert {len(row.ids), len(row.logprobs), len(row.mask), len(row.versions), len(row.figures["ratio"])} == {MOST_TOKENS}


def test_a_token_has_the_version_of_its_span() -> None:
    assert token_versions(np.array([0, 4, 2, 5]), 4).tolist() == [4, 4, 5, 5]
    assert token_versions(np.empty(0, np.int64), 2).tolist() == [-1, -1]
