"""What tests of the torch engine under a layout have each rank do, and the same on one device."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import threading
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult
from asyncflow.engines.train.model import check_sharing
from asyncflow.engines.train.model.kernels import CpuFlash
from asyncflow.engines.train.model.packing import Packed, pack_thrifty
from asyncflow.engines.train.model.weight_files import WeightFiles
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.engines.train.parallel import check_sharing_of_ranks, fsdp
from asyncflow.engines.train.parallel.fsdp import ExactSums, HandedSums
from asyncflow.engines.train.parallel.many_ranks import ManyRanks
from asyncflow.engines.train.state import placed_like
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.types import Array, HeldWeights, Layout, LossSums, Objective, Ragged, TokenBatch, UserError, WeightSource
from asyncflow.weight_sync.base import WeightSyncOptions
from asyncflow.weight_sync.shared_memory import SharedMemory
from asyncflow.weight_sync.staging import Filling
from tests.patience import patience
from tests.unit.engines.train.parallel.processes import end_itself
from tests.unit.engines.train.training import leave_pieces_to_helpers, torch_engine, train_options, weights_of

Round = list[list[MicroBatch]]  # of each data-parallel group its micro-batches


@dataclass(frozen=True)
class Clipped:
    """A loss with ratio, entropy and reference, as sums over tokens."""

    is_token_local: bool = True

    def loss(self, batch: TokenBatch) -> LossSums:
        """See `Objective.loss`."""
        ratio_T = (batch.logprobs_T - batch.old_logprobs_T).exp()
        gains_T = (batch.advantages_T * ratio_T).minimum(batch.advantages_T * ratio_T.clamp(0.8, 1.2))
        if batch.ref_logprobs_T is not None:
            gains_T = gains_T - 0.1 * (batch.logprobs_T - batch.ref_logprobs_T) ** 2
        gains_T = gains_T + 0.1 * batch.entropy_T
        return LossSums(
            loss=-(batch.mask_T * gains_T).sum(),
            metrics={
                "policy/entropy": (batch.mask_T * batch.entropy_T).sum(),
                "ratio/max": (batch.mask_T * ratio_T.detach()).max(),
            },
        )


@dataclass
class Made:
    """What came of the steps on one rank; `weights` and `fingerprint` on rank 0 alone."""

    results: list[MicroBatchResult] = field(default_factory=list)
    updates: list[OptimResult] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    fingerprint: dict[str, str] = field(default_factory=dict)
    remark: str = ""


def train(
    path: Path, steps: list[list[Round]], layout: Layout, options: dict[str, Any], objective: Objective = Clipped()
) -> Made | None:
    """On each rank: the steps' rounds, of which a leader takes its own micro-batches. None from those that follow."""
    return asyncio.run(_train(torch_engine(path, layout=layout, **options), steps, objective))


def train_as_a_worker(folder: Path, *arguments: Any) -> Made | None:
    """As `train` in a process of a run, which says its last words, and ends with its error."""
    try:
        return train(*arguments)
    except Exception as error:
        (folder / os.environ["RANK"]).write_text(f"{type(error).__name__}: {error}")
        os._exit(1)


@dataclass(frozen=True)
class Version:
    """What a publication has made: `hash` of the file, `sums` of its tensors."""

    hash: str
    sums: dict[str, int]


def publish(path: Path, rounds: list[Round], layout: Layout, options: dict[str, Any], folder: Path) -> list[Version] | None:
    """On each rank: a step, whose weights are published while the ranks make the next one but for its update; the hash waits for
    that. On rank 0: what was published, and what comes of the same weights if they lie there in one piece. Else None."""
    return asyncio.run(_publish(torch_engine(path, layout=layout, **options), rounds, folder))


