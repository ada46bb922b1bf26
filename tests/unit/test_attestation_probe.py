"""The probe: what an engine's sums do not see is found at the install by its log-probs, and right weights are let through."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncflow.attestation import Attestation, Probe, Probing, fault_of_probe, new_probing
from asyncflow.engines.base import MicroBatch
from asyncflow.engines.lora import sum_of_base
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.transformers_engine import TransformersEngine
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.loops.algorithm1 import probed
from asyncflow.types import Ragged
from tests.unit.engines.train.training import Sum, one_rank, policy_gradient, torch_engine, train_on, weights_of
from tests.unit.test_attestation import (
    SPEC,
    Q,
    engine_of,
    fault,
    half_bound,
    nothing,
    path,
    published,
    version_of,
    zero_modules,
)

__all__ = ["path"]  # the fixture


async def probe_by(trainer: TorchEngine, probing: Probing, tensors: Mapping[str, Tensor], dtype: str | None = None) -> Probe:
    """What a trainer with these weights makes of it, as its loop asks for it. `dtype`: what versions travel in."""
    with torch.no_grad():
        for name, parameter in one_rank(trainer).policy.parameters.items():
            parameter.copy_(tensors[name])

    async def probe_ids(version: int) -> list[int]:
        return probing.token_ids

    @contextlib.contextmanager
    def busy(task: str, **fields: Any) -> Iterator[None]:
        yield

    context: Any = SimpleNamespace(
        versions=SimpleNamespace(probe_ids=probe_ids),
        spans=SimpleNamespace(busy=busy),
        published_dtype=dtype,
    )
    probe = await probed(trainer, context, 2)
    assert probe is not None
    return probe


def strong_version(engine: SlotEngine, path: Path, *, has_lora: bool) -> dict[str, Tensor]:
    """A version whose matrices count for much, as a trained model's do; its norms are the files'."""
    if has_lora:
        return version_of(engine, path, 1, has_lora=True)
    generator = torch.Generator().manual_seed(1)
    whole = load_file(path / "model.safetensors")
    return {n: torch.randn(t.shape, generator=generator) * 0.3 if t.ndim == 2 else t for n, t in whole.items()}


def micro_batch() -> MicroBatch:
    rows = Ragged.from_arrays([np.arange(5, 9), np.arange(20, 24)], "int64")
    size = len(rows.values)
    return MicroBatch(
        indices=np.arange(2),
        prompt_ids=np.arange(30, 36),
        response_ids=rows,
        loss_mask=Ragged(np.ones(size, np.uint8), rows.offsets),
        rollout_logprobs=Ragged(np.full(size, -4.0, np.float32), rows.offsets),
        advantages=np.array([1.0, -0.5], np.float32),
        staleness=np.zeros(2, np.int64),
    )


async def told_by(engine: SlotEngine | TransformersEngine, probe: Probe) -> Attestation:
    """As a rollout worker reports it."""
    found = await engine.log_probs(np.array(probe.token_ids))
    attested = await engine.attest()
    return Attestation(attested.parts, attested.base, found.tolist())


def swapped_rows(engine: SlotEngine, tensors: Mapping[str, Tensor]) -> None:
    """Two heads change places in one matrix: the same elements, elsewhere."""
    name = f"{Q}.lora_B.weight" if engine._decoder.lora.slices else f"{Q}.weight"
    engine._decoder.install({**tensors, name: tensors[name].roll(len(tensors[name]) // 2, 0)})


def shuffled(engine: SlotEngine, tensors: Mapping[str, Tensor]) -> None:
    """The elements of each matrix of a kind change places."""
    generator = torch.Generator().manual_seed(5)
    kind = "lora_A.weight" if engine._decoder.lora.slices else "down_proj.weight"
    moved = {
        name: tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape)
        for name, tensor in tensors.items()
        if name.endswith(kind)
    }
    engine._decoder.install({**tensors, **moved})


def stale(engine: SlotEngine, tensors: Mapping[str, Tensor]) -> None:
    """The version before is installed once more."""
    engine._decoder.install({name: 0.5 * tensor for name, tensor in tensors.items()})


def negated(engine: SlotEngine, tensors: Mapping[str, Tensor]) -> None:
    """All elements of each matrix of a kind have the other sign."""
    kind = "lora_A.weight" if engine._decoder.lora.slices else "down_proj.weight"
    engine._decoder.install({name: -tensor if name.endswith(kind) else tensor for name, tensor in tensors.items()})


Install = Callable[[SlotEngine, Mapping[str, Tensor]], None]
OF_ADAPTERS: dict[Install, set[str]] = {zero_modules: {"float32", "bfloat16"}, half_bound: {"float32", "bfloat16"}}
FAULTS: dict[Install, set[str]] = {
    **{nothing: {"float32", "bfloat16"}, stale: {"float32", "bfloat16"}, shuffled: {"float32", "bfloat16"}},
    negated: {"float32", "bfloat16"},
    swapped_rows: {"float32"},  # of one matrix of an adapter: in bfloat16 it is no more than right weights differ by
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_lora", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("path", ["qwen2"], indirect=True)
async def test_right_weights_are_let_through_and_a_planted_fault_is_found_with_both_numbers(
    path: Path, tmp_path: Path, has_lora: bool, dtype: str
) -> None:
    engine, trainer = engine_of(path, has_lora=has_lora, dtype=dtype), torch_engine(path, lora=SPEC if has_lora else None)
    probing, tensors = new_probing(96, 64, ["float32", dtype]), strong_version(engine, path, has_lora=has_lora)
    probe = await probe_by(trainer, probing, tensors)
    manifest = await published(tmp_path, tensors, 2, dtype, sum_of_base(path, dtype) if has_lora else None)
    for install, dtypes in (FAULTS | OF_ADAPTERS if has_lora else FAULTS).items():
        if dtype not in dtypes:
            continue
        install(engine, tensors)
        told = await told_by(engine, probe)
        found = fault_of_probe(told, 2, probe, probing.tolerance)
        named = re.match(
            r"the engine gives token (\d+) of the probe sequence the log-prob (\S+), and the trainer (\S+) under", found
        )
        assert named is not None, (install.__name__, found)
        at = int(named[1]) - 2
        assert named.group(2, 3) == (f"{told.log_probs[at]:.4f}", f"{probe.log_probs[at]:.4f}"), "it names both numbers"
        is_unseen = install in (shuffled, swapped_rows) or (install is negated and dtype == "float32" and not has_lora)
        assert (fault(manifest, told) == "") == is_unseen, "a sum knows no order, and 32 bits of what 32-bit words add up to"
        engine._decoder.lora.use(True)
        await engine.install(2, tensors)
        assert fault_of_probe(await told_by(engine, probe), 2, probe, probing.tolerance) == ""
    await engine.close()
    await trainer.close()


@pytest.mark.parametrize("has_lora", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("path", ["qwen2"], indirect=True)
async def test_right_weights_that_travel_rounded_are_let_through_and_a_fault_is_found_within_the_same_bound(
    path: Path, has_lora: bool
) -> None:
    """Both ends compute in float32: the trainer's own weights are not those that the engine was given."""
    engine, trainer = engine_of(path, has_lora=has_lora), torch_engine(path, lora=SPEC if has_lora else None)
    probing, tensors = new_probing(96, 64, ["float32", "float32"]), strong_version(engine, path, has_lora=has_lora)
    sent = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    probe, of_own = [await probe_by(trainer, probing, tensors, dtype) for dtype in ("bfloat16", None)]
    kept = await weights_of(trainer)
    assert all(kept[name].equal(tensor) for name, tensor in tensors.items()), "the trainer's are what they were"
    await engine.install(2, sent)
    told = await told_by(engine, probe)
    assert fault_of_probe(told, 2, probe, probing.tolerance) == ""
    assert fault_of_probe(told, 2, of_own, probing.tolerance), "rounding alone moves log-probs by more"
    swapped_rows(engine, sent)
    assert fault_of_probe(await told_by(engine, probe), 2, probe, probing.tolerance)
    await engine.close()
    await trainer.close()


