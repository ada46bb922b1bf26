"""A tiny random model of each family, made once, and micro-batches for it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncflow.engines.base import MicroBatch
from asyncflow.engines.train.random_model import make_random_model
from asyncflow.types import Ragged

# Several threads on a busy machine are slower than one, and models this small gain nothing from them.
torch.set_num_threads(1)

TEXTS = [f"Tom has {i} coins. Ann finds {i % 7} of them.\n{i}+{i % 7}={i + i % 7}\n" for i in range(40)]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of `random:<name>`."""
    folder = tmp_path_factory.mktemp("models")

    def path_of(name: str) -> Path:
        if not (folder / name).exists():
            make_random_model(f"random:{name}", folder / name, TEXTS, seed=1)
        return folder / name

    return path_of


def micro_batch(seed: int = 0, lengths: tuple[int, ...] = (5, 1, 9, 5), num_prompt_tokens: int = 6) -> MicroBatch:
    """Random tokens, mask, advantages and log-probs."""
    rng = np.random.default_rng(seed)
    responses = Ragged.from_arrays([rng.integers(0, 250, n) for n in lengths], "int64")
    mask = (rng.random(len(responses.values)) > 0.2).astype(np.uint8)
    advantages = rng.normal(size=len(lengths)).astype(np.float32)
    logprobs = rng.normal(size=len(responses.values)).astype(np.float32)
    return MicroBatch(
        indices=np.arange(len(lengths)),
        prompt_ids=rng.integers(0, 250, num_prompt_tokens),
        response_ids=responses,
        loss_mask=Ragged(mask, responses.offsets),
        rollout_logprobs=Ragged(logprobs, responses.offsets),
        advantages=advantages,
        staleness=np.zeros(len(lengths), np.int64),
    )


@pytest.fixture
def make_micro_batch() -> Callable[..., MicroBatch]:
    return micro_batch