async def _publish(engine: TorchEngine, rounds: list[Round], folder: Path) -> list[Version] | None:
    rank, objective = engine.data_parallel_rank, Clipped()
    if rank is None:
        await engine.follow(objective, lambda what: contextlib.nullcontext())
        return None
    await engine.begin_step()
    for round_ in rounds:
        await engine.forward_backward(round_[rank], objective)
    await engine.optim_step(100)
    names = "ab" if rank == 0 else ""  # a sender has its folder to itself: a second one would clear it of what the first has begun
    senders = [SharedMemory(WeightSyncOptions(directory=folder / name, attested_dtype="bfloat16")).sender("s") for name in names]
    may_hash, finish, source = threading.Event(), Filling.finish, await engine.export_weights()

    def finish_then(*arguments: Any) -> str:
        assert may_hash.wait(patience(60))
        return finish(*arguments)

    with patch.object(Filling, "finish", finish_then):
        publishing = asyncio.create_task(senders[0].publish(1, source) if rank == 0 else read(source))
        await source.gathered()
        await engine.begin_step()
        for round_ in rounds:
            await engine.forward_backward(round_[rank], objective)
        may_hash.set()
        manifests = [await publishing]
    held = HeldWeights(await weights_of(engine))
    await engine.close()
    if rank:
        return None
    manifests.append(await senders[1].publish(1, held))
    for sender in senders:
        await sender.close()
    return [Version(made.hash, made.sums) for made in manifests if made is not None]


async def read(source: WeightSource) -> None:
    """Help to gather."""
    async for _ in source.tensors():
        raise AssertionError("this rank was given a tensor")


def train_alone(path: Path, steps: list[list[Round]], options: dict[str, Any], objective: Objective = Clipped()) -> Made:
    """The same on one device: all groups' micro-batches, one after the other."""
    joined = [[[[batch for batches in round_ for batch in batches]] for round_ in rounds] for rounds in steps]
    made = asyncio.run(_train(torch_engine(path, **options), joined, objective))
    assert made is not None
    return made


def train_helped(
    path: Path, steps: list[list[Round]], layout: Layout, options: dict[str, Any], most: int | None
) -> tuple[Made | None, dict[str, int]]:
    """As `train`, with two helpers on each rank, which take all pieces that are left to them, or `most` of them. Returns also how
    many they have taken, of passes (`forward_backward`) and of updates (`optim_step`)."""
    engine = torch_engine(path, layout=layout, helpers=("cpu",) * (1 if most else 2), **options)
    made, taken, training = engine.helpers, dict[str, int](), engine.training
    assert made is not None
    made.allow(range(2))
    takers = leave_pieces_to_helpers(made, most)

    def counted(method: str, call: Any) -> Any:
        def count(*arguments: Any) -> Any:
            before = len(takers)
            result = call(*arguments)
            taken[method] = taken.get(method, 0) + sum(taker.startswith("train-helper") for taker in takers[before:])
            return result

        return count

    for method in ("forward_backward", "optim_step"):
        setattr(training, method, counted(method, getattr(training, method)))
    return asyncio.run(_train(engine, steps, Clipped())), taken


async def _train(engine: TorchEngine, steps: list[list[Round]], objective: Objective) -> Made | None:
    rank = engine.data_parallel_rank
    if rank is None:
        await engine.follow(objective, lambda what: contextlib.nullcontext())
        return None
    made = Made(remark=engine.remark)
    for rounds in steps:
        await engine.begin_step()
        for round_ in rounds:
            made.results += await engine.forward_backward(round_[rank], objective)
        made.updates.append(
            await engine.optim_step(sum(tokens_of(batch) for round_ in rounds for group in round_ for batch in group))
        )
    made.weights = arrays(await weights_of(engine))
    made.fingerprint = dict(await engine.fingerprint())
    await engine.close()
    return made


