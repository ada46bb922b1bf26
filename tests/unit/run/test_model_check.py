"""What `asyncflow check MODEL` says is what the engines say themselves (tests/families.py has the models)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from asyncflow.config import parse
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.model_folder import read_json
from asyncflow.run.models.model_check import checked
from asyncflow.run.preparation.checks import check_train_engine
from asyncflow.types import LoraSpec, UserError
from tests.families import write_model
from tests.unit.engines.train.training import train_options


@pytest.mark.parametrize(("name", "context"), [("mistral, windows", 6), ("gemma2, windows", 6), ("gemma2", 128), ("mistral", 128)])
async def test_slots_are_for_contexts_that_the_engine_takes(name: str, context: int, tmp_path: Path) -> None:
    path = write_model(name, tmp_path / "model")
    (verdict,) = [line for line in await checked(str(path), [], tmp_path) if "slots:" in line]
    if context == 6:
        assert verdict.endswith(
            "no: a context of 128 tokens is longer than the model's windows of 6: take transformers, or model.max_context_tokens=6"
        )
        with pytest.raises(ValueError, match="windows of 6"):
            SlotEngine(path, num_slots=2, max_context=128)
    else:
        assert re.search(r"slots: yes(, up to a context of 128 tokens, which its windows are)?$", verdict)
    (verdict,) = [line for line in await checked(str(path), [f"model.max_context_tokens={context}"], tmp_path) if "slots:" in line]
    assert "slots: yes" in verdict
    await SlotEngine(path, num_slots=2, max_context=context).close()


@pytest.mark.parametrize(
    ("name", "lora", "verdict"),
    [
        ("gpt2", "{rank: 8}", "no: model.lora: the model has no linear layers of the kind that gets an adapter"),
        ("llama", "{targets: [qproj]}", "no: model.lora.targets: the model has no linear layer 'qproj'"),
        ("phi3", "{targets: [qkv_proj]}", "yes"),
        ("mixtral", "{rank: 4}", "yes"),
    ],
)
async def test_an_adapter_is_counted_and_refused_as_the_trainer_does(name: str, lora: str, verdict: str, tmp_path: Path) -> None:
    path = write_model(name, tmp_path / "model")
    told = "\n".join(await checked(str(path), [f"model.lora={lora}"], tmp_path))
    assert f"torch: {verdict}" in told
    options = train_options(lora=LoraSpec(**{"rank": 16, "alpha": 32.0, **yaml.safe_load(lora)}))
    if verdict == "yes":
        count = sum(parameter.numel() for parameter in OneRank(path, options).policy.parameters.values())
        assert f"{count:,} parameters of the adapter" in told
    else:
        assert "parameters of the adapter" not in told
        with pytest.raises(UserError, match=verdict.removeprefix("no: ")):
            OneRank(path, options)


async def test_a_folder_without_weights_is_refused_as_a_run_refuses_it(tmp_path: Path) -> None:
    path = write_model("llama", tmp_path / "model")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(UserError, match="has no weights in safetensors format"):
        await checked(str(path), [], tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "mamba"])
async def test_memory_is_told_of_models_whose_fields_have_other_names(name: str, tmp_path: Path) -> None:
    path = write_model(name, tmp_path / "model")
    count = AutoModelForCausalLM.from_pretrained(path).num_parameters()
    told = "\n".join(await checked(str(path), [], tmp_path))
    assert f"memory     {count:,} parameters" in told and f"4 B x {count:,} / tensor_parallel 1" in told
    assert re.search(r"this machine    all of it on the CPU: 0\.\d GiB of [\d.]+ available, enough", told), told


async def test_a_context_across_a_rope_s_limit_is_told(tmp_path: Path) -> None:
    path = write_model("llama", tmp_path / "model")
    fields = read_json(path / "config.json")
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    (path / "config.json").write_text(
        json.dumps({**fields, "rope_parameters": {**rope, "original_max_position_embeddings": 32}, "max_position_embeddings": 128})
    )
    for context, verdict in ((32, "yes"), (33, "no: under the rope type 'longrope' a row that exceeds 32 positions")):
        told = "\n".join(await checked(str(path), [f"model.max_context_tokens={context}"], tmp_path))
        assert f"transformers: {verdict}" in told
        assert "torch: yes, each row a sequence of its own: under the rope type 'longrope'" in told


@pytest.mark.parametrize("method", ["gptq", "fp8"])
async def test_a_quantised_model_is_refused_by_all_engines_that_would_have_to_change_its_weights(
    method: str, tmp_path: Path
) -> None:
    path = write_model("llama", tmp_path / "model")
    fields = read_json(path / "config.json") | {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 128}}
    (path / "config.json").write_text(json.dumps(fields))
    told = await checked(str(path), [], tmp_path)
    verdicts = [line for line in told if "engine" in line and "vllm" not in line and "outside" not in line]
    assert verdicts and not [line for line in verdicts if ": yes" in line]
    for engine in ("torch", "transformers"):
        (verdict,) = [line for line in verdicts if f"{engine}:" in line]
        assert f"its weights are quantised ({method}): take the ones that they were made of" in verdict
    with pytest.raises(UserError, match=rf"quantised \({method}\)"):
        check_train_engine(parse({"model": {"path": str(path)}, "data": {"path": "generated:arithmetic"}}), fields)
