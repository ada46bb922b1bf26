"""What `asyncflow check MODEL` says is what the engines say themselves (tests/families.py has the models)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.model_folder import read_json
from asyncflow.run.models.model_check import checked
from tests.families import write_model


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
