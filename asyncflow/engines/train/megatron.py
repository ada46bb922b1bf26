"""Trains a Qwen2, Qwen3 or Llama model as Megatron-Core's GPTModel, by tensor, pipeline and data parallelism.

consumes: micro-batches with a loss, optimiser steps, requests for log-probs and weights
waits for: nothing but the call before it (one compute thread), and in it for the other processes
is unblocked by: each call as it comes; a follower by its leader's call

    checkpoint <-> Hugging Face names (megatron_weights.py) <-> GPTModel, a stage's layers, a rank's share of each matrix
    micro-batch -> pack (packing.py) -> stages, by Megatron's 1F1B schedule -> loss on the last one (micro_step.py) -> gradient sums
    float32 weights <- AdamW (optimizer.py) <- clip <- sums over data-parallel groups / normaliser

Of Megatron are the model, its parallel layers and groups, and the schedule of the pipeline; the layers are those that need no
TransformerEngine ("local"), with this package's attention in them (attention.py), so that prompts are shared. Shapes go before
tensors through the pipeline, so that micro-batches need not be of one length.

Left out: Megatron's optimiser and its buckets of gradients, which are written for CUDA alone (so the optimiser's state is whole in
each data-parallel group); `accumulate: exact`; sequence, context and expert parallelism; layers that do not divide by the stages.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.devices import check_device
from asyncflow.engines.families import check_family
from asyncflow.engines.rollout.config import DecoderConfig
from asyncflow.engines.rollout.decoder import load_tensors
from asyncflow.engines.train.gathered_state import GatheredState, loaded
from asyncflow.engines.train.megatron_model import Core, Stage, stage_origins
from asyncflow.engines.train.megatron_weights import Origin
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.check_sharing import check_shared_log_probs
from asyncflow.engines.train.model.hf_files import write_model
from asyncflow.engines.train.model.packing import filled_alike, pack_thrifty
from asyncflow.engines.train.model.tri_model import OLD_MODELS, TriModel
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.engines.train.parallel import calls
from asyncflow.engines.train.parallel.lone import joined
from asyncflow.threads import ComputeThread
from asyncflow.types import Array, Objective, Ragged, TensorSpec, UserError, WeightSource


class MegatronEngine:
    """Implements `TrainEngine`."""

    def __init__(self, model_path: Path | str, options: TrainEngineOptions) -> None:
        """Load the model at `model_path` (Hugging Face format); takes seconds, in the calling thread.

        Raises:
            UserError: Megatron or the device is not there, the layout does not fit the model, or it cannot be trained here.
        """
        check_device(options.device, "train.device")
        config, self._padding_id = _check(Path(model_path), options)
        self._options, self._model_path = options, Path(model_path)
        self._ranks = joined(options.layout, options.device)
        self.device, self.data_parallel_rank = str(self._ranks.device), self._ranks.dp_rank if self._ranks.is_leader else None
        self._core = Core(options.layout, self._ranks.device)
        torch.manual_seed(options.seed)
        tensors = load_tensors(self._model_path)
        self._policy = self._stage(config, tensors, is_trained=True)
        old_model = self._stage(config, tensors, is_trained=False) if options.old in OLD_MODELS else None
        reference = self._stage(config, tensors, is_trained=False) if options.has_reference else None
        self._models = TriModel(self._policy, options.old, old_model, reference, is_corrected=options.is_corrected)
        self._masters = {name: self._master(name, tensors) for name in self._policy.weights}
        self._optimizer = Optimizer(self._masters, options)
        self._stages = stage_origins(config, options.layout.pp)
        # A last stage's copy of a tied embedding is no weight of its own.
        tied = (options.layout.pp - 1, "output_layer.weight") if config.tie_word_embeddings else None
        self._places = [(i, name) for i, stage in enumerate(self._stages) for name in stage if (i, name) != tied]
        sources = [self._stages[i][name].names for i, name in self._places]
        self._number_of = {source: number for number, names in enumerate(sources) for source in names}
        self._specs = {name: TensorSpec(tuple(tensors[name].shape), "float32") for name in self._number_of}
        self._state = GatheredState(is_writer=self._ranks.rank == 0)
        self._is_to_check = options.check_shared_prompt
        self._has_gradient = self._is_broken = False
        self._fill_tokens = 0
        # The count holds for GEMMs only when it is set inside the thread that calls them.
        self._thread = ComputeThread("train-engine", setup=lambda: torch.set_num_threads(options.num_threads))
        self._handlers: Mapping[type, Callable[[Any, Objective | None], Any]] = {
            calls.BeginStep: lambda call, _: self._begin_step(),
            calls.ForwardBackward: lambda call, objective: self._forward_backward(call.micro_batches, objective),
            calls.OptimStep: lambda call, _: self._optim_step(call.normaliser),
            calls.Discard: lambda call, _: self._discard(),
            calls.LogProbs: lambda call, _: self._log_probs(call.prompt_ids, call.response_ids),
            calls.Gather: lambda call, _: self._gather(self._number_of[call.name]),
            calls.Fingerprint: lambda call, _: self._fingerprint(),
            calls.Save: lambda call, _: self._save(call.path),
            calls.SaveState: lambda call, _: self._save_state(call.folder),
            calls.LoadState: lambda call, _: self._load_state(call.folder),
            calls.Close: lambda call, _: self._ranks.leave(),
        }

    async def follow(self, objective: Objective, busy: Callable[[str], AbstractContextManager[object]]) -> None:
        """See `TrainEngine.follow`."""
        is_open = True
        while is_open:
            call = await self._thread.run(self._ranks.hear)
            with busy(calls.name_of(call)):
                await self._thread.run(self._handlers[type(call)], call, objective)
            is_open = not isinstance(call, calls.Close)
        self._thread.close()

    async def begin_step(self) -> None:
        """See `TrainEngine.begin_step`."""
        await self._lead(calls.BeginStep())

    async def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`.

        One that is not finite adds nothing; in a pipeline of several stages, whose first ones have let go of it by then, it makes
        the step one that is skipped. Raises `RunError` when sharing the prompt gives other log-probs than not sharing it.
        """
        if not micro_batches:  # data-parallel groups meet in `optim_step` only
            return []
        return await self._lead(calls.ForwardBackward(list(micro_batches)), objective)

    async def optim_step(self, normaliser: int) -> OptimResult:
        """See `TrainEngine.optim_step`. Also skipped when nothing was accumulated. Raises `ValueError` if `normaliser` < 1."""
        if normaliser < 1:
            raise ValueError(f"a step cannot be divided by {normaliser}")
        return await self._lead(calls.OptimStep(normaliser))

    async def discard(self) -> None:
        """See `TrainEngine.discard`."""
        await self._lead(calls.Discard())

    async def log_probs(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """See `LogProbEngine.log_probs`: under the policy's current weights."""
        values: Array = await self._lead(calls.LogProbs(prompt_ids, response_ids))
        return Ragged(values, response_ids.offsets)

    async def export_weights(self) -> WeightSource:
        """See `TrainEngine.export_weights`: float32."""
        return _Source(self)

    async def fingerprint(self) -> Mapping[str, str]:
        """See `TrainEngine.fingerprint`."""
        return await self._lead(calls.Fingerprint()) if self.data_parallel_rank == 0 else {}

    async def save(self, path: Path) -> None:
        """Write config, generation config and float32 weights; the tokenizer's files are the caller's to copy."""
        if self.data_parallel_rank == 0:
            await self._lead(calls.Save(path))

    async def save_state(self, folder: Path) -> Awaitable[None]:
        """See `TrainEngine.save_state`: data-parallel rank 0 writes, see gathered_state.py."""
        if self.data_parallel_rank != 0:
            return asyncio.sleep(0)
        return asyncio.wrap_future(await self._lead(calls.SaveState(folder)))

    async def load_state(self, folder: Path) -> None:
        """See `TrainEngine.load_state`."""
        await self._lead(calls.LoadState(folder))

    async def close(self) -> None:
        """See `TrainEngine.close`: the followers, too."""
        await self._lead(calls.Close())
        self._thread.close()

    async def gathered(self, name: str) -> Mapping[str, Tensor]:
        """The whole float32 tensor of that Hugging Face name, and those that Megatron keeps with it; of data-parallel rank 0."""
        return await self._lead(calls.Gather(name))

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Of all weights, in the order in which they are gathered."""
        return self._specs

    async def _lead(self, call: calls.Call, objective: Objective | None = None) -> Any:
        """Make a call in all processes of the group."""

        def tell_and_do() -> Any:
            self._ranks.tell(call)
            return self._handlers[type(call)](call, objective)

        return await self._thread.run(tell_and_do)

    def _stage(self, config: DecoderConfig, tensors: Mapping[str, Tensor], *, is_trained: bool) -> Stage:
        stage = Stage(self._core, config, self._options, is_trained=is_trained, padding_id=self._padding_id)
        stage.load(tensors)
        return stage

    def _master(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Parameter:
        """The float32 weight that is updated: the model's own, unless that is narrower."""
        weight = self._policy.weights[name]
        if weight.dtype == torch.float32:
            return weight
        origin = self._policy.origins[name]
        whole = [tensors[source].float() for source in origin.names]
        master = nn.Parameter(origin.shard(whole, self._policy.tp, self._options.layout.tp).clone().to(weight.device))

        def add(_: Tensor) -> None:
            # At once: autograd would add up in the weight's own, narrow dtype.
            assert weight.grad is not None
            gradient, weight.grad = weight.grad.float(), None
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

        register: Any = weight.register_post_accumulate_grad_hook  # torch has no types for it
        register(add)
        return master

    def _begin_step(self) -> None:
        self._state.begin_step()
        self._models.begin_step()

    def _forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective | None) -> list[MicroBatchResult]:
        assert objective is not None
        batches = [pack_thrifty(batch.prompt_ids, batch.response_ids, self.device) for batch in micro_batches]
        shared = next((i for i, packed in enumerate(batches) if packed.layout.has_prompt), None)
        if self._is_to_check and shared is not None:
            check_shared_log_probs(self._policy.log_probs, micro_batches[shared], self.device, self._policy.dtype)
            self._is_to_check = False
        if self._options.pipeline_fill and self._options.layout.pp > 1:
            batches = filled_alike(batches)
            self._fill_tokens += sum(packed.fill_tokens for packed in batches)
        known = [micro_step.given(self._models, packed, batch) for packed, batch in zip(batches, micro_batches, strict=True)]
        results: dict[int, MicroBatchResult] = {}

        def loss(number: int, hidden_P1H: Tensor) -> Tensor:
            hidden_TH, head_VH, shard = self._policy.head(batches[number], hidden_P1H)
            chunk_tokens = self._options.log_prob_chunk_tokens
            made = micro_step.loss(known[number], objective, hidden_TH, head_VH, chunk_tokens=chunk_tokens, shard=shard)
            results[number] = made.result
            is_added = made.result.is_finite or self._options.layout.pp > 1
            return made.total if is_added else made.total.detach()

        self._policy.run(batches, loss, has_grad=True)
        told = self._told([results[number] for number in sorted(results)])
        self._has_gradient |= any(result.is_finite for result in told)
        self._is_broken |= self._options.layout.pp > 1 and not all(result.is_finite for result in told)
        return told

    def _optim_step(self, normaliser: int) -> OptimResult:
        self._models.before_update()
        has_gradient, is_broken = self._ranks.largest([self._has_gradient, self._is_broken], of="dp")
        (fill_tokens,) = self._ranks.total([self._fill_tokens], of="dp")
        if is_broken or not has_gradient:  # every micro-batch was refused
            self._clear()
            norm, learning_rate = math.nan if is_broken else 0.0, self._optimizer.learning_rate
            return OptimResult(grad_norm=norm, learning_rate=learning_rate, skipped=True, fill_tokens=fill_tokens)
        gradients = self._summed(normaliser)
        result = self._optimizer.update(gradients, self._norm(gradients))
        self._narrow()
        self._clear()
        return replace(result, fill_tokens=fill_tokens)

    @torch.no_grad()
    def _narrow(self) -> None:
        """The policy computes with the weights as they are now."""
        for name, weight in self._policy.weights.items():
            if weight is not self._masters[name]:
                weight.copy_(self._masters[name])

    def _summed(self, normaliser: int) -> list[Tensor]:
        """The step's gradients, in the order of the weights: over all processes that share one, divided."""
        core, is_tied = self._core, self._policy.config.tie_word_embeddings and self._options.layout.pp > 1
        gradients = []
        for name, master in self._masters.items():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            if "q_layernorm" in name or "k_layernorm" in name:  # whole on each rank, but used for the rank's heads only
                dist.all_reduce(master.grad, group=core.tp_group)
            if is_tied and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                dist.all_reduce(master.grad, group=core.embedding_group)
            dist.all_reduce(master.grad, group=core.dp_group)
            gradients.append(master.grad.div_(normaliser))
        return gradients

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        """Over the whole model: what several processes hold is counted by one."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for (name, origin), gradient in zip(self._masters_origins(), gradients, strict=True):
            is_copy = (origin.cut == "whole" and self._policy.tp > 0) or (self._policy.stage, name) not in self._places
            if not is_copy:
                squares += gradient.double().square().sum()
        dist.all_reduce(squares, group=self._core.model_group)
        return math.sqrt(squares.item())

    def _masters_origins(self) -> list[tuple[str, Origin]]:
        return [(name, self._policy.origins[name]) for name in self._masters]

    def _told(self, own: list[MicroBatchResult]) -> list[MicroBatchResult]:
        """What the last stage has found, on all of them."""
        group = self._core.pp_group
        if group.size() == 1:
            return own
        content = torch.frombuffer(bytearray(msgspec.msgpack.encode(own)), dtype=torch.uint8)
        source, length = dist.get_global_rank(group, group.size() - 1), torch.tensor([len(content)])
        dist.broadcast(length, source, group=group)
        content = content if self._policy.is_last else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, source, group=group)
        return msgspec.msgpack.decode(content.numpy().data, type=list[MicroBatchResult])

    def _discard(self) -> None:
        self._models.before_update()  # the version rises all the same
        self._clear()

    def _clear(self) -> None:
        self._has_gradient = self._is_broken = False
        self._fill_tokens = 0
        for master in self._masters.values():
            master.grad = None

    def _log_probs(self, prompt_ids: Array, response_ids: Ragged) -> Array:
        packed = pack_thrifty(prompt_ids, response_ids, self.device)
        log_probs_T = self._policy.log_probs(packed)
        last = dist.get_global_rank(self._core.pp_group, self._options.layout.pp - 1)
        dist.broadcast(log_probs_T, last, group=self._core.pp_group)
        return log_probs_T.cpu().numpy()

    @torch.no_grad()
    def _gather(self, number: int, kind: str = "weights") -> dict[str, Tensor]:
        """Weight `number`, or what there is of that `kind` for it, whole, by Hugging Face names; in all processes of the group."""
        stage, name = self._places[number]
        origin, tp, group = self._stages[stage][name], self._options.layout.tp, self._core.pp_group
        if stage == self._policy.stage:
            own = self._kept(name, kind).detach().contiguous()
        else:
            whole = [torch.empty(self._specs[source].shape, device="meta") for source in origin.names]
            dtype = self._models.old_model.dtype if kind == "old" and self._models.old_model else torch.float32
            own = torch.empty(origin.shard(whole, 0, tp).shape, dtype=dtype, device=self.device)
        dist.broadcast(own, dist.get_global_rank(group, stage), group=group)
        shards = [torch.empty_like(own) for _ in range(tp)]
        dist.all_gather(shards, own, group=self._core.tp_group)
        return dict(zip(origin.names, origin.join(shards), strict=True))

    def _kept(self, name: str, kind: str) -> Tensor:
        """This process's part of a weight (float32), of what the optimiser has for it, or of the old policy's."""
        if kind == "old" and self._models.old_model is not None:
            return self._models.old_model.weights[name]
        master = self._masters[name]
        return master if kind == "weights" else self._optimizer.adamw.state[master][kind]

    def _everything(self) -> Iterator[tuple[str, Tensor]]:
        """The state's tensors, each gathered when it is its turn; in all processes of the group."""
        moments = ["exp_avg", "exp_avg_sq"] if self._optimizer.num_updates else []
        for number in range(len(self._places)):
            for kind in ["weights", *moments, *(["old"] if self._models.old_model else [])]:
                for name, tensor in self._gather(number, kind).items():
                    yield _state_name(name, kind), tensor

    def _save_state(self, folder: Path) -> Future[None]:
        return self._state.save(self._everything(), self._optimizer.num_updates, folder)

    @torch.no_grad()
    def _load_state(self, folder: Path) -> None:
        self._optimizer.make_states(self._state.load(folder))
        moments = ["exp_avg", "exp_avg_sq"] if self._optimizer.num_updates else []
        for name, origin in self._policy.origins.items():
            for kind in ["weights", *moments, *(["old"] if self._models.old_model else [])]:
                part = self._kept(name, kind)
                shapes = [self._specs[source].shape for source in origin.names]
                whole = [
                    loaded(_state_name(source, kind), shape, part.dtype, folder)
                    for source, shape in zip(origin.names, shapes, strict=True)
                ]
                part.copy_(origin.shard(whole, self._policy.tp, self._options.layout.tp))
        self._narrow()

    def _fingerprint(self) -> Mapping[str, str]:
        step = torch.tensor(float(self._optimizer.num_updates))
        hashes = {f"optimizer/{name}/step": _sha256(step) for name in self._specs} if step else {}
        return hashes | {name: _sha256(tensor) for name, tensor in self._everything() if not name.startswith("old/")}

    def _save(self, path: Path) -> None:
        tensors = (pair for number in range(len(self._places)) for pair in self._gather(number).items())
        if self._ranks.is_leader:
            write_model(path, self._model_path, tensors)
        else:
            for _ in tensors:
                pass  # taking part


