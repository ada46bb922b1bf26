"""Low-rank adapters: to the last digit those of PEFT, in passes and in files; trained alone; the base is the reference."""

import asyncio
import gc
import json
import os
import re
import shutil
import time
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncflow.engines.lora import merge_lora, read_lora
from asyncflow.engines.lora_files import write_lora
from asyncflow.engines.train.model.causal_model import load_module
from asyncflow.engines.train.model.log_probs import Head
from asyncflow.engines.train.model.packing import Packed, pack_thrifty
from asyncflow.engines.train.model.products import adopt
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.types import LoraSpec, LossSums, TokenBatch, UserError
from tests.depth import in_gate
from tests.families import CONFIGS, RESPONSES, micro_batch, plain_log_probs, write_model
from tests.patience import patience
from tests.unit.engines.train.training import (
    MakeMicroBatch,
    ModelPath,
    Sum,
    assert_same,
    frozen_engine,
    moved_less,
    one_rank,
    policy_gradient,
    reference_log_probs,
    torch_engine,
    train_on,
    train_options,
    weights_of,
)

SPEC = LoraSpec(rank=4, alpha=8.0)
MODELS = ("qwen2-tiny", "qwen3-tiny", "llama-tiny")


@pytest.fixture
def adapter(model_path: ModelPath, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Adapter in PEFT's files, written by PEFT, for `qwen2-tiny` unless the test names another: none of its matrices is 0."""
    return adapter_for(model_path(getattr(request, "param", "qwen2-tiny")), tmp_path / "adapter")


def adapter_for(base: Path, folder: Path) -> Path:
    torch.manual_seed(3)
    model = peft_model(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(folder)
    return folder


def peft_model(base: Path) -> Any:
    config = LoraConfig(r=SPEC.rank, lora_alpha=SPEC.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).eval()


@pytest.mark.parametrize("name", MODELS)
async def test_log_probs_and_gradients_are_those_of_peft_to_the_bit(
    name: str, model_path: ModelPath, make_micro_batch: MakeMicroBatch, tmp_path: Path
) -> None:
    base = model_path(name)
    folder = adapter_for(base, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(load_module(base, torch.float32), folder, is_trainable=True).eval()
    adopt(theirs)
    policy = one_rank(torch_engine(base, lora=replace(SPEC, path=str(folder)))).policy
    batch = make_micro_batch(1, (5, 9, 3))
    packed = pack_thrifty(batch.prompt_ids, batch.response_ids)
    inputs = {"input_ids": packed.tokens_P[None], "position_ids": packed.positions_P[None], "layout": packed.layout}
    states_TH = packed.predicting(theirs.get_base_model().model(**inputs, use_cache=False).last_hidden_state[0])
    hidden_TH, head = policy.hidden(packed)
    head_VH = head.weight_VH
    assert torch.equal(hidden_TH @ head_VH.t(), states_TH @ theirs.get_output_embeddings().weight.t())
    for made_TH in (hidden_TH, states_TH):
        (made_TH @ head_VH.t()).log_softmax(1).gather(1, packed.targets_T[:, None]).sum().backward()
    gradients = {as_travels(n): p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert gradients.keys() == policy.parameters.keys() and len(gradients) == 2 * 7 * theirs.config.num_hidden_layers
    assert all(torch.equal(gradients[n], p.grad) for n, p in policy.parameters.items()), "another gradient"
    assert all(p.grad is None for n, p in policy.module.named_parameters() if n not in policy.parameters), "the base has one, too"


def as_travels(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default.", ".")


async def test_a_step_is_that_of_peft_with_adamw(model_path: ModelPath, make_micro_batch: MakeMicroBatch, adapter: Path) -> None:
    """Packed, with a shared prompt and exact sums, beside rows of their own through PEFT's model with plain attention."""
    base = model_path("qwen2-tiny")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter, is_trainable=True)
    engine = torch_engine(base, lora=replace(SPEC, path=str(adapter)), accumulate="exact", learning_rate=1e-3)
    before = await weights_of(engine)
    batch = make_micro_batch(1, (5, 9, 3))
    await train_on(engine, batch, Sum(policy_gradient))
    result = await engine.optim_step(7)
    loss = torch.zeros(())
    for k, log_probs in enumerate(reference_log_probs(theirs.eval(), batch)):
        loss = loss - (torch.tensor(batch.loss_mask[k]) * float(batch.advantages[k]) * log_probs).sum() / 7
    loss.backward()
    trained = {as_travels(n): p for n, p in theirs.named_parameters() if p.requires_grad}
    assert result.grad_norm == pytest.approx(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0).item(), rel=1e-5)
    torch.optim.AdamW(trained.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0).step()
    moved_less(await weights_of(engine), {n: p.detach() for n, p in trained.items()}, before, 1e-2)


async def test_the_adapter_alone_is_trained_exported_and_restored(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, tmp_path: Path
) -> None:
    base = model_path("qwen2-tiny")
    engine = torch_engine(base, lora=SPEC, accumulate="exact", learning_rate=1e-2)
    first = await weights_of(engine)
    whole = {name: weight.clone() for name, weight in one_rank(engine).policy.module.named_parameters() if "lora_" not in name}
    assert all(t.any() == name.endswith("lora_A.weight") for name, t in first.items()) and not first.keys() & whole.keys()
    await train_on(engine, make_micro_batch(0), Sum(policy_gradient))
    await engine.optim_step(3)
    await engine.begin_step()
    await (await engine.save_state(tmp_path / "state"))
    other = torch_engine(base, lora=SPEC, accumulate="exact", learning_rate=1e-2, seed=5)
    assert not (await weights_of(other))[next(iter(first))].equal(first[next(iter(first))]), "the seed decides the first values"
    await other.load_state(tmp_path / "state")
    for each in (engine, other):
        await train_on(each, make_micro_batch(1), Sum(policy_gradient))
        await each.optim_step(3)
    assert_same(await weights_of(engine), await weights_of(other))
    assert await engine.fingerprint() == await other.fingerprint()
    module = one_rank(engine).policy.module
    assert_same({name: w.detach() for name, w in module.named_parameters() if "lora_" not in name}, whole)
    saved = sum(file.stat().st_size for file in (tmp_path / "state").iterdir())
    assert saved < 0.5 * (base / "model.safetensors").stat().st_size, "the base is in no checkpoint"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_reference_is_the_base_itself(
    dtype: str, model_path: ModelPath, make_micro_batch: MakeMicroBatch, adapter: Path
) -> None:
    base, seen = model_path("qwen2-tiny"), []
    engine = torch_engine(base, lora=replace(SPEC, path=str(adapter)), has_reference=True, dtype=dtype)

    def loss(batch: TokenBatch) -> LossSums:
        assert batch.ref_logprobs_T is not None
        seen.append((batch.ref_logprobs_T, batch.logprobs_T.detach()))
        return policy_gradient(batch)

    batch = make_micro_batch(0)
    await train_on(engine, batch, Sum(loss))
    apart = await frozen_engine(base, dtype=dtype).log_probs(batch.prompt_ids, batch.response_ids)
    ((reference_T, policy_T),) = seen
    np.testing.assert_array_equal(reference_T.numpy(), apart.values)
    assert not torch.equal(reference_T, policy_T), "the policy has an adapter, and the reference none"
    kept = one_rank(engine).policy.module.model.embed_tokens.weight
    assert kept.dtype == getattr(torch, dtype), "the base is kept as passes compute with it"


@pytest.mark.parametrize(
    ("old", "changes"),
    [("step_start", {}), ("previous", {}), ("previous", {"dtype": "bfloat16", "activation_checkpointing": True})],
)
async def test_an_old_policy_is_an_older_adapter_on_the_same_base(
    old: str, changes: dict[str, Any], model_path: ModelPath, make_micro_batch: MakeMicroBatch, adapter: Path
) -> None:
    lora = replace(SPEC, path=str(adapter))
    engine = torch_engine(model_path("qwen2-tiny"), lora=lora, old=old, learning_rate=1e-2, **changes)
    seen: list[Tensor] = []

    def loss(batch: TokenBatch) -> LossSums:
        seen.append(batch.old_logprobs_T.clone())
        return policy_gradient(batch)

    batch = make_micro_batch(0)
    batch = replace(batch, staleness=np.full(len(batch.indices), old == "previous", np.int64))
    await engine.begin_step()
    before = await engine.log_probs(batch.prompt_ids, batch.response_ids)
    weights = await weights_of(engine)
    await train_on(engine, batch, Sum(loss))
    assert_same(await weights_of(engine), weights)
    await engine.optim_step(3)
    await train_on(engine, batch, Sum(loss))
    assert not np.array_equal((await engine.log_probs(batch.prompt_ids, batch.response_ids)).values, before.values)
    for old_T in seen:
        np.testing.assert_array_equal(old_T.numpy(), before.values)


async def test_exported_weights_stay_as_they_are_while_an_old_policy_computes(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is read from this memory beside the next step."""
    engine = torch_engine(model_path("qwen2-tiny"), lora=replace(SPEC, path=str(adapter)), old="previous", learning_rate=1e-2)
    batch, policy = make_micro_batch(0), one_rank(engine).policy
    await train_on(engine, batch, Sum(policy_gradient))
    await engine.optim_step(3)
    source = await engine.export_weights()
    assert source.are_lasting
    exported = {name: tensor async for name, tensor in source.tensors()}
    expected, seen = {name: tensor.clone() for name, tensor in exported.items()}, []
    hidden = policy.hidden

    def looking(packed: Packed) -> tuple[Tensor, Head]:
        made = hidden(packed)
        seen.append([name for name, tensor in exported.items() if not torch.equal(tensor, expected[name])])
        return made

    monkeypatch.setattr(policy, "hidden", looking)
    await train_on(engine, replace(batch, staleness=np.ones(len(batch.indices), np.int64)), Sum(policy_gradient))
    assert seen == [[], []], "the old policy's pass, then the policy's"


@pytest.mark.parametrize("accumulate", ["exact", "fp32"])
async def test_exact_sums_do_not_know_the_order_of_micro_batches(
    accumulate: str, model_path: ModelPath, make_micro_batch: MakeMicroBatch, adapter: Path
) -> None:
    made = []
    for order in ((0, 1, 2), (2, 0, 1)):
        engine = torch_engine(model_path("qwen2-tiny"), lora=replace(SPEC, path=str(adapter)), accumulate=accumulate)
        for number in order:
            await train_on(engine, make_micro_batch(number), Sum(policy_gradient))
        await engine.optim_step(9)
        made.append(await engine.fingerprint())
    assert (made[0] == made[1]) == (accumulate == "exact")


@pytest.mark.parametrize("name", MODELS)
async def test_files_go_to_peft_and_come_from_it(
    name: str, model_path: ModelPath, make_micro_batch: MakeMicroBatch, tmp_path: Path
) -> None:
    base = model_path(name)
    engine = torch_engine(base, lora=SPEC, learning_rate=1e-2)
    await train_on(engine, make_micro_batch(0), Sum(policy_gradient))
    await engine.optim_step(3)
    await engine.save(tmp_path / "ours")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "ours")
    ours = await weights_of(engine)
    assert_same({as_travels(n): p.detach() for n, p in theirs.named_parameters() if "lora_" in n}, ours)
    theirs.save_pretrained(tmp_path / "theirs")
    again = torch_engine(base, lora=replace(SPEC, path=str(tmp_path / "theirs")))
    assert_same(await weights_of(again), ours)
    merge_lora(base, tmp_path / "theirs", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    expected = theirs.merge_and_unload().state_dict()
    assert_same(merged, {name: expected[name] for name in load_file(base / "model.safetensors")})


@pytest.mark.parametrize(
    ("changes", "fields", "sentence"),
    [
        ({"targets": ("q_prj",)}, {}, "the model has no linear layer 'q_prj': its names end in down_proj, gate_proj, k_proj"),
        ({"rank": 8}, {}, "has rank 4 and alpha 8: set model.lora.rank=4 model.lora.alpha=8"),
        ({"targets": ("q_proj",)}, {}, "tensors that bind to nothing here"),
        ({}, {"use_dora": True}, "asks for use_dora = True, which is not computed here"),
        ({}, {"rank_pattern": {"q_proj": 2}}, "asks for rank_pattern"),
        ({}, {"bias": "all"}, "is no plain LoRA"),
        ({}, {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "has init_lora_weights = 'loftq'"),
        ({}, {"init_lora_weights": "corda", "corda_config": {}}, "has init_lora_weights = 'corda'"),
        ({}, {"init_lora_weights": "lora_ga"}, "has init_lora_weights = 'lora_ga'"),
        ({"path": "nowhere"}, {}, "There is no adapter in PEFT's format at nowhere"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    changes: dict[str, Any], fields: dict[str, Any], sentence: str, model_path: ModelPath, adapter: Path
) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(UserError, match=re.escape(sentence)):
        torch_engine(model_path("qwen2-tiny"), lora=replace(SPEC, **{"path": str(adapter), **changes}))


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "eva", "pissa", "pissa_niter_4", "olora"])
def test_an_adapter_of_a_base_that_peft_changes_is_refused_until_it_is_converted(
    init: Any, model_path: ModelPath, tmp_path: Path
) -> None:
    """By PEFT's own files: those that are taken make the model that PEFT has trained, by merging."""
    base = model_path("qwen2-tiny")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = {name: weight.clone() for name, weight in model.state_dict().items()}
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=init, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trained = get_peft_model(model, config).eval()
    changed = {
        name
        for name, weight in trained.named_parameters()
        if "lora_" not in name and not torch.equal(weight, plain[as_travels(name).replace(".base_layer", "")])
    }
    trained.peft_config["default"].init_lora_weights = True
    trained.save_pretrained(tmp_path / "initial")
    trained.peft_config["default"].init_lora_weights = init
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.05)
    trained.save_pretrained(tmp_path / "adapter")
    folder = tmp_path / "adapter"
    if changed:
        with pytest.raises(UserError, match=f"has init_lora_weights = '{init}'.*path_initial_model_for_weight_conversion"):
            merge_lora(base, folder, tmp_path / "merged")
        folder = tmp_path / "converted"
        trained.save_pretrained(folder, path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    assert bool(changed) == (isinstance(init, str) and init.startswith(("pissa", "olora")))
    merge_lora(base, folder, tmp_path / "merged")
    (tmp_path / "merged" / "config.json").write_text((base / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, trained(input_ids=ids).logits, atol=1e-4)


def test_an_adapter_that_lacks_a_layer_is_refused(model_path: ModelPath, adapter: Path) -> None:
    tensors = read_lora(adapter, SPEC)
    tensors.pop("model.layers.1.self_attn.q_proj.lora_A.weight")
    write_lora(adapter, SPEC, Path("base"), {name: tensor.numpy() for name, tensor in tensors.items()})
    with pytest.raises(UserError, match=r"lacks 1 of 28 tensors, model.layers.1.self_attn.q_proj.lora_A.weight the first"):
        torch_engine(model_path("qwen2-tiny"), lora=replace(SPEC, path=str(adapter)))


async def test_adapters_over_one_base_have_its_memory_in_common_and_do_not_meet(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch
) -> None:
    base, options = model_path("qwen2-tiny"), {"accumulate": "exact", "learning_rate": 1e-2}

    async def trained(engine: TorchEngine, seed: int) -> None:
        await train_on(engine, make_micro_batch(seed), Sum(policy_gradient))
        await engine.optim_step(3)
        await engine.begin_step()

    alone = torch_engine(base, lora=SPEC, **options)
    await trained(alone, 0)
    expected = await weights_of(alone)
    await alone.close()
    one = torch_engine(base, lora=SPEC, **options)
    other = torch_engine(base, lora=replace(SPEC, rank=SPEC.rank + 1), **options)
    places = [
        {name: w.data_ptr() for name, w in one_rank(engine).policy.module.named_parameters() if "lora_" not in name}
        for engine in (one, other)
    ]
    assert places[0] == places[1] and len(places[0]) > 10
    await trained(other, 1)
    await trained(one, 0)
    assert_same(await weights_of(one), expected)
    whole = torch_engine(base)
    assert not set(places[0].values()) & {w.data_ptr() for w in one_rank(whole).policy.module.parameters()}


async def test_a_base_goes_with_its_last_adapter_and_is_read_again_when_its_files_change(
    model_path: ModelPath, tmp_path: Path
) -> None:
    shutil.copytree(model_path("qwen2-tiny"), tmp_path / "base")
    engine = torch_engine(tmp_path / "base", lora=SPEC)
    base = weakref.ref(one_rank(engine).policy._loaded)
    os.utime(tmp_path / "base" / "model.safetensors", ns=(1, 1))
    assert one_rank(torch_engine(tmp_path / "base", lora=SPEC)).policy._loaded is not base()
    await engine.close()
    del engine
    deadline = time.monotonic() + patience(20)  # its thread ends by itself
    while base() is not None and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
        gc.collect()
    assert base() is None


def test_every_default_target_of_a_mamba_trains_and_those_that_cannot_are_refused(tmp_path: Path) -> None:
    path = write_model("mamba", tmp_path / "model")
    training = OneRank(path, train_options(lora=SPEC, temperature=0.7))
    with torch.no_grad():
        for name, parameter in training.policy.parameters.items():
            if name.endswith("lora_B.weight"):
                parameter.add_(torch.ones_like(parameter) * 0.05)
    batch = micro_batch()
    training.policy.log_probs(training.policy.pack(batch.prompt_ids, batch.response_ids)).sum().backward()
    targets = {name.rsplit(".", 3)[1] for name in training.policy.parameters}
    assert targets == {"in_proj"}
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in training.policy.parameters.values())
    with pytest.raises(UserError, match=r"layers\.0\.mixer\.dt_proj gets no adapter: a Mamba layer"):
        OneRank(path, train_options(lora=replace(SPEC, targets=("in_proj", "dt_proj"))))


@pytest.mark.parametrize("name", in_gate("deepseek_v3", "falcon_h1", of=sorted(set(CONFIGS) - {"gpt2"})))
def test_peft_computes_what_an_adapter_of_any_family_does(name: str, tmp_path: Path) -> None:
    """With default targets: of deepseek_v3 PEFT takes names of the dense layers for the experts', and of Mamba's kind it refuses
    `out_proj`. (gpt2 has no linear layers.)"""
    path = write_model(name, tmp_path / "model")
    policy = OneRank(path, train_options(lora=SPEC, temperature=0.7)).policy
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.normal_(std=0.3)
    write_lora(tmp_path / "adapter", SPEC, path, {n: p.detach().numpy() for n, p in policy.parameters.items()})
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    batch = micro_batch()
    rows = [batch.response_ids[k] for k in range(len(RESPONSES))]
    base = torch.cat([plain_log_probs(theirs, batch.prompt_ids, row, 0.7) for row in rows])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*missing adapter keys.*")
        with_adapter = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = torch.cat([plain_log_probs(with_adapter, batch.prompt_ids, row, 0.7) for row in rows])
    ours = torch.tensor(policy.response_log_probs(batch.prompt_ids, batch.response_ids).values)
    assert (expected - base).abs().max() > 0.05, "it changes nothing"
    assert (ours - expected).abs().max() < 1e-4
