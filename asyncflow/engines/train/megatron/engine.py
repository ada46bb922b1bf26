"""Trains a Qwen2, Qwen3 or Llama model as Megatron-Core's GPTModel, by tensor, pipeline and data parallelism.

consumes, waits for, is unblocked by: as led_engine.py says

    checkpoint <-> Hugging Face names (weights.py) <-> GPTModel, a stage's layers, a rank's share of each matrix
    micro-batch -> pack (packing.py) -> stages, by Megatron's 1F1B schedule -> loss on the last one (micro_step.py) -> gradient sums
    float32 weights <- AdamW (optimizer.py) <- clip <- sums over data-parallel groups / normaliser

Of Megatron are the model, its parallel layers and groups, and the schedule of the pipeline; the layers are those that need no
TransformerEngine ("local"), with this package's attention in them (attention.py), so that prompts are shared. Shapes go before
tensors through the pipeline, so that micro-batches need not be of one length.

Left out: Megatron's optimiser and its buckets of gradients, which are written for CUDA alone (so the optimiser's state is whole in
each data-parallel group); `accumulate: exact`; sequence, context and expert parallelism; layers that do not divide by the stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.devices import check_device
from asyncflow.engines.rollout.config import DecoderConfig
from asyncflow.engines.train.checks import check_megatron, model_fields
from asyncflow.engines.train.gathered_state import GatheredState
from asyncflow.engines.train.led_engine import LedEngine
from asyncflow.engines.train.megatron.model import Core, Stage
from asyncflow.engines.train.megatron.tensors import StageTensors
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.check_sharing import check_shared_log_probs
from asyncflow.engines.train.model.hf_files import write_model
from asyncflow.engines.train.model.packing import filled_alike, pack_thrifty
from asyncflow.engines.train.model.tri_model import OLD_MODELS, TriModel
from asyncflow.engines.train.model.weight_files import WeightFiles
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.engines.train.parallel.lone import joined
from asyncflow.engines.train.parallel.ranks import Ranks
from asyncflow.engines.train.state import fingerprint_of
from asyncflow.types import Array, Objective, Ragged, UserError


class MegatronEngine(LedEngine):
    """Implements `TrainEngine`."""

    def __init__(self, model_path: Path | str, options: TrainEngineOptions) -> None:
        """Load the model at `model_path` (Hugging Face format); takes seconds, in the calling thread.

        Raises:
            UserError: Megatron or the device is not there, the layout does not fit the model, or it cannot be trained here.
        """
        check_device(options.device, "train.device")
        fields = model_fields(model_path)
        check_megatron(options, fields)
        ranks = joined(options.layout, options.device)
        training = MegatronTraining(Path(model_path), fields, options, ranks)
        super().__init__(training, options, ranks if ranks.size > 1 else None)


class MegatronTraining:
    """Implements `Training`."""

    def __init__(self, model_path: Path, fields: Mapping[str, Any], options: TrainEngineOptions, ranks: Ranks) -> None:
        """`fields`: of the model's config.json."""
        self._options, self._model_path, self._ranks = options, model_path, ranks
        self._device, self.data_parallel_rank = ranks.device, ranks.dp_rank if ranks.is_leader else None
        try:
            config = DecoderConfig.from_fields(fields)
        except ValueError as error:
            raise UserError(f"The megatron engine cannot train the model at {model_path}: {error}.") from error
        self._padding_id = fields.get("pad_token_id")
        self._core = Core(options.layout, ranks.device)
        torch.manual_seed(options.seed)
        files = WeightFiles(model_path)
        self._policy = self._stage(config, files, is_trained=True)
        old_model = self._stage(config, files, is_trained=False) if options.old in OLD_MODELS else None
        reference = self._stage(config, files, is_trained=False) if options.has_reference else None
        self._models = TriModel(self._policy, options.old, old_model, reference, is_corrected=options.is_corrected)
        self._masters = {name: self._master(name, files) for name in self._policy.weights}
        self._optimizer = Optimizer(self._masters, options)
        self._tensors = StageTensors(self._policy, self._masters, self._optimizer, old_model, options.layout, files.shapes)
        self.specs = self._tensors.specs
        self._state = GatheredState(is_writer=ranks.rank == 0)
        self._is_to_check = options.check_shared_prompt
        self._has_gradient = self._is_broken = False
        self._fill_tokens = 0

    def begin_step(self) -> None:
        """See `TrainEngine.begin_step`."""
        self._state.begin_step()
        self._models.begin_step()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`.

        One that is not finite adds nothing; in a pipeline of several stages, whose first ones have let go of it by then, it makes
        the step one that is skipped. Raises `RunError` when sharing the prompt gives other log-probs than not sharing it.
        """
        if not micro_batches:  # data-parallel groups meet in `optim_step` only
            return []
        batches = [pack_thrifty(batch.prompt_ids, batch.response_ids, self._device) for batch in micro_batches]
        shared = next((i for i, packed in enumerate(batches) if packed.layout.has_prompt), None)
        if self._is_to_check and shared is not None:
            check_shared_log_probs(self._policy.log_probs, micro_batches[shared], self._device, self._policy.dtype)
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

    def optim_step(self, normaliser: int) -> OptimResult:
        """See `TrainEngine.optim_step`."""
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

    def discard(self) -> None:
        """See `TrainEngine.discard`."""
        self._models.before_update()  # the version rises all the same
        self._clear()

    def log_probs(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """See `LogProbEngine.log_probs`."""
        packed = pack_thrifty(prompt_ids, response_ids, self._device)
        log_probs_T = self._policy.log_probs(packed)
        last = dist.get_global_rank(self._core.pp_group, self._options.layout.pp - 1)
        dist.broadcast(log_probs_T, last, group=self._core.pp_group)
        return Ragged(log_probs_T.cpu().numpy(), response_ids.offsets)

    def gather(self, name: str) -> Tensor | None:
        """See `Training.gather`."""
        if not self._is_first_group:
            return None
        tensor = self._tensors.weight(name)
        return tensor if self._ranks.is_leader else None

    def fingerprint(self) -> Mapping[str, str]:
        """See `TrainEngine.fingerprint`."""
        if not self._is_first_group:
            return {}
        step = torch.tensor(float(self._optimizer.num_updates))
        steps = {f"optimizer/{name}/step": step for name in self.specs if step}
        of_state = (pair for pair in self._tensors.everything() if not pair[0].startswith("old/"))
        return fingerprint_of(chain(steps.items(), of_state))

    def save(self, path: Path) -> None:
        """See `TrainEngine.save`."""
        if not self._is_first_group:
            return
        tensors = ((name, self._tensors.weight(name)) for name in self.specs)
        if self._ranks.is_leader:
            write_model(path, self._model_path, tensors)
        else:
            for _ in tensors:
                pass  # taking part

    def save_state(self, folder: Path) -> Future[None]:
        """See `TrainEngine.save_state`: rank 0 writes, see gathered_state.py."""
        tensors = self._tensors.everything() if self._is_first_group else ()
        return self._state.save(tensors, self._optimizer.num_updates, folder)

    def load_state(self, folder: Path) -> None:
        """See `TrainEngine.load_state`."""
        self._optimizer.make_states(self._state.load(folder))
        self._tensors.load(folder)
        self._narrow()

    @property
    def _is_first_group(self) -> bool:
        """Of the data-parallel groups, which all have the same weights and state."""
        return self._ranks.dp_rank == 0

    def _stage(self, config: DecoderConfig, files: WeightFiles, *, is_trained: bool) -> Stage:
        stage = Stage(self._core, config, self._options, is_trained=is_trained, padding_id=self._padding_id)
        stage.load(files)
        return stage

    def _master(self, name: str, files: WeightFiles) -> nn.Parameter:
        """The float32 weight that is updated: the model's own, unless that is narrower."""
        weight = self._policy.weights[name]
        if weight.dtype == torch.float32:
            return weight
        origin = self._policy.origins[name]
        whole = [files[source].float() for source in origin.names]
        master = nn.Parameter(origin.shard(whole, self._policy.tp, self._options.layout.tp).clone().to(weight.device))

        def add(_: Tensor) -> None:
            # At once: autograd would add up in the weight's own, narrow dtype.
            assert weight.grad is not None
            gradient, weight.grad = weight.grad.float(), None
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

        register: Any = weight.register_post_accumulate_grad_hook  # torch has no types for it
        register(add)
        return master

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
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, gradient in zip(self._masters, gradients, strict=True):
            if self._tensors.is_own(name, self._policy.origins[name]):
                squares += gradient.double().square().sum()
        dist.all_reduce(squares, group=self._core.model_group)
        return math.sqrt(squares.item())

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

    def _clear(self) -> None:
        self._has_gradient = self._is_broken = False
        self._fill_tokens = 0
        for master in self._masters.values():
            master.grad = None
