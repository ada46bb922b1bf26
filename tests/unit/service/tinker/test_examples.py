"""Examples as micro-batches: which token predicts which target, and what is refused."""

import numpy as np
import pytest

from asyncflow.engines.train.model.packing import pack_thrifty
from asyncflow.service.tinker.examples import Example, LossInputs, loss_inputs
from asyncflow.service.tinker.losses import make_loss


def example(tokens: list[int], targets: list[int], weights: list[float], **more: object) -> Example:
    inputs = {"target_tokens": np.array(targets), "weights": np.array(weights, np.float32), **more}
    return Example(np.array(tokens, np.int64), inputs)


def checked(examples: list[Example]) -> LossInputs:
    return loss_inputs(examples, make_loss("cross_entropy", {}), vocab_size=50, max_context=9)


def test_position_i_predicts_target_i_also_where_the_target_is_not_the_next_token() -> None:
    examples = [example([3, 4, 5], [0, 5, 6], [0.0, 1.0, -2.0]), example([7], [8], [1.0]), example([3, 9], [9, 1], [0.5, 0.0])]
    batches = list(checked(examples).micro_batches(1000))
    assert [numbers for numbers, _ in batches] == [[0, 2], [1]]  # those that begin alike together
    batch = batches[0][1]
    assert batch.prompt_ids.tolist() == [3] and batch.target_ids is not None
    assert [ids.tolist() for ids in batch.response_ids] == [[4, 5, 6], [9, 1]]
    assert [ids.tolist() for ids in batch.target_ids] == [[0, 5, 6], [9, 1]]
    assert batch.loss_mask.values.tolist() == [0, 1, 1, 1, 0] and batch.advantages.tolist() == [0.0, 1.0, -2.0, 0.5, 0.0]
    packed = pack_thrifty(batch.prompt_ids, batch.response_ids, targets=batch.target_ids)
    # The hidden states that predict are those of the input's own tokens.
    predicting = packed.predicting(packed.tokens_P[:, None].float())[:, 0]
    assert predicting.tolist() == [3, 4, 5, 3, 9] and packed.targets_T.tolist() == [0, 5, 6, 9, 1]


def test_a_micro_batch_has_at_most_so_many_tokens_or_one_example() -> None:
    batches = checked([example([1, 2, 3], [2, 3, 4], [1.0] * 3) for _ in range(5)]).micro_batches(8)
    assert [numbers for numbers, _ in batches] == [[0, 1], [2, 3], [4]]
    batches = checked([example([1, 2, 3], [2, 3, 4], [1.0] * 3) for _ in range(2)]).micro_batches(2)
    assert [numbers for numbers, _ in batches] == [[0], [1]]


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (example([1, 50], [1, 1], [1.0, 1.0]), "model_input of datum 1 has a token outside"),
        (example([1, 2], [1, -1], [1.0, 1.0]), "target_tokens of datum 1 has a token outside"),
        (example([], [], []), "1 to 8 here"),
        (example([1] * 9, [1] * 9, [1.0] * 9), "datum 1 has 9 tokens"),
        (example([1, 2], [1], [1.0, 1.0]), r"target_tokens of datum 1 has shape \[1\], and its input 2 tokens"),
        (example([1, 2], [[1, 2], [3, 4]], [1.0, 1.0]), "several targets for a token are not supported"),
        (example([1, 2], [1, 2], [1.0, float("nan")]), "weights of datum 1 has numbers that are not finite"),
        (example([1, 2], [1, 2], [1.0, 1.0], mask=np.ones(2)), "datum 1 has mask, which this loss does not use"),
        (Example(np.array([1, 2]), {"target_tokens": np.array([1, 2])}), "datum 1 lacks weights"),
    ],
)
def test_an_example_that_is_none_is_named(bad: Example, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        checked([example([1, 2], [2, 3], [1.0, 1.0]), bad])


def test_a_request_has_an_example() -> None:
    with pytest.raises(ValueError, match="one example at least"):
        checked([])
