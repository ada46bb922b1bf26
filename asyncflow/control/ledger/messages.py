"""Messages of the ledger: a trained group and an update, which it receives, and the totals of a step, which it gives."""

from __future__ import annotations

import msgspec

from asyncflow.telemetry.metrics import GroupFigures


class Consumed(msgspec.Struct, frozen=True):
    """Group whose gradient has been added: its rows, and its share of the normaliser. `is_left_out`: the gradient is 0, and nothing
    was computed."""

    rows: list[int]
    empty_rows: list[int]  # those of them without a token to train on: the mean over responses is not over these
    loss_tokens: int
    is_finite: bool
    is_left_out: bool = False


class TrainedGroup(msgspec.Struct, frozen=True):
    """Group whose gradient has been added, and its figures, which are passed on for metrics."""

    consumed: Consumed
    figures: GroupFigures


class Update(msgspec.Struct, frozen=True):
    """Result of an optimiser step. `is_skipped`: it could not be made; the weights are as before. `fill_tokens`: see
    `OptimResult`."""

    grad_norm: float
    learning_rate: float
    normaliser: int
    is_skipped: bool
    fill_tokens: int = 0


class StepTotals(msgspec.Struct, frozen=True):
    """A closed step, or one of its updates: the integers that the gradient may be divided by, and how its rows ended.
    `is_left_out`: it has rows, and nothing of them was computed."""

    step: int
    tokens: int
    sequences: int
    dead: int
    non_finite_rows: list[int]
    is_left_out: bool = False
