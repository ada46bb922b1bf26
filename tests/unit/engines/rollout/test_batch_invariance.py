"""A sample's tokens and log-probs are the same bits in any company; and the probe says so, or says what differs."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.linears import AnyLinear, Linear, PackedLinear, can_pack
from asyncflow.engines.rollout.slot_cache import SlotCache
from tests.depth import few, in_gate

# 12 elements for a head and 20 for two: no row of any matrix begins at a multiple of 64 bytes by itself.
SIZES = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "max_position_embeddings": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "llama": ("Llama", {"mlp_bias": True, "attention_bias": True}),
    "gemma2": ("Gemma2", {"head_dim": 20, "query_pre_attn_scalar": 20, "sliding_window": 256, "tie_word_embeddings": True}),
}
DTYPES = ("float32", "bfloat16")
PROMPTS = [np.arange(7 * length, 8 * length) % 96 for length in (1, 2, 3, 4, 17, 31, 33, 64, 100)]
SAMPLES = (0, 1, 2)
STOPS = (5, 50)

Made = dict[tuple[int, int], Response]  # by number of the prompt and sample


@pytest.fixture(scope="module", params=in_gate("qwen3", "llama", of=FAMILIES))
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, fields = FAMILIES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **HEADS, **fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are made different from 0 and 1, so that they count
            parameter.add_(torch.randn_like(parameter) * 0.1)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


def opened(path: Path, dtype: Literal["float32", "bfloat16"], num_slots: int, **chosen: Any) -> SlotEngine:
    return SlotEngine(path, num_slots=num_slots, max_context=170, dtype=dtype, stop_ids=STOPS, **chosen)


async def generate(engine: SlotEngine, prompt: int, samples: tuple[int, ...]) -> Made:
    sampling = Sampling(temperature=1.0 - 0.1 * (prompt % 3), max_new_tokens=20 + 9 * (prompt % 6))
    key = SampleKey(seed=3, prompt_index=prompt)
    stream = engine.generate(PROMPTS[prompt], samples=samples, sampling=sampling, key=key)
    return {(prompt, response.sample): response async for response in stream}


async def generate_all(engine: SlotEngine, requests: list[tuple[int, tuple[int, ...]]]) -> Made:
    """All requests at once, handed in in this order."""
    return {key: made for part in await asyncio.gather(*(generate(engine, *r) for r in requests)) for key, made in part.items()}


async def interrupt(engine: SlotEngine) -> None:
    while True:
        await engine.pause()
        await asyncio.sleep(0.002)
        await engine.resume()
        await asyncio.sleep(0.004)


def assert_equal_bits(made: Made, expected: Made) -> None:
    assert made.keys() == expected.keys()
    for key, response in made.items():
        assert np.array_equal(response.token_ids, expected[key].token_ids), key
        assert np.array_equal(response.logprobs.view(np.int32), expected[key].logprobs.view(np.int32)), key


@pytest.mark.parametrize("dtype", DTYPES)
async def test_bits_do_not_depend_on_the_company(model_path: Path, dtype: Literal["float32", "bfloat16"]) -> None:
    engine = opened(model_path, dtype, 64, speculation=0)
    assert engine.is_deterministic, engine.why_not_deterministic
    alone: Made = {}
    for prompt in range(len(PROMPTS)):
        for sample in SAMPLES:
            alone |= await generate(engine, prompt, (sample,))
    assert len({len(response.token_ids) for response in alone.values()}) > 8  # so slots end, and move, at many moments

    groups = [(prompt, SAMPLES) for prompt in range(len(PROMPTS))]
    singles = [(prompt, (sample,)) for prompt in range(len(PROMPTS)) for sample in SAMPLES]
    shuffled = random.Random(0).sample(singles, len(singles))
    assert_equal_bits(await generate_all(engine, groups), alone)
    engine._slots._tokens_of_prompts = 40  # other prompts in a pass
    assert_equal_bits(await generate_all(engine, groups[::-1]), alone)
    interruption = asyncio.create_task(interrupt(engine))
    assert_equal_bits(await generate_all(engine, shuffled), alone)
    assert not interruption.done()
    interruption.cancel()
    await engine.close()
    for num_slots in few((4, 13), (4, 5, 13)):  # siblings that come later take over the keys of the first
        engine = opened(model_path, dtype, num_slots, speculation=2)
        assert_equal_bits(await generate_all(engine, groups if num_slots % 2 else shuffled), alone)
        await engine.close()


def by_rows(product: Callable[..., Tensor], self: AnyLinear, x: Tensor, *adapted: Any) -> Tensor:
    return product(self, x, *adapted) * (1 + 1e-6 * len(x))


def by_slots(attend: Callable[..., Tensor], self: SlotCache, layer: int, step: Any, q_NHD: Tensor) -> Tensor:
    return attend(self, layer, step, q_NHD) * (1 + 1e-3 * (len(q_NHD) > 40))


def by_place(attend: Callable[..., Tensor], self: SlotCache, layer: int, step: Any, q_NHD: Tensor) -> Tensor:
    attended = attend(self, layer, step, q_NHD)
    attended[3] += 1e-3
    return attended


@pytest.mark.parametrize(
    ("owner", "name", "fault", "reason"),
    [
        (PackedLinear if can_pack(torch.float32, torch.device("cpu")) else Linear, "__call__", by_rows, "prompt of 1 tokens"),
        (SlotCache, "attend", by_slots, "slot among 64"),
        (SlotCache, "attend", by_place, "slot among 64"),
    ],
)
async def test_the_probe_finds_a_dependence(
    owner: type, name: str, fault: Callable[..., Tensor], reason: str, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: fault(method, *arguments))
    engine = opened(model_path, "float32", 64)
    assert not engine.is_deterministic and reason in engine.why_not_deterministic
    await engine.close()


async def test_two_threads_promise_nothing(model_path: Path) -> None:
    engine = SlotEngine(model_path, num_slots=4, max_context=64, num_threads=2)
    assert not engine.is_deterministic and "2 threads" in engine.why_not_deterministic
    await engine.close()


async def test_the_number_of_threads_changes_between_two_steps(model_path: Path) -> None:
    engine = SlotEngine(model_path, num_slots=4, max_context=64)
    for count in (2, 1):
        await engine.use_threads(count)
        assert await asyncio.wrap_future(engine._hand_in(torch.get_num_threads)) == count
    await engine.close()
