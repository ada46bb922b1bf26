"""Attested weights: an engine that generates with anything but the version that it was given is found at the install, by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncflow.attestation import Attestation, fault_of
from asyncflow.bit_sums import sum_of, sum_of_bits
from asyncflow.engines.lora import sum_of_base
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.vllm.weights import TensorsInFiles, shapes_of
from asyncflow.types import HeldWeights, LoraSpec
from asyncflow.weight_sync.base import Manifest, WeightSyncOptions
from asyncflow.weight_sync.shared_memory import SharedMemory
from tests.unit.engines.rollout.test_decoder import new_model

SPEC = LoraSpec(rank=4, alpha=8.0)
Q = "model.layers.1.self_attn.q_proj"


def engine_of(path: Path, *, has_lora: bool, dtype: Any = "float32") -> SlotEngine:
    lora = {"lora": SPEC} if has_lora else {}
    return SlotEngine(path, num_slots=4, max_context=64, dtype=dtype, stop_ids=[], **lora)


def version_of(engine: SlotEngine, path: Path, seed: int, *, has_lora: bool) -> dict[str, Tensor]:
    """A whole model, or an adapter, that is another one for each seed."""
    generator = torch.Generator().manual_seed(seed)
    before = engine._decoder.lora.slices if has_lora else load_file(path / "model.safetensors")
    return {name: torch.randn(tensor.shape, generator=generator) * 0.1 for name, tensor in before.items()}


async def published(tmp_path: Path, tensors: Mapping[str, Tensor], version: int, dtype: str, base: int | None) -> Manifest:
    options = WeightSyncOptions(directory=tmp_path / f"weights-{version}", attested_dtype=dtype, base=base)
    sender = SharedMemory(options).sender("one")
    manifest = await sender.publish(version, HeldWeights(tensors))
    await sender.close()
    return manifest


def fault(manifest: Manifest, attested: Attestation) -> str:
    return fault_of(attested, manifest.version, manifest.sums, manifest.base)


@pytest.fixture(params=["qwen2", "qwen2-untied", "qwen3", "llama"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    new_model(request.param).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("has_lora", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_engine_shows_that_it_has_the_version_that_was_published(
    path: Path, tmp_path: Path, has_lora: bool, dtype: str
) -> None:
    engine = engine_of(path, has_lora=has_lora, dtype=dtype)
    base = sum_of_base(path, dtype) if has_lora else None
    tensors = [version_of(engine, path, seed, has_lora=has_lora) for seed in (1, 2)]
    manifests = [await published(tmp_path, each, number, dtype, base) for number, each in enumerate(tensors, 1)]
    assert not has_lora or manifests[0].num_bytes < 0.5 * (path / "model.safetensors").stat().st_size
    for own, other in ((0, 1), (1, 0)):
        await engine.install(own, tensors[own])
        attested = await engine.attest()
        assert fault(manifests[own], attested) == ""
        assert "generates with other weights than those of version" in fault(manifests[other], attested), "a stale version"
    await engine.close()


@pytest.mark.parametrize("has_lora", [False, True], ids=["whole", "adapter"])
async def test_rotary_frequencies_in_a_model_s_files_are_no_weights(path: Path, tmp_path: Path, has_lora: bool) -> None:
    """Older files of Llama's kind have them: transformers leaves them out, so neither trainer nor engine has them to add up."""
    before, shapes, names = sum_of_base(path, "float32"), shapes_of(path), [*TensorsInFiles(path)]
    tensors = load_file(path / "model.safetensors")
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    save_file({**tensors, **buffers}, path / "model.safetensors", metadata={"format": "pt"})
    assert (sum_of_base(path, "float32"), shapes_of(path), [*TensorsInFiles(path)]) == (before, shapes, names)
    engine = engine_of(path, has_lora=has_lora, dtype="float32")
    version = {n: t for n, t in version_of(engine, path, 1, has_lora=has_lora).items() if n not in buffers}
    manifest = await published(tmp_path, version, 1, "float32", sum_of_base(path, "float32") if has_lora else None)
    await engine.install(1, version)
    assert fault(manifest, await engine.attest()) == ""
    await engine.close()


