"""Runs that train a low-rank adapter: what travels, what is saved, merged, resumed and refused."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from asyncflow.telemetry.certificate import read_certificate
from tests.conftest import MODEL, merged
from tests.depth import deep
from tests.e2e.commands import rows, run_command, write_config
from tests.e2e.test_resume import prints

STEPS = 3


def tree(folder: Path, name: str, steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder), "steps": steps, "stall_timeout_seconds": 60},
        "model": {"path": str(MODEL), "lora": {"rank": 4, "alpha": 8}},
        "data": {"path": "generated:arithmetic", "limit": 64},
        "algorithm": {"name": "grpo", "kl_coefficient": 0.1},
        "rollout": {"num_slots": 16, "group_size": 4, "max_new_tokens": 24},
        "train": {"prompts_per_step": 4, "learning_rate": 1e-2, "accumulate": "exact"},
        "telemetry": {"trackers": [], "fingerprints": True},
        "checkpoint": {"every_steps": 1},
    }
    return merged(base, changes)


def test_an_adapter_is_trained_published_saved_resumed_and_merged(tmp_path: Path) -> None:
    for name, steps in (("whole", STEPS), ("parts", STEPS - 1)):
        (tmp_path / f"config-{name}").mkdir()
        done = run_command("train", write_config(tmp_path / f"config-{name}", tree(tmp_path, name, steps)))
        assert done.returncode == 0, done.stderr
    done = run_command("train", write_config(tmp_path / "config-parts", tree(tmp_path, "parts")), "--resume")
    assert done.returncode == 0, done.stderr
    run, resumed = tmp_path / "whole", tmp_path / "parts"
    saved, again = (load_file(folder / "model" / "adapter_model.safetensors") for folder in (run, resumed))
    assert saved.keys() == again.keys() and all(np.array_equal(saved[name], again[name]) for name in saved)
    of_whole, of_parts = prints(run), prints(resumed)
    assert of_whole == of_parts and all("lora_" in name for name in of_whole[-1]["tensors"] if name.startswith("weights/"))
    seen = rows(run / "metrics.jsonl")
    assert [row["weights/attested"] for row in seen[1:]] == [1.0] * (STEPS - 1), "each install has been attested"
    assert {row["weights/version_bytes"] for row in seen[1:]} < {*range((MODEL / "model.safetensors").stat().st_size // 5)}
    assert max(row["mismatch/logprob_difference"] for row in seen) < 1e-5, "the engine has the adapter that the trainer has"
    assert seen[-1]["policy/kl"] > 0, "the reference is the base"
    certificate = read_certificate(run)
    assert certificate is not None and not certificate.voided and certificate.is_deterministic

    merged_to = tmp_path / "merged"
    done = run_command("merge", run, merged_to)
    assert done.returncode == 0, done.stderr
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL), run / "model").merge_and_unload()
    ours = AutoModelForCausalLM.from_pretrained(merged_to)
    expected = dict(theirs.named_parameters())
    assert all(expected[name].equal(weight) for name, weight in ours.named_parameters())
    assert (merged_to / "tokenizer.json").is_file()
    again_merged = run_command("merge", run, merged_to)
    assert again_merged.returncode == 2 and "is there already" in again_merged.stderr


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": {"engine": {"name": "deepspeed"}}}, "trains no low-rank adapters"),
        ({"rollout": {"engine": {"name": "vllm", "addresses": ["unix:/tmp/x"]}}}, "started for whole weights"),
        ({"train": {"frozen_dtype": "bfloat16"}}, "share the policy's base"),
        ({"model": {"lora": {"path": "nowhere"}}}, "There is no adapter in PEFT's format at nowhere"),
        ({"model": {"lora": {"targets": ["q_prj"]}}}, "the model has no linear layer 'q_prj'"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    done = run_command("train", write_config(tmp_path, tree(tmp_path, "run", **changes)))
    assert done.returncode == 2 and sentence in done.stderr, done.stderr


DEAF = """
from asyncflow.engines.rollout.engine import SlotEngine

class Deaf(SlotEngine):
    async def install(self, version, tensors):
        self._slots.version = version
"""


SWAPPED = """
from asyncflow.engines.rollout.engine import SlotEngine

class Swapped(SlotEngine):
    async def prepare(self, version, tensors):
        pass

    async def install(self, version, tensors):
        await super().install(version, {name: tensor.roll(len(tensor) // 2, 0) for name, tensor in tensors.items()})
"""


def failed_with(engine: str, source: str, lora: Any, folder: Path) -> CompletedProcess[str]:
    """A run whose rollout engine is the class of this name and source: it ends with exit 1."""
    (folder / "own.py").write_text(source)
    changes: dict[str, Any] = {
        "rollout": {"engine": {"path": f"{folder / 'own.py'}:{engine}"}},
        "weight_sync": {"deadline_seconds": 2},
        "algorithm": {"name": "grpo", "kl_coefficient": 0.0},
    }
    config = tree(folder, "run", **changes)
    config["model"]["lora"] = lora
    done = run_command("train", write_config(folder, config))
    assert done.returncode == 1, done.stderr
    return done


WHOLE_OR_NOT = [pytest.param(None, id="whole", marks=deep), pytest.param({"rank": 4, "alpha": 8}, id="adapter")]


@pytest.mark.parametrize("lora", WHOLE_OR_NOT)
def test_an_engine_that_installs_nothing_gets_no_prompts_and_ends_the_run_by_name(lora: Any, tmp_path: Path) -> None:
    """It says that it has the version, as its responses do; what it attests does not."""
    done = failed_with("Deaf", DEAF, lora, tmp_path)
    what = "without 28 of the 28 tensors" if lora else "with other weights than those"
    assert f"the engine generates {what} of version 1" in done.stderr, done.stderr
    assert len(rows(tmp_path / "run" / "metrics.jsonl")) == 1, "a step was made by weights that are not its version's"


@deep
@pytest.mark.parametrize("lora", WHOLE_OR_NOT)
def test_an_engine_that_puts_elements_in_other_places_ends_the_run_by_name(lora: Any, tmp_path: Path) -> None:
    """Its sums of bits are right."""
    done = failed_with("Swapped", SWAPPED, lora, tmp_path)
    assert "of the probe sequence the log-prob" in done.stderr, done.stderr
    assert "under version 1: all of its tokens' differ by" in done.stderr
    assert len(rows(tmp_path / "run" / "metrics.jsonl")) == 1, "a step was made by weights that are not its version's"
