"""The rows of the transfer queue's benchmark, and whether what came back is what was written."""

from __future__ import annotations

import numpy as np
import xxhash

from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.types import Batch, Column, GroupMeta, Interval, Ragged

GROUP_BITS = 3
SIZE = 1 << GROUP_BITS
READS = ("prompt_ids", "response_ids", "logprobs")
SCHEMA = Schema(
    (
        Column("prompt_ids", "int64", ragged=True),
        Column("response_ids", "int64", ragged=True),
        Column("logprobs", "float32", ragged=True),
        Column("blob", "uint8", shape=(1 << 20,)),
        Column("x", "int64"),
    ),
    (
        TaskSpec("train", READS, whole_groups=False),
        TaskSpec("large", ("blob",), whole_groups=False),
        TaskSpec("meta", ("x",), whole_groups=False),
    ),
    GROUP_BITS,
)


class Payloads:
    """Rows numbered on and on."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._next_group = 0

    def admit(self, rows: int) -> tuple[list[GroupMeta], np.ndarray]:
        count = -(-rows // SIZE)
        sizes = [SIZE] * (rows // SIZE) + ([rows % SIZE] if rows % SIZE else [])
        metas = [GroupMeta(self._next_group + i, size, 0, Interval(0, 0)) for i, size in enumerate(sizes)]
        self._next_group += count
        return metas, SCHEMA.rows_of(metas)

    def small(self, rows: int) -> tuple[list[GroupMeta], Batch]:
        """prompt_ids int64 of 64 to 192, response_ids int64 of 128 to 384, logprobs float32 as long."""
        metas, indices = self.admit(rows)
        prompts, responses = self._rng.integers(64, 193, rows), self._rng.integers(128, 385, rows)
        columns = {
            "prompt_ids": self._ragged(prompts, "int64"),
            "response_ids": self._ragged(responses, "int64"),
            "logprobs": self._ragged(responses, "float32"),
        }
        return metas, Batch(indices, np.array([m.group for m in metas]), columns)

    def large(self, rows: int) -> tuple[list[GroupMeta], Batch]:
        metas, indices = self.admit(rows)
        blob = self._rng.integers(0, 256, (rows, 1 << 20), np.uint8)
        return metas, Batch(indices, np.array([m.group for m in metas]), {"blob": blob})

    def _ragged(self, lengths: np.ndarray, dtype: str) -> Ragged:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return Ragged(self._rng.integers(0, 1 << 15, int(offsets[-1])).astype(dtype), offsets)


def size_of(batch: Batch) -> int:
    return sum(values.nbytes for values in batch.columns.values())


def check_equal(written: Batch, read: Batch, names: tuple[str, ...]) -> None:
    """Every byte of every row."""
    order = np.argsort(read.indices)
    if not np.array_equal(read.indices[order], written.indices):
        raise SystemExit("other rows came back than were written")
    for name in names:
        a, b = written.columns[name], read.columns[name]
        if isinstance(a, Ragged):
            assert isinstance(b, Ragged)
            same = all(np.array_equal(a[i], b[j]) for i, j in enumerate(order.tolist()))
        else:
            same = np.array_equal(a, np.asarray(b)[order])
        if not same:
            raise SystemExit(f"column {name} came back changed")


def fingerprint(batch: Batch, i: int) -> int:
    """Of a row's small columns."""
    return xxhash.xxh3_64_intdigest(b"|".join(batch.ragged(name)[i].tobytes() for name in READS))