def nothing(engine: SlotEngine, tensors: Mapping[str, Tensor]) -> None:
    """An install that installs nothing."""


def the_version_before(engine: SlotEngine, tensors: Mapping[str, Tensor]) -> None:
    """An update of a small step ago."""
    engine._decoder.install({name: tensor + 1e-6 for name, tensor in tensors.items()})


def zero_modules(engine: SlotEngine, tensors: Mapping[str, Tensor]) -> None:
    engine._decoder.install(tensors)
    engine._decoder.lora.use(False)


def half_bound(engine: SlotEngine, tensors: Mapping[str, Tensor]) -> None:
    engine._decoder.install(tensors)
    for layer in engine._decoder.lora._layers[::2]:
        layer.linear.lora.clear()


def one_tensor_stays(engine: SlotEngine, tensors: Mapping[str, Tensor]) -> None:
    own = f"{Q}.lora_B.weight" if engine._decoder.lora.slices else f"{Q}.weight"
    before = engine._decoder.installed(own).clone()
    engine._decoder.install({**tensors, own: before})


def rounded(engine: SlotEngine, tensors: Mapping[str, Tensor]) -> None:
    engine._decoder.install({name: tensor.bfloat16().float() for name, tensor in tensors.items()})


def one_bit(engine: SlotEngine, tensors: Mapping[str, Tensor]) -> None:
    name = f"{Q}.lora_A.weight" if engine._decoder.lora.slices else "model.norm.weight"
    flipped = tensors[name].clone()
    flipped.view(torch.int32).view(-1)[3] ^= 1
    engine._decoder.install({**tensors, name: flipped})


def the_embedding_stays(engine: SlotEngine, tensors: Mapping[str, Tensor]) -> None:
    """Of a model that ties its output layer: that is right, and the tokens that go in are looked up in the old one."""
    before = engine._decoder.embedding.clone()
    engine._decoder.install(tensors)
    engine._decoder.embedding.copy_(before)


FAULTS: list[tuple[Callable[[SlotEngine, Mapping[str, Tensor]], None], bool, str]] = [
    (nothing, True, "without 42 of the 42 tensors of version 2, model.layers.0.mlp.down_proj.lora_A.weight the first"),
    (nothing, False, "in 30 of 30 parts, model.embed_tokens.weight the first"),
    (the_version_before, True, "in 24 of 24 parts, model.layers.0.self_attn.q_proj.lora_A.weight the first"),
    (the_version_before, False, "in 30 of 30 parts, model.embed_tokens.weight the first"),
    (
        zero_modules,
        True,
        "without 42 of the 42 tensors of version 2, model.layers.0.mlp.down_proj.lora_A.weight the first",
    ),
    (
        half_bound,
        True,
        "without 24 of the 42 tensors of version 2, model.layers.0.self_attn.k_proj.lora_A.weight the first",
    ),
    (one_tensor_stays, True, f"in 1 of 24 parts, {Q}.lora_B.weight the first"),
    (one_tensor_stays, False, f"in 1 of 30 parts, {Q}.weight the first"),
    (the_embedding_stays, False, "in 1 of 30 parts, model.embed_tokens.weight the first"),
    (rounded, True, "in 24 of 24 parts, model.layers.0.self_attn.q_proj.lora_A.weight the first"),
    (rounded, False, "in 30 of 30 parts, model.embed_tokens.weight the first"),
    (one_bit, True, f"in 1 of 24 parts, {Q}.lora_A.weight the first"),
    (one_bit, False, "in 1 of 30 parts, model.norm.weight the first"),
]


@pytest.mark.parametrize(("install", "has_lora", "sentence"), FAULTS, ids=lambda v: getattr(v, "__name__", str(v)[:8]))
@pytest.mark.parametrize("path", ["qwen2"], indirect=True)
async def test_a_planted_fault_is_found_at_the_first_install(
    install: Callable[[SlotEngine, Mapping[str, Tensor]], None], has_lora: bool, sentence: str, path: Path, tmp_path: Path
) -> None:
    engine = engine_of(path, has_lora=has_lora)
    tensors = version_of(engine, path, 1, has_lora=has_lora)
    manifest = await published(tmp_path, tensors, 2, "float32", sum_of_base(path, "float32") if has_lora else None)
    install(engine, tensors)
    found = fault(manifest, await engine.attest())
    assert found.endswith(sentence) and "version 2" in found, found
    engine._decoder.install(tensors)
    assert fault(manifest, await engine.attest()) == ""
    await engine.close()


