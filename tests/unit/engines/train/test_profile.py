"""What is timed is what a train engine computes, all of it, and inside the block that is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncflow.engines.train import profile
from asyncflow.engines.train.profile import Amount, profile_layer
from asyncflow.types import LossSums, TokenBatch, UserError
from tests.unit.engines.train.training import ModelPath, train_options

AMOUNT = Amount(tokens=(30, 60), num_responses=4, repeats=2)
EACH = {(task, tokens): 2 for tokens in (30, 60) for task in ("layer_forward", "layer_backward")}


class Objective:
    """Counts the response tokens that it sees."""

    is_token_local = True

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.task = lambda: ""

    def loss(self, batch: TokenBatch) -> LossSums:
        self.seen[self.task()] += len(batch.logprobs_T)
        loss = batch.logprobs_T * batch.advantages_T
        if batch.ref_logprobs_T is not None:
            loss = loss + batch.ref_logprobs_T
        return LossSums(loss=loss.sum(), metrics={})


class Measured:
    """A `Measure` that knows what is measured now."""

    def __init__(self) -> None:
        self.now, self.blocks = "", Counter[tuple[str, int]]()

    @contextmanager
    def __call__(self, task: str, *, tokens: int = 0, bytes: int = 0) -> Iterator[None]:
        assert not self.now, "one in another"
        self.now = task
        yield
        self.now = ""
        self.blocks[task, tokens or bytes] += 1


@pytest.mark.parametrize("family", ["qwen2-tiny", "qwen3-tiny", "llama-tiny"])
def test_it_times_the_layer_of_the_model_and_nothing_else(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    measured, during, calls = Measured(), Counter[str](), []
    make, modules = profile._one_layer, []

    def watched(path: Path) -> Any:
        module = make(path)
        layer = module.base_model.layers[0]
        layer.register_forward_hook(lambda _, inputs, out: calls.append((inputs[0].detach().clone(), out.detach(), measured.now)))
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: during.update([measured.now]))
        modules.append(module)
        return module

    monkeypatch.setattr(profile, "_one_layer", watched)
    objective = Objective()
    objective.task = lambda: measured.now
    weights = profile_layer(model_path(family), train_options(), objective, has_reference=False, amount=AMOUNT, measure=measured)
    (module,) = modules
    layer = module.base_model.layers[0]
    num_bytes = 4 * sum(parameter.numel() for parameter in layer.parameters())
    heads = {("head_loss", tokens): 2 for tokens in (24, 48)}
    sums = {(task, num_bytes): 2 for task in ("accumulate", "optim_step")}
    warm = {key: count for key, count in measured.blocks.items() if key[0] == "warm_up"}
    assert measured.blocks == EACH | heads | sums | warm and sum(warm.values()) == 2 * 3 + 2
    num_parameters = len(list(layer.parameters()))
    assert during == {"layer_backward": 4 * num_parameters, "warm_up": 2 * num_parameters}
    assert objective.seen == {"head_loss": 2 * (24 + 48), "warm_up": 24 + 48}
    assert [now for *_, now in calls] == ["warm_up", "layer_forward", "layer_forward"] * 2
    assert {name: tensor.shape for name, tensor in weights.items()} == {name: p.shape for name, p in layer.named_parameters()}

    hidden_1PH, out_1PH, _ = calls[-1]  # the model's own forward gives the layer the same, and gets the same from it
    packed = profile._packed(60, 4, module.config.vocab_size, torch.device("cpu"))
    outputs = module.base_model(
        inputs_embeds=hidden_1PH, position_ids=packed.positions_P[None], layout=packed.layout, attention_mask=None, use_cache=False
    )
    assert torch.equal(outputs.last_hidden_state, module.base_model.norm(out_1PH))
    assert torch.equal(calls[-1][1], out_1PH)


def test_the_exact_sums_the_reference_and_the_dtype_are_those_of_the_options(model_path: ModelPath) -> None:
    measured, seen, backwards = Measured(), [], []

    class Looking(Objective):
        is_token_local = False

        def loss(self, batch: TokenBatch) -> LossSums:
            seen.append((batch.logprobs_T.dtype, batch.ref_logprobs_T is not None))
            batch.logprobs_T.register_hook(lambda _: backwards.append(measured.now))
            return super().loss(batch)

    options = train_options(accumulate="exact", dtype="bfloat16")
    amount = Amount(tokens=(30,), num_responses=2, repeats=1)
    weights = profile_layer(model_path("qwen2-tiny"), options, Looking(), has_reference=True, amount=amount, measure=measured)
    assert set(seen) == {(torch.float32, True)}
    assert backwards == ["warm_up", "head_loss"]
    assert all(isinstance(tensor, Tensor) and tensor.dtype == torch.float32 for tensor in weights.values())
    assert measured.blocks["layer_forward", 30] == 1


def test_a_device_that_is_not_there_is_a_mistake_of_the_users(model_path: ModelPath) -> None:
    with pytest.raises(UserError, match="npu"):
        profile_layer(
            model_path("qwen2-tiny"),
            train_options(device="npu"),
            Objective(),
            has_reference=False,
            amount=AMOUNT,
            measure=Measured(),
        )
