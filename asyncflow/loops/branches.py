"""Branches: further sequences of one row, each behind a prompt of its own.

    response_ids of a row    [ the row's sequence | context, sampled, observed, sampled | context, sampled ]
    branches                                      (first token, context tokens)          (first token, context tokens)

A conversation branches where what came before is told in another way: a chat template drops earlier thoughts, a program sums them
up, sub-agents work side by side. All sequences of a row have its advantage. The row counts once, and each sampled token once: a
context is masked. So a micro-batch with one of its sequences says how many tokens are trained of the whole row. A row whose first
branch begins with its first token has no sequence behind the group's prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from asyncflow.engines.base import MicroBatch
from asyncflow.types import Array, Batch, Ragged, RunError

BRANCHES: Final = "branches"
"""The column: int64, ragged, flat pairs."""
PER_TOKEN: Final = ("response_ids", "loss_mask", "rollout_logprobs")


def has_branches(batch: Batch) -> bool:
    """Whether a row of a leased group has any."""
    return BRANCHES in batch.columns and len(batch.ragged(BRANCHES).values) > 0


def first_sequences(batch: Batch, of_tokens: Ragged) -> Ragged:
    """First sequence of each row, the one behind the group's prompt, of a column with a number for each response token."""
    ends = [pairs[0] if len(pairs) else None for pairs in batch.ragged(BRANCHES)]
    rows = [row[:end] for row, end in zip(of_tokens, ends, strict=True)]
    return Ragged.from_arrays(rows, str(of_tokens.values.dtype))


def branch_micro_batches(batch: Batch, token_advantages: Ragged, row_staleness: Array) -> Iterator[MicroBatch]:
    """A micro-batch for each branch of a leased group, with its own prompt, in the order of rows."""
    columns, row_tokens = {name: batch.ragged(name) for name in PER_TOKEN}, tokens_of_rows(batch)
    for row, pairs in enumerate(batch.ragged(BRANCHES)):
        length = len(columns["response_ids"][row])
        begun = [(int(first), int(context)) for first, context in pairs.reshape(-1, 2)]
        for (first, context), (end, _) in pairwise([*begun, (length, 0)]):
            own = slice(first + context, end)
            found: Any = {name: Ragged.from_arrays([each[row][own]], str(each.values.dtype)) for name, each in columns.items()}
            yield MicroBatch(
                indices=batch.indices[row : row + 1],
                prompt_ids=columns["response_ids"][row][first : first + context],
                advantages=token_advantages[row][own],
                staleness=row_staleness[row : row + 1],
                rewards=batch.dense("reward")[row : row + 1] if "reward" in batch.columns else None,
                row_tokens=row_tokens[row : row + 1],
                **found,
            )


def tokens_of_rows(batch: Batch) -> Array:
    """Loss tokens of each row, int64 [R], over all of its sequences."""
    return np.array([mask.sum() for mask in batch.ragged("loss_mask")], np.int64)


def check_alone(batch: Batch, others: Sequence[str]) -> None:
    """Check that no other model has numbers for the tokens: it would have read branches as one sequence. Raises `RunError`."""
    if found := [name for name in others if name in batch.columns]:
        raise RunError(
            f"group {batch.groups[0]} has episodes of several sequences, and {found[0]} was computed for one each: set "
            f"train.reference=fused, and take an algorithm without a critic"
        )
