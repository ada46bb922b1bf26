"""The cache of `rollout.engine: transformers`: log-probs beside one forward pass of families with caches of every kind, and what
the engine does at its start about a cache that is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.engines.rollout.transformers_engine import TransformersEngine
from tests.families import CONFIGS, plain_log_probs, write_model
from tests.unit.engines.rollout.models import llama

CONTEXT = 40
Keys = tuple[Tensor, Tensor]
Update = Callable[..., Keys]


def opened(path: Path, **changes: Any) -> TransformersEngine:
    return TransformersEngine(path, **{"num_slots": 6, "max_context": CONTEXT, "stop_ids": (), **changes})


async def largest_difference(engine: TransformersEngine, path: Path) -> float:
    """Largest difference from one forward pass, in batches of prompts of several lengths whose rows end one after another. Between
    any two tokens something else is computed, as an install's probe does."""
    rows: Any = engine._slots
    between, other = rows._between_tokens, np.arange(3, 20)
    rows._between_tokens = lambda: (engine._log_probs(other), between())
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    largest, asked = 0.0, [(number, length) for number, length in enumerate((7, 7, 1, 12, 1, 2, 7))]
    prompts = [np.random.default_rng(number).integers(3, 61, length) for number, length in asked]

    async def responses(number: int, count: int) -> list[Response]:
        stream = engine.generate(prompts[number], samples=range(2), sampling=Sampling(0.7, count), key=SampleKey(1, number))
        return [response async for response in stream]

    all_made = await asyncio.gather(*(responses(number, 3 + 6 * (number % 3)) for number, _ in asked))
    for prompt, made in zip(prompts, all_made, strict=True):
        for response in made:
            with torch.no_grad():
                expected = plain_log_probs(plain, prompt, response.token_ids, 0.7).numpy()
            largest = max(largest, float(np.abs(expected - response.logprobs).max()))
    await engine.close()
    return largest


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "gemma2, windows",
        "gpt_oss",
        "deepseek_v3",
        "mamba",
        "lfm2",
        "falcon_h1",
        "jamba",
        "recurrent_gemma",
        "xlstm",
        "rwkv",
    ],
)
def test_log_probs_are_those_of_one_forward_pass(name: str, tmp_path: Path) -> None:
    path, kind = write_model(name, tmp_path), CONFIGS[name][0]
    engine = opened(path)
    way = "one by one: in a batch, with the cache, log-probs differ by" if kind == "rwkv" else "in batches: with the cache"
    assert engine.remark.startswith(f"rows of this {kind} are generated {way}")
    assert asyncio.run(largest_difference(engine, path)) < 1e-4


def test_a_cache_that_is_wrong_in_a_batch_makes_rows_go_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model("llama", tmp_path)

    def mixed(update: Update, *arguments: Any, **options: Any) -> Keys:
        """Each row has the keys of the row before it."""
        keys, values = update(*arguments, **options)
        return keys.roll(1, 0), values

    plant(monkeypatch, DynamicLayer, mixed)
    engine = opened(path)
    assert engine.remark.startswith("rows of this llama are generated one by one: in a batch, with the cache, log-probs differ by")
    assert asyncio.run(largest_difference(engine, path)) < 1e-4


def test_a_batch_that_fails_makes_rows_go_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model("llama", tmp_path)

    def of_one_row(update: Update, layer: Any, keys: Tensor, *arguments: Any, **options: Any) -> Keys:
        if len(keys) > 1:
            raise RuntimeError("planted")
        return update(layer, keys, *arguments, **options)

    plant(monkeypatch, DynamicLayer, of_one_row)
    engine = opened(path)
    assert engine.remark == "rows of this llama are generated one by one: in a batch, with the cache, RuntimeError: planted"
    assert asyncio.run(largest_difference(engine, path)) < 1e-4


def forgets(update: Update, *arguments: Any, **options: Any) -> Keys:
    """Of a row's oldest token nothing is left."""
    keys, values = (tensor.clone() for tensor in update(*arguments, **options))
    if keys.shape[2] > 5:
        keys[:, :, 0], values[:, :, 0] = 0, 0
    return keys, values


@pytest.mark.parametrize("name, layer", [("llama", DynamicLayer), ("mistral, windows", DynamicSlidingWindowLayer)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_that_is_wrong_for_a_row_alone_is_refused(
    name: str, layer: type, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(name, tmp_path)
    strong = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in strong.parameters():
            parameter.mul_(3)  # as a trained model's, whose tokens depend on those before them
    strong.save_pretrained(path)
    asyncio.run(opened(path, dtype=dtype).close())
    plant(monkeypatch, layer, forgets)
    kind = CONFIGS[name][0]
    sentence = f"with the cache of this model of type '{kind}', not even a row alone: log-probs differ by .* another model"
    with pytest.raises(ValueError, match=sentence) as caught:
        opened(path, dtype=dtype)
    assert ("rollout.dtype=float32" in str(caught.value)) == (dtype == "bfloat16")


def plant(monkeypatch: pytest.MonkeyPatch, layer: Any, fault: Callable[..., Keys]) -> None:
    """Have `fault` called in place of a cache layer's `update`, with that as its first argument."""
    update = layer.update
    monkeypatch.setattr(layer, "update", lambda *arguments, **options: fault(update, *arguments, **options))


def test_the_start_generates_a_few_tokens(tmp_path: Path) -> None:
    """Without a window a dozen forward passes; a context in which nothing has room is none of its business."""
    path, lengths = write_model("llama", tmp_path), []
    update = DynamicLayer.update

    def counted(layer: Any, keys: Tensor, *arguments: Any, **options: Any) -> Keys:
        lengths.append(keys.shape[2])
        return update(layer, keys, *arguments, **options)

    with patch.object(DynamicLayer, "update", counted):
        asyncio.run(opened(path).close())
        assert 0 < sum(lengths) <= 40  # of two layers
        lengths.clear()
        asyncio.run(opened(path, max_context=2).close())
        assert not lengths


def test_a_deep_rwkv_has_the_weights_that_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would halve those of each sixth layer in the first forward pass, and not those that come later."""
    monkeypatch.setitem(CONFIGS, "deep", ("rwkv", {**CONFIGS["rwkv"][1], "num_hidden_layers": 8}, ""))
    path, tokens = write_model("deep", tmp_path), np.arange(3, 20)
    weights = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())

    async def first_and_then() -> None:
        engine = opened(path)
        first = await engine.log_probs(tokens)
        assert all(torch.equal(engine._parameters[name], tensor) for name, tensor in weights.items())
        await engine.install(1, weights)
        np.testing.assert_array_equal(await engine.log_probs(tokens), first)
        await engine.close()

    asyncio.run(first_and_then())
    assert asyncio.run(largest_difference(opened(path), path)) < 1e-4


async def test_a_head_that_only_the_files_have_apart_stays_apart(tmp_path: Path) -> None:
    """The configuration ties it, and transformers believes the files."""
    path = llama(tmp_path, 32)
    file = path / "config.json"
    file.write_text(file.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    engine = opened(path)
    try:
        tensors = {name: tensor async for name, tensor in (await engine.export_weights()).tensors()}
        assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    finally:
        await engine.close()
