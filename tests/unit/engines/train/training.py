"""What tests of train engines have in common."""

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncflow.config import parse
from asyncflow.engines.base import MicroBatch, MicroBatchResult, TrainEngine, TrainEngineOptions
from asyncflow.engines.train.frozen_engine import FrozenEngine
from asyncflow.engines.train.helpers import Helpers
from asyncflow.engines.train.leader_engine import TrainingEngine
from asyncflow.engines.train.model.log_probs import Head, VocabularyShard, token_local_losses
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.run.factories import train_engine_options
from asyncflow.types import LossSums, Objective, TokenBatch
from tests.patience import patience

ModelPath = Callable[[str], Path]
MakeMicroBatch = Callable[..., MicroBatch]


def train_options(**changes: Any) -> TrainEngineOptions:
    """The configuration's defaults, with changes."""
    return replace(train_engine_options(parse({"model": {"path": "model"}, "data": {"path": "data"}})), **changes)


def torch_engine(model_path: Path | str, **changes: Any) -> TorchEngine:
    """An engine by the configuration's defaults, with changes."""
    return TorchEngine(model_path, train_options(**changes))


def one_rank(engine: TorchEngine) -> OneRank:
    """What an engine on one device does in its thread: to look at, and to break."""
    assert isinstance(engine.training, OneRank)
    return engine.training


def frozen_engine(model_path: Path | str, **changes: Any) -> FrozenEngine:
    """An engine as `torch_engine`'s reference, computed apart."""
    return FrozenEngine(model_path, train_options(**changes))


async def train_on(engine: TrainEngine, micro_batch: MicroBatch, objective: Objective) -> MicroBatchResult:
    """`forward_backward` of one micro-batch."""
    (result,) = await engine.forward_backward([micro_batch], objective)
    return result


async def weights_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Copies of what it exports."""
    source = await engine.export_weights()
    return {name: tensor.clone() async for name, tensor in source.tensors()}


@dataclass(frozen=True)
class Sum:
    """An objective of a loss function alone."""

    loss: Callable[[TokenBatch], LossSums]
    is_token_local: bool = True


def policy_gradient(batch: TokenBatch) -> LossSums:
    """- sum mask A ratio: its gradient at ratio 1 is that of - sum mask A log p."""
    ratio_T = (batch.logprobs_T - batch.old_logprobs_T).exp()
    return LossSums(
        loss=-(batch.mask_T * batch.advantages_T * ratio_T).sum(),
        metrics={"policy/entropy": (batch.mask_T * batch.entropy_T).sum()},
    )


def reference_log_probs(model: Any, batch: MicroBatch, temperature: float = 1.0) -> list[Tensor]:
    """Of each response's tokens, by a pass of its own of transformers' model."""
    log_probs = []
    for response in batch.response_ids:
        tokens = torch.tensor(np.concatenate([batch.prompt_ids, response]))
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(batch.prompt_ids) - 1 : -1] / temperature
        log_probs.append(logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)])
    return log_probs


def reference_steps(path: Path, steps: list[list[MicroBatch]], normalisers: list[int], lrs: list[float], clip: float) -> Any:
    """The weights after these steps, and the gradient norms before the clip."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    norms = []
    for batches, normaliser, lr in zip(steps, normalisers, lrs, strict=True):
        loss = torch.zeros(())
        for batch in batches:
            for k, log_probs in enumerate(reference_log_probs(model, batch)):
                loss = loss - (torch.tensor(batch.loss_mask[k]) * float(batch.advantages[k]) * log_probs).sum()
        (loss / normaliser).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), norms


def assert_same(left: Any, right: Any) -> None:
    """Two models have the same weights, to the bit."""
    assert left.keys() == right.keys()
    assert all(left[name].equal(right[name]) for name in left)


def rows_of(batch: MicroBatch, rows: slice) -> MicroBatch:
    """A micro-batch of some of the rows."""
    chosen = range(len(batch.indices))[rows]
    return MicroBatch(
        indices=batch.indices[rows],
        prompt_ids=batch.prompt_ids,
        response_ids=batch.response_ids.take(chosen),
        loss_mask=batch.loss_mask.take(chosen),
        rollout_logprobs=batch.rollout_logprobs.take(chosen),
        advantages=batch.advantages[rows],
        staleness=batch.staleness[rows],
    )


def untied(path: Path, folder: Path) -> Path:
    """That model with an output layer of its own."""
    shutil.copytree(path, folder)
    config = json.loads((path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def moved_less(left: dict[str, Tensor], right: dict[str, Tensor], before: Any, share: float) -> None:
    """Two models have moved alike, but for a share of the way."""
    assert left.keys() == right.keys()
    for name in left:
        # Adam divides by the gradient's own size: where that is rounding error alone, the direction is too (the key biases)
        if not name.endswith("k_proj.bias"):
            assert (left[name] - right[name]).norm() < share * (right[name] - before[name]).norm(), name


def leave_pieces_to_helpers(made: Helpers[Any], most: int | None = None) -> list[str]:
    """Let nobody but helpers take a piece that was left to others, until they have taken `most`: then they leave. Returns the names
    of the threads that take pieces."""
    takers: list[str] = []
    compute, take = made._compute_piece, made._take_pieces_until

    def noted(*arguments: Any) -> None:
        takers.append(threading.current_thread().name)
        if len(takers) == most:
            made.allow(())
        compute(*arguments)

    def take_later(is_over: Callable[[], bool]) -> None:
        with made._changed:
            assert made._changed.wait_for(lambda: is_over() or not made.allowed, patience(60))
        take(is_over)

    made._compute_piece = noted  # type: ignore[method-assign]
    made._take_pieces_until = take_later  # type: ignore[method-assign]
    return takers


def hold_back(engine: TrainingEngine[Any], passes_of_helpers: int) -> None:
    """Let the compute thread take a second pass of each round only when the helpers have computed so many."""
    made = engine.helpers
    assert made is not None
    made.allow(range(2))
    computed = threading.Semaphore(0)
    made.on_pass = lambda start, end: computed.release()
    compute, next_of_own = made.compute, made._next

    def held_back(*arguments: Any) -> Any:
        still = [*range(passes_of_helpers)]

        def held() -> int | None:
            while still:
                assert computed.acquire(timeout=patience(60))
                still.pop()
            return next_of_own()

        made._next = held  # type: ignore[method-assign]
        return compute(*arguments)

    made.compute = held_back  # type: ignore[method-assign]


def token_local_loss(
    hidden_TH: Tensor,
    head_VH: Tensor,
    targets_T: Tensor,
    loss: Callable[[slice, Tensor, Tensor], LossSums],
    *,
    chunk_tokens: int,
    shard: VocabularyShard | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """`token_local_losses` of one micro-batch: the scalar, its metrics and the detached log-probs. `loss` takes a slice of T."""
    total, (sums,), log_probs_T = token_local_losses(
        hidden_TH,
        Head(head_VH, chunk_tokens, shard, softcap),
        targets_T,
        lambda _, part, log_probs_C, entropy_C: loss(part, log_probs_C, entropy_C),
        [len(hidden_TH)],
    )
    return total, dict(sums.metrics), log_probs_T
