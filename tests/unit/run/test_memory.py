"""The arithmetic of `--dry-run`: against models that exist, against tensors that are made, and by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.config import Config, load, parse
from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.train.adapter_shapes import adapter_shapes
from asyncflow.engines.train.random_model import SPECS, make_random_model
from asyncflow.run.device_shares import num_devices
from asyncflow.run.preparation.checks import check_shapes
from asyncflow.run.preparation.memory import (
    COPIED_BYTES,
    GIB,
    MemoryUse,
    Shapes,
    critic_parts,
    host_parts,
    lines,
    micro_batch_tokens,
    parts_by_task,
    reference_parts,
    reward_model_parts,
    rollout_parts,
    shared_sums,
    training_parts,
    values_parts,
)
from asyncflow.types import LoraSpec, UserError
from tests.conftest import MODEL, ROOT

PAPERS = ROOT / "recipes" / "papers"
PUBLISHED = {"qwen2.5-7b": 7_615_616_512, "qwen3-8b": 8_190_735_360, "deepseek-r1-distill-qwen-32b": 32_763_876_352}
"""Parameters, as the models' pages on the Hub count them."""


def shapes_of(name: str) -> Shapes:
    return Shapes.of(json.loads((PAPERS / "models" / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_models_have_as_many_parameters_as_the_real_ones(name: str) -> None:
    assert shapes_of(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("spec", [*SPECS, "shipped"])
def test_a_model_that_is_made_has_as_many(spec: str, tmp_path: Path) -> None:
    folder = MODEL if spec == "shipped" else tmp_path
    if spec != "shipped":
        make_random_model(spec, tmp_path, ["some text"], 0)
    with safe_open(folder / "model.safetensors", "np") as file:
        made = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert Shapes.of(json.loads((folder / "config.json").read_text())).parameters == made


def test_what_a_size_follows_from_must_be_there() -> None:
    with pytest.raises(UserError, match=r"no vocab_size, num_attention_heads, intermediate_size, model_type"):
        Shapes.of({"hidden_size": 8, "num_hidden_layers": 2})


@pytest.mark.parametrize(("kind", "size"), [("qwen3", 128), ("qwen2", 16), ("llama", 16)])
def test_a_head_is_as_wide_as_its_family_says_where_the_file_says_nothing(kind: str, size: int) -> None:
    """As transformers takes it, and the engines that compute these models by code of their own."""
    fields = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"model_type": kind, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    of_layer = model.model.layers[0].self_attn
    assert Shapes.of(fields).head_dim == DecoderConfig.from_fields(fields).head_dim == of_layer.head_dim == size
    assert Shapes.of(fields | {"tie_word_embeddings": model.config.tie_word_embeddings}).parameters == model.num_parameters()


@pytest.mark.parametrize("kind", ["phi3", "llama"])
@pytest.mark.parametrize("targets", [(), ("qkv_proj", "down_proj"), ("q_proj", "v_proj")])
def test_an_adapter_has_the_parameters_that_the_trainer_gives_it(kind: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Also where q, k and v are one matrix, and gate and up another."""
    fields = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"model_type": kind, "num_key_value_heads": 2, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    spec = LoraSpec(4, 8.0, targets)
    try:
        right = sum(rows * columns for rows, columns in adapter_shapes(tmp_path, spec).values())
    except UserError:  # the model has no such matrices
        assert targets and (kind == "phi3") == ("q_proj" in targets)
        return
    assert Shapes.of(fields).of_adapter(spec) == right > 0


def config_of(**sections: Any) -> Config:
    return parse({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


def by_name(parts: list[MemoryUse]) -> dict[str, float]:
    return {part.name: part.num_bytes for part in parts}


TINY = Shapes(100, 8, 4, 4, 2, 2, 16, is_tied=False, has_qkv_bias=True, has_qk_norm=False)
# A layer: 2 * 8*8 + 2 * 8*4 + 3 * 8*16 = 576, biases 8 + 2 * 4 = 16, norms 16: 608. All: 4 * 608 + 2 * 800 + 8 = 4,040.


def test_one_device_by_hand() -> None:
    assert (TINY.of_layer, TINY.parameters) == (608, 4040)
    rollout, train = {"group_size": 4, "max_new_tokens": 10}, {"accumulate": "exact", "log_prob_chunk_tokens": 16}
    config = config_of(rollout=rollout, train={**train, "tokens_per_micro_batch": None})
    parts = by_name(training_parts(config, TINY, prompt_tokens=5))
    assert micro_batch_tokens(config, 5) == 45
    assert parts["weights"] == 4 * 4040 and parts["gradient sums"] == 8 * 4040 and parts["optimiser state"] == 8 * 4040
    assert parts["gathered weights"] == 0 and parts["logits"] == 3 * 4 * 16 * 100
    assert parts["activations"] == 4 * 45 * 4 * (6 * 8 + 3 * 8 + 4 * 4 + 4 * 16)
    # A pass of several groups is that much longer, and never more than a step.
    for tokens, longest in ((44, 45), (200, 200), (1_000_000, 32 * 45)):
        parts = by_name(training_parts(config_of(rollout=rollout, train={**train, "tokens_per_micro_batch": tokens}), TINY, 5))
        assert parts["activations"] == 4 * longest * 4 * (6 * 8 + 3 * 8 + 4 * 4 + 4 * 16)


def test_what_a_layout_cuts() -> None:
    train = {"dtype": "bfloat16", "responses_per_micro_batch": 1, "activation_checkpointing": True, "prompts_per_step": 2}
    config = config_of(
        rollout={"max_new_tokens": 11}, train=train, plan={"train": {"dp": 2, "tp": 2, "pp": 2}}, algorithm={"kl_coefficient": 0.1}
    )
    parts = by_name(training_parts(config, TINY, prompt_tokens=5))
    stage = 2 * 608 + 800 + 8  # half of the layers, and the embedding or the head
    assert parts["weights"] == stage and parts["optimiser state"] == 2 * stage and parts["reference"] == 2 * stage / 4
    assert parts["gathered weights"] == (2 * 2 + 4) * 800 / 2
    exact = config_of(train={**train, "accumulate": "exact"}, plan={"train": {"dp": 2, "tp": 2, "pp": 2}})
    assert by_name(training_parts(exact, TINY, prompt_tokens=5))["gathered weights"] == (3 * 2 + 16) * 800 / 2
    assert parts["activations"] == 2 * 16 * (2 * 2 * 8 + 6 * 8 + (3 * 8 + 4 * 4 + 4 * 16) / 2)
    moved = config_of(
        train={**train, "offload": True, "offload_optimizer": True},
        algorithm={"kl_coefficient": 0.1},
        rollout={"max_new_tokens": 11},
    )
    parts = by_name(training_parts(moved, TINY, prompt_tokens=5))
    assert parts["reference"] == parts["optimiser state"] == 0 and parts["weights in bfloat16"] == 2 * 4040
    with_helper = config_of(train={**train, "helpers": 1})
    of_helper = by_name(training_parts(with_helper, TINY, prompt_tokens=5))
    assert of_helper["helpers"] == of_helper["gradient sums"] + of_helper["activations"] + of_helper["logits"]
    of_ranks = config_of(train={**train, "helpers": 1}, plan={"train": {"dp": 2}})
    assert "helpers" not in by_name(training_parts(of_ranks, TINY, prompt_tokens=5))  # they take pieces alone
    cut = config_of(train=train, plan={"train": {"tp": 2}})
    assert by_name(training_parts(cut, TINY, prompt_tokens=5))["weights in bfloat16"] == 2 * 800 / 2


def test_what_generation_takes() -> None:
    config = config_of(rollout={"num_slots": 6, "dtype": "bfloat16"})
    parts = by_name(rollout_parts(config, TINY, 20))
    assert parts["weights"] == 2 * 4040
    assert parts["keys and values"] == 2 * (2 * 4 * 2 * 2) * 6 * 20 and "copies of these" not in parts
    on_device = config_of(environment="tools", episodes={"num_parked": 3}, rollout={"num_slots": 6, "device": "cuda:1-2"})
    parts = by_name(rollout_parts(on_device, TINY, 20))
    assert parts["keys and values"] == 4 * (2 * 4 * 2 * 2) * 9 * 20 and parts["copies of these"] == 4 * (2 * 2 * 2) * 6 * 20
    wide = replace(TINY, head_dim=1 << 20)  # 16 MiB a token and layer
    copied = [by_name(rollout_parts(on_device, wide, context))["copies of these"] for context in (2, 16, 128)]
    assert copied == [2 * 6 * (16 << 20), 1 << 30, 128 * (16 << 20)]
    engine = {"name": "vllm", "instances": 4, "tensor_parallel": 2}
    parts = by_name(rollout_parts(config_of(rollout={"num_slots": 6, "dtype": "bfloat16", "engine": engine}), TINY, 20))
    assert parts["weights"] == 4040 and parts["keys and values"] == 2 * (2 * 4 * 1 * 2) * 2 * 20
    assert host_parts(config_of(weight_sync={"dtype": "bfloat16"}), TINY, 2)[0].num_bytes == 4 * 2 * 4040


def test_the_cache_is_as_large_as_the_engines_own() -> None:
    import torch

    from asyncflow.engines.decoder_config import DecoderConfig
    from asyncflow.engines.rollout import device_cache
    from asyncflow.engines.rollout.slot_cache import SlotCache

    sizes = {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = DecoderConfig.from_fields({"model_type": "qwen2", **sizes, "num_key_value_heads": 2})
    cache = SlotCache(config, num_slots=6, max_context=64, like=torch.zeros(1, dtype=torch.bfloat16))
    parts = by_name(rollout_parts(config_of(rollout={"num_slots": 6, "dtype": "bfloat16"}), TINY, 64))
    assert parts["keys and values"] == cache.tensor.nbytes and COPIED_BYTES == device_cache.COPIED_BYTES


SET_UPS = {
    "qwen2.5-7b-gsm8k": (16, 1024, 64, 200),
    "qwen3-8b-deepscaler": (16, 16384, 32, 100),
    "deepseek-r1-distill-qwen-32b-64-devices": (64, 8192, 64, 20),
    "deepseek-r1-distill-qwen-32b-48-npus": (48, 8192, 64, 20),
}
"""Devices, context, prompts a step and steps: PA's Table 1, but for GSM8K's steps."""


def test_every_set_up_of_the_paper_is_looked_at() -> None:
    assert {path.stem for path in PAPERS.glob("*.yaml")} == SET_UPS.keys()
    assert {path.stem for path in (PAPERS / "models").iterdir()} == PUBLISHED.keys()


@pytest.mark.parametrize("recipe", SET_UPS)
def test_a_papers_recipe_is_the_papers_and_fits_its_devices(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load(PAPERS / f"{recipe}.yaml")
    shapes = Shapes.of(check_shapes(config))
    devices, context, prompts, steps = SET_UPS[recipe]
    assert num_devices(config) == devices and config.model.max_context_tokens == context
    assert (config.train.prompts_per_step, config.rollout.group_size, config.run.steps) == (prompts, 32, steps)
    assert config.run.name == recipe
    longest = config.data.max_prompt_tokens
    assert longest is not None and longest + config.rollout.max_new_tokens <= context
    parts = training_parts(config, shapes, longest)
    assert {"old policy", "reference"} < by_name(parts).keys(), "the tri-model"
    for of_kind in (parts, rollout_parts(config, shapes, context)):
        assert 7 * GIB < sum(part.num_bytes for part in of_kind) < 64 * GIB
    shown = lines(config, shapes, prompt_tokens=longest, context=context, max_staleness=0)
    assert f"{shapes.parameters:,} parameters" in shown[0] and len(shown) > 10


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.path=shapes:nowhere.json"], r"there is no file nowhere\.json with the fields"),
        (["plan.train.tp=3"], r"plan\.train\.tp is 3"),
        (["model.max_context_tokens=null"], r"set model\.max_context_tokens"),
        (["model.max_context_tokens=100000"], r"max_position_embeddings 32768"),
        (["rollout.max_new_tokens=2000"], r"leaves no room for a prompt"),
        (["rollout.engine.pause_mode=wait", "schedule={name: bounded, max_staleness: 2}"], "pause_mode=wait"),
        (["reward.scorer=guess"], "reward 'guess'"),
    ],
)
def test_shapes_that_could_not_be_trained_are_refused(overrides: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=sentence):
        check_shapes(load(PAPERS / "qwen2.5-7b-gsm8k.yaml", overrides))


def test_a_reference_of_its_own_by_hand() -> None:
    train = {"reference": "task", "frozen_dtype": "bfloat16", "log_prob_chunk_tokens": 16}
    config = config_of(
        rollout={"group_size": 4, "max_new_tokens": 10}, train=train, algorithm={"name": "grpo", "kl_coefficient": 0.1}
    )
    parts = by_name(reference_parts(config, TINY, prompt_tokens=5))
    assert parts["weights"] == 2 * 4040
    assert parts["activations"] == 2 * 45 * (6 * 8 + 3 * 4 * 2 + 4 * 2 * 2 + 4 * 16)
    assert parts["logits"] == 4 * 16 * 100
    kept_by_host = config_of(train={**train, "offload": True}, algorithm={"name": "grpo", "kl_coefficient": 0.1})
    assert by_name(reference_parts(kept_by_host, TINY, prompt_tokens=5))["weights"] == 2 * 800
    shown = lines(config, TINY, prompt_tokens=5, context=15, max_staleness=0)
    assert any(line.endswith("each of the reference") for line in shown)
    fused = lines(config_of(), TINY, prompt_tokens=5, context=15, max_staleness=0)
    assert not any("reference" in line for line in fused)


def test_a_critic_its_values_and_a_reward_model_by_hand() -> None:
    reward = {"place": "task", "model": {"path": str(MODEL)}}
    tree = {
        "model": {"path": str(MODEL)}, "data": {"path": "generated:arithmetic"}, "algorithm": "ppo", "reward": reward,
        "plan": {"values": {"num_workers": 1}, "train": {"dp": 2, "tp": 2}}, "train": {"helpers": 0},
    }  # fmt: skip
    config, shapes = parse(tree), Shapes.of(json.loads((MODEL / "config.json").read_text()))
    once = replace(shapes, is_tied=True).parameters  # it has no output layer of its own
    sizes = {part.name: part.num_bytes for part in critic_parts(config, shapes, 20)}
    assert (sizes["weights"], sizes["gradient sums"], sizes["optimiser state"]) == (4 * once, 4 * once, 8 * once)
    assert not sizes.keys() & {"logits", "old policy", "helpers"}
    helped = by_name(critic_parts(config.changed(train={"helpers": 2}), shapes, 20))
    assert helped == sizes | {"helpers": 2 * (sizes["gradient sums"] + sizes["activations"])}
    assert values_parts(config, shapes, 20)[0].num_bytes == reward_model_parts(config, shapes, 30)[0].num_bytes == 4 * once
    shown = "\n".join(lines(config, shapes, prompt_tokens=20, context=276, max_staleness=0))
    assert all(each in shown for each in ("the critic", "each of its values", "each reward model"))


def test_memory_of_tasks_that_share_devices_is_added_up_and_refused_where_it_does_not_fit() -> None:
    tree = {
        "model": {"path": str(MODEL)}, "data": {"path": "generated:arithmetic"}, "algorithm": "ppo",
        "train": {"reference": "task"}, "plan": {"shares": {"reference": "train", "critic": "train"}},
    }  # fmt: skip
    config, shapes = parse(tree), Shapes.of(json.loads((MODEL / "config.json").read_text()))
    parts = parts_by_task(config, shapes, 20, 276)
    together = sum(part.num_bytes for task in ("train", "reference", "critic") for part in parts[task])
    assert shared_sums(config, parts) == {"train": pytest.approx(together)}
    lengths = {"prompt_tokens": 20, "context": 276, "max_staleness": 0}
    shown = lines(config, shapes, **lengths, device_bytes=together * 1.001)
    assert shown[-1].endswith("train and reference and critic on one device (plan.shares)")
    with pytest.raises(UserError, match=r"train and reference and critic need .* GiB of a device together"):
        lines(config, shapes, **lengths, device_bytes=together * 0.999)


def test_memory_of_a_helper_is_added_up_with_that_of_the_device_that_generates() -> None:
    tree = {
        "model": {"path": str(MODEL)}, "data": {"path": "generated:arithmetic"}, "train": {"device": "cuda"},
        "rollout": {"device": "cuda:1"}, "plan": {"shares": {"helpers": "rollout"}},
    }  # fmt: skip
    config, shapes = parse(tree), Shapes.of(json.loads((MODEL / "config.json").read_text()))
    parts = parts_by_task(config, shapes, 20, 276)
    size = {task: sum(part.num_bytes for part in each) for task, each in parts.items()}
    of_optimizer = next(part.num_bytes for part in parts["train"] if part.name == "optimiser state")
    assert size["helpers"] == size["train"] - of_optimizer > 0
    assert shared_sums(config, parts) == {"rollout": pytest.approx(size["rollout"] + size["helpers"])}
    with pytest.raises(UserError, match=r"rollout and helpers need .* leave helpers out there"):
        lines(config, shapes, prompt_tokens=20, context=276, max_staleness=0, device_bytes=size["helpers"])
