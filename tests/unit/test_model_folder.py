"""What a model's folder says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncflow.model_folder import end_token_ids, read_json, weight_files
from asyncflow.types import UserError


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config": {"eos_token_id": 2}, "config": {"eos_token_id": 9}}, [2]),
        ({"generation_config": {"eos_token_id": [2, 4]}}, [2, 4]),
        ({"generation_config": {"eos_token_id": 0}}, [0]),
        ({"config": {"eos_token_id": 3}}, [3]),
        ({}, []),
        ({"generation_config": {}, "config": {"eos_token_id": 3}}, [3]),
        ({"generation_config": {"eos_token_id": []}, "config": {"eos_token_id": 3}}, [3]),
        ({"generation_config": {"eos_token_id": None}, "config": {}}, []),
    ],
)
def test_the_end_tokens_are_those_of_the_generation_config_and_then_of_the_config(
    tmp_path: Path, files: dict[str, Any], ids: list[int]
) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert end_token_ids(tmp_path) == ids


def test_json_files_are_objects_or_nothing(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    assert read_json(file) == {}
    file.write_text("[1]")
    assert read_json(file) == {}
    file.write_text('{"a": 1}')
    assert read_json(file) == {"a": 1}
    for broken in (b"{", b'{"a": "\xff"}'):
        file.write_bytes(broken)
        with pytest.raises(UserError, match="is not JSON"):
            read_json(file)


def test_weights_are_in_one_file_or_else_in_those_of_the_index(tmp_path: Path) -> None:
    whole, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    assert weight_files(tmp_path) == [whole]  # which is not there: who opens it says so
    index.write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}))
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    whole.touch()
    assert weight_files(tmp_path) == [whole]
