"""The optimiser whose state is kept elsewhere, and activations that are made again: the same bits as without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from asyncflow.engines.base import MicroBatch
from asyncflow.engines.train import optimizer as optimizer_file
from asyncflow.engines.train.model import causal_model
from asyncflow.engines.train.model.packing import pack_thrifty
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.types import LossSums, TokenBatch
from tests.unit.engines.train.training import train_options


class Loss:
    """- sum A log p."""

    def __init__(self, is_token_local: bool) -> None:
        self.is_token_local = is_token_local

    def loss(self, batch: TokenBatch) -> LossSums:
        return LossSums(loss=-(batch.advantages_T * batch.logprobs_T).sum(), metrics={})


def updated(offloads: bool, num_steps: int = 3) -> tuple[list[torch.Tensor], dict[tuple[str, str], torch.Tensor], Optimizer]:
    generator = torch.Generator().manual_seed(0)
    parameters = {
        str(i): nn.Parameter(torch.randn(shape, generator=generator)) for i, shape in enumerate([(5, 3), (3,), (4, 4), (2,)])
    }
    optimizer = Optimizer(parameters, train_options(learning_rate=0.1, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2))
    optimizer._offloads = offloads
    for step in range(num_steps):
        gradients = []
        for i, parameter in enumerate(parameters.values()):
            if (i, step) != (3, 0):  # one comes to its first gradient later than the others
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                gradients.append(parameter.grad)
        norm = torch.stack([g.norm() for g in gradients]).norm().item()
        assert not optimizer.update(gradients, norm).skipped
        for parameter in parameters.values():
            parameter.grad = None
    states = {(name, kind): state for name, kind, state in optimizer.states()}
    return [p.detach() for p in parameters.values()], states, optimizer


def test_state_that_comes_over_piece_by_piece_changes_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, states, _ = updated(False)
    pieces: list[int] = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: (pieces.append(1), step(self)))
    monkeypatch.setattr(optimizer_file, "PIECE_ELEMENTS", 18)
    ours, our_states, optimizer = updated(True)
    assert len(pieces) == 3 * 2  # 15 + 3 elements, then 16 + 2
    assert all(mine.equal(theirs) for mine, theirs in zip(ours, weights, strict=True))
    assert our_states.keys() == states.keys() and all(our_states[key].equal(states[key]) for key in states)
    # Between updates it lies where it was put, and nowhere else.
    assert all(
        state is optimizer._host[optimizer._parameters[name], kind] for (name, kind), state in our_states.items() if kind != "step"
    )


@pytest.mark.parametrize("is_token_local", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_that_are_made_again_change_no_bits_and_are_not_kept(
    model_path: Callable[[str], Path],
    make_micro_batch: Callable[..., MicroBatch],
    monkeypatch: pytest.MonkeyPatch,
    dtype: Any,
    is_token_local: bool,
) -> None:
    made, forwards = [], []
    plain = causal_model.checkpoint
    monkeypatch.setattr(causal_model, "checkpoint", lambda *a, **k: (forwards.append(1), plain(*a, **k))[1])
    for recomputes in (False, True):
        options = train_options(dtype=dtype, learning_rate=1e-3, activation_checkpointing=recomputes)
        training = OneRank(model_path("qwen3-tiny"), options)
        for seed in range(2):
            training.forward_backward([make_micro_batch(seed, num_prompt_tokens=20)], Loss(is_token_local))
            training.optim_step(10)
        assert bool(forwards) is recomputes
        made.append(training.fingerprint())
    assert made[0] == made[1]


def test_less_is_kept_for_the_backward_pass(model_path: Callable[[str], Path], make_micro_batch: Callable[..., MicroBatch]) -> None:
    batch, kept = make_micro_batch(num_prompt_tokens=60), []
    packed = pack_thrifty(batch.prompt_ids, batch.response_ids)
    for recomputes in (False, True):
        policy = OneRank(model_path("qwen3-tiny"), train_options(activation_checkpointing=recomputes)).policy
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            made = policy.hidden(packed)
        kept.append(sum(e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"))
        del made
    assert kept[1] < 0.5 * kept[0]
