"""A layer's profile on ranks: what each has of the matrices, and the collectives of each axis of the layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from asyncflow.engines.train import profile
from asyncflow.engines.train.profile import Amount, profile_layer
from asyncflow.types import Layout, LossSums, TokenBatch
from tests.unit.engines.train.parallel.processes import Processes, RankFailed
from tests.unit.engines.train.training import ModelPath, train_options

SMALL_BYTES = (1 << 10, 1 << 14)


class Sum:
    is_token_local = True

    def loss(self, batch: TokenBatch) -> LossSums:
        return LossSums(loss=batch.logprobs_T.sum(), metrics={})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    processes = Processes(4)
    yield processes
    processes.close()


def tasks_of(path: Path, layout: Layout) -> list[tuple[str, int]]:
    """On a rank: (task, tokens or bytes) of all that is measured, in order."""
    found = []
    profile.MESSAGE_BYTES = SMALL_BYTES  # type: ignore[misc]

    @contextmanager
    def measure(task: str, *, tokens: int = 0, bytes: int = 0) -> Iterator[None]:
        found.append((task, tokens or bytes))
        yield

    amount = Amount(tokens=(29,), num_responses=2, repeats=1)
    profile_layer(path, train_options(layout=layout), Sum(), has_reference=False, amount=amount, measure=measure)
    assert not dist.is_initialized()
    return [each for each in found if each[0] != "warm_up"]


def test_each_rank_has_its_part_and_each_axis_its_collectives(ranks: Processes, model_path: ModelPath) -> None:
    (alone,) = ranks.run(tasks_of, model_path("qwen3-tiny"), Layout(), size=1)
    assert [task for task, _ in alone] == ["layer_forward", "layer_backward", "head_loss", "accumulate", "optim_step"]
    for layout in (Layout(dp=2, tp=2), Layout(pp=3)):
        each = ranks.run(tasks_of, model_path("qwen3-tiny"), layout, size=layout.size)
        assert all(tasks == each[0] for tasks in each)
        computed, exchanged = each[0][: len(alone)], each[0][len(alone) :]
        assert [task for task, _ in computed] == [task for task, _ in alone]
        assert computed[:3] == alone[:3]
        share = computed[-1][1] / alone[-1][1]
        assert share == 1 if layout.tp == 1 else 1 / layout.tp < share < 1.01 / layout.tp  # norms are not cut
        axes = [axis for axis in ("tp", "dp") if getattr(layout, axis) > 1]
        kinds = [f"{axis}/{kind}" for axis in axes for _ in SMALL_BYTES for kind in ("all_reduce", "all_gather", "reduce_scatter")]
        assert [task for task, _ in exchanged] == kinds + ["pp/send"] * (len(SMALL_BYTES) if layout.pp > 1 else 0)
        for num_bytes in SMALL_BYTES:
            assert sum(num_bytes <= size / (2 if task == "pp/send" else 1) < num_bytes + 64 for task, size in exchanged) in (
                1,
                3,
                6,
            )


def test_a_model_that_cannot_be_cut_so_is_refused(ranks: Processes, model_path: ModelPath) -> None:
    with pytest.raises(RankFailed, match=r"plan\.train\.tp"):
        ranks.run(tasks_of, model_path("qwen3-tiny"), Layout(tp=3), size=3)
