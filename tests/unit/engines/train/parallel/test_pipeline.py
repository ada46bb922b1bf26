"""Stages of a model in processes of their own compute what the model in one piece does."""

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch

from asyncflow.engines.train.parallel.one_f_one_b import Crossing, StagePass, crossing, one_forward_one_backward
from asyncflow.engines.train.parallel.stages import keep_stage, share_out
from asyncflow.types import UserError
from tests.depth import deep, in_gate
from tests.unit.engines.train.parallel.pipeline_ranks import compare, compare_sharded, faulty, make_model, tied_updates
from tests.unit.engines.train.parallel.processes import Processes

SIZES = [(num_stages, num_micro_batches) for num_stages in range(1, 6) for num_micro_batches in range(8)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    ranks = Processes(4)
    yield ranks
    ranks.close()


@pytest.fixture
def mortal_ranks() -> Iterator[Processes]:
    """For tests that they do not survive."""
    ranks = Processes(3)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("num_stages", "families", "numbers"),
    in_gate(
        (3, ("qwen3",), (0, 1, 4)),
        of=[(1, ("qwen2",), (2,)), (2, ("qwen2", "qwen3", "llama"), (3,)), (3, ("qwen3",), (0, 1, 4)), (4, ("llama",), (2, 5))],
    ),
)
def test_losses_and_gradients_are_those_of_one_process(
    ranks: Processes, num_stages: int, families: tuple[str, ...], numbers: tuple[int, ...]
) -> None:
    found = ranks.run(compare, families, numbers, size=num_stages)
    assert len(found) == num_stages and all(len(of_stage) == len(families) * (4 * len(numbers) + 3) + 1 for of_stage in found)
    assert not {case: errors for of_stage in found for case, errors in of_stage.items() if not max(errors) < 1e-6}


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_stages_have_all_of_a_model_and_each_parameter_once(is_tied: bool) -> None:
    whole = make_model("qwen3", is_tied)
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    for num_stages in range(1, 6):
        found: list[tuple[str, torch.Size]] = []
        for index in range(num_stages):
            part = copy.deepcopy(whole)
            stage = keep_stage(part, index, num_stages)
            assert (stage.tied_name is not None) == (is_tied and num_stages > 1 and index in (0, num_stages - 1))
            assert (stage.copy_name is not None) == (stage.tied_name is not None and index > 0)
            found += [(name, parameter.shape) for name, parameter in part.named_parameters() if name != stage.copy_name]
        assert len(found) == len(shapes) and dict(found) == shapes
    with pytest.raises(UserError, match="set it to 5 at most"):
        keep_stage(whole, 0, 6)


def test_each_stage_may_be_sharded_over_data_parallel_ranks(ranks: Processes) -> None:
    assert all(error < 1e-6 for errors in ranks.run(compare_sharded) for error in errors)


def test_the_two_copies_of_a_tied_matrix_stay_equal_to_the_bit(ranks: Processes) -> None:
    first, middle, last = ranks.run(tied_updates, size=3)
    assert first == last and first and not middle


def test_a_loss_that_is_not_finite_reaches_all_stages_and_nothing_waits(ranks: Processes) -> None:
    assert max(ranks.run(faulty, "nan", 2, size=3)) < 5