def arrays(tensors: dict[str, Tensor]) -> dict[str, Array]:
    """As arrays, which another process takes without torch's shared memory."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def tokens_of(batch: MicroBatch) -> int:
    """Those that count in the normaliser."""
    return int(batch.loss_mask.values.sum())


def make_batch(seed: int, lengths: tuple[int, ...], num_prompt_tokens: int, staleness: int = 0) -> MicroBatch:
    """Random tokens, advantages and log-probs."""
    rng = np.random.default_rng(seed)
    responses = Ragged.from_arrays([rng.integers(0, 250, n) for n in lengths], "int64")
    size = len(responses.values)
    mask = (rng.random(size) > 0.2).astype(np.uint8)
    mask[0] = 1
    return MicroBatch(
        indices=np.arange(len(lengths)),
        prompt_ids=rng.integers(0, 250, num_prompt_tokens),
        response_ids=responses,
        loss_mask=Ragged(mask, responses.offsets),
        rollout_logprobs=Ragged(rng.normal(-5.0, 0.1, size).astype(np.float32), responses.offsets),
        advantages=rng.normal(size=len(lengths)).astype(np.float32),
        staleness=np.full(len(lengths), staleness),
    )


def make_steps(dp: int, *, num_steps: int = 5, is_shared: bool = True, staleness: int = 0) -> list[list[Round]]:
    """Two rounds a step: the first with a micro-batch or two for each group, the second with none for the last group but one.

    All micro-batches share their prompt, or, with a prompt that is short beside the responses, none does: see `shared_ways`.
    """
    number, steps = 0, []
    shortest, lengths = (23, (5, 1, 9, 5)) if is_shared else (1, (25, 2, 13))
    for step in range(num_steps):
        rounds: list[Round] = []
        for round_ in range(2):
            groups: Round = []
            for group in range(dp):
                count = 1 + (group + step) % 2 if round_ == 0 else int(group == 0)
                batches = []
                for _ in range(count):
                    number += 1
                    ragged = tuple(n + (number * (i + 1)) % 4 for i, n in enumerate(lengths))
                    num_prompt_tokens = shortest + number % (5 if is_shared else 2)
                    batches.append(make_batch(number, ragged, num_prompt_tokens, staleness * (step > 0)))
                groups.append(batches)
            rounds.append(groups)
        steps.append(rounds)
    return steps


def shared_ways(rounds: list[Round]) -> set[bool]:
    """Whether the engine shares the prompt of the micro-batches: both, where it does of some alone."""
    batches = [batch for round_ in rounds for group in round_ for batch in group]
    return {pack_thrifty(batch.prompt_ids, batch.response_ids).layout.has_prompt for batch in batches}


@dataclass
class Gradients:
    """`sums` of the gradients, whole, by name, on rank 0; `norm` of them; `fill_tokens` told with it; `tied`: after an update by
    them, the bytes of this rank's part of the matrix that the first and the last stage have."""

    results: list[MicroBatchResult]
    sums: dict[str, Array]
    norm: float
    fill_tokens: int
    tied: bytes | None


def gradients(
    path: Path, rounds: list[Round], layout: Layout, options: dict[str, Any], objective: Objective = Clipped()
) -> Gradients:
    """On each rank: what came of its group's micro-batches."""
    many = ManyRanks(path, train_options(layout=layout, **options))
    try:
        results = [result for round_ in rounds for result in many.forward_backward(round_[many.ranks.dp_rank], objective)]
        policy, whole_ones = many._policy, {}
        many._sums.gradients(1)
        if (tied := policy.stage.tied_name) is not None:
            grad = policy.parts[tied].grad
            assert grad is not None
            many._pipeline.add_tied_(grad)
        for name, spec in many.specs.items():
            part = policy.parts.get(name)
            placed = None if part is None or part.grad is None else placed_like(part.grad, policy.parameters[name])
            whole_ones[name] = many._to_first(name, placed, spec.shape, torch.float32)
        many.discard()
        for round_ in rounds:
            many.forward_backward(round_[many.ranks.dp_rank], objective)
        update = many.optim_step(1)
        known = {name: tensor.numpy() for name, tensor in whole_ones.items() if tensor is not None}
        tied_bytes = None if tied is None else policy.parts[tied].detach().numpy().tobytes()
        return Gradients(results, known, update.grad_norm, update.fill_tokens, tied_bytes)
    finally:
        many.close()


def gradients_alone(path: Path, rounds: list[Round], options: dict[str, Any], objective: Objective = Clipped()) -> Gradients:
    """The same on one device."""
    one = OneRank(path, train_options(**options))
    batches = [batch for round_ in rounds for group in round_ for batch in group]
    results = one.forward_backward(batches, objective)
    one._sums.gradients(1)
    sums = {name: p.grad.numpy() for name, p in one.policy.parameters.items() if p.grad is not None}
    one.discard()
    one.forward_backward(batches, objective)
    return Gradients(results, sums, one.optim_step(1).grad_norm, 0, None)


@dataclass(frozen=True)
class Broken:
    """`Clipped`, whose loss is not finite, or raises an error, or ends its process, for rows of one advantage."""

    how: str
    advantage: float
    is_token_local: bool = True

    def loss(self, batch: TokenBatch) -> LossSums:
        """See `Objective.loss`."""
        sums = Clipped().loss(batch)
        if not (batch.advantages_T == self.advantage).any():
            return sums
        if self.how == "dies":
            end_itself()
        if self.how == "raises":
            raise UserError("this loss is not for these rows")
        factor = {"infinite": math.inf, "huge": 1e9}[self.how]
        return LossSums(loss=sums.loss * factor, metrics=sums.metrics)


