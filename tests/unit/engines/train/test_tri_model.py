"""Old policy and reference: which weights their log-probs are of, when those weights move, and what they cost nothing of."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncflow.config import load
from asyncflow.engines.base import MicroBatch
from asyncflow.engines.train.frozen_engine import FrozenEngine
from asyncflow.engines.train.model import check_sharing
from asyncflow.engines.train.model.causal_model import CausalModel, FrozenModel
from asyncflow.engines.train.model.packing import Packed, SharedPrompt, pack
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.run.factories import train_engine_options
from asyncflow.types import Layout, LossSums, Ragged, RunError, TokenBatch
from tests.conftest import MODEL, ROOT
from tests.unit.engines.train.training import (
    MakeMicroBatch,
    ModelPath,
    frozen_engine,
    one_rank,
    torch_engine,
    train_on,
    train_options,
    weights_of,
)


@dataclass
class Objective:
    """- sum A ratio, which keeps what it was given."""

    is_token_local: bool = True
    seen: list[TokenBatch] = field(default_factory=list)

    def loss(self, batch: TokenBatch) -> LossSums:
        self.seen.append(batch)
        ratio_T = (batch.logprobs_T - batch.old_logprobs_T).exp()
        return LossSums(loss=-(batch.advantages_T * ratio_T).sum(), metrics={})


async def step(engine: TorchEngine, batch: MicroBatch) -> TokenBatch:
    """One step of training; what its loss saw."""
    objective = Objective()
    await engine.begin_step()
    assert (await train_on(engine, batch, objective)).is_finite
    await engine.optim_step(10)
    (seen,) = objective.seen
    return seen


async def log_probs(engine: TorchEngine | FrozenEngine, batch: MicroBatch) -> list[float]:
    return (await engine.log_probs(batch.prompt_ids, batch.response_ids)).values.tolist()


def of_staleness(batch: MicroBatch, *staleness: int) -> MicroBatch:
    return replace(batch, staleness=np.array(staleness, np.int64))


async def test_current_is_the_policy_itself_and_takes_no_second_model(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch
) -> None:
    engine = torch_engine(model_path("qwen2-tiny"), learning_rate=1e-2)
    assert one_rank(engine).models.old_model is None and one_rank(engine).models.reference is None
    for _ in range(2):
        seen = await step(engine, make_micro_batch())
        assert seen.old_logprobs_T.equal(seen.logprobs_T.detach()) and seen.ref_logprobs_T is None


async def test_step_start_is_the_policy_at_the_start_of_the_step(model_path: ModelPath, make_micro_batch: MakeMicroBatch) -> None:
    engine, batch = torch_engine(model_path("qwen2-tiny"), learning_rate=1e-2, old="step_start"), make_micro_batch()
    await step(engine, batch)
    at_start = await log_probs(engine, batch)
    seen = await step(engine, batch)
    assert seen.old_logprobs_T.tolist() == at_start == seen.logprobs_T.tolist()
    objective = Objective()  # a second update in the same step
    await train_on(engine, batch, objective)
    assert objective.seen[0].old_logprobs_T.tolist() == at_start != objective.seen[0].logprobs_T.tolist()


async def test_previous_is_bitwise_one_update_behind_and_chosen_by_each_rows_staleness(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch
) -> None:
    engine, batch = torch_engine(model_path("qwen2-tiny"), learning_rate=1e-2, old="previous"), make_micro_batch()
    old_model = one_rank(engine).models.old_model
    assert old_model is not None
    seen = await step(engine, batch)  # the first step has no stale rows
    assert seen.old_logprobs_T.equal(seen.logprobs_T.detach())
    for _ in range(3):
        theta, before = await weights_of(engine), await log_probs(engine, batch)
        await step(engine, of_staleness(batch, 1, 0, 1, 0))
        for name, parameter in old_model.parameters.items():
            assert parameter.equal(theta[name]), name
        objective = Objective()
        await train_on(engine, of_staleness(batch, 1, 0, 1, 0), objective)
        now, (seen,) = await log_probs(engine, batch), objective.seen
        rows = np.repeat(np.arange(4), batch.response_ids.lengths)
        assert seen.old_logprobs_T.tolist() == [before[t] if row in (0, 2) else now[t] for t, row in enumerate(rows)]
        await engine.discard()
        assert all(old_model.parameters[name].equal(tensor) for name, tensor in (await weights_of(engine)).items())


async def test_rollout_takes_the_samplers_own_log_probs(model_path: ModelPath, make_micro_batch: MakeMicroBatch) -> None:
    engine, batch = torch_engine(model_path("qwen2-tiny"), old="rollout"), of_staleness(make_micro_batch(), 0, 3, 1, 7)
    assert (await step(engine, batch)).old_logprobs_T.tolist() == batch.rollout_logprobs.values.tolist()


@pytest.mark.parametrize(("old", "staleness"), [("current", 1), ("step_start", 1), ("previous", 2)])
async def test_rows_that_are_too_stale_are_refused_by_name(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, old: Any, staleness: int
) -> None:
    engine = torch_engine(model_path("qwen2-tiny"), old=old)
    message = f"row 2 has staleness {staleness}, and train.old={old} is right up to {staleness - 1} only: take train.old=rollout"
    with pytest.raises(ValueError, match=message):
        await train_on(engine, of_staleness(make_micro_batch(), 0, 0, staleness, 0), Objective())


@pytest.mark.parametrize("old", ["current", "step_start"])
async def test_under_a_correction_stale_rows_have_the_policy_before_the_update_as_their_proximal_policy(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, old: Any
) -> None:
    engine = torch_engine(model_path("qwen2-tiny"), learning_rate=1e-2, old=old, is_corrected=True)
    for _ in range(2):
        batch = of_staleness(make_micro_batch(), 1, 0, 5, 2)
        before = await log_probs(engine, batch)
        seen = await step(engine, batch)
        assert seen.old_logprobs_T.tolist() == before != seen.rollout_logprobs_T.tolist()


@pytest.mark.parametrize("num_prompt_tokens", [30, 1])  # with and without a shared prompt
async def test_the_reference_stays_as_it_was_fused_or_as_a_task(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, num_prompt_tokens: int
) -> None:
    batch = make_micro_batch(num_prompt_tokens=num_prompt_tokens)
    fused, as_task = (
        torch_engine(model_path("qwen2-tiny"), learning_rate=1e-2, has_reference=True),
        frozen_engine(model_path("qwen2-tiny")),
    )
    original = await log_probs(fused, batch)
    assert await log_probs(as_task, batch) == original
    for _ in range(2):
        seen = await step(fused, batch)
        assert seen.ref_logprobs_T is not None and seen.ref_logprobs_T.tolist() == original
    assert seen.logprobs_T.tolist() != original
    given = await as_task.log_probs(batch.prompt_ids, batch.response_ids)
    trainer = torch_engine(model_path("qwen2-tiny"))
    seen = await step(trainer, replace(batch, ref_logprobs=given))
    assert seen.ref_logprobs_T is not None and seen.ref_logprobs_T.tolist() == original


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes" / "papers").glob("*.yaml")), ids=lambda path: path.stem)
async def test_a_papers_recipe_computes_policy_old_policy_and_reference_in_one_micro_step(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(train_engine_options(load(recipe)), layout=Layout(), device="cpu", learning_rate=1e-2)
    engine, batch, asked = TorchEngine(model_path("qwen2-tiny"), options), make_micro_batch(), []
    log_probs_of = FrozenModel.log_probs

    def noted(model: FrozenModel, packed: Packed) -> torch.Tensor:
        asked.append(model)
        return log_probs_of(model, packed)

    monkeypatch.setattr(FrozenModel, "log_probs", noted)
    models, first = one_rank(engine).models, await step(engine, batch)
    asked.clear()
    seen = await step(engine, batch)
    assert len(asked) == 2 and asked[0] is models.reference and asked[1] is models.old_model
    assert seen.old_logprobs_T.equal(seen.logprobs_T.detach()), "the policy that sampled: the ratio is 1"
    assert seen.ref_logprobs_T is not None and seen.ref_logprobs_T.equal(first.logprobs_T.detach())
    assert not seen.ref_logprobs_T.equal(seen.old_logprobs_T)


async def test_frozen_models_may_be_kept_in_bfloat16(model_path: ModelPath, make_micro_batch: MakeMicroBatch) -> None:
    batch = of_staleness(make_micro_batch(), 1, 1, 1, 1)
    engine = torch_engine(model_path("qwen2-tiny"), old="previous", has_reference=True, frozen_dtype="bfloat16")
    seen = await step(engine, batch)
    policy = seen.logprobs_T.detach()
    models = one_rank(engine).models
    for model, log_probs_T in ((models.old_model, seen.old_logprobs_T), (models.reference, seen.ref_logprobs_T)):
        assert model is not None and {p.dtype for p in model.parameters.values()} == {torch.bfloat16}
        assert log_probs_T is not None and log_probs_T.dtype == torch.float32
        torch.testing.assert_close(log_probs_T, policy, atol=0.05, rtol=0)
        assert not log_probs_T.equal(policy)


async def test_a_shared_prompt_that_gives_other_numbers_stops_the_run(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_micro_batch(num_prompt_tokens=20)
    await train_on(torch_engine(model_path("qwen2-tiny")), batch, Objective())

    def wrong(*arguments: Any, is_shared: bool) -> Packed:
        """A shared layout with one token of the third response taken for another."""
        packed = pack(*arguments, is_shared=is_shared)
        packed.targets_T[8] += is_shared
        return packed

    monkeypatch.setattr(check_sharing, "pack", wrong)
    engine = torch_engine(model_path("qwen2-tiny"))
    with pytest.raises(RunError, match=r"the log-prob -\d+\.\d+ for a token of row 2, where the row alone has -\d+\.\d+"):
        await train_on(engine, batch, Objective())
    unchecked = torch_engine(model_path("qwen2-tiny"), check_shared_prompt=False)
    assert (await train_on(unchecked, batch, Objective())).is_finite


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_response_that_sees_another_one_is_noticed(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    batch = make_micro_batch(lengths=(15, 11, 19, 5), num_prompt_tokens=20)
    await train_on(torch_engine(model_path("qwen2-tiny"), dtype=dtype), batch, Objective())

    def leaking(*arguments: Any, is_shared: bool) -> Packed:
        """The second response's segment goes on into the third."""
        packed = pack(*arguments, is_shared=is_shared)
        merged = (
            replace(packed.layout, segment_lengths=(20, 15, 30, 5), prompts=(SharedPrompt(0, 3),)) if is_shared else packed.layout
        )
        return replace(packed, layout=merged)

    monkeypatch.setattr(check_sharing, "pack", leaking)
    with pytest.raises(RunError, match=r"a gradient .* away from that of the rows alone|the log-prob .* for a token of row 2"):
        await train_on(torch_engine(model_path("qwen2-tiny"), dtype=dtype), batch, Objective())


