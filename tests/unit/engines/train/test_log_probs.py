"""Chunked log-probs and the two ways to their gradient, against a plain log-softmax over all logits."""

import math
import weakref
from typing import Any

import pytest
import torch

from asyncflow.engines.train.model import products
from asyncflow.engines.train.model.log_probs import Head, log_probs_and_entropy
from asyncflow.types import LossSums
from tests.unit.engines.train.training import token_local_loss

T, H, V = 23, 8, 50


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TH, head_VH = (torch.randn(n, H, generator=generator).to(dtype).requires_grad_() for n in (T, V))
    return hidden_TH, head_VH, torch.randint(V, (T,), generator=generator), torch.randn(T, generator=generator)


def clipped(log_probs: torch.Tensor, entropy: torch.Tensor, advantages: torch.Tensor, bonus: float = 0.0) -> LossSums:
    """Not linear in the log-probs, and with tokens that have no gradient; perhaps with a bonus for entropy, not linear either."""
    ratio = (log_probs + 4).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    if bonus:
        loss = loss - bonus * (entropy**2).sum()
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
    log_probs_T, entropy_T = log_probs_and_entropy(hidden_TH, Head(head_VH, chunk_tokens), targets_T)
    exact: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(log_probs_T, expected_T, **exact)
    expected_entropy_T = -(log_p_TV.exp() * log_p_TV).sum(1)
    torch.testing.assert_close(entropy_T, expected_entropy_T, **exact)
    weight_T = weight_T.double()
    for uses in ((1, 0), (0, 1), (2, -3)):
        losses = [
            sum(use * (x * weight_T.roll(i)).sum() for i, (use, x) in enumerate(zip(uses, pair, strict=True)) if use)
            for pair in ((log_probs_T, entropy_T), (expected_T, expected_entropy_T))
        ]
        pairs = zip(*(list(torch.autograd.grad(x, (hidden_TH, head_VH), retain_graph=True)) for x in losses), strict=True)
        for ours, expected in pairs:
            assert expected.norm() > 0.1
            torch.testing.assert_close(ours, expected, **exact)


def test_an_entropy_of_nearly_one_token_has_a_finite_gradient() -> None:
    # p underflows to 0, whose logarithm is not finite: p log p is 0 there, and so is the gradient
    hidden_TH = torch.tensor([[200.0, 0.0], [0.0, 0.0]], requires_grad=True)
    head_VH = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    for is_local in (True, False):
        targets_T = torch.tensor([0, 1])
        if is_local:
            loss, _, _ = token_local_loss(
                hidden_TH, head_VH, targets_T, lambda _, __, entropy: LossSums(entropy.sum(), {}), chunk_tokens=2
            )
        else:
            loss = log_probs_and_entropy(hidden_TH, Head(head_VH, 2), targets_T)[1].sum()
        assert loss.item() == pytest.approx(math.log(3))
        for gradient in gradients(loss, hidden_TH, head_VH):
            assert gradient.isfinite().all() and gradient.abs().max() < 1e-6  # the uniform one is at its maximum


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bonus", [0.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 100])
def test_a_token_local_loss_is_that_of_the_log_probs_of_all_tokens(dtype: torch.dtype, chunk_tokens: int, bonus: float) -> None:
    hidden_TH, head_VH, targets_T, weight_T = make_inputs(dtype)
    log_probs_T, entropy_T = log_probs_and_entropy(hidden_TH, Head(head_VH, chunk_tokens), targets_T)
    sums = clipped(log_probs_T, entropy_T, weight_T, bonus)
    total, metrics, own_log_probs_T = token_local_loss(
        hidden_TH,
        head_VH,
        targets_T,
        lambda part, log_probs_C, entropy_C: clipped(log_probs_C, entropy_C, weight_T[part], bonus),
        chunk_tokens=chunk_tokens,
    )
    assert own_log_probs_T.equal(log_probs_T) and not own_log_probs_T.requires_grad
    assert own_log_probs_T.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(total, sums.loss)
    assert not any(value.requires_grad for value in metrics.values())
    assert metrics.keys() == sums.metrics.keys() and metrics["clipped"] == sums.metrics["clipped"] > 0
    torch.testing.assert_close(metrics["entropy"], sums.metrics["entropy"].detach())
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


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.mkldnn._linear_pointwise.default)


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
            self.logits += func in PRODUCTS and out.shape[1] == 1000
        return out


