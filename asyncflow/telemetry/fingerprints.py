"""Fingerprints of a run: what every step was trained on and what came of it, hashed, so that two runs can be compared bit by bit.

    the trainer's loop: group, group, ..., step --> FingerprintLog --> fingerprints.jsonl --> read_fingerprints --> equivalence.py

One line a step. Nothing here is a number that may be rounded: arrays are told by the SHA-256 of their bytes, numbers by their
hexadecimal digits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from asyncflow.types import Advantages, Array, Batch, RunError

FINGERPRINTS_FILE: Final = "fingerprints.jsonl"


def fingerprints_file(rank: int) -> str:
    """Name of the file that the trainer of this data-parallel rank writes."""
    return f"fingerprints-{rank}.jsonl" if rank else FINGERPRINTS_FILE


class RowPrint(msgspec.Struct, frozen=True):
    """A trained row. `spans`: (first token, policy version) pairs, flat."""

    row: int
    response: str
    logprobs: str
    reward: str
    spans: list[int]


class GroupPrint(msgspec.Struct, frozen=True):
    """A trained group. `losses`: each micro-batch's unnormalised sum, in order; those of later epochs after the first one's."""

    group: int
    rows: list[RowPrint]
    losses: list[str]


class StepPrint(msgspec.Struct, frozen=True):
    """A step. `groups` in the order in which training took them; `tensors`: weights and optimiser state after the update.

    Of the `loss_tokens`, the train engine's log-probs of `equal_tokens` have the bits of the rollout engine's;
    `logprob_difference` is the largest absolute difference, in nats.
    """

    step: int
    groups: list[GroupPrint]
    tensors: dict[str, str]
    loss_tokens: int
    equal_tokens: int
    logprob_difference: str


class TrainedMicroBatch(Protocol):
    """Record of a trained micro-batch."""

    @property
    def loss_sum(self) -> float:
        """Sum of the loss over the micro-batch."""
        ...

    @property
    def loss_tokens(self) -> int:
        """Tokens in the loss."""
        ...

    @property
    def logprob_differences(self) -> tuple[int, float]:
        """Tokens whose log-prob equals the rollout engine's to the bit, and the largest absolute difference in nats."""
        ...

    @property
    def is_computed(self) -> bool:
        """Whether an engine computed it. False: it has no gradient."""
        ...

    @property
    def token_figures(self) -> Mapping[int, Mapping[str, Sequence[float]]]:
        """Numbers by name, one for each token, of some rows, by their indices."""
        ...


class Fingerprinted(Protocol):
    """Train engine of which fingerprints are taken."""

    async def fingerprint(self) -> Mapping[str, str]:
        """SHA-256 of each tensor of the weights and of the optimiser's state, by name. See `TrainEngine`."""
        ...


class StepLog(Protocol):
    """Listener that is told of what a step is trained on, and of its end."""

    def group(self, batch: Batch, results: Sequence[TrainedMicroBatch], advantages: Advantages) -> None:
        """A whole group whose gradient has been added; `results` of its micro-batches. Once for each epoch."""

    async def step(self, step: int, engine: Fingerprinted) -> None:
        """Write the step, whose update is done, if there was one. Its groups are there until this returns."""


class FingerprintLog:
    """Takes a step's groups as they are trained, and writes the step's line after its update."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._groups: dict[int, GroupPrint] = {}
        self._logprobs: list[tuple[int, int, float]] = []

    def group(self, batch: Batch, results: Sequence[TrainedMicroBatch], advantages: Advantages) -> None:
        """A whole group whose gradient has been added; `results` of its micro-batches. Once for each epoch."""
        number, losses = int(batch.groups[0]), [result.loss_sum.hex() for result in results]
        if (before := self._groups.get(number)) is not None:
            self._groups[number] = msgspec.structs.replace(before, losses=before.losses + losses)
            return
        responses, logprobs, spans = (batch.ragged(n) for n in ("response_ids", "rollout_logprobs", "version_spans"))
        rewards = batch.dense("reward").tolist()
        rows = [
            RowPrint(row, _digest(responses[i]), _digest(logprobs[i]), rewards[i].hex(), spans[i].tolist())
            for i, row in enumerate(batch.indices.tolist())
        ]
        self._groups[number] = GroupPrint(number, rows, losses)
        self._logprobs += [(result.loss_tokens, *result.logprob_differences) for result in results if result.is_computed]

    async def step(self, step: int, engine: Fingerprinted) -> None:
        """Write the line of the step, whose update is done, if there was one."""
        tokens, equal, differences = zip(*self._logprobs, strict=True) if self._logprobs else ((), (), ())
        tensors = dict(await engine.fingerprint())
        line = StepPrint(step, [*self._groups.values()], tensors, sum(tokens), sum(equal), max(differences, default=0.0).hex())
        self._groups, self._logprobs = {}, []
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def read_fingerprints(path: Path) -> list[StepPrint]:
    """The steps of a finished run, in their order. Raises `RunError` when a file is missing or damaged.

    `path` is the first data-parallel rank's file; those of the others, beside it, are joined to it, step by step: a run may have
    been resumed by more ranks, or fewer.
    """
    files = [path, *sorted(path.parent.glob(f"{path.stem}-*{path.suffix}"))]
    try:
        ranks = [[msgspec.json.decode(line, type=StepPrint) for line in file.read_bytes().splitlines()] for file in files]
    except (OSError, msgspec.DecodeError) as error:
        raise RunError(f"{path} holds no fingerprints: {error}") from error
    others = [{line.step: line for line in rank} for rank in ranks[1:]]
    return [_joined([line, *(rank[line.step] for rank in others if line.step in rank)]) for line in ranks[0]]


def _joined(ranks: Sequence[StepPrint]) -> StepPrint:
    """One step of all ranks; weights and optimiser state are those of the first rank."""
    return msgspec.structs.replace(
        ranks[0],
        groups=[group for each in ranks for group in each.groups],
        loss_tokens=sum(each.loss_tokens for each in ranks),
        equal_tokens=sum(each.equal_tokens for each in ranks),
        logprob_difference=max((each.logprob_difference for each in ranks), key=float.fromhex),
    )


def _digest(values: Array) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()
