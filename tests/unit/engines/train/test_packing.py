"""The two layouts of one prompt with its responses."""

import numpy as np
import pytest
import torch

from asyncflow.engines.train.model.packing import (
    SharedPrompt,
    cut_into_batches,
    cut_into_passes,
    filled_alike,
    pack,
    pack_inert,
    token_ratio,
)
from asyncflow.types import Ragged

PROMPT = np.array([1, 2, 3])
RESPONSES = Ragged.from_arrays([np.array([4, 5]), np.array([6])], "int64")


def test_rows_lie_end_to_end_and_positions_start_again() -> None:
    packed = pack(PROMPT, RESPONSES, is_shared=False)
    assert packed.tokens_P.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6]
    assert packed.positions_P.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert packed.layout.segment_lengths == (5, 4) and not packed.layout.prompts and packed.num_tokens == 9
    assert packed.predicting(packed.tokens_P[:, None])[:, 0].tolist() == [3, 4, 3]
    assert packed.targets_T.tolist() == [4, 5, 6]
    assert packed.row_T.tolist() == [0, 0, 1]


def test_a_shared_prompt_comes_once_and_positions_start_again_behind_it() -> None:
    packed = pack(PROMPT, RESPONSES, is_shared=True)
    assert packed.tokens_P.tolist() == [1, 2, 3, 4, 5, 6]
    assert packed.positions_P.tolist() == [0, 1, 2, 3, 4, 3]
    assert packed.layout.segment_lengths == (3, 2, 1) and packed.layout.prompts == (SharedPrompt(0, 2),) and packed.num_tokens == 6
    assert packed.predicting(packed.tokens_P[:, None])[:, 0].tolist() == [3, 4, 3]
    assert packed.targets_T.tolist() == [4, 5, 6]
    assert packed.row_T.tolist() == [0, 0, 1]


def test_one_response_is_one_row_either_way() -> None:
    shared, row = (pack(PROMPT, RESPONSES.take([0]), is_shared=is_shared) for is_shared in (True, False))
    assert shared.layout.segment_lengths == row.layout.segment_lengths == (5,)
    assert not shared.layout.prompts


def test_an_inert_segment_predicts_nothing_and_leaves_no_gradient() -> None:
    packed = pack_inert(3)
    assert packed.num_tokens == len(packed.tokens_P) == 3 and packed.positions_P.tolist() == [0, 1, 2]
    assert packed.layout.segment_lengths == (3,) and not packed.layout.has_prompt
    assert not len(packed.targets_T) and not len(packed.row_T) and not packed.response_lengths
    hidden_PH = torch.randn(3, 2, requires_grad=True)
    predicting_TH = packed.predicting(hidden_PH)
    assert predicting_TH.shape == (0, 2)
    predicting_TH.sum().backward()
    assert hidden_PH.grad is not None and not hidden_PH.grad.any()


@pytest.mark.parametrize("is_shared", [True, False])
def test_filling_brings_all_to_the_longest_and_changes_nothing_that_predicts(is_shared: bool) -> None:
    """An inert one is filled like the others."""
    prompt_ids = np.arange(4)
    short, long = (
        pack(prompt_ids, Ragged.from_arrays([np.arange(n) for n in lengths], "int64"), is_shared=is_shared)
        for lengths in [(3, 1), (5, 6, 2)]
    )
    filled, same, inert = filled_alike([short, long, pack_inert(2)])
    assert same is long and (filled.num_tokens, inert.num_tokens) == (long.num_tokens, long.num_tokens)
    assert filled.fill_tokens == long.num_tokens - short.num_tokens and inert.fill_tokens == inert.num_tokens
    for one in (filled, inert):
        assert sum(one.layout.segment_lengths) == len(one.tokens_P) == len(one.positions_P) == one.num_tokens
        assert one.layout.segment_lengths[-1] and not one.positions_P[-1]
    assert filled.layout.segment_lengths[:-1] == short.layout.segment_lengths
    assert filled.tokens_P[: short.num_tokens].equal(short.tokens_P) and filled.targets_T.equal(short.targets_T)
    hidden_PH = torch.randn(filled.num_tokens, 2, requires_grad=True)
    predicting_TH = filled.predicting(hidden_PH)
    assert predicting_TH.equal(short.predicting(hidden_PH[: short.num_tokens]))
    predicting_TH.sum().backward()
    assert hidden_PH.grad is not None and not hidden_PH.grad[short.num_tokens :].any()
    assert not inert.predicting(hidden_PH).numel() and filled_alike([]) == []


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("prompt_length", [1, 4])
def test_predicting_is_the_position_before_each_response_token_and_so_is_its_gradient(prompt_length: int, is_shared: bool) -> None:
    lengths = (3, 1, 5)
    responses = Ragged.from_arrays([np.arange(n) for n in lengths], "int64")
    packed = pack(np.arange(prompt_length), responses, is_shared=is_shared)
    hidden_PH = torch.randn(packed.num_tokens, 2, requires_grad=True)
    predicting_TH = packed.predicting(hidden_PH)
    # the position that a token of a response is at, less one: looked up by (segment, position)
    segment_P = np.repeat(np.arange(len(packed.layout.segment_lengths)), packed.layout.segment_lengths)
    where = {key: i for i, key in enumerate(zip(segment_P.tolist(), packed.positions_P.tolist(), strict=True))}
    expected = []
    for k, n in enumerate(lengths):
        own, prompt = (k + 1, 0) if is_shared else (k, k)
        expected += [where[(prompt if j == 0 else own, prompt_length - 1 + j)] for j in range(n)]
    assert predicting_TH.equal(hidden_PH[expected])
    weight_TH = torch.randn_like(predicting_TH)
    predicting_TH.backward(weight_TH)
    assert hidden_PH.grad is not None
    torch.testing.assert_close(hidden_PH.grad, torch.zeros_like(hidden_PH).index_add(0, torch.tensor(expected), weight_TH))


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(("num_prompt_tokens", "lengths"), [(0, (3, 2)), (4, (3, 0)), (4, ())])
def test_what_cannot_be_predicted_is_refused(num_prompt_tokens: int, lengths: tuple[int, ...], is_shared: bool) -> None:
    responses = Ragged.from_arrays([np.ones(n, np.int64) for n in lengths], "int64")
    with pytest.raises(ValueError, match="cannot pack"):
        pack(np.ones(num_prompt_tokens, np.int64), responses, is_shared=is_shared)