def sampled(policy: CausalModel, prompt: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Responses of these lengths as the policy itself gives them."""
    generator = torch.Generator().manual_seed(0)
    responses = [np.zeros(0, np.int64) for _ in lengths]
    for row, length in enumerate(lengths):
        for _ in range(length):
            packed = pack(prompt, Ragged.from_arrays([np.append(responses[row], 0)], "int64"), "cpu", is_shared=False)
            hidden_TH, head = policy.hidden(packed)
            odds = (hidden_TH[-1] @ head.weight_VH.T).float().softmax(-1)
            responses[row] = np.append(responses[row], int(torch.multinomial(odds, 1, generator=generator)))
    return responses


@pytest.mark.parametrize("seed", range(3))
def test_rounding_to_bfloat16_is_told_from_a_fault_in_a_trained_model(
    make_micro_batch: MakeMicroBatch, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The gradient of a sum of log-probs is small beside its addends: rounding changes it by some percent."""
    policy, lengths = CausalModel(MODEL, train_options(dtype="bfloat16")), (10, 8, 6, 9, 4, 3, 4, 2)
    prompt = np.random.default_rng(seed).integers(0, policy.module.config.vocab_size, 30)
    responses = Ragged.from_arrays(sampled(policy, prompt, lengths), "int64")
    batch = replace(make_micro_batch(lengths=lengths), prompt_ids=prompt, response_ids=responses)
    check_sharing.check_sharing(policy, batch)

    def leaking(*arguments: Any, is_shared: bool) -> Packed:
        """The first response's segment goes on into the second."""
        packed = pack(*arguments, is_shared=is_shared)
        segments = (30, 18, *lengths[2:]) if is_shared else packed.layout.segment_lengths
        prompts = (SharedPrompt(0, len(segments) - 1),) if is_shared else ()
        return replace(packed, layout=replace(packed.layout, segment_lengths=segments, prompts=prompts))

    monkeypatch.setattr(check_sharing, "pack", leaking)
    with pytest.raises(RunError, match="sharing the prompt gives"):
        check_sharing.check_sharing(policy, batch)
