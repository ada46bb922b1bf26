"""Batches that a run has trained on, kept to be trained on again (`asyncflow replay`).

    the trainer's loop: group, group, ..., step --> BatchLog --> batches/step-000012.safetensors --> read_batch --> replay

A file holds every column of a step's groups as they were trained, in that order: `indices` and `groups`, a dense column by its
name, a ragged one as `NAME/values` and `NAME/offsets`. Of several data-parallel ranks each writes its own groups.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from asyncflow.run_dir import replace
from asyncflow.telemetry.fingerprints import Fingerprinted, StepLog, TrainedMicroBatch
from asyncflow.types import Advantages, Array, Batch, Ragged, RunError, Values

BATCHES_DIR: Final = "batches"
_NAME: Final = re.compile(r"step-(\d{6,})(?:-(\d+))?\.safetensors")


class BatchLog:
    """Takes a step's groups as they are trained, and writes them after its update.

    The newest `keep` steps stay; 0: nothing is kept. `first`: the step that this attempt of the run begins with; what is there of
    later ones belongs to a lineage that has ended. The first rank removes what is to go, of all ranks: an earlier attempt may have
    had more of them. Nobody has made a step's update before all have begun it, so nothing new is in its way.
    """

    def __init__(self, run_dir: Path, keep: int, *, rank: int, first: int) -> None:
        self._folder, self._keep, self._rank = run_dir / BATCHES_DIR, keep, rank
        self._groups: dict[int, Batch] = {}
        for path, step, _ in _files(run_dir) if rank == 0 else ():
            if step >= first:
                path.unlink(missing_ok=True)

    def group(self, batch: Batch, results: Sequence[TrainedMicroBatch], advantages: Advantages) -> None:
        """A group whose gradient has been added; of later epochs it is the same again."""
        if self._keep:
            self._groups.setdefault(int(batch.groups[0]), batch)

    async def step(self, step: int, engine: Fingerprinted) -> None:
        """Write the step, whose update is done; its rows are there until this returns."""
        batches, self._groups = [*self._groups.values()], {}
        if batches:
            await asyncio.to_thread(self._write, step, batches)

    def _write(self, step: int, batches: Sequence[Batch]) -> None:
        self._folder.mkdir(exist_ok=True)
        name = f"step-{step:06d}{f'-{self._rank}' if self._rank else ''}.safetensors"
        replace(self._folder / name, safetensors.numpy.save(_as_tensors(joined(batches)), {"step": str(step)}))
        for path, old, _ in _files(self._folder.parent) if self._rank == 0 else ():
            if old <= step - self._keep:
                path.unlink(missing_ok=True)


class StepLogs:
    """Log that passes everything on to others, if there are any."""

    def __init__(self, *logs: StepLog) -> None:
        self._logs = logs

    def group(self, batch: Batch, results: Sequence[TrainedMicroBatch], advantages: Advantages) -> None:
        """See `FingerprintLog.group`."""
        for log in self._logs:
            log.group(batch, results, advantages)

    async def step(self, step: int, engine: Fingerprinted) -> None:
        """See `FingerprintLog.step`."""
        for log in self._logs:
            await log.step(step, engine)


def kept_steps(run_dir: Path) -> list[int]:
    """The steps whose batches are there, in order."""
    return sorted({step for _, step, _ in _files(run_dir)})


def _files(run_dir: Path) -> Iterator[tuple[Path, int, int]]:
    """The kept batches: file, step, rank."""
    for path in [*(run_dir / BATCHES_DIR).glob("step-*.safetensors")]:
        if (match := _NAME.fullmatch(path.name)) is not None:
            yield path, int(match[1]), int(match[2] or 0)


def read_batch(run_dir: Path, step: int) -> Batch:
    """The groups that a step trained, of all ranks, the first rank's first. Raises `RunError` where a file is damaged."""
    ranks = {rank: path for path, found, rank in _files(run_dir) if found == step}
    batches = []
    for _, path in sorted(ranks.items()):
        try:
            batches.append(_as_batch(safetensors.numpy.load_file(path)))
        except (SafetensorError, KeyError, OSError, ValueError) as error:
            raise RunError(f"the batch {path} cannot be read: {error}") from error
    if not batches:
        raise RunError(f"there is no batch of step {step} in {run_dir / BATCHES_DIR}")
    return joined(batches)


def joined(batches: Sequence[Batch]) -> Batch:
    """The rows and groups of several batches with the same columns, one behind the other."""
    columns: dict[str, Values] = {}
    for name, first in batches[0].columns.items():
        if isinstance(first, Ragged):
            parts = [batch.ragged(name) for batch in batches]
            offsets = np.concatenate([[0], np.cumsum(np.concatenate([part.lengths for part in parts]))]).astype(np.int64)
            columns[name] = Ragged(np.concatenate([part.values[part.offsets[0] : part.offsets[-1]] for part in parts]), offsets)
        else:
            columns[name] = np.concatenate([batch.dense(name) for batch in batches])
    indices, groups = (np.concatenate([getattr(batch, which) for batch in batches]) for which in ("indices", "groups"))
    return Batch(indices, groups, columns)


def _as_tensors(batch: Batch) -> dict[str, Array]:
    tensors = {"indices": batch.indices, "groups": batch.groups}
    for name, values in batch.columns.items():
        tensors |= (
            {f"{name}/values": values.values, f"{name}/offsets": values.offsets} if isinstance(values, Ragged) else {name: values}
        )
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _as_batch(tensors: Mapping[str, Array]) -> Batch:
    columns: dict[str, Values] = {}
    for name, tensor in tensors.items():
        column, _, part = name.partition("/")
        if part == "values":
            columns[column] = Ragged(tensor, tensors[f"{column}/offsets"])
        elif not part and name not in ("indices", "groups"):
            columns[name] = tensor
    return Batch(tensors["indices"], tensors["groups"], columns)