def test_the_token_ratio_counts_what_both_layouts_hold() -> None:
    assert token_ratio(512, [64] * 16) == 6.0
    ragged = Ragged.from_arrays([np.ones(n, np.int64) for n in (3, 7, 2)], "int64")
    rows, shared = (pack(np.ones(5, np.int64), ragged, is_shared=is_shared).num_tokens for is_shared in (False, True))
    assert token_ratio(5, [3, 7, 2]) == rows / shared > 1
    assert token_ratio(5, [3]) == 1.0


def test_micro_batches_are_brought_to_one_length_only_where_it_takes_no_more_than_it_may() -> None:
    packed = [pack_inert(8), pack_inert(10), pack_inert(10)]  # 2 of 30 tokens would fill
    for at_most, lengths in ((0.0, [8, 10, 10]), (0.06, [8, 10, 10]), (0.07, [10, 10, 10]), (1.0, [10, 10, 10])):
        assert [one.num_tokens for one in filled_alike(packed, at_most)] == lengths
    assert [one.num_tokens for one in filled_alike([pack_inert(8), pack_inert(8)], 0.0)] == [8, 8]


@pytest.mark.parametrize(
    ("lengths", "most", "threads", "expected"),
    [
        ([20, 20, 20, 20], None, 2, [1, 1, 1, 1]),
        ([20, 20, 20, 20], 100, 1, [4]),
        ([20, 20, 20, 20], 100, 2, [2, 2]),
        ([20, 20, 20, 20, 20], 100, 2, [3, 2]),
        ([20, 20], 100, 4, [1, 1]),
        ([20] * 6, 1000, 4, [2, 2, 1, 1]),  # as many passes as there are stages or threads
        ([100, 10, 10], 1000, 4, [1, 1, 1]),
        ([20] * 12, 100, 2, [3, 3, 3, 3]),  # two passes each, as short as that allows
        ([20] * 7, 100, 3, [2, 2, 2, 1]),
        ([90, 20, 20, 20], 100, 2, [1, 3]),
        ([20], 100, 2, [1]),
        ([], 100, 2, []),
    ],
)
def test_passes_are_as_long_as_may_be_and_even_for_several_threads(
    lengths: list[int], most: int | None, threads: int, expected: list[int]
) -> None:
    packed = [pack(np.arange(4), Ragged(np.arange(n - 4), np.array([0, n - 4])), is_shared=True) for n in lengths]
    cut = cut_into_passes(packed, most, threads)
    assert [each.stop - each.start for each in cut] == expected
    assert [number for each in cut for number in range(each.start, each.stop)] == [*range(len(lengths))]


@pytest.mark.parametrize(
    ("lengths", "most", "parts", "expected"),
    [
        ([(9, 9), (9, 9), (9, 9)], 54, 1, [3]),
        ([(9, 9), (9, 9), (9, 9)], 53, 1, [2, 1]),
        ([(9, 9), (9, 9), (9, 9), (9, 9)], 100, 2, [2, 2]),
        ([(9, 9), (19, 19)], 1000, 1, [1, 1]),  # 80 tokens in one batch, 60 in two
        ([(20, 5), (20, 20), (16, 16)], 1000, 1, [3]),  # 126 instead of 118
        ([(90, 90), (9, 9)], 54, 1, [1, 1]),
        ([(9, 9), (9, 9), (9, 9)], 1000, 2, [2, 1]),
        ([], 54, 1, []),
    ],
)
def test_batches_of_rows_are_cut_by_their_tokens_filled_up(
    lengths: list[tuple[int, ...]], most: int, parts: int, expected: list[int]
) -> None:
    packed = [
        pack(np.arange(1), Ragged.from_arrays([np.arange(length - 1) for length in rows], "int64"), is_shared=False)
        for rows in lengths
    ]
    cut = cut_into_batches(packed, most, parts)
    assert [one.stop - one.start for one in cut] == expected and [i for one in cut for i in range(one.start, one.stop)] == [
        *range(len(packed))
    ]
