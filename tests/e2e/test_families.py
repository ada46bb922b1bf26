"""A whole run over a model that no decoder of ours computes: rows of their own in the trainer, rollout by `generate`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from asyncflow.run.preparation.prepare import TOKENIZER_FILES
from tests.conftest import MODEL
from tests.depth import deep
from tests.e2e.commands import rows, run_command, write_config


@deep
def test_soft_caps_and_sliding_windows_train_and_generate(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    model = tmp_path / "gemma2"
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=373, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=256, sliding_window=24, query_pre_attn_scalar=8,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    for name in TOKENIZER_FILES:
        if (MODEL / name).is_file():
            shutil.copyfile(MODEL / name, model / name)
    reward = tmp_path / "reward.py"
    reward.write_text("def score(sample):\n    return len(set(sample.response)) / 100\n")
    tree = small(
        model={"path": str(model)},
        reward={"scorer": {"path": f"{reward}:score"}},
        rollout={"engine": "transformers", "max_new_tokens": 24, "top_p": 0.9, "stop": ["#"]},
        train={"learning_rate": 1e-3, "learning_rate_schedule": "cosine"},
    )
    done = run_command("train", write_config(tmp_path, tree))
    assert done.returncode == 0, done.stderr
    run_dir = Path(tree["run"]["dir"]) / tree["run"]["name"]
    first, second = rows(run_dir / "metrics.jsonl")
    assert first["policy/grad_norm"] > 0 and second["policy/learning_rate"] < first["policy/learning_rate"] == 1e-3
    assert 0.8 < first["importance_weight/mean"] < 1  # what top_p has left
    assert "rows of this gemma2 are computed in batches" in (run_dir / "logs" / "trainer-0.log").read_text()
    assert "rows of this gemma2 are generated in batches" in (run_dir / "logs" / "rollout-0.log").read_text()
    trained = AutoModelForCausalLM.from_pretrained(run_dir / "model").state_dict()
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert trained.keys() == before.keys() and any(not torch.equal(trained[name], before[name]) for name in before)
