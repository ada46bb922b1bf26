"""The language model within a model that takes images, too: a causal language model of its own, with the same logits."""

from __future__ import annotations

import asyncio
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.config import parse
from asyncflow.run.models.model_check import checked
from asyncflow.run.models.model_source import check_folder, is_made, model_folder
from asyncflow.types import UserError
from tests.conftest import MODEL
from tests.depth import in_gate
from tests.families import BASE

VISION = {
    **{"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
    **{"patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "vision_output_dim": 16},
    **{"projector_input_dim": 16, "projector_output_dim": 16},
}
LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
TOKENS = {"boi_token_index": 57, "eoi_token_index": 58, "image_token_index": 59}
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # model_type of the whole, class of its language model, what differs from BASE there and in the images' part
    "gemma3": ("Gemma3", "Gemma3ForCausalLM", {"sliding_window": 8, "query_pre_attn_scalar": 8}, {}),
    "gemma4": ("Gemma4", "Gemma4ForCausalLM", {"sliding_window": 8}, {}),
    "qwen3_5": ("Qwen3_5", "Qwen3_5ForCausalLM", LINEAR, {}),
    "mistral3": ("Mistral3", "MistralForCausalLM", {"model_type": "mistral"}, {"model_type": "pixtral"}),
    "llama4": ("Llama4", "Llama4ForCausalLM", {"num_local_experts": 2, "intermediate_size_mlp": 48}, {}),
}


def write_whole(kind: str, folder: Path) -> Any:
    """Write a random model of several modalities, with the tests' tokenizer. Returns it."""
    name, _, text, vision = KINDS[kind]
    parts = {} if kind == "gemma4" else {"vision_config": {**VISION, **vision}}
    tokens = {**TOKENS, "mm_tokens_per_image": 4} if kind == "gemma3" else {}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(kind, text_config={**BASE, "vocab_size": 67, **text}, **parts, **tokens)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
        model.save_pretrained(folder)
    for file in MODEL.glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    return model


def found(path: Path, scratch: Path, lines: list[str] | None = None) -> Path:
    config = parse({"model": {"path": str(path)}, "data": {"path": "generated:arithmetic"}})
    scratch.mkdir()
    return asyncio.run(model_folder(config, None, scratch, ([] if lines is None else lines).append))


@pytest.mark.parametrize("kind", in_gate("gemma3", of=KINDS))
def test_the_language_model_has_the_logits_of_the_whole_one(kind: str, tmp_path: Path) -> None:
    whole, lines = write_whole(kind, tmp_path / "whole"), list[str]()
    assert is_made(str(tmp_path / "whole"))
    folder = found(tmp_path / "whole", tmp_path / "scratch", lines)
    name, own = KINDS[kind][:2]
    told = f"is a {name}ForConditionalGeneration: its language model is taken out of it, without what sees or hears"
    assert told in lines[0]
    fields = json.loads((folder / "config.json").read_text())
    assert fields["architectures"] == [own] and "vision_config" not in fields and check_folder("model.path", folder, "x")
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [2, 5]}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(model).__name__ == own
    row = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=row).logits, whole(input_ids=row).logits)


async def test_a_check_says_what_becomes_of_it_without_its_weights(tmp_path: Path) -> None:
    write_whole("gemma3", tmp_path / "whole")
    (tmp_path / "whole" / "model.safetensors").write_bytes(b"")
    (tmp_path / "scratch").mkdir()
    lines = await checked(str(tmp_path / "whole"), ["model.max_context_tokens=8"], tmp_path / "scratch", lambda line: None)
    assert "Gemma3ForCausalLM (gemma3_text)" in lines[0]
    assert any(line.startswith("rollout.engine  slots: yes") for line in lines), lines


def test_one_whose_language_model_is_none_by_itself_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    write_whole("gemma3", folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "architectures": ["T5ForConditionalGeneration"]}))
    with pytest.raises(UserError, match="transformers has no causal language model for"):
        found(folder, tmp_path / "scratch")


def test_files_of_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    there, gone = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / there)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": there, "b": gone}}))
    with pytest.raises(UserError, match=f"has not all of its weights: {gone} is missing"):
        found(folder, tmp_path / "scratch")
