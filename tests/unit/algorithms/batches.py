"""Token batches and scored groups to try algorithms on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from asyncflow.types import LossSums, Objective, Ragged, ScoredGroup, TokenBatch, is_maximum

LENGTHS = [3, 7, 1, 5]
FIELDS = ("logprobs_T", "old_logprobs_T", "rollout_logprobs_T", "ref_logprobs_T", "entropy_T", "advantages_T", "mask_T")


def random_batch(seed: int = 0) -> TokenBatch:
    """Float64, with masked tokens, ratios on both sides of all bounds, and a reference."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=torch.float64) * scale

    row_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    logprobs_T = normal(1.0) - 3
    mask_T = (torch.rand(num_tokens, generator=generator) > 0.2).double()
    return TokenBatch(
        logprobs_T=logprobs_T.clone().requires_grad_(),
        old_logprobs_T=logprobs_T + normal(0.8),
        rollout_logprobs_T=logprobs_T + normal(0.1),
        ref_logprobs_T=logprobs_T + normal(0.5),
        entropy_T=normal(1.0).abs(),
        advantages_T=torch.tensor([1.5, -0.5, 0.0, -1.0], dtype=torch.float64)[row_T],
        mask_T=mask_T,
        row_T=row_T,
        row_tokens_R=mask_T.new_zeros(len(LENGTHS)).index_add(0, row_T, mask_T),
    )


def check_parts(parts: list[LossSums], whole: LossSums) -> None:
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    for name, value in whole.metrics.items():
        join = max if is_maximum(name) else sum
        assert join(part.metrics[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-12)


def rows_of(batch: TokenBatch, rows: range) -> TokenBatch:
    chosen_T = (batch.row_T >= rows.start) & (batch.row_T < rows.stop)
    columns = {name: getattr(batch, name)[chosen_T] for name in FIELDS}
    return TokenBatch(**columns, row_T=batch.row_T[chosen_T] - rows.start, row_tokens_R=batch.row_tokens_R[rows.start : rows.stop])


def cut_within_rows(algorithm: Objective, batch: TokenBatch) -> list[LossSums]:
    parts = []
    for part in (slice(0, 3), slice(3, 4), slice(4, 9), slice(9, None)):
        columns = {name: getattr(batch, name)[part] for name in (*FIELDS, "row_T")}
        parts.append(algorithm.loss(TokenBatch(**columns, row_tokens_R=batch.row_tokens_R)))
    return parts


def scored_group(
    rewards: Sequence[float],
    *,
    lengths: Sequence[int] | None = None,
    truncated: Sequence[int] | None = None,
    mask: Sequence[Sequence[int]] | None = None,
    rollout: Sequence[Sequence[float]] | None = None,
    reference: Sequence[Sequence[float]] | None = None,
    values: Sequence[Sequence[float]] | None = None,
) -> ScoredGroup:
    """Responses of 3 tokens, all of them the policy's, unless told otherwise."""
    rows = mask or [[1] * length for length in lengths or [3] * len(rewards)]
    loss_mask = Ragged.from_arrays([np.array(row) for row in rows], "uint8")
    return ScoredGroup(
        rewards=np.array(rewards, np.float32),
        truncated=np.array(truncated or [0] * len(rewards), np.uint8),
        loss_mask=loss_mask,
        rollout_logprobs=Ragged.from_arrays([np.array(row) for row in rollout or [[-1.0] * len(row) for row in rows]], "float32"),
        ref_logprobs=None if reference is None else Ragged.from_arrays([np.array(row) for row in reference], "float32"),
        values=None if values is None else Ragged.from_arrays([np.array(row) for row in values], "float32"),
    )
