"""Rows of several sequences: each is trained behind its own prompt, under the row's advantage, and counts once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asyncflow.algorithms.gspo import GSPO
from asyncflow.engines.base import MicroBatch, Response
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.log_probs import Head
from asyncflow.engines.train.model.packing import pack_thrifty
from asyncflow.engines.train.model.tri_model import TriModel
from asyncflow.environments.capture.transcript import CapturedSequence
from asyncflow.loops import samples
from asyncflow.loops import training_batches as batches
from asyncflow.loops.samples import ScoredRow
from asyncflow.loops.transcript import Played, played_sequences
from asyncflow.rewards.base import Sample, Score
from asyncflow.types import Batch, Old, Ragged, RunError
from tests.builders import scored
from tests.unit.engines.train.training import train_options

BITS = 2
NUM_TOKENS = 128
PROMPT = np.array([5, 6])


def sequence(prompt_ids: list[int], token_ids: list[int]) -> CapturedSequence:
    """Tokens behind a prompt; those above 100 were sampled, by version 3."""
    made = CapturedSequence(0, np.array(prompt_ids, np.int64))
    for token in token_ids:
        ids = np.array([token], np.int64)
        if token > 100:
            made.sample(Response(0, ids, (-ids / 100).astype(np.float32), np.array([[0, 3]]), "stop"))
        else:
            made.observe(ids)
    return made


def played(*sequences: CapturedSequence, sample: int = 0) -> Played:
    return played_sequences(sample, PROMPT, sequences, ended="stop", reward=1.0, seconds=0.5)


def batch_of(*rows: Played) -> Batch:
    """Group 1, as it is leased for training."""
    given = [ScoredRow((1 << BITS) + row.response.sample, row, Sample("", "", {}, True), Score(1.0, (1.0,))) for row in rows]
    made = samples.outputs(1, given, has_episodes=True)
    samples.schema(BITS, 1.0, 1, has_episodes=True).check_outputs("rollout", made)
    return Batch(made.indices, made.groups, {**made.columns, "prompt_ids": Ragged.from_arrays([PROMPT], "int64")})


def test_the_first_sequence_continues_the_prompt_and_others_are_branches() -> None:
    row = played(sequence([5, 6, 7], [101, 8, 102]), sequence([5, 9], [103, 104]))
    assert row.response.token_ids.tolist() == [7, 101, 8, 102, 5, 9, 103, 104]
    assert row.loss_mask.tolist() == [0, 1, 0, 1, 0, 0, 1, 1] and row.branches.tolist() == [[4, 2]]
    assert row.turns[:, :2].tolist() == [[1, 1], [3, 1], [6, 2]] and row.turn_rewards == [None, None, 1.0]
    assert row.response.version_spans.tolist() == [[0, 3]]


def test_every_sequence_is_a_sequence_of_its_own_for_the_engine() -> None:
    rows = played(sequence([5, 6, 7], [101, 8, 102]), sequence([5, 9], [103, 104]), sequence([4], [105])), scored_plain(1)
    found = list(batches.micro_batches(3, batch_of(*rows), np.array([2.0, -1.0], np.float32), 2))
    told = [
        (
            piece.indices.tolist(),
            piece.prompt_ids.tolist(),
            [row.tolist() for row in piece.response_ids],
            [row.tolist() for row in piece.loss_mask],
            piece.token_advantages.tolist(),
        )
        for piece in found
    ]
    assert told == [
        ([4, 5], [5, 6], [[7, 101, 8, 102], [110, 111]], [[0, 1, 0, 1], [1, 1]], [2.0] * 4 + [-1.0] * 2),
        ([4], [5, 9], [[103, 104]], [[1, 1]], [2.0, 2.0]),
        ([4], [4], [[105]], [[1]], [2.0]),
    ]
    assert [piece.staleness.tolist() for piece in found] == [[0, 3], [0], [0]]


def test_each_sampled_token_is_trained_once_with_its_log_prob() -> None:
    batch = batch_of(played(sequence([5, 6], [101, 9, 102]), sequence([5, 6, 101, 8], [103])))
    found = list(batches.micro_batches(3, batch, np.ones(1, np.float32), 1))
    trained = {}
    for piece in found:
        columns = (piece.response_ids, piece.loss_mask, piece.rollout_logprobs)
        for token, mask, logprob in zip(*(each.values for each in columns), strict=True):
            if mask:
                trained[int(token)] = logprob
    assert trained == {t: pytest.approx(-t / 100) for t in (101, 102, 103)}
    assert sum(int(piece.loss_mask.values.sum()) for piece in found) == 3


def test_a_row_counts_once_by_sequences_and_ratios_are_those_of_each_of_its_sequences() -> None:
    row = played(sequence([5, 6, 7], [101, 8, 102]), sequence([5, 9], [103, 104, 105]), sequence([4], [106]))
    found = list(batches.micro_batches(3, batch_of(row, scored_plain(1)), np.array([2.0, -1.0], np.float32), 2))
    weights = [-loss_of(piece, "current") for piece in found]  # the ratio is 1
    assert weights == pytest.approx([2 * 2 / 6 - 1, 2 * 3 / 6, 2 * 1 / 6]) and sum(weights) == pytest.approx(2 - 1)
    s = [math.exp(mean / 100) / NUM_TOKENS for mean in (101.5, 104, 106)]
    assert -loss_of(found[1], "rollout") == pytest.approx(2 * 3 / 6 * s[1])
    assert -loss_of(found[2], "rollout") == pytest.approx(2 * 1 / 6 * s[2])
    assert -loss_of(found[0], "rollout") == pytest.approx(2 * 2 / 6 * s[0] - math.e / NUM_TOKENS)


def loss_of(piece: MicroBatch, old: Old) -> float:
    """GSPO's, of a policy to which all tokens are equally likely; nothing is clipped that makes it smaller."""
    models = TriModel(None, train_options(old=old, is_corrected=True), lambda: pytest.fail("there is no other model"))
    packed = pack_thrifty(piece.prompt_ids, piece.response_ids)
    hidden_TH = torch.zeros(len(packed.targets_T), 1)
    known = micro_step.given_frozen(models, packed, piece, None, None)
    algorithm = GSPO(clip_low=0.99, clip_high=9.0)
    return micro_step.losses([known], algorithm, hidden_TH, Head(torch.zeros(NUM_TOKENS, 1), 64)).results[0].loss_sum


