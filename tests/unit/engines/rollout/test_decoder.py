"""The decoder beside transformers' models; installs; bits that do not depend on the neighbours."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.rollout.decoder import Decoder
from asyncflow.engines.rollout.decoder_weights import load_tensors
from asyncflow.engines.rollout.key_cache import BLOCK
from asyncflow.engines.rollout.linears import MIN_ROWS, Linear, PackedLinear, can_pack
from asyncflow.engines.rollout.prompt_attention import PromptPiece
from tests.conftest import ROOT
from tests.depth import deep, few
from tests.patience import patience

SIZES = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA = {**HEADS, "head_dim": 16, "sliding_window": 224, "query_pre_attn_scalar": 20, "tie_word_embeddings": True}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {**HEADS, "tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"num_attention_heads": 6, "num_key_value_heads": 1, "rope_theta": 1e6}),
    "qwen3": ("Qwen3", {**HEADS, "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "llama": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "mlp_bias": True, "attention_bias": True}),
    "llama3": ("Llama", {**HEADS, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}}),
    "llama-linear": ("Llama", {**HEADS, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {**GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "granite": (
        "Granite",
        {**HEADS, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 4.0},
    ),
    "mistral": ("Mistral", {**HEADS, "sliding_window": 224}),
    "olmo2": ("Olmo2", HEADS),
    "phi3": ("Phi3", {**HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "smollm3": ("SmolLM3", {**HEADS, "no_rope_layers": [1, 0, 1]}),
}


def new_model(name: str, seed: int = 0) -> PreTrainedModel:
    family, fields = MODELS[name]
    torch.manual_seed(seed)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**SIZES, **fields, **tokens)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are made different from 0 and 1, so that they count
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def new_decoder(fields: dict[str, Any], dtype: torch.dtype = torch.float32, num_slots: int = 6) -> Decoder:
    config = DecoderConfig.from_fields(fields)
    return Decoder(config, num_slots=num_slots, max_context=224, dtype=dtype, device=torch.device("cpu"))


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    path = tmp_path_factory.mktemp(request.param)
    model = new_model(request.param)
    model.save_pretrained(path)
    return model, path


def load(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = new_decoder(json.loads((path / "config.json").read_text()), dtype)
    decoder.install(load_tensors(path))
    return decoder


def places(decoder: Decoder) -> list[int]:
    """Addresses of all weights, those of the matrices first."""
    packed = [torch.ops.mkldnn.data_ptr(linear.weight) for linear in decoder.packed]
    plain = sorted(decoder.slices.values(), key=lambda piece: -piece.dim())
    return [*packed, *(piece.data_ptr() for piece in plain)]


def contents(decoder: Decoder) -> list[Tensor]:
    """Copies of all weights."""
    packed = [linear.weight.to_dense() for linear in decoder.packed if linear.weight is not None]
    return [*packed, *(piece.clone() for piece in decoder.slices.values())]


@torch.inference_mode()
def teacher_forced(decoder: Decoder, prompts: list[np.ndarray], responses: list[np.ndarray]) -> list[Tensor]:
    """Log-probs [length + 1, V] along each response, one slot each, all decoded together (equal lengths)."""
    logits = [decoder.prefill(prompts, [[slot] for slot in range(len(prompts))])]
    for step in range(len(responses[0])):
        positions = np.array([len(p) + step for p in prompts])
        logits.append(decoder.decode(np.array([r[step] for r in responses]), positions))
    return list(torch.stack(logits, 1).log_softmax(-1))


def prompts_and_responses(lengths: tuple[int, ...], response_length: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 96, n) for n in lengths], [rng.integers(0, 96, response_length) for _ in lengths]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_log_probs_equal_those_of_transformers(saved: tuple[PreTrainedModel, Path], dtype: torch.dtype, tolerance: float) -> None:
    model, path = saved
    prompts, responses = prompts_and_responses((1, 40, 63, 64, 120), 70)  # across the borders of key blocks
    for prompt, response, ours in zip(prompts, responses, teacher_forced(load(path, dtype), prompts, responses), strict=True):
        with torch.no_grad():
            theirs = model(torch.tensor(np.concatenate([prompt, response]))[None]).logits[0, len(prompt) - 1 :].log_softmax(-1)
        chosen = torch.tensor(response)[:, None]
        assert (ours[:-1].gather(1, chosen) - theirs[:-1].gather(1, chosen)).abs().max() < tolerance


def test_a_config_that_is_written_whole_computes_the_same(saved: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    model, path = saved
    fields = {name: value for name, value in model.config.to_dict().items() if name != "architectures"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    prompts, responses = prompts_and_responses((5, 40), 3)
    whole, short = (teacher_forced(load(folder), prompts, responses) for folder in (tmp_path, path))
    assert all(torch.equal(left, right) for left, right in zip(whole, short, strict=True))


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="this machine has no bfloat16 products")
@torch.inference_mode()
def test_bfloat16_prompts_are_computed_to_the_bits_of_transformers(saved: tuple[PreTrainedModel, Path]) -> None:
    """Also where the trainer sees the prompt with its response behind it. Later tokens only agree: attention rounds in decode."""
    model, path = saved
    model = copy.deepcopy(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(torch.bfloat16)
    for name, buffer in buffers.items():  # training leaves them in float32
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, buffer)
    prompts, responses = prompts_and_responses((1, 2, 3, 40, 63, 64, 100), 40)
    ours = load(path, torch.bfloat16).prefill(prompts, [[0]] * len(prompts))
    for prompt, response, logits_V in zip(prompts, responses, ours, strict=True):
        row = torch.tensor(np.concatenate([prompt, response]))[None]
        assert torch.equal(logits_V, model(row, use_cache=False).logits[0, len(prompt) - 1].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_piece_may_begin_anywhere_behind_the_prompt(saved: tuple[PreTrainedModel, Path], dtype: torch.dtype) -> None:
    """Keys, values and logits are those of the whole sequence in one pass, to the bit, whatever else is in the passes."""
    if dtype == torch.bfloat16 and not can_pack(dtype, torch.device("cpu")):
        pytest.skip("this machine has no bfloat16 products")
    decoder = load(saved[1], dtype)
    begins, ends = [1, 31, 33, 70, 128, 130], [2, 33, 100, 170, 200, 224]
    sequences, _ = prompts_and_responses(tuple(ends), 1)

    def kept() -> list[tuple[Tensor, Tensor]]:
        found = []
        for slot, end in enumerate(ends):
            blocks = decoder.cache.blocks(np.array([slot]), -(-end // BLOCK))
            halves = [decoder.cache.read(layer, blocks) for layer in range(len(decoder.layers))]
            found.append(tuple(torch.stack([half[which][0, :, :end] for half in halves]) for which in (0, 1)))
        return found

    whole, expected = decoder.prefill(sequences, [[slot] for slot in range(6)]), kept()
    decoder.cache.clear()
    prompts = [PromptPiece(slot, 0, sequences[slot][:begin], wants_logits=False) for slot, begin in enumerate(begins)]
    assert not len(decoder.compute(prompts))
    behind = [PromptPiece(slot, begin, sequences[slot][begin:], wants_logits=slot > 1) for slot, begin in enumerate(begins)]
    logits_PV = decoder.compute(behind[::-1])
    assert torch.equal(logits_PV, whole[2:].flip(0))
    for one, other in zip(kept(), expected, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@torch.inference_mode()
def test_greedy_tokens_equal_generate(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    prompt = np.arange(10)
    expected = model.generate(torch.tensor(prompt)[None], max_new_tokens=100, do_sample=False)[0, 10:].tolist()
    decoder = load(path)
    tokens = [int(decoder.prefill([prompt], [[0]]).argmax())]
    for position in range(10, 109):
        tokens.append(int(decoder.decode(np.array(tokens[-1:]), np.array([position])).argmax()))
    assert tokens == expected


def test_install_equals_a_fresh_load_and_converts_dtypes(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    other = {name: tensor + 0.05 for name, tensor in model.named_parameters()}
    prompts, responses = prompts_and_responses((5, 9), 3)
    for dtype in (torch.float32, torch.bfloat16):
        changed, fresh = load(path, dtype), new_decoder(json.loads((path / "config.json").read_text()), dtype)
        before = teacher_forced(changed, prompts, responses)
        pointers = places(changed)
        changed.install(other)
        fresh.install({name: tensor.to(dtype) for name, tensor in other.items()})
        after = teacher_forced(changed, prompts, responses)
        assert all(torch.equal(a, b) for a, b in zip(after, teacher_forced(fresh, prompts, responses), strict=True))
        assert not torch.equal(after[0], before[0])
        assert pointers == places(changed)
        for name in changed.shapes:
            assert torch.equal(changed.installed(name), other[name].to(dtype)), name


@deep
@pytest.mark.parametrize("order", ["packed", "plain"])
def test_no_matrix_is_there_twice(order: str) -> None:
    """In the process's memory all weights are there once, and in an install one matrix more, as it came and packed."""
    if order == "packed" and not can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("this machine has no packed products")
    # What is freed is to be free for the kernel, too.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, Path(__file__).with_name("install_memory.py"), order]
    done = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=patience(120)).stdout)
    model, largest, slack = done["model"], done["largest"], 4 << 20
    for memory, peak in done["seen"]:
        assert abs(memory - model) < slack
        assert peak < model + 4 * largest + slack  # gate and up are fused: as they came, and packed


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape", "dtype", "head"])
def test_a_bad_install_changes_nothing(fault: str, tmp_path: Path) -> None:
    new_model("qwen3").save_pretrained(tmp_path)
    decoder, tensors = load(tmp_path), load_tensors(tmp_path)
    before = contents(decoder)
    bad = {name: tensor + 1 for name, tensor in tensors.items()}
    name = "model.norm.weight"
    if fault == "missing":
        del bad[name]
    elif fault == "unexpected":
        name = "model.layers.9.mlp.up_proj.weight"
        bad[name] = torch.zeros(2)
    elif fault == "shape":
        bad[name] = torch.zeros(1)  # would broadcast
    elif fault == "dtype":
        bad[name] = torch.zeros(48, dtype=torch.int64)
    else:
        name = "lm_head.weight"
        bad[name] = torch.zeros(96, 48)
    with pytest.raises(ValueError, match=name):
        decoder.install(bad)
    assert all(torch.equal(old, new) for old, new in zip(before, contents(decoder), strict=True))


