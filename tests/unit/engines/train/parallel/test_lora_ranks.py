"""Low-rank adapters over several processes: trained, restored and saved as by one process."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncflow.engines.base import TrainEngine
from asyncflow.engines.lora import read_lora
from asyncflow.engines.lora_files import write_lora
from asyncflow.types import Layout, LoraSpec, LossSums, TokenBatch
from tests.depth import deep
from tests.unit.engines.train.conftest import micro_batch
from tests.unit.engines.train.parallel.processes import Processes
from tests.unit.engines.train.training import ModelPath, Sum, assert_same, moved_less, one_rank, torch_engine, weights_of

SPEC = LoraSpec(rank=4, alpha=8.0)
STEPS = [[micro_batch(0), micro_batch(1, (3, 8)), micro_batch(2)], [micro_batch(3, (2, 2, 2), 9), micro_batch(4)]]
OPTIONS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "max_grad_norm": 2.0,
    "has_reference": True,
    "old": "step_start",
    "accumulate": "exact",
}
CASES = [
    (Layout(2, 1, 1), "qwen2-tiny", "float32"),
    (Layout(1, 2, 1), "qwen3-tiny", "float32"),
    (Layout(1, 1, 2), "qwen2-tiny", "float32"),
    pytest.param(Layout(2, 1, 1), "llama-tiny", "bfloat16", marks=deep),
    pytest.param(Layout(2, 2, 1), "qwen2-tiny", "float32", marks=deep),
    pytest.param(Layout(1, 2, 2), "llama-tiny", "float32", marks=deep),
]


def with_kl(batch: TokenBatch) -> LossSums:
    """A loss of policy, old policy and reference."""
    assert batch.ref_logprobs_T is not None
    ratio_T = (batch.logprobs_T - batch.old_logprobs_T).exp()
    kl_T = (batch.logprobs_T - batch.ref_logprobs_T).square()
    return LossSums(loss=(batch.mask_T * (0.3 * kl_T - batch.advantages_T * ratio_T)).sum(), metrics={})


async def trained(engine: TrainEngine, folder: Path, dp: int) -> dict[str, Any]:
    """What a leader has seen of two steps, a checkpoint between them and a third step that is undone."""
    rank = engine.data_parallel_rank
    assert rank is not None
    seen: dict[str, Any] = {"norms": [], "losses": []}
    for number, batches in enumerate([*STEPS, STEPS[0]]):
        await engine.begin_step()
        if number == 2:
            await (await engine.save_state(folder / "state"))
            seen["fingerprint"] = dict(await engine.fingerprint())
            seen["weights"] = {name: tensor.clone() for name, tensor in (await weights_of(engine)).items()}
        results = await engine.forward_backward(batches[rank::dp], Sum(with_kl))
        seen["losses"].append(sum(result.loss_sum for result in results))
        seen["norms"].append((await engine.optim_step(20)).grad_norm)
    await engine.load_state(folder / "state")
    seen["loaded"] = dict(await engine.fingerprint())
    await engine.save(folder / "adapter")
    await engine.close()
    return seen


def work(layout: Layout, dtype: str, path: Path, start: Path, folder: Path) -> dict[str, Any] | None:
    engine = torch_engine(path, layout=layout, dtype=dtype, lora=replace(SPEC, path=str(start)), **OPTIONS)
    if engine.data_parallel_rank is None:
        asyncio.run(engine.follow(Sum(with_kl), lambda name: nullcontext()))
        return None
    seen = asyncio.run(trained(engine, folder, layout.dp))
    return {**seen, "weights": {name: tensor.numpy() for name, tensor in seen["weights"].items()}}


@pytest.mark.parametrize(("layout", "family", "dtype"), CASES, ids=str)
def test_several_processes_train_an_adapter_as_one(
    layout: Layout, family: str, dtype: str, model_path: ModelPath, tmp_path: Path
) -> None:
    path, start = model_path(family), tmp_path / "start"
    alone = torch_engine(path, lora=SPEC, dtype=dtype, **OPTIONS)
    generator = torch.Generator().manual_seed(1)
    before = {name: torch.randn(p.shape, generator=generator) * 0.05 for name, p in one_rank(alone).policy.parameters.items()}
    write_lora(start, SPEC, path, {name: tensor.numpy() for name, tensor in before.items()})
    alone = torch_engine(path, lora=replace(SPEC, path=str(start)), dtype=dtype, **OPTIONS)
    expected = asyncio.run(trained(alone, tmp_path / "alone", 1))
    processes = Processes(layout.size)
    try:
        answers = processes.run(work, layout, dtype, path, start, tmp_path / "many", size=layout.size, seconds=180)
    finally:
        processes.close()
    leaders = [answer for answer in answers if answer is not None]
    first = leaders[0]
    assert len(leaders) == layout.dp and first["loaded"] == first["fingerprint"]
    made = {name: torch.tensor(array) for name, array in first["weights"].items()}
    rounding = 1e-4 if dtype == "float32" else 0.05
    assert first["norms"] == pytest.approx(expected["norms"], rel=rounding)
    losses = [sum(each["losses"][i] for each in leaders) for i in range(3)]
    assert losses == pytest.approx(expected["losses"], rel=rounding, abs=rounding)
    moved_less(made, expected["weights"], before, 0.02 if dtype == "float32" else 0.3)
    if layout == Layout(layout.dp) and dtype == "float32":  # exact sums do not know how groups were dealt out
        assert first["fingerprint"] == expected["fingerprint"]
    assert_same(read_lora(tmp_path / "many" / "adapter", SPEC), made)
