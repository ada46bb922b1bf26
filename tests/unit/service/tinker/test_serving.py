"""Adapters over a real model: what is trained, saved, loaded again, and sampled from."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import torch as safetensors_torch
from safetensors.numpy import save_file

from asyncflow.engines.base import SampleKey, Sampling
from asyncflow.engines.lora import initial_lora, merged_lora
from asyncflow.engines.lora_files import holds_adapter, spec_in, write_lora
from asyncflow.engines.rollout.adapter_bank import Adapter, AdapterBank
from asyncflow.engines.rollout.decoder_weights import load_tensors
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.slot_options import AdapterRoom
from asyncflow.engines.rollout.slots import Slots
from asyncflow.service.tinker.answers import SampleOutput
from asyncflow.service.tinker.messages import LoraConfig
from asyncflow.service.tinker.samplers import SampleRequest, SamplerFiles, Samplers
from asyncflow.service.tinker.serving import base_model, config_of_model, engine_maker, read_weights, targets_of
from asyncflow.types import LoraSpec, Ragged, RunError, UserError
from tests.conftest import MODEL


def maker() -> Any:
    config = config_of_model(str(MODEL), [])
    return engine_maker(config, base_model(config, MODEL, None))


async def tensors_of(engine: Any) -> dict[str, torch.Tensor]:
    source = await engine.export_weights()
    return {name: tensor.clone() async for name, tensor in source.tensors()}


@pytest.mark.parametrize(("folder", "name"), [("My model (v2)", "My_model__v2_"), (".hidden", "_hidden"), ("a" * 120, "a" * 100)])
def test_the_run_of_a_models_folder_has_a_name_of_a_run(tmp_path: Path, folder: str, name: str) -> None:
    assert config_of_model(str(tmp_path / folder), []).run.name == name


def test_the_run_of_a_link_to_a_model_has_the_links_name(tmp_path: Path) -> None:
    """Caches of models have folders named by hashes: a user names them by links."""
    (tmp_path / "tiny").symlink_to(MODEL)
    assert config_of_model(str(tmp_path / "tiny"), []).run.name == "tiny"


def test_an_adapter_of_a_part_has_the_linear_layers_of_that_part() -> None:
    assert targets_of(MODEL, LoraConfig(rank=4)) == ()
    attention = targets_of(MODEL, LoraConfig(rank=4, train_mlp=False))
    mlp = targets_of(MODEL, LoraConfig(rank=4, train_attn=False))
    assert attention == ("k_proj", "o_proj", "q_proj", "v_proj") and mlp == ("down_proj", "gate_proj", "up_proj")


async def test_an_adapter_is_made_saved_and_loaded_and_its_base_stays(tmp_path: Path) -> None:
    make = maker()
    asked = LoraConfig(rank=4, train_mlp=False, seed=3)
    engine, other = make(None, asked), make(None, LoraConfig(rank=4, train_mlp=False, seed=4))
    first, others = await tensors_of(engine), await tensors_of(other)
    lows = [name for name in first if "lora_A" in name]
    assert lows and all("self_attn" in name for name in first) and not any(first[name].equal(others[name]) for name in lows)
    for target in (tmp_path / "adapter", tmp_path / "same"):
        target.mkdir()
        await engine.save(target)
    assert holds_adapter(tmp_path / "adapter") and not holds_adapter(MODEL)
    assert (spec_in(tmp_path / "adapter").rank, spec_in(tmp_path / "adapter").alpha) == (4, 32.0)
    again = make(tmp_path / "adapter", None)  # of the checkpoint, whatever is asked for
    assert all(tensor.equal(first[name]) for name, tensor in (await tensors_of(again)).items())
    # The base, as long as B is 0.
    base, merged = load_tensors(MODEL), merged_lora(MODEL, tmp_path / "adapter")
    assert all(tensor.equal(base[name]) for name, tensor in merged.items())
    for made in (engine, other, again):
        await made.close()


async def test_without_an_adapter_all_weights_are_trained(tmp_path: Path) -> None:
    make = maker()
    engine = make(None, None)
    assert "model.embed_tokens.weight" in await tensors_of(engine)
    (tmp_path / "whole").mkdir()
    await engine.save(tmp_path / "whole")
    again = make(tmp_path / "whole", LoraConfig(rank=4))  # likewise
    assert "model.embed_tokens.weight" in await tensors_of(again)
    for made in (engine, again):
        await made.close()


def test_a_part_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="layers that the model does not have"):
        targets_of(tmp_path, LoraConfig(rank=4, train_mlp=False))


PROMPT = np.arange(3, 20)


async def adapter_files(folder: Path, engine: SlotEngine, spec: LoraSpec, seed: int) -> SamplerFiles:
    """PEFT's files of an adapter that is not 0."""
    shapes = {name: tuple(piece.shape) for name, piece in engine._decoder.lora.new(spec).slices.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in initial_lora(shapes, spec, seed).items()}
    write_lora(folder, spec, MODEL, {name: tensor.numpy() for name, tensor in tensors.items()})
    return SamplerFiles(MODEL, folder)