def loaded_weights(path: Path, layout: Layout, options: dict[str, Any]) -> dict[str, dict[str, Array]]:
    """On rank 0: the weights of policy and reference as they were loaded, whole, by name, as float32."""
    many = ManyRanks(path, train_options(layout=layout, has_reference=True, **options))
    try:
        found: dict[str, dict[str, Array]] = {"policy": {}, "reference": {}}
        for model, weights in zip((many._policy, many.models.reference), found.values(), strict=True):
            assert model is not None and not any(part.is_meta for part in model.parts.values())
            assert model.parts.keys() - many.specs.keys() <= {model.stage.copy_name}, "a tied one comes once"
            for name, spec in many.specs.items():
                tensor = many._to_first(name, model.parameters.get(name), spec.shape, next(iter(model.parts.values())).dtype)
                weights |= {} if tensor is None else {name: tensor.float().numpy()}
        return found
    finally:
        many.close()


def loading_bytes(path: Path, layout: Layout) -> int:
    """On each rank: the most that was allocated at a time for tensors while a model was loaded, beside its mapped file.

    Nothing reads it whole: what other threads would allocate, as transformers has them do, is not counted.
    """
    mapped = (path / "model.safetensors").stat().st_size
    gc.collect()  # an earlier model's parameters, which would count as freed here
    no_whole = patch.object(AutoModelForCausalLM, "from_pretrained", None), patch.object(WeightFiles, "__getitem__", None)
    with no_whole[0], no_whole[1], profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        many = ManyRanks(path, train_options(layout=layout))
    many.close()
    now = most = 0
    for event in seen.profiler.kineto_results.events():  # in order of time
        if event.name() == "[memory]" and abs(event.nbytes()) != mapped:
            now += event.nbytes()
            most = max(most, now)
    return most


@dataclass(frozen=True, slots=True, eq=False)
class Doubled(Packed):
    """The same log-probs, and twice the gradient."""

    def predicting(self, hidden_PH: Tensor, temperature: float = 1.0) -> Tensor:
        hidden_TH = Packed.predicting(self, hidden_PH, temperature)
        return hidden_TH + hidden_TH - hidden_TH.detach()


def check_with_fault(path: Path, layout: Layout, fault: str, faulty: int) -> list[MicroBatchResult]:
    """On each rank: a round whose check finds a fault in the shared layout of data-parallel group `faulty`, in -1 none."""
    many = ManyRanks(path, train_options(layout=layout))

    def broken(micro_batch: MicroBatch, device: Any) -> tuple[Packed, Packed]:
        shared, rows = check_sharing.both_ways(micro_batch, device)
        if many.ranks.dp_rank == faulty and fault == "log-prob":
            shared.targets_T[8] += 1
        if many.ranks.dp_rank == faulty and fault == "gradient":
            shared = Doubled(*(getattr(shared, field.name) for field in fields(Packed)))
        return shared, rows

    round_ = [[make_batch(group, (5, 3, 4), 20)] for group in range(layout.dp)]
    try:
        with patch.object(check_sharing_of_ranks, "both_ways", broken):
            return many.forward_backward(round_[many.ranks.dp_rank], Clipped())
    finally:
        many.close()


def sums_of_a_check(path: Path, layout: Layout) -> float:
    """On each rank: what is in exact sums, and counted of their range, after nothing but a check."""
    many = ManyRanks(path, train_options(layout=layout, accumulate="exact"))
    batch = make_batch(1, (5, 3, 4), 20)
    try:
        many._check_sharing([batch], [pack_thrifty(batch.prompt_ids, batch.response_ids)])
        sums = many._sums
        assert isinstance(sums, ExactSums) and not any(unit.sums_E is not None for unit in sums._units)
        return sum(float(unit.peaks.sum() + unit.steps.sum()) for unit in sums._units)
    finally:
        many.close()


