"""The suite of train engines, on several processes: the same steps, weights and log-probs as one process of the torch engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from asyncflow.engines.base import MicroBatch, OptimResult, TrainEngine
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.packing import pack_thrifty
from asyncflow.types import Layout
from tests.contract.devices import BACKENDS, needed_devices
from tests.contract.test_train_engine import ZERO3, make, needed
from tests.depth import deep
from tests.unit.engines.train.conftest import micro_batch
from tests.unit.engines.train.parallel.processes import Processes
from tests.unit.engines.train.training import ModelPath, Sum, moved_less, policy_gradient, torch_engine, untied, weights_of

CASES: list[tuple[str, dict[str, Any], Layout, str]] = [
    ("torch", {}, Layout(2, 1, 1), "qwen2-tiny"),
    pytest.param("torch", {}, Layout(1, 2, 1), "qwen3-tiny", marks=deep),
    ("torch", {}, Layout(1, 1, 2), "llama-tiny"),
    ("deepspeed", {"stage": 1}, Layout(2, 1, 1), "qwen2-tiny"),
    pytest.param("deepspeed", {"stage": 2}, Layout(2, 1, 1), "qwen3-tiny", marks=pytest.mark.smoke),
    ("deepspeed", ZERO3, Layout(2, 1, 1), "qwen2-tiny"),
    ("deepspeed", {"stage": 2}, Layout(2, 1, 1), "llama-tiny"),
    ("megatron", {}, Layout(2, 1, 1), "llama-tiny"),
    ("megatron", {}, Layout(1, 2, 1), "qwen3-tiny"),
    ("megatron", {}, Layout(1, 1, 2), "qwen2-tiny"),
    pytest.param("megatron", {}, Layout(1, 1, 2), "untied", marks=pytest.mark.smoke),
    ("megatron", {}, Layout(1, 2, 2), "qwen2-tiny"),
    ("megatron", {}, Layout(2, 2, 1), "qwen3-tiny"),
    ("megatron", {}, Layout(2, 2, 2), "qwen3-tiny"),
]
OPTIONS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "max_grad_norm": 2.0,
    "has_reference": True,
    "old": "step_start",
    "tokens_per_pass": 60,  # two micro-batches, or one
}
STEPS = [
    [micro_batch(0), micro_batch(1, (3, 8)), micro_batch(2)],
    [micro_batch(3, (2, 2, 2), 9)],  # fewer than there may be data-parallel groups
    [micro_batch(4), micro_batch(5, (1, 1), 3), micro_batch(6, (25, 2, 13), 2), micro_batch(7, (4, 12))],  # the third in rows
    [micro_batch(seed, (9, 8)) for seed in range(10, 17)],  # of two data-parallel groups one has a pass more
]
NORMALISERS = [30, 5, 40, 50]
TOLD = [micro_batch(0), micro_batch(1)]
LAST = [micro_batch(8), micro_batch(9)]


@pytest.fixture
def ranks(layout: Layout) -> Iterator[Processes]:
    processes = Processes(layout.size)  # new ones each time: DeepSpeed and Megatron keep a process's groups for good
    yield processes
    processes.close()


def broken(batch: MicroBatch) -> MicroBatch:
    """Its loss is not finite."""
    return replace(batch, advantages=np.full_like(batch.advantages, np.inf))


async def step(engine: TrainEngine, batches: Sequence[MicroBatch], normaliser: int, dp: int) -> tuple[float, OptimResult]:
    """An optimiser step, whose micro-batches are dealt out to the data-parallel groups, over two turns; the own losses' sum."""
    rank = engine.data_parallel_rank
    assert rank is not None
    own = list(batches[rank::dp])
    await engine.begin_step()
    sizes, plain = list[int](), micro_step.losses

    def counted(known: Any, *others: Any, **more: Any) -> Any:
        sizes.append(len(known))
        return plain(known, *others, **more)

    with patch.object(micro_step, "losses", counted):
        results = [
            result for round_ in (own[:1], own[1:]) for result in await engine.forward_backward(round_, Sum(policy_gradient))
        ]
    if len(batches) == 7 and sizes:  # on the last stage
        assert max(sizes) > 1, sizes
    assert all(result.is_finite for result in results) and len(results) == len(own)
    return sum(result.loss_sum for result in results), await engine.optim_step(normaliser)


def work(kind: str, own: dict[str, Any], layout: Layout, path: Path, folder: Path, device: str) -> dict[str, Any] | None:
    """A rank's part; of a leader what it has seen."""
    fills = 1.0 if layout.size > 2 else 0.0  # on two ranks native lengths
    engine = make(kind, path, own, layout=layout, device=device, pipeline_fill=fills, **OPTIONS)
    assert dist.group.WORLD is not None
    assert dist.group.WORLD._get_backend(torch.device(device)).name() == BACKENDS[device]
    if engine.data_parallel_rank is None:
        asyncio.run(engine.follow(Sum(policy_gradient), lambda name: nullcontext()))
        return None
    return asyncio.run(lead(engine, layout.dp, folder))