def test_plain_products_equal_packed_ones(saved: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, responses = prompts_and_responses((5, 9), 3)
    packed = teacher_forced(load(saved[1]), prompts, responses)
    monkeypatch.setattr("asyncflow.engines.rollout.decoder_weights.can_pack", lambda dtype, device: False)
    plain = teacher_forced(load(saved[1]), prompts, responses)
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(packed, plain, strict=True))


def test_packed_products_see_few_numbers_of_rows(saved: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps code for every number of rows: prompts of all lengths must not reach it, nor must every number of slots."""
    seen: set[int] = set()
    for kind in (Linear, PackedLinear):

        def spy(self: Any, x: torch.Tensor, *adapted: Any, product: Any = kind.__call__) -> torch.Tensor:
            seen.add(len(x))
            result: torch.Tensor = product(self, x, *adapted)
            return result

        monkeypatch.setattr(kind, "__call__", spy)
    decoder = load(saved[1])
    with torch.inference_mode():
        for length in range(1, 200, few(4, 1)):
            decoder.prefill([np.arange(length) % 96], [[0]])
        for rows in range(1, 8):  # one slot more than there are is for inert rows
            decoder.decode(np.zeros(rows, np.int64), np.full(rows, 5))
    assert 2 < len(seen) < 32 and min(seen) == MIN_ROWS


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    model = new_model("llama")
    model.save_pretrained(tmp_path / "one")
    tensors = load_tensors(tmp_path / "one")
    (tmp_path / "many").mkdir()
    names, weight_map = list(tensors), {}
    for shard in (0, 1):
        part = names[shard::2]
        save_file({name: tensors[name] for name in part}, tmp_path / "many" / f"shard-{shard}.safetensors")
        weight_map |= dict.fromkeys(part, f"shard-{shard}.safetensors")
    (tmp_path / "many" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = load_tensors(tmp_path / "many")
    assert sharded.keys() == tensors.keys() and all(torch.equal(sharded[name], tensors[name]) for name in tensors)


def test_buffers_and_slots_are_aligned(saved: tuple[PreTrainedModel, Path]) -> None:
    decoder = load(saved[1])
    layer = decoder.layers[-1]
    assert all(torch.ops.mkldnn.data_ptr(linear.weight) % 64 == 0 for linear in decoder.packed)
    assert all(
        buffer.data_ptr() % 64 == 0
        for buffer in (decoder.embedding, (layer.norms_before or layer.norms_behind)[0], decoder.cache.tensor)
    )
    assert decoder.cache.tensor.stride(2) * decoder.cache.tensor.element_size() % 64 == 0


def test_a_context_beyond_the_positions_is_refused() -> None:
    config = DecoderConfig.from_fields({"model_type": "llama", **SIZES, **HEADS})
    with pytest.raises(ValueError, match="512"):
        Decoder(config, num_slots=1, max_context=513, dtype=torch.float32, device=torch.device("cpu"))


def test_the_class_is_the_one_that_transformers_chooses(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    assert set(load(path).shapes) == {name for name, _ in AutoModelForCausalLM.from_pretrained(path).named_parameters()}
    assert type(model).__name__ == json.loads((path / "config.json").read_text())["architectures"][0]
