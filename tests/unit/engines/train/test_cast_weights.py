"""Weights in the dtype of passes: cast once an update, in whichever thread and layer, with the bits of a cast in each pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncflow.engines.base import MicroBatch
from asyncflow.engines.train.model.cast_weights import CastWeights
from asyncflow.engines.train.model.causal_model import CausalModel
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.engines.train.passes import Passes
from asyncflow.types import LoraSpec
from tests.unit.engines.train.conftest import micro_batch
from tests.unit.engines.train.training import ModelPath, Sum, policy_gradient, train_options

CHANGES: dict[str, Any] = {"dtype": "bfloat16", "learning_rate": 1e-2, "check_shared_prompt": False}


class Casts(TorchDispatchMode):
    """Number of times that each parameter of a model is read to make a tensor of bfloat16, by name."""

    def __init__(self, model: CausalModel) -> None:
        super().__init__()
        self._names = {parameter.data_ptr(): name for name, parameter in model.parameters.items()}
        self.counts = dict.fromkeys(model.parameters, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.bfloat16:
            for each in args:
                if isinstance(each, Tensor) and each.dtype == torch.float32 and each.data_ptr() in self._names:
                    self.counts[self._names[each.data_ptr()]] += 1
        return made


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_each_weight_is_cast_once_an_update(model_path: ModelPath, is_recomputed: bool) -> None:
    options = train_options(**CHANGES, activation_checkpointing=is_recomputed, tokens_per_pass=60)
    training = OneRank(model_path("llama-tiny"), options)
    helper = Passes(model_path("llama-tiny"), options, training.passes)
    batches = [micro_batch(number) for number in range(4)]
    for _ in range(2):
        with Casts(training.policy) as casts:
            training.begin_step()
            training.log_probs(batches[0].prompt_ids, batches[0].response_ids)
            for each in batches:
                training.forward_backward([each], Sum(policy_gradient))
            helper.compute(batches[:1], [helper.policy.pack(batches[0].prompt_ids, batches[0].response_ids)], Sum(policy_gradient))
        # At the start the probe of passes has made copies, which nothing has changed since.
        assert set(casts.counts.values()) <= {0, 1} and len(set(casts.counts.values())) == 1, casts.counts
        training.optim_step(20)
    assert set(casts.counts.values()) == {1}


@contextmanager
def casts_in_each_pass() -> Iterator[None]:
    def of(_kept: CastWeights, _name: str, parameter: Tensor) -> Tensor:
        return parameter.to(torch.bfloat16)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CastWeights, "of", of)
        yield


def _trained(path: Path, folder: Path, **changes: Any) -> tuple[Any, ...]:
    """What comes of two steps, of going back to the first one's state, and of its weights once more."""
    training = OneRank(path, train_options(**{**CHANGES, **changes}))
    batches: list[MicroBatch] = [micro_batch(number) for number in range(4)]
    found: list[Any] = []

    def step() -> None:
        training.begin_step()
        found.append(training.forward_backward(batches, Sum(policy_gradient)))
        found.append({name: None if p.grad is None else p.grad.tolist() for name, p in training.policy.parameters.items()})
        training.optim_step(20)
        found.append(training.log_probs(batches[0].prompt_ids, batches[0].response_ids).values.tobytes())
        found.append(training.fingerprint())

    step()
    training.save_state(folder).result()
    step()
    training.load_state(folder)
    found.append(training.log_probs(batches[0].prompt_ids, batches[0].response_ids).values.tobytes())
    assert found[-1] == found[2] != found[6]
    step()
    assert found[4:8] == found[9:]
    return tuple(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": "exact", "tokens_per_pass": 60},
        {"accumulate": "fp32", "activation_checkpointing": True, "old": "step_start"},
        {"accumulate": "exact", "lora": LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))},
    ],
)
def test_bits_are_those_of_a_cast_in_each_pass(model_path: ModelPath, tmp_path: Path, changes: dict[str, Any]) -> None:
    found = _trained(model_path("llama-tiny"), tmp_path / "kept", **changes)
    with casts_in_each_pass():
        assert found == _trained(model_path("llama-tiny"), tmp_path / "cast", **changes)
