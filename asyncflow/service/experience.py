"""Experience over HTTP: groups that a trainer has taken, as JSON, as msgpack, or as a safetensors file.

Binary forms have the same columns, end to end: `numbers` int64 [G] (of the groups), `rows_per_group` int64 [G], `prompt_lengths`
int64 [G], `prompt_ids` int64, `indices` int64 [R], `lengths` int64 [R], `response_ids` int64 [T], `loss_mask` uint8 [T],
`rollout_logprobs` float32 [T], `advantages` float32 [T], `rewards` float32 [R], `staleness` int64 [R].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from asyncflow.run.services.desk import DeskGroup, TakenGroups

Form = Literal["json", "msgpack", "safetensors"]
MEDIA_TYPES: Mapping[str, str] = {"msgpack": "application/msgpack", "safetensors": "application/octet-stream"}
BULK = ("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs")
"""Columns that a client of the queue may read there instead."""


def columns_of(groups: Sequence[DeskGroup], *, has_bulk: bool) -> dict[str, np.ndarray]:
    """Columns of some groups; without those in `BULK` where the client reads them from the queue."""
    batches = [group.experience for group in groups]
    found: dict[str, np.ndarray] = {
        "numbers": np.array([group.number for group in groups], np.int64),
        "rows_per_group": np.array([len(batch.indices) for batch in batches], np.int64),
        "prompt_lengths": np.array([len(batch.prompt_ids) for batch in batches], np.int64),
    }
    for name in ("indices", "lengths", "advantages", "rewards", "staleness", *(BULK if has_bulk else ())):
        parts = [getattr(batch, name) for batch in batches]
        found[name] = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return found


def as_msgpack(taken: TakenGroups, *, has_bulk: bool) -> bytes:
    """A map: `step`, `normaliser` (null: there may be more groups), `columns`: dtype, shape and bytes of each."""
    columns = {
        name: {"dtype": values.dtype.name, "shape": list(values.shape), "data": np.ascontiguousarray(values).data}
        for name, values in columns_of(taken.groups, has_bulk=has_bulk).items()
    }
    return msgspec.msgpack.encode({"step": taken.step, "normaliser": taken.normaliser, "columns": columns})


def as_safetensors(taken: TakenGroups, *, has_bulk: bool) -> bytes:
    """A safetensors file, whose metadata have `step` and, where there are no more groups, `normaliser`."""
    from safetensors.numpy import save

    metadata = {"step": str(taken.step)} | ({} if taken.normaliser is None else {"normaliser": str(taken.normaliser)})
    return save(columns_of(taken.groups, has_bulk=has_bulk), metadata)


def as_lists(group: DeskGroup, *, has_bulk: bool) -> dict[str, Any]:
    """One group as JSON has it: a list for each row."""
    batch = group.experience
    ends = np.cumsum(batch.lengths)[:-1]

    def rows(values: np.ndarray) -> list[list[Any]]:
        return [part.tolist() for part in np.split(values, ends)]

    found: dict[str, Any] = {
        "number": group.number,
        "indices": batch.indices.tolist(),
        "advantages": rows(batch.advantages),
        "rewards": batch.rewards.tolist(),
        "staleness": batch.staleness.tolist(),
    }
    if has_bulk:
        found |= {"prompt_ids": batch.prompt_ids.tolist()}
        found |= {name: rows(getattr(batch, name)) for name in BULK if name != "prompt_ids"}
    return found