def wanted(weights: SamplerFiles) -> SampleRequest:
    sampling = Sampling(max_new_tokens=16, stop_ids=())
    return SampleRequest(weights, PROMPT, 2, sampling, SampleKey(1, 2), scored_tokens=len(PROMPT))


def bits(output: SampleOutput) -> list[bytes]:
    assert output.prompt_logprobs is not None
    each = [part.tobytes() for one in output.sequences for part in (one.token_ids, one.logprobs)]
    return [*each, output.prompt_logprobs.tobytes()]


async def test_clients_with_different_adapters_sample_at_once_on_one_engine_by_their_trainers_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = AdapterRoom(number=2, rank=8)
    engine = SlotEngine(MODEL, num_slots=8, max_context=128, adapter_room=room)
    adapters = [
        await adapter_files(tmp_path / "one", engine, LoraSpec(8, 32.0), 1),
        await adapter_files(tmp_path / "two", engine, LoraSpec(3, 32.0, ("k_proj", "o_proj", "q_proj", "v_proj")), 2),
        await adapter_files(tmp_path / "large", engine, LoraSpec(9, 32.0), 3),
    ]
    samplers = Samplers([engine], MODEL, read_weights, largest_queue=10, num_adapters=room.number)
    asked = [*adapters[:2], SamplerFiles(MODEL)]
    alone = [bits(await samplers.sample(wanted(weights))) for weights in asked]
    assert len({tuple(each) for each in alone}) == 3
    passes, rows_of = [], AdapterBank.rows_of

    def seen(bank: AdapterBank, numbers: np.ndarray) -> Any:
        passes.append(set(numbers.tolist()))
        return rows_of(bank, numbers)

    monkeypatch.setattr(AdapterBank, "rows_of", seen)
    outputs = await asyncio.gather(*(samplers.sample(wanted(weights)) for weights in asked))
    assert {0, 1, 2} in passes, "no pass had rows of all three"
    assert [bits(output) for output in outputs] == alone
    with pytest.raises(ValueError, match="rank 9 exceeds the largest rank that this engine has room for, 8"):
        await samplers.sample(wanted(adapters[2]))
    make = maker()
    for weights, output in zip(adapters, outputs[:2], strict=False):
        trainer = make(weights.adapter, None)
        ids = Ragged.from_arrays([one.token_ids for one in output.sequences], "int64")
        theirs = (await trainer.log_probs(PROMPT, ids)).values
        assert np.abs(theirs - np.concatenate([one.logprobs for one in output.sequences])).max() < 1e-5
        await trainer.close()
    await samplers.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_engine_that_has_not_the_weights_that_it_was_given_samples_nothing_until_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    """The first load of an adapter and the first installs of a model come to nothing, or to a half."""
    engine = SlotEngine(MODEL, num_slots=8, max_context=128, dtype=dtype, adapter_room=AdapterRoom(number=2, rank=8))
    adapter = await adapter_files(tmp_path / "one", engine, LoraSpec(8, 32.0), 1)
    other = shutil.copytree(MODEL, tmp_path / "other")
    changed = {name: 1.01 * tensor for name, tensor in load_tensors(MODEL).items()}
    safetensors_torch.save_file(changed, other / "model.safetensors")
    read = partial(read_weights, dtype=dtype)
    samplers = Samplers([engine], MODEL, read, largest_queue=10, num_adapters=2)
    copy, install = Adapter.copy, Slots.install

    def half(self: Adapter, tensors: dict[str, torch.Tensor]) -> None:
        copy(self, {name: 0 * tensor if "layers.0" in name else tensor for name, tensor in tensors.items()})

    monkeypatch.setattr(Adapter, "copy", half)
    with pytest.raises(RunError, match=r"the server's engine has others: .* other weights than those of version 0"):
        await samplers.sample(wanted(adapter))
    monkeypatch.setattr(Adapter, "copy", copy)
    right = bits(await samplers.sample(wanted(adapter)))
    monkeypatch.setattr(Slots, "install", lambda self, *arguments: None)
    for _ in range(2):  # the engine still has the base, which nobody knows
        with pytest.raises(RunError, match=r"the server's engine has others: .* other weights than those of"):
            await samplers.sample(wanted(SamplerFiles(other)))
    assert bits(await samplers.sample(wanted(adapter))) == right, "its base is brought, and looked at again"
    monkeypatch.setattr(Slots, "install", install)
    whole = [bits(await samplers.sample(wanted(SamplerFiles(folder)))) for folder in (other, MODEL, other)]
    assert whole[0] == whole[2] != whole[1]
    assert bits(await samplers.sample(wanted(adapter))) == right
    await samplers.close()
