"""Chunked log-probs and the two ways to their gradient, against a plain log-softmax over all logits."""

from typing import Any

import pytest
import torch

from asyncflow.engines.train.model.log_probs import log_probs_and_entropy, token_local_loss
from asyncflow.types import LossSums

T, H, V = 23, 8, 50


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TH, head_VH = (torch.randn(n, H, generator=generator).to(dtype).requires_grad_() for n in (T, V))
    return hidden_TH, head_VH, torch.randint(V, (T,), generator=generator), torch.randn(T, generator=generator)


def clipped(log_probs: torch.Tensor, entropy: torch.Tensor, advantages: torch.Tensor) -> LossSums:
    """Not linear in the log-probs, and with tokens that have no gradient."""
    ratio = (log_probs + 4).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    known = ratio.detach()
    metrics = {"entropy": entropy.sum(), "clipped": (known > 1.2).double().sum(), "ratio/max": known.max()}
    return LossSums(loss=loss, metrics=metrics)


def gradients(loss: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 100])
def test_log_probs_entropy_and_gradient_are_those_of_a_log_softmax(chunk_tokens: int) -> None:
    hidden_TH, head_VH, targets_T, weight_T = make_inputs(torch.float64)
    log_p_TV = (hidden_TH @ head_VH.t()).log_softmax(1)
    expected_T = log_p_TV[torch.arange(T), targets_T]
    log_probs_T, entropy_T = log_probs_and_entropy(hidden_TH, head_VH, targets_T, chunk_tokens=chunk_tokens)
    exact: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(log_probs_T, expected_T, **exact)
    torch.testing.assert_close(entropy_T, -(log_p_TV.exp() * log_p_TV).sum(1), **exact)
    assert not entropy_T.requires_grad
    weight_T = weight_T.double()
    pairs = zip(*(gradients((x * weight_T).sum(), hidden_TH, head_VH) for x in (log_probs_T, expected_T)), strict=True)
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, **exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 100])
def test_a_token_local_loss_is_that_of_the_log_probs_of_all_tokens(dtype: torch.dtype, chunk_tokens: int) -> None:
    hidden_TH, head_VH, targets_T, weight_T = make_inputs(dtype)
    log_probs_T, entropy_T = log_probs_and_entropy(hidden_TH, head_VH, targets_T, chunk_tokens=chunk_tokens)
    sums = clipped(log_probs_T, entropy_T, weight_T)
    total, metrics, own_log_probs_T = token_local_loss(
        hidden_TH,
        head_VH,
        targets_T,
        lambda part, log_probs_C, entropy_C: clipped(log_probs_C, entropy_C, weight_T[part]),
        chunk_tokens=chunk_tokens,
    )
    assert own_log_probs_T.equal(log_probs_T) and not own_log_probs_T.requires_grad
    assert own_log_probs_T.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(total, sums.loss)
    assert metrics.keys() == sums.metrics.keys() and metrics["clipped"] == sums.metrics["clipped"] > 0
    torch.testing.assert_close(metrics["entropy"], sums.metrics["entropy"])
    assert metrics["ratio/max"] == sums.metrics["ratio/max"]
    # scaled, since what comes from above must reach gradients that were made before
    pairs = zip(*(gradients(3 * loss, hidden_TH, head_VH) for loss in (total, sums.loss)), strict=True)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for ours, expected in pairs:
        assert ours.dtype == dtype and expected.norm() > 0
        assert (ours - expected).norm() < tolerance * expected.norm()


def test_a_token_local_loss_without_gradient_has_the_same_numbers() -> None:
    hidden_TH, head_VH, targets_T, weight_T = make_inputs()

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        return token_local_loss(
            hidden_TH, head_VH, targets_T, lambda part, p, entropy: clipped(p, entropy, weight_T[part]), chunk_tokens=5
        )

    with torch.no_grad():
        total, metrics, log_probs_T = run()
    expected, expected_metrics, expected_T = run()
    assert expected.requires_grad and not total.requires_grad
    assert total.equal(expected) and metrics["entropy"].equal(expected_metrics["entropy"]) and log_probs_T.equal(expected_T)


def test_made_gradients_are_given_out_once() -> None:
    hidden_TH, head_VH, targets_T, weight_T = make_inputs()
    total, _, _ = token_local_loss(
        hidden_TH, head_VH, targets_T, lambda part, p, entropy: clipped(p, entropy, weight_T[part]), chunk_tokens=5
    )
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the tensors of a shape [n, V] that are made, and the rows of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.logits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
            self.logits += func is torch.ops.aten.mm.default and out.shape[1] == 1000
        return out


@pytest.mark.parametrize("is_local", [True, False])
def test_no_logits_of_all_tokens_are_made_and_a_token_local_loss_makes_them_once(is_local: bool) -> None:
    num_tokens, vocabulary_size, chunk_tokens = 64, 1000, 4
    hidden_TH = torch.randn(num_tokens, 8, requires_grad=True)
    head_VH = torch.randn(vocabulary_size, 8, requires_grad=True)
    targets_T = torch.arange(num_tokens)
    with Watch() as watch:
        if is_local:
            loss, _, _ = token_local_loss(
                hidden_TH, head_VH, targets_T, lambda _, log_probs, __: LossSums(log_probs.sum(), {}), chunk_tokens=chunk_tokens
            )
        else:
            loss = log_probs_and_entropy(hidden_TH, head_VH, targets_T, chunk_tokens=chunk_tokens)[0].sum()
        loss.backward()
    assert 0 < watch.largest <= head_VH.numel() < num_tokens * vocabulary_size
    assert watch.logits == (1 if is_local else 2) * num_tokens // chunk_tokens