@pytest.mark.parametrize("path", ["qwen2"], indirect=True)
async def test_a_probe_is_scored_at_temperature_1_whatever_the_run_s_is(path: Path) -> None:
    slots, trainer = engine_of(path, has_lora=False), torch_engine(path, temperature=0.7)
    general = TransformersEngine(path, num_slots=2, max_context=64, stop_ids=[])
    tensors = strong_version(slots, path, has_lora=False)
    probe = await probe_by(trainer, new_probing(96, 64, ["float32"]), tensors)
    for engine in (slots, general):
        await engine.install(2, tensors)
        assert fault_of_probe(await told_by(engine, probe), 2, probe, 1e-5) == ""
        await engine.close()
    sampled = await trainer.log_probs(np.array(probe.token_ids[:1]), Ragged.from_arrays([np.array(probe.token_ids[1:])], "int64"))
    assert np.abs(sampled.values - probe.log_probs).max() > 1e-3, "at the run's"
    await trainer.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", ["qwen2"], indirect=True)
@pytest.mark.parametrize("published", [None, "bfloat16"])
async def test_a_probe_changes_no_bit_of_the_training(path: Path, dtype: str, published: str | None) -> None:
    prints = []
    for is_probed in (False, True):
        trainer = torch_engine(path, accumulate="exact", learning_rate=1e-3, dtype=dtype)
        for _ in range(2):
            await trainer.begin_step()
            await train_on(trainer, micro_batch(), Sum(policy_gradient))
            if is_probed:
                await probe_by(trainer, new_probing(96, 64, ["float32"]), await weights_of(trainer), published)
            await trainer.optim_step(8)
        prints.append(await trainer.fingerprint())
        await trainer.close()
    assert prints[0] == prints[1]


