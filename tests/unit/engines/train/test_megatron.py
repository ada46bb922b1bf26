"""Weights to Megatron's shards and back, without Megatron."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.rollout.decoder_weights import load_tensors
from asyncflow.engines.train.adapters.megatron.core import Core
from asyncflow.engines.train.adapters.megatron.origins import Origin, origins, padded_vocabulary
from asyncflow.types import Layout
from tests.unit.engines.train.training import ModelPath


def config_of(path: Path, **changes: object) -> DecoderConfig:
    return DecoderConfig.from_fields({**json.loads((path / "config.json").read_text()), **changes})


@pytest.mark.parametrize(("kind", "first"), [("npu", ["mindspeed.megatron_adaptor"]), ("cpu", [])])
def test_on_npus_mindspeed_comes_before_megatron(monkeypatch: pytest.MonkeyPatch, kind: str, first: list[str]) -> None:
    """It replaces parts of it."""
    loaded: list[str] = []

    def load(name: str) -> None:
        loaded.append(name)
        if name.startswith("megatron"):
            raise ModuleNotFoundError(name)

    device: Any = SimpleNamespace(type=kind)
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda name: name == "mindspeed" or None)
        patched.setattr(importlib, "import_module", load)
        with pytest.raises(ModuleNotFoundError, match="megatron"):
            Core(Layout(1, 1, 1), device)
    assert loaded == [*first, "megatron.core.parallel_state"]


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family", ["qwen2-tiny", "qwen3-tiny", "llama-tiny"])
def test_shards_make_up_the_model_again(model_path: ModelPath, family: str, num_ranks: int, num_stages: int) -> None:
    path = model_path(family)
    config, tensors = config_of(path), load_tensors(path)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    each = config.num_hidden_layers // num_stages
    found: dict[str, torch.Tensor] = {}
    for stage in range(num_stages):
        layers = range(stage * each, (stage + 1) * each)
        for origin in origins(config, layers, is_first=stage == 0, is_last=stage == num_stages - 1).values():
            whole = [tensors[name] for name in origin.names]
            shards = [origin.shard(whole, rank, num_ranks) for rank in range(num_ranks)]
            assert len({shard.shape for shard in shards}) == 1
            if origin.cut != "whole":
                padded = padded_vocabulary(config.vocab_size, num_ranks) * config.hidden_size
                total = padded if origin.cut == "vocabulary" else sum(tensor.numel() for tensor in whole)
                assert sum(shard.numel() for shard in shards) == total
            found |= dict(zip(origin.names, origin.join(shards), strict=True))
    assert found.keys() == tensors.keys() and all(found[name].equal(tensors[name]) for name in tensors)


def test_queries_lie_beside_the_key_that_they_share() -> None:
    origin = Origin(("q", "k", "v"), "heads", num_key_heads=2, head_dim=1)
    q, k, v = torch.tensor([1.0, 2, 3, 4]), torch.tensor([10.0, 20]), torch.tensor([100.0, 200])
    assert origin.shard([q, k, v], 0, 1).tolist() == [1, 2, 10, 100, 3, 4, 20, 200]
    assert origin.shard([q, k, v], 1, 2).tolist() == [3, 4, 20, 200]


def test_each_rank_has_its_gate_above_its_up() -> None:
    origin = Origin(("gate", "up"), "rows")
    gate, up = torch.arange(4.0), torch.arange(4.0) + 10
    assert origin.shard([gate, up], 1, 2).tolist() == [2, 3, 12, 13]


def test_the_last_shard_of_a_vocabulary_is_filled_up() -> None:
    origin = Origin(("embedding",), "vocabulary", vocab_size=5)
    shards = [origin.shard([torch.arange(1.0, 6)[:, None]], rank, 2) for rank in range(2)]
    assert [shard.flatten().tolist() for shard in shards] == [[1, 2, 3], [4, 5, 0]]


def test_an_untied_model_has_an_output_layer_of_its_own(model_path: ModelPath) -> None:
    config = config_of(model_path("qwen2-tiny"), tie_word_embeddings=False)
    last = origins(config, range(1, 2), is_first=False, is_last=True)
    assert last["output_layer.weight"].names == ("lm_head.weight",)
    assert last["decoder.layers.0.mlp.linear_fc2.weight"].names == ("model.layers.1.mlp.down_proj.weight",)
    assert "embedding.word_embeddings.weight" not in last
