"""The optimiser's update; its state where that is kept elsewhere, and activations that are made again: the same bits as without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import get_scheduler

from asyncflow.engines.base import Hyperparameters, MicroBatch
from asyncflow.engines.train import optimizer as optimizer_file
from asyncflow.engines.train.model import causal_model
from asyncflow.engines.train.model.packing import pack_thrifty
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.engines.train.optimizer import Optimizer, learning_rate_at
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


def test_an_update_is_adamw_of_clipped_gradients_at_a_rate_that_warms_up_and_shrinks_matrices_alone() -> None:
    options = train_options(learning_rate=0.1, weight_decay=0.5, max_grad_norm=0.5, warmup_steps=2)
    parameters = {"matrix": nn.Parameter(torch.tensor([[1.0, -2.0]])), "vector": nn.Parameter(torch.tensor([3.0, 4.0]))}
    optimizer, (beta1, beta2) = Optimizer(parameters, options), options.betas
    weights = {name: p.detach().double().numpy().copy() for name, p in parameters.items()}
    first, second = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for number, norm in enumerate((0.25, 2.0, 5.0), 1):  # the first is not clipped
        rate, factor = 0.1 * min(1.0, number / 2), min(1.0, 0.5 / norm)
        for name, parameter in parameters.items():
            parameter.grad = torch.full_like(parameter, norm / 2)  # of four elements
            gradient = np.full(parameter.shape, factor * norm / 2)
            first[name] = beta1 * first[name] + (1 - beta1) * gradient
            second[name] = beta2 * second[name] + (1 - beta2) * gradient**2
            change = first[name] / (1 - beta1**number) / (np.sqrt(second[name] / (1 - beta2**number)) + 1e-8)
            weights[name] *= 1 - rate * 0.5 * (name == "matrix")
            weights[name] -= rate * change
        result = optimizer.update([p.grad for p in parameters.values() if p.grad is not None], norm)
        assert (result.grad_norm, result.skipped) == (norm, False) and result.learning_rate == pytest.approx(rate)
        for name, parameter in parameters.items():
            np.testing.assert_allclose(parameter.detach().numpy(), weights[name], rtol=1e-5)


def test_hyperparameters_that_are_chosen_for_an_update_are_those_of_that_update() -> None:
    (first,), (second,) = ([nn.Parameter(torch.tensor([[1.0, -2.0]]))] for _ in range(2))
    options = train_options(learning_rate=0.1, weight_decay=0.5, max_grad_norm=0.5, warmup_steps=2)
    chosen = Hyperparameters(learning_rate=0.02, betas=(0.8, 0.9), epsilon=1e-3, weight_decay=0.3, max_grad_norm=None)
    ours, torchs = Optimizer({"matrix": first}, options), torch.optim.AdamW([second], 0.02, (0.8, 0.9), 1e-3, 0.3)
    ours.set_hyperparameters(chosen)
    for _ in range(3):
        first.grad, second.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0]])
        assert ours.update([first.grad], 5.0).learning_rate == 0.02
        torchs.step()
        assert torch.equal(first, second)


def test_an_update_without_a_finite_norm_is_left_out_and_is_none_of_the_warm_up() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Optimizer({"only": parameter}, train_options(learning_rate=0.1, warmup_steps=4))
    parameter.grad = torch.tensor([1.0, torch.inf])
    for gradients, norm in (([parameter.grad], float("inf")), ([parameter.grad], float("nan")), ([], 0.0)):
        assert optimizer.update(gradients, norm).skipped
    assert parameter.tolist() == [1.0, 1.0] and optimizer.num_updates == 0 and optimizer.learning_rate == pytest.approx(0.025)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_the_learning_rate_goes_as_transformers_schedules_do(kind: str, warmup_steps: int) -> None:
    options = train_options(
        learning_rate=0.5, warmup_steps=warmup_steps, learning_rate_schedule=kind, num_updates=20, min_learning_rate=0.0
    )
    adamw = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.5)
    name = f"{kind}_with_warmup" if kind == "constant" else kind
    theirs = get_scheduler(name, adamw, num_warmup_steps=warmup_steps, num_training_steps=20)
    for update in range(20):
        if update >= warmup_steps:  # before that theirs begins at 0, with an update that does nothing
            assert learning_rate_at(update, options) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        adamw.step()
        theirs.step()
    rising = [learning_rate_at(update, options) for update in range(warmup_steps)]
    assert rising == pytest.approx([0.5 * (n + 1) / 4 for n in range(warmup_steps)])


def test_a_falling_learning_rate_ends_at_its_least_and_stays_there() -> None:
    for kind in ("linear", "cosine"):
        options = train_options(learning_rate=0.5, learning_rate_schedule=kind, num_updates=10, min_learning_rate=0.1)
        rates = [learning_rate_at(update, options) for update in range(13)]
        assert rates[0] == 0.5 and rates == sorted(rates, reverse=True) and rates[9] > 0.1
        assert rates[10:] == pytest.approx([0.1] * 3)


def test_epsilon_no_clip_and_no_decay_by_name() -> None:
    options = train_options(
        learning_rate=0.1, epsilon=0.5, weight_decay=0.5, max_grad_norm=None, no_weight_decay=(r"embed", r"bias$")
    )
    parameters = {name: nn.Parameter(torch.full((2, 2), 3.0)) for name in ("embed.weight", "norm.weight", "up.bias", "bias.weight")}
    optimizer = Optimizer(parameters, options)
    for parameter in parameters.values():
        parameter.grad = torch.full((2, 2), 4.0)
    optimizer.update([p.grad for p in parameters.values() if p.grad is not None], 1e9)
    for name, parameter in parameters.items():
        decayed = 3.0 * (1 - 0.1 * 0.5) if name in ("norm.weight", "bias.weight") else 3.0
        np.testing.assert_allclose(parameter.detach().numpy(), decayed - 0.1 * 4.0 / (4.0 + 0.5), rtol=1e-6)


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


@pytest.mark.parametrize("elements", [1, 7, 16, 2**18])
def test_pieces_that_fit_the_cache_have_the_bits_of_torchs_own_step(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_file, "CACHED_ELEMENTS", elements)
    options = train_options(learning_rate=0.1, weight_decay=0.1, max_grad_norm=None)
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 33), (3,), (4, 4), (1,)]
    ours = {str(i): nn.Parameter(torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)}
    ours["turned"] = nn.Parameter(torch.randn(6, 9, generator=generator).t())  # not contiguous
    theirs = [nn.Parameter(p.detach().clone()) for p in ours.values()]
    rates = {"lr": options.learning_rate, "betas": options.betas, "eps": options.epsilon}
    matrices = [p for p in theirs if p.ndim > 1]
    vectors = [p for p in theirs if p.ndim == 1]
    torchs = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], **rates)
    optimizer = Optimizer(ours, options)
    for step in range(4):
        for i, (own, their) in enumerate(zip(ours.values(), theirs, strict=True)):
            own.grad = their.grad = None if (i, step) == (2, 0) else torch.randn(own.shape, generator=generator)
        optimizer.update([p.grad for p in ours.values() if p.grad is not None], 1.0)
        torchs.step()
    assert all(map(torch.equal, ours.values(), theirs))
    states = {(name, kind): state for name, kind, state in optimizer.states()}
    for name, their in zip(ours, theirs, strict=True):
        assert all(torch.equal(states[name, kind], torchs.state[their][kind]) for kind in ("step", "exp_avg", "exp_avg_sq"))