async def lead(engine: TrainEngine, dp: int, folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {"steps": []}
    for number, (batches, normaliser) in enumerate(zip(STEPS, NORMALISERS, strict=True)):
        if number == 1:  # a step that comes to nothing
            round_ = [broken(TOLD[0])] if engine.data_parallel_rank == dp - 1 else [TOLD[1]]
            await engine.begin_step()
            round_ = [replace(batch, examined_rows=(1,)) for batch in round_]
            results = await engine.forward_backward(round_, Sum(policy_gradient))
            seen["told"] = {row: figures["log-prob of the trainer"] for row, figures in results[0].token_figures.items()}
            seen["is_finite"] = [result.is_finite for result in results]
            await engine.discard()
        seen["steps"].append(await step(engine, batches, normaliser, dp))
    probe = STEPS[0][0]
    seen["log_probs"] = (await engine.log_probs(probe.prompt_ids, probe.response_ids)).values
    seen["rounded"] = (await engine.log_probs(probe.prompt_ids, probe.response_ids, rounded_to="bfloat16")).values
    again = (await engine.log_probs(probe.prompt_ids, probe.response_ids)).values
    assert again.tolist() == seen["log_probs"].tolist(), "the weights are what they were"
    seen["weights"] = {name: tensor.numpy() for name, tensor in (await weights_of(engine)).items()}
    seen["fingerprint"] = await engine.fingerprint()
    await engine.save(folder / "model")
    await (await engine.save_state(folder / "state"))
    seen["last"] = await step(engine, LAST, 20, dp)
    await engine.load_state(folder / "state")
    seen["loaded"] = await engine.fingerprint()
    await engine.close()
    return seen


@pytest.mark.parametrize(("kind", "own", "layout", "family"), CASES, ids=lambda v: str(v) if isinstance(v, str) else "")
def test_several_processes_train_as_one(
    ranks: Processes,
    model_path: ModelPath,
    tmp_path: Path,
    kind: str,
    own: dict[str, Any],
    layout: Layout,
    family: str,
    device: str,
) -> None:
    """On devices of each kind; the one process is on the CPU."""
    needed_devices(device, layout.size)
    needed(kind, device)
    assert {pack_thrifty(batch.prompt_ids, batch.response_ids).layout.has_prompt for batch in STEPS[2]} == {True, False}
    path = untied(model_path("llama-tiny"), tmp_path / "untied") if family == "untied" else model_path(family)
    answers = ranks.run(work, kind, own, layout, path, tmp_path, device, size=layout.size, seconds=180)
    leaders = [answer for answer in answers if answer is not None]
    assert len(leaders) == layout.dp
    first = leaders[0]
    for other in leaders[1:]:
        assert [result for _, result in other["steps"]] == [result for _, result in first["steps"]], "all leaders see one update"
        assert other["weights"] == {} and other["fingerprint"] == {}
    assert leaders[-1]["is_finite"] == [False]

    told: list[Any] = []  # log-probs of the second row of each of `TOLD`, before the second step

    async def alone() -> tuple[list[tuple[float, OptimResult]], Any, Any, Any, Any]:
        engine = torch_engine(path, **OPTIONS)
        steps = []
        for number, (batches, normaliser) in enumerate(zip(STEPS, NORMALISERS, strict=True)):
            if number == 1:
                told.extend([(await engine.log_probs(each.prompt_ids, each.response_ids))[1] for each in TOLD])
            steps.append(await step(engine, batches, normaliser, 1))
        weights, probe = await weights_of(engine), STEPS[0][0]
        log_probs = (await engine.log_probs(probe.prompt_ids, probe.response_ids)).values
        await engine.load_state(tmp_path / "state")  # of another engine, under another layout
        rounded = (await engine.log_probs(probe.prompt_ids, probe.response_ids, rounded_to="bfloat16")).values
        return steps, weights, log_probs, rounded, await step(engine, LAST, 20, 1)

    steps, weights, log_probs, rounded, last = asyncio.run(alone())
    for number, (loss, result) in enumerate([*steps, last]):
        found = [(*leader["steps"], leader["last"])[number] for leader in leaders]
        assert sum(part for part, _ in found) == pytest.approx(loss, rel=1e-4)
        assert found[0][1].grad_norm == pytest.approx(result.grad_norm, rel=1e-4)
        assert found[0][1].learning_rate == result.learning_rate and not found[0][1].skipped
    np.testing.assert_allclose(first["log_probs"], log_probs, atol=1e-4)
    np.testing.assert_allclose(first["rounded"], rounded, atol=1e-4)
    assert np.abs(rounded - log_probs).max() > 3e-4, "rounding is seen"
    for number, leader in enumerate(leaders):
        np.testing.assert_allclose(leader["told"][1], told[0 if number == layout.dp - 1 else 1], atol=1e-4)
    before = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    of_ranks = {name: torch.from_numpy(array) for name, array in first["weights"].items()}
    moved_less(of_ranks, weights, before, 2e-2)
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).named_parameters())
    assert saved.keys() == of_ranks.keys() and all(saved[name].equal(tensor) for name, tensor in of_ranks.items())
    assert len(first["fingerprint"]) == 4 * len(of_ranks) and first["loaded"] == first["fingerprint"]