class _Source:
    """Implements `WeightSource`."""

    are_lasting = False

    def __init__(self, engine: MegatronEngine) -> None:
        self.specs, self._engine = engine.specs, engine

    async def tensors(self) -> AsyncIterator[tuple[str, Tensor]]:
        """See `WeightSource.tensors`: what Megatron keeps as one weight is gathered as one, which is up to three tensors."""
        if self._engine.data_parallel_rank == 0:
            found: dict[str, Tensor] = {}
            for name in self.specs:
                if name not in found:
                    found = dict(await self._engine.gathered(name))
                yield name, found.pop(name).cpu().contiguous()


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()


def _state_name(name: str, kind: str) -> str:
    """As state.py calls it."""
    return f"optimizer/{name}/{kind}" if kind.startswith("exp_avg") else f"{kind}/{name}"


def _check(model_path: Path, options: TrainEngineOptions) -> tuple[DecoderConfig, int | None]:
    """The model, and its padding token. Raises `UserError` for what the engine does not compute."""
    layout = options.layout
    if options.accumulate != "fp32":
        raise UserError("The megatron engine adds gradients as they come: set train.accumulate to fp32.")
    if options.offload_optimizer:
        raise UserError("The megatron engine keeps the optimiser on the device: set train.offload_optimizer to false.")
    if options.offload:
        raise UserError("The megatron engine keeps old policy and reference on the device: set train.offload to false.")
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise UserError("train.engine is megatron, which is not installed: pip install 'asyncflow-rl[megatron]'.")
    try:
        raw = json.loads((model_path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"There is no model in Hugging Face format at {model_path}: {error}") from error
    check_family(raw)
    try:
        config = DecoderConfig.from_fields(raw)
    except ValueError as error:
        raise UserError(f"The megatron engine cannot train the model at {model_path}: {error}.") from error
    if config.output_bias or config.mlp_bias:
        raise UserError(f"The megatron engine has no biases on output and MLP projections, which the model at {model_path} has.")
    for what, number, name, parts in (
        ("layers", config.num_hidden_layers, "pp", layout.pp),
        ("key heads", config.num_key_value_heads, "tp", layout.tp),
        ("elements of the MLP", config.intermediate_size, "tp", layout.tp),
    ):
        if number % parts:
            raise UserError(f"plan.train.{name}={parts} does not divide the model's {number} {what}: take one that does.")
    return config, raw.get("pad_token_id")