def test_an_engine_that_cannot_sum_up_its_weights_may_differ_by_more_and_one_that_tells_nothing_is_let_through() -> None:
    probe = Probe([1, 2, 3], [-2.0, -3.0])
    for parts, difference, is_right in (([], 0.19, True), ([], 0.21, False), (None, 0.99, True), (None, 1.01, False)):
        told = Attestation(parts, None, [-2.0 - difference, -3.0 - difference])
        assert (fault_of_probe(told, 1, probe, 0.2) == "") == is_right, (parts, difference)
    assert fault_of_probe(Attestation([], None, [-2.9, -3.9], unseen=["a"]), 1, probe, 0.2) == "", "it may be quantised"
    assert fault_of_probe(Attestation([]), 1, probe, 0.2) == ""
    assert "nan" in fault_of_probe(Attestation([], None, [-2.0, math.nan]), 1, probe, 0.2)
    right, wrong = probe.log_probs, [-5.0, -3.0]
    assert fault_of_probe(Attestation([], None, [*right, *right]), 1, probe, 0.2) == "", "two servers"
    found = fault_of_probe(Attestation([], None, [*right, *wrong]), 1, probe, 0.2)
    assert "token 2 of the probe sequence the log-prob -5.0000, and the trainer -2.0000 under version 1" in found
    assert "differ by 1.5 nats on average, and may by 0.2" in found
    assert "3 log-probs of the probe sequence's 2" in fault_of_probe(Attestation([], None, [*right, -1.0]), 1, probe, 0.2)
    assert fault_of_probe(Attestation([], None, []), 1, probe, 0.2)


def test_the_probe_fits_every_vocabulary_and_context() -> None:
    for vocabulary in (2, 20, 96, 49152, 262_144):
        for context in (1, 2, 15, 16, 4096):
            ids = new_probing(vocabulary, context, ["float32", "bfloat16"]).token_ids
            assert len(ids) == (min(16, context) if context > 1 else 0) and all(0 <= token < vocabulary for token in ids)
            assert vocabulary < 32 or (len(set(ids)) == len(ids) and max(ids, default=0) <= vocabulary // 2)