@pytest.mark.parametrize("is_local", [True, False])
def test_no_logits_of_all_tokens_are_made_and_a_token_local_loss_makes_them_once(is_local: bool) -> None:
    num_tokens, vocabulary_size, chunk_tokens = 256, 1000, 16
    hidden_TH = torch.randn(num_tokens, 32, requires_grad=True)
    head_VH = torch.randn(vocabulary_size, 32, requires_grad=True)
    targets_T = torch.arange(num_tokens)
    with Watch() as watch:
        if is_local:
            loss, _, _ = token_local_loss(
                hidden_TH, head_VH, targets_T, lambda _, log_probs, __: LossSums(log_probs.sum(), {}), chunk_tokens=chunk_tokens
            )
        else:
            loss = log_probs_and_entropy(hidden_TH, Head(head_VH, chunk_tokens), targets_T)[0].sum()
        loss.backward()
    assert 0 < watch.largest <= head_VH.numel() < num_tokens * vocabulary_size
    assert watch.logits == (1 if is_local else 2) * num_tokens // chunk_tokens


class Held(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements (float32) of the tensors made within it that are held at the same time, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and (storage := out.untyped_storage())._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes() // 4
            weakref.finalize(storage, self.sizes.pop, storage._cdata)
            self.most = max(self.most, sum(self.sizes.values()))
        return out


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("takes_onednn", [True, False])
def test_of_a_chunks_logits_so_many_are_held_and_no_copy_more(
    is_local: bool, takes_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if takes_onednn and not torch._C._has_mkldnn:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "_TAKES_ONEDNN", takes_onednn)
    chunk_tokens, width, vocabulary_size = 33, 2, 20_000
    hidden_TH = torch.randn(3 * chunk_tokens, width, requires_grad=True)
    head_VH = torch.randn(vocabulary_size, width, requires_grad=True)
    with Held() as held:
        backward(is_local, hidden_TH, head_VH, torch.arange(len(hidden_TH)), None, chunk_tokens)
    # The logits, which oneDNN makes of rows that are filled up, their probabilities, and the products of both, whose sums the
    # entropies are made of. The gradient of the head and, of one chunk, what is added to it; all else is small.
    rows = (products.filled(chunk_tokens) if takes_onednn else chunk_tokens) + 2 * chunk_tokens
    assert (rows - 1) * vocabulary_size < held.most < (rows + 2 * width + 1) * vocabulary_size


@pytest.mark.parametrize("is_local", [True, False])
def test_an_entropy_that_no_loss_uses_costs_no_operation(is_local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = torch.special.entr
    monkeypatch.setattr(torch.special, "entr", lambda p: (made.append(p.shape), real(p))[1])
    hidden_TH, head_VH, targets_T, _ = make_inputs()
    for uses_entropy in (False, True):
        made.clear()
        weight = 0.5 if uses_entropy else None
        backward(is_local, hidden_TH, head_VH, targets_T, weight)
        assert made == ([(length, V) for length in (4, 5, 4, 5, 5)] if uses_entropy else [])


def backward(
    is_local: bool,
    hidden_TH: torch.Tensor,
    head_VH: torch.Tensor,
    targets_T: torch.Tensor,
    weight: float | None,
    chunk_tokens: int = 5,
) -> None:
    """By chunks; the entropy is in the metrics, and with a weight in the loss."""

    def loss(_: slice, log_probs: torch.Tensor, entropy: torch.Tensor) -> LossSums:
        total = log_probs.sum() if weight is None else log_probs.sum() + weight * entropy.sum()
        return LossSums(total, {"entropy": entropy.sum()})

    if is_local:
        total, _, _ = token_local_loss(hidden_TH, head_VH, targets_T, loss, chunk_tokens=chunk_tokens)
    else:
        total = loss(slice(None), *log_probs_and_entropy(hidden_TH, Head(head_VH, chunk_tokens), targets_T)).loss
    total.backward()