@pytest.mark.parametrize(
    ("fault", "faulty_stage", "says"),
    [
        ("error", 1, "planted"),
        ("shape", 0, "hidden states (6, 4), torch.float32, and not (7, 4)"),
        ("death", 0, "has died"),
        pytest.param("death", 2, "has died", marks=deep),
        ("silence", 2, ""),
    ],
)
def test_a_stage_that_fails_ends_the_others(mortal_ranks: Processes, fault: str, faulty_stage: int, says: str) -> None:
    answers = mortal_ranks.answers(faulty, fault, faulty_stage, seconds=20)
    assert not any(has_returned for has_returned, _ in answers)
    texts = [(name, text) for _, (name, text, _) in answers]
    assert says in texts[faulty_stage][1]
    for stage, (name, text) in enumerate(texts):
        if stage != faulty_stage:
            assert name == "RunError" and f"did not pass between stages {stage} and" in text and "of micro-batch" in text
    if faulty_stage != 1:  # its neighbour names it, or the stage on the other side, which may have noticed and ended before
        assert any(f"rank {rank} has died, or was silent for 2 s" in texts[1][1] for rank in (0, 2))


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), SIZES)
def test_every_stage_passes_over_every_micro_batch_and_keeps_few(num_stages: int, num_micro_batches: int) -> None:
    for stage in range(num_stages):
        order = one_forward_one_backward(stage, num_stages, num_micro_batches)
        for kind in ("forward", "backward"):
            assert [one.micro_batch for one in order if one.kind == kind] == list(range(num_micro_batches))
        alive = 0
        for one in order:
            alive += 1 if one.kind == "forward" else -1
            assert 0 <= alive <= num_stages - stage
    assert one_forward_one_backward(0, 3, 4) == [
        *(StagePass("forward", 0), StagePass("forward", 1), StagePass("forward", 2), StagePass("backward", 0)),
        *(StagePass("forward", 3), StagePass("backward", 1), StagePass("backward", 2), StagePass("backward", 3)),
    ]


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), SIZES)
def test_no_stage_waits_for_one_that_waits_for_it_even_where_sends_wait_to_be_received(
    num_stages: int, num_micro_batches: int
) -> None:
    """Each stage posts what lies between two passes, and goes on when all of it has met its counterpart."""
    posts = [exchanges(stage, num_stages, num_micro_batches) for stage in range(num_stages)]
    open_posts: list[set[Crossing]] = [set() for _ in range(num_stages)]  # as (what, micro-batch, peer)
    has_moved = True
    while has_moved:
        has_moved = False
        for stage in range(num_stages):
            while not open_posts[stage] and posts[stage]:
                open_posts[stage], has_moved = posts[stage].pop(0), True
            for post in tuple(open_posts[stage]):
                counterpart = post._replace(stage=stage)
                if counterpart in open_posts[post.stage]:
                    open_posts[stage].remove(post)
                    open_posts[post.stage].remove(counterpart)
                    has_moved = True
    assert not any(posts) and not any(open_posts)


def exchanges(stage: int, num_stages: int, num_micro_batches: int) -> list[set[Crossing]]:
    order = one_forward_one_backward(stage, num_stages, num_micro_batches)
    both = zip([None, *order], [*order, None], strict=True)
    ends = [(crossing(a, stage, num_stages, is_before=False), crossing(b, stage, num_stages, is_before=True)) for a, b in both]
    return [{c for c in messages if c is not None} for messages in ends]


@pytest.mark.parametrize(
    ("layer_costs", "num_stages", "first_cost", "last_cost", "sizes"),
    [
        ([10] * 4, 2, 0, 0, [2, 2]),
        ([10] * 5, 2, 0, 0, [2, 3]),  # the first stage keeps more activations
        ([10] * 8, 2, 0, 40, [6, 2]),  # a head as large as four layers
        ([10] * 8, 4, 10, 20, [1, 3, 3, 1]),
        ([10] * 3, 3, 1000, 1000, [1, 1, 1]),
        ([10] * 7, 1, 5, 5, [7]),
        ([10, 10, 10, 10, 100], 3, 0, 0, [2, 2, 1]),  # the others are even all the same
    ],
)
def test_layers_are_shared_out_by_cost(
    layer_costs: Sequence[int], num_stages: int, first_cost: int, last_cost: int, sizes: list[int]
) -> None:
    layers = share_out(layer_costs, num_stages, first_cost=first_cost, last_cost=last_cost)
    assert [len(of_stage) for of_stage in layers] == sizes
    assert [i for of_stage in layers for i in of_stage] == list(range(len(layer_costs)))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match=r"plan\.train\.pp is 3, but the model has 2 layers: set it to 2 at most"):
        share_out([1, 1], 3, first_cost=1, last_cost=1)
