"""Weights are read from a model's files one at a time, or in part, and what is wrong with the files is said in a sentence."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncflow.engines.train.model.weight_files import WeightFiles
from asyncflow.types import UserError
from tests.unit.engines.train.training import ModelPath


def test_weights_in_several_files_are_those_of_one(model_path: ModelPath, tmp_path: Path) -> None:
    path = model_path("qwen2-tiny")
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(tmp_path, max_shard_size="500KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    expected, found = load_file(path / "model.safetensors"), WeightFiles(tmp_path)
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)
    assert found.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_what_lies_there(tmp_path: Path, dtype: torch.dtype) -> None:
    whole, vector = torch.randn(7, 5), torch.randn(6)
    save_file({"a": whole, "b": vector}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    for rows, columns in (
        (slice(2, 6), slice(1, 4)),
        (slice(0, 7), slice(0, 5)),
        (slice(6, 7), slice(0, 2)),
        (slice(7, 7), slice(0, 5)),
    ):
        expected = whole[rows, columns].to(dtype)
        part = torch.full_like(expected, 9.0)
        files.fill(part, "a", (rows.start, columns.start))
        assert part.equal(expected)
    part = torch.empty(2, dtype=dtype)
    files.fill(part, "b", (4,))
    assert part.equal(vector[4:].to(dtype))


def test_what_is_wrong_with_the_files_is_said(model_path: ModelPath, tmp_path: Path) -> None:
    tensors = load_file(model_path("qwen2-tiny") / "model.safetensors")
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    files.check({"a": (2, 3)})
    with pytest.raises(UserError, match=rf"{tmp_path} lacks {len(tensors)} of its weights, model.embed_tokens.weight the first"):
        files.check({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    with pytest.raises(UserError, match="lacks 1 of its weights, a the first"):
        files.check({"a": (3, 2)})
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="cannot be read") as caught:
            WeightFiles(folder)
        assert "\n" not in str(caught.value)