def state_bytes(path: Path, layout: Layout, options: dict[str, Any]) -> int:
    """On each rank: the bytes of parameters, gradient sums and optimiser state, after an update, while sums are there."""
    many = ManyRanks(path, train_options(layout=layout, **options))
    round_ = [[make_batch(group, (5, 3), 9)] for group in range(layout.dp)]
    try:
        for _ in range(2):
            many.begin_step()
            many.forward_backward(round_[many.ranks.dp_rank], Clipped())
            if not many._optimizer.num_updates:
                many.optim_step(10)
        return held_bytes([*many._policy.parts.values()], many)
    finally:
        many.close()


def layer_passes(path: Path, layout: Layout, options: dict[str, Any]) -> int:
    """On each rank: how often one micro-batch goes through a layer's attention, backward pass included."""
    many = ManyRanks(path, train_options(layout=layout, **options))
    passes = list[str]()
    try:
        layers = many._policy._root.module.base_model.layers
        layer = next(layer for layer in layers if next(layer.parameters(), None) is not None)
        layer.self_attn.o_proj.register_forward_pre_hook(lambda *_: passes.append("o_proj"))
        many.forward_backward([make_batch(0, (5, 3), 20)], Clipped())
        return len(passes)
    finally:
        many.close()


def collectives(path: Path, rounds: list[Round], layout: Layout, options: dict[str, Any]) -> tuple[int, int]:
    """How often a unit's parameters were gathered over data-parallel ranks, and how often its gradients added up, on this one."""
    many = ManyRanks(path, train_options(layout=layout, **options))
    calls = list[str]()

    def counted(name: str, call: Any) -> Any:
        def called(*arguments: Any, **others: Any) -> Any:
            calls.append(name)
            return call(*arguments, **others)

        return called

    gathers = patch.object(DefaultAllGather, "__call__", counted("gather", DefaultAllGather.__call__))
    try:
        with gathers, patch.object(fsdp, "_reduce_scatter", counted("scatter", fsdp._reduce_scatter)):
            for round_ in rounds:
                many.forward_backward(round_[many.ranks.dp_rank], Clipped())
    finally:
        many.close()
    return calls.count("gather"), calls.count("scatter")


def remark_where_rows_differ(path: Path, layout: Layout, options: dict[str, Any], faulty: int) -> tuple[str, int | None]:
    """The engine's remark, and the tokens of a pass, where on one rank rows of long sequences are rounded otherwise."""
    forward = CpuFlash.forward

    def shaky(self: CpuFlash, *arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = forward(self, *arguments)
        is_other = int(os.environ["RANK"]) == faulty and len(out) > 60
        return (torch.nextafter(out, out + 1) if is_other else out), lse

    with patch.object(CpuFlash, "forward", shaky):
        many = ManyRanks(path, train_options(layout=layout, **options))
    many.close()
    return many.remark, many._tokens_per_pass


def held_bytes(parts: list[torch.nn.Parameter], training: Any) -> int:
    """Of parameters, their sums, and their optimiser state."""
    states = [state for _, _, state in training._optimizer.states()]
    sums = training._sums
    if isinstance(sums, ExactSums):
        tensors = [unit.sums_E for unit in sums._units]
    elif isinstance(sums, HandedSums):
        tensors = [part.grad for part in parts]
    else:
        tensors = [*getattr(sums, "_sums", {}).values()] or [part.grad for part in parts]
    return sum(tensor.nbytes for tensor in (*parts, *states, *tensors) if tensor is not None)


def logprobs_after(path: Path, layout: Layout, folder: Path, how: str) -> Array | None:
    """Train a step and save the state (`save`), or load it (`load`): the log-probs of a batch, of a leader, and save the model."""
    return asyncio.run(_logprobs_after(torch_engine(path, layout=layout, learning_rate=1e-2), folder, how))


async def _logprobs_after(engine: TorchEngine, folder: Path, how: str) -> Array | None:
    if engine.data_parallel_rank is None:
        await engine.follow(Clipped(), lambda what: contextlib.nullcontext())
        return None
    batch = make_batch(0, (5, 1, 9), 20)
    if how == "load":
        await engine.load_state(folder / "state")
    await engine.begin_step()
    await engine.forward_backward([batch], Clipped())
    await engine.optim_step(10)
    if how == "save":
        await (await engine.save_state(folder / "state"))
        await engine.save(folder / "model")
        await engine.forward_backward([batch], Clipped())
        await engine.optim_step(10)
    log_probs = await engine.log_probs(batch.prompt_ids, batch.response_ids)
    await engine.close()
    return log_probs.values
