"""The probe of models whose attention is not ours: which way it takes, and what it refuses. Families: test_families.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BertConfig, PretrainedConfig, StableLmConfig

from asyncflow.engines.train.model import own_rows
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.types import UserError
from tests.families import micro_batch
from tests.unit.engines.train.training import train_options

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def saved(folder: Path, config: PretrainedConfig) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def test_rows_that_depend_on_their_batch_go_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, batch = saved(tmp_path, StableLmConfig(**SIZES, num_key_value_heads=2)), micro_batch()
    plain = OneRank(path, train_options())
    assert plain.policy.way == "batched" and "in batches" in plain.remark

    def filled_at_the_left(rows: list[Tensor], batch_first: bool) -> Tensor:
        longest = max(map(len, rows))
        return torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])

    monkeypatch.setattr(own_rows, "pad_sequence", filled_at_the_left)
    broken = OneRank(path, train_options())
    assert broken.policy.way == "alone" and "one by one: in a batch they differ by" in broken.remark
    expected, found = (training.log_probs(batch.prompt_ids, batch.response_ids) for training in (plain, broken))
    monkeypatch.undo()
    np.testing.assert_allclose(found.values, plain.log_probs(batch.prompt_ids, batch.response_ids).values, atol=1e-5)
    assert np.abs(expected.values - found.values).max() > 1e-3  # what filling at the left would have made of it


def test_a_model_that_sees_what_is_behind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain = saved(tmp_path, StableLmConfig(**SIZES, num_key_value_heads=2)), torch.nn.functional.scaled_dot_product_attention

    def both_ways(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return plain(query, key, value, scale=options.get("scale"), enable_gqa=options.get("enable_gqa", False))

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", both_ways)
    with pytest.raises(UserError, match="this model of type 'stablelm' is not causal"):
        OneRank(path, train_options())


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, BertConfig(**SIZES, max_position_embeddings=64))
    with pytest.raises(UserError, match="this model of type 'bert'"):
        OneRank(path, train_options())


def test_logits_that_are_more_than_is_known_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, StableLmConfig(**SIZES, num_key_value_heads=2))
    monkeypatch.setattr("asyncflow.engines.train.model.causal_model.logit_scale", lambda config: 2.0)
    with pytest.raises(UserError, match="does not get the log-probs that this model of type 'stablelm' gives to a row"):
        OneRank(path, train_options())
