"""Messages of the ledger: a trained group and an update, which it receives, and the totals of a step, which it gives."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec
import numpy as np


class Consumed(msgspec.Struct, frozen=True):
    """A group whose gradient has been added: R rows, the figures that metrics are made of, and its share of the normaliser."""

    rows: list[int]
    empty_rows: list[int]  # those of them without a token to train on: the mean over responses is not over these
    prompt_length: int
    rewards: np.ndarray  # float32 [R]
    response_lengths: np.ndarray  # int64 [R]
    truncated: np.ndarray  # uint8 [R]
    staleness: np.ndarray  # int64 [R], versions
    num_spans: np.ndarray  # int64 [R], policy versions that made the response
    loss_sum: float
    loss_tokens: int
    computed_tokens: int  # loss tokens whose loss was computed: what `metrics` are sums over
    logical_tokens: int  # of what was computed
    physical_tokens: int
    metrics: Mapping[str, float]
    is_finite: bool
    left_out: int = 0  # rows that were not computed
    reward_parts: np.ndarray = msgspec.field(default_factory=partial(np.empty, 0, np.float32))  # [R * parts], where they are kept


class Update(msgspec.Struct, frozen=True):
    """Result of an optimiser step. `is_skipped`: it could not be made; the weights are as before. `fill_tokens`: see
    `OptimResult`."""

    grad_norm: float
    learning_rate: float
    normaliser: int
    is_skipped: bool
    fill_tokens: int = 0


class StepTotals(msgspec.Struct, frozen=True):
    """A closed step, or one of its updates: the integers that the gradient may be divided by, and how its rows ended."""

    step: int
    tokens: int
    sequences: int
    dead: int
    non_finite_rows: list[int]