@pytest.mark.parametrize("path", ["qwen2"], indirect=True)
async def test_another_base_is_found_whatever_the_adapter(path: Path, tmp_path: Path) -> None:
    engine = engine_of(path, has_lora=True)
    tensors = version_of(engine, path, 1, has_lora=True)
    whole = load_file(path / "model.safetensors")
    whole["model.norm.weight"][0] += 1e-3
    (tmp_path / "other").mkdir()
    save_file(whole, tmp_path / "other" / "model.safetensors")
    (tmp_path / "other" / "config.json").write_text((path / "config.json").read_text())
    manifest = await published(tmp_path, tensors, 1, "float32", sum_of_base(tmp_path / "other", "float32"))
    await engine.install(1, tensors)
    assert fault(manifest, await engine.attest()) == (
        "version 1 is an adapter for another base than the engine's: give every machine the same model"
    )
    await engine.close()


def test_a_sum_does_not_know_the_order_and_knows_every_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensor = torch.randn(3, 50, dtype=torch.float64).to(dtype)
        assert sum_of_bits(tensor) == sum_of_bits(tensor.flatten()[torch.randperm(150)]) == sum_of_bits(tensor.t())
        assert 0 <= sum_of_bits(tensor) < 1 << 32 and sum_of_bits(torch.zeros(5, dtype=dtype)) == 0
        assert sum_of_bits(tensor) != sum_of_bits(tensor * 2)


def test_a_sum_over_an_adapter_sees_its_scaling_left_out() -> None:
    """vLLM keeps B times the scaling, which is a power of two as a rule: in 32 bits such a change adds up to nothing."""
    b = torch.randn(576, 16)
    assert sum_of_bits(b) == sum_of_bits(2 * b) and sum_of("q_proj.lora_B.weight", b) != sum_of("q_proj.lora_B.weight", 2 * b)
    sums = {"q_proj.lora_B.weight": sum_of("q_proj.lora_B.weight", 2 * b)}
    for scaling, is_right in ((2, True), (1, False), (4, False), (-2, False)):
        told = Attestation([([*sums], sum_of("q_proj.lora_B.weight", scaling * b))])
        assert (fault_of(told, 1, sums) == "") == is_right, scaling


@pytest.mark.parametrize("count", [1, 65_536, 65_537, 200_000])
def test_a_sum_is_that_of_all_words_also_where_it_does_not_fit_into_32_bits(count: int) -> None:
    for dtype, size in ((torch.uint8, 8), (torch.int16, 16), (torch.int32, 32), (torch.int64, 64)):
        largest = (1 << size) - 1 if size == 8 else (1 << (size - 1)) - 1
        for value in (largest, 1, *(() if size == 8 else (-1, -largest - 1))):
            halves = (value & ((1 << 32) - 1)) + (value >> 32) if size == 64 else value
            assert sum_of_bits(torch.full((count,), value, dtype=dtype)) == count * halves % (1 << 32)
    words = torch.randint(-(1 << 31), 1 << 31, (count,), generator=torch.Generator().manual_seed(count), dtype=torch.int32)
    assert sum_of_bits(words) == sum(words.tolist()) % (1 << 32)


def test_a_base_that_is_not_all_seen_is_not_compared_and_one_that_is_not_told_is_refused() -> None:
    told = Attestation([(["a"], 1)])
    assert "an adapter for another base" in fault_of(told, 1, {"a": 1}, 5)
    assert fault_of(replace(told, unseen=["model.norm"]), 1, {"a": 1}, 5) == ""
    assert "an adapter for another base" in fault_of(replace(told, base=6, unseen=["model.norm"]), 1, {"a": 1}, 5)
