"""Models sharded over ranks compute what one process does, and no rank has more than its share."""

from collections.abc import Iterator
from typing import Any

import pytest

from asyncflow.engines.families import check_tensor_parallel
from asyncflow.types import UserError
from tests.depth import deep, few, in_gate
from tests.unit.engines.train.parallel.processes import Processes
from tests.unit.engines.train.parallel.tensor_ranks import (
    bytes_kept,
    compare_bfloat16,
    compare_heads,
    compare_models,
    compare_sharded,
    compare_stages,
    refused_plans,
    sums_over_ranks,
)

RAGGED = [1, 40, 2, 60]
TOLERANCES = [("float64", 1e-12), ("float32", 5e-4), ("bfloat16", 2e-2)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    ranks = Processes(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("num_ranks", "families", "tied"),
    [
        (2, few(("qwen2", "qwen3"), ("qwen2", "qwen3", "llama")), few((True,), (True, False))),
        pytest.param(4, ("qwen3",), (False,), marks=deep),
    ],
)
def test_losses_and_gradients_are_those_of_one_process(
    ranks: Processes, num_ranks: int, families: tuple[str, ...], tied: tuple[bool, ...]
) -> None:
    for errors in ranks.run(compare_models, families, tied, size=num_ranks):
        assert len(errors) == len(families) * len(tied)
        assert not {case: error for case, error in errors.items() if not error < 1e-5}


@pytest.mark.parametrize(
    ("family", "is_tied", "is_checkpointed"),
    [("qwen3", True, True), pytest.param("llama", False, False, marks=deep)],
)
def test_fsdp_shards_what_is_sharded(ranks: Processes, family: str, is_tied: bool, is_checkpointed: bool) -> None:
    for errors in ranks.run(compare_sharded, family, is_tied, is_checkpointed):
        assert len(errors) > 30
        assert not {name: error for name, error in errors.items() if not error < 1e-5}


def test_bfloat16_is_as_near_as_in_one_process(ranks: Processes) -> None:
    for error, in_one_process in ranks.run(compare_bfloat16):
        assert 0 < error < 1.3 * in_one_process < 0.1


def test_what_crosses_between_stages_is_as_it_is_without(ranks: Processes) -> None:
    for errors in ranks.run(compare_stages, size=2):
        assert not {name: error for name, error in errors.items() if not error < 1e-5}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sums_over_ranks_are_in_their_order_wherever_an_element_is(ranks: Processes, num_ranks: int) -> None:
    assert ranks.run(sums_over_ranks, size=num_ranks) == [[]] * num_ranks


def test_a_rank_keeps_its_share_alone(ranks: Processes) -> None:
    for kept in ranks.run(bytes_kept, "qwen2"):
        for name, share in kept.items():
            assert share == 1.0 if name.endswith("norm.weight") else 0.2 < share < 0.27, name


@pytest.mark.parametrize(("dtype", "tolerance"), in_gate(("float64", 1e-12), of=TOLERANCES))
@pytest.mark.parametrize(
    "sizes", in_gate([1, 40, 2, 60], [50, 51], of=[[25, 25, 25, 25], [26, 26, 26, 23], [1, 40, 2, 60], [50, 51]])
)
def test_log_probs_over_shards_are_those_of_the_whole_head(
    ranks: Processes, sizes: list[int], dtype: str, tolerance: float
) -> None:
    for errors in ranks.run(compare_heads, sizes, dtype, size=len(sizes)):
        assert len(errors) == 30
        assert not {name: error for name, error in errors.items() if not error < tolerance}


@pytest.mark.parametrize(
    ("fields", "possible"),
    [
        ({}, (1, 2, 4)),
        ({"num_key_value_heads": None}, (1, 2, 4, 8)),
        ({"intermediate_size": 50}, (1, 2)),
        ({"vocab_size": 5, "num_key_value_heads": 8}, (1, 2)),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_can(fields: dict[str, Any], possible: tuple[int, ...]) -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 101, **fields}
    for num_ranks in range(1, 10):
        if num_ranks in possible:
            check_tensor_parallel(config, num_ranks)
            continue
        with pytest.raises(UserError, match=f"plan.train.tp is {num_ranks}, .* by {', '.join(map(str, possible))} alone"):
            check_tensor_parallel(config, num_ranks)


def test_a_plan_that_is_not_understood_is_refused(ranks: Processes) -> None:
    (said,) = ranks.run(refused_plans, size=1)
    none, lacking, unknown = said
    assert "no tensor-parallel plan for a model of type 'qwen3'" in none
    assert "plan for layers.0.self_attn.q_proj is none" in lacking and "plan for layers.0.mlp.up_proj is packed_colwise" in unknown
