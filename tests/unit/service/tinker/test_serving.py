"""Adapters over a real model: what is trained, saved, loaded again, and sampled from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from asyncflow.engines.lora import merged_lora
from asyncflow.engines.lora_files import spec_in
from asyncflow.engines.rollout.decoder import load_tensors
from asyncflow.service.tinker.context import NewAdapter
from asyncflow.service.tinker.serving import base_model, config_of_model, engine_maker, holds_adapter, targets_of
from asyncflow.types import UserError
from tests.conftest import MODEL


def maker() -> Any:
    config = config_of_model(str(MODEL), [])
    return engine_maker(config, base_model(config, None))


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
    assert targets_of(MODEL, NewAdapter(rank=4)) == ()
    attention = targets_of(MODEL, NewAdapter(rank=4, has_mlp=False))
    mlp = targets_of(MODEL, NewAdapter(rank=4, has_attention=False))
    assert attention == ("k_proj", "o_proj", "q_proj", "v_proj") and mlp == ("down_proj", "gate_proj", "up_proj")


async def test_an_adapter_is_made_saved_and_loaded_and_its_base_stays(tmp_path: Path) -> None:
    make = maker()
    asked = NewAdapter(rank=4, has_mlp=False, seed=3)
    engine, other = make(None, asked), make(None, NewAdapter(rank=4, has_mlp=False, seed=4))
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
    # What is sampled from: the base, as long as B is 0.
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
    again = make(tmp_path / "whole", NewAdapter(rank=4))  # likewise
    assert "model.embed_tokens.weight" in await tensors_of(again)
    for made in (engine, again):
        await made.close()


def test_a_part_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="layers that the model does not have"):
        targets_of(tmp_path, NewAdapter(rank=4, has_mlp=False))
