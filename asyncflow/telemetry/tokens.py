"""Trained responses token by token: what rollout engine and trainer have each said of a token, and what the loss made of it.

    the trainer's loop: group, step --> TokenLog --with the next report--> tokens.jsonl --> read_tokens --> the live page

Only responses that `samples.jsonl` keeps have lines here (`telemetry.samples_per_step`): one of each prompt with `MOST_TOKENS` at
most, the others of the first prompt with their advantage alone. So a step adds a bounded number of bytes.
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
from asyncflow.types import Advantages, Array, Batch

MOST_TOKENS: Final = 2_048
"""Tokens of a response that are told of."""
_DIGITS: Final = 5


class TrainedTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row in one of the epochs of the step that trained it; a number for each of its tokens, or for none of them.

    `length`: of the response, of which there may be more. `ids`: tokens; `logprobs`: of the rollout engine; `mask`: 1 in the loss;
    `versions`: that sampled the token, -1: unknown. `figures`: of the trainer, by name (`MicroBatchResult.token_figures`); None:
    not finite. `advantage`: of the row, the mean of its tokens' where they have their own; None: not known, or not finite.
    """

    row: int  # first in the line, which is found by it
    step: int
    epoch: int
    length: int
    ids: list[int] = []
    logprobs: list[float | None] = []
    mask: list[int] = []
    versions: list[int] = []
    figures: dict[str, list[float | None]] = {}
    advantage: float | None = None


class TokenLog:
    """`StepLog` that hands over, once the step is trained, the rows of which micro-batches have figures, and the advantages of all
    that are sampled."""

    def __init__(self, keep: Callable[[TrainedTokens], None], is_sampled: Callable[[int], bool]) -> None:
        self._keep, self._is_sampled = keep, is_sampled
        self._rows: list[dict[str, Any]] = []
        self._sampled: dict[int, dict[str, Any]] = {}

    def group(self, batch: Batch, results: Sequence[TrainedMicroBatch], advantages: Advantages) -> None:
        """See `StepLog.group`."""
        for number, index in enumerate(batch.indices.tolist()):
            if self._is_sampled(index):
                (advantage,) = _rounded([np.mean(advantages[number])])
                length = len(batch.ragged("response_ids")[number])
                self._sampled[index] = {"row": index, "length": length, "advantage": advantage}
        for result in results:
            for index, figures in result.token_figures.items():
                row = int(np.flatnonzero(batch.indices == index)[0])
                self._rows.append(_of_row(batch, row) | {"figures": {name: _rounded(values) for name, values in figures.items()}})

    async def step(self, step: int, engine: Fingerprinted) -> None:
        """See `StepLog.step`."""
        rows, self._rows, sampled, self._sampled = self._rows, [], self._sampled, {}
        epochs: Counter[int] = Counter()
        for row in rows:
            self._keep(TrainedTokens(step=step, epoch=epochs[row["row"]], **(sampled.get(row["row"], {}) | row)))
            epochs[row["row"]] += 1
        for index, row in sampled.items():
            if index not in epochs:
                self._keep(TrainedTokens(step=step, epoch=0, **row))


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