def test_a_row_without_a_sequence_behind_the_prompt_has_branches_alone() -> None:
    batch = batch_of(played(sequence([9], [101])), scored_plain(1))
    found = list(batches.micro_batches(3, batch, np.array([1.0, 0.0], np.float32), 1))
    assert [(piece.indices.tolist(), piece.prompt_ids.tolist()) for piece in found] == [([5], [5, 6]), ([4], [9])]


def test_advantages_of_tokens_go_with_them() -> None:
    batch = batch_of(played(sequence([5, 6], [101, 102]), sequence([9], [103])))
    advantages = Ragged.from_arrays([np.array([1, 2, 0, 3], np.float32)], "float32")
    assert [piece.token_advantages.tolist() for piece in batches.micro_batches(3, batch, advantages, 1)] == [[1, 2], [3]]


def test_numbers_that_another_model_has_made_of_branches_are_refused() -> None:
    batch = batch_of(played(sequence([5, 6], [101]), sequence([9], [103])))
    batch.columns[samples.REFERENCE_COLUMN.name] = batch.columns["rollout_logprobs"]  # type: ignore[index]
    with pytest.raises(RunError, match="episodes of several sequences"):
        list(batches.micro_batches(3, batch, np.ones(1, np.float32), 1))


def scored_plain(sample: int) -> Played:
    """A row of one sequence, of two sampled tokens, by version 0."""
    response = Response(sample, np.array([110, 111]), -np.ones(2, np.float32), np.array([(0, 0)]), "stop")
    return scored(4 + sample, response, 1.0).played
