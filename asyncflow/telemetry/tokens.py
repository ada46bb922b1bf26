"""Trained responses token by token: what rollout engine and trainer have each said of a token, and what the loss made of it.

    the trainer's loop: group, step --> TokenLog --with the next report--> tokens.jsonl --> read_tokens --> the live page

Only responses that `samples.jsonl` keeps have lines here (`telemetry.samples_per_step`), of `MOST_TOKENS` tokens at most, so a step
adds a bounded number of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from asyncflow.run_dir import TOKENS_FILE
from asyncflow.telemetry.fingerprints import Fingerprinted, TrainedMicroBatch
from asyncflow.types import Array, Batch

MOST_TOKENS: Final = 2_048
"""Tokens of a response that are told of."""
_DIGITS: Final = 5


class TrainedTokens(msgspec.Struct, frozen=True):
    """A row in one of the epochs of the step that trained it; a number for each of its tokens.

    `length`: of the response, of which there may be more. `ids`: tokens; `logprobs`: of the rollout engine; `mask`: 1 in the loss;
    `versions`: that sampled the token, -1: unknown. `figures`: of the trainer, by name (`MicroBatchResult.token_figures`); None:
    not finite.
    """

    row: int  # first in the line, which is found by it
    step: int
    epoch: int
    length: int
    ids: list[int]
    logprobs: list[float | None]
    mask: list[int]
    versions: list[int]
    figures: dict[str, list[float | None]]


class TokenLog:
    """`StepLog` that hands over the rows of which micro-batches have figures, once the step is trained."""

    def __init__(self, keep: Callable[[TrainedTokens], None]) -> None:
        self._keep = keep
        self._rows: list[dict[str, Any]] = []

    def group(self, batch: Batch, results: Sequence[TrainedMicroBatch]) -> None:
        """See `StepLog.group`."""
        for result in results:
            for index, figures in result.token_figures.items():
                row = int(np.flatnonzero(batch.indices == index)[0])
                self._rows.append(_of_row(batch, row) | {"figures": {name: _rounded(values) for name, values in figures.items()}})

    async def step(self, step: int, engine: Fingerprinted) -> None:
        """See `StepLog.step`."""
        rows, self._rows = self._rows, []
        epochs: Counter[int] = Counter()
        for row in rows:
            self._keep(TrainedTokens(step=step, epoch=epochs[row["row"]], **row))
            epochs[row["row"]] += 1


def token_versions(spans: Array, num_tokens: int) -> Array:
    """Version that sampled each token (int64 [L]), from the column `version_spans` of a row (int64, flat pairs); -1: unknown."""
    pairs = spans.reshape(-1, 2)
    if not len(pairs):
        return np.full(num_tokens, -1)
    found: Array = pairs[np.searchsorted(pairs[:, 0], np.arange(num_tokens), "right") - 1, 1]
    return found


def read_tokens(run_dir: Path, rows: Collection[int]) -> list[TrainedTokens]:
    """Lines of these rows, in order. Other lines are not decoded."""
    begins = tuple(b'{"row":%d,' % row for row in rows)
    found = []
    try:
        with (run_dir / TOKENS_FILE).open("rb") as file:
            for line in file:
                if line.startswith(begins) and line.endswith(b"\n"):
                    found.append(_DECODER.decode(line))
    except FileNotFoundError:
        pass
    return found


def _of_row(batch: Batch, row: int) -> dict[str, Any]:
    ids = batch.ragged("response_ids")[row]
    columns = {
        "ids": ids,
        "mask": batch.ragged("loss_mask")[row],
        "versions": token_versions(batch.ragged("version_spans")[row], len(ids)),
    }
    shown = {name: column[:MOST_TOKENS].tolist() for name, column in columns.items()}
    logprobs = _rounded(batch.ragged("rollout_logprobs")[row])
    return {"row": int(batch.indices[row]), "length": len(ids), **shown, "logprobs": logprobs}


def _rounded(values: Sequence[float] | Array) -> list[float | None]:
    return [round(float(value), _DIGITS) if math.isfinite(value) else None for value in values[:MOST_TOKENS]]


_DECODER = msgspec.json.Decoder(TrainedTokens)
