"""Training of a Qwen2, Qwen3 or Llama model as Megatron-Core's GPTModel, with tensor, pipeline and data parallelism.

    checkpoint <-> Hugging Face names (origins.py) <-> GPTModel, a stage's layers, a rank's share of each matrix
    micro-batch -> pack (packing.py) -> stages, by Megatron's 1F1B schedule -> loss on the last one (micro_step.py) -> gradient sums
    float32 weights <- AdamW (optimizer.py) <- clip <- sums over data-parallel groups / normaliser

Megatron provides the model, its parallel layers and groups, and the pipeline's schedule. The layers are those that need no
TransformerEngine ("local"), with this package's attention in them (attention.py), so that prompts are shared. In the pipeline each
tensor's shape is sent before it, so micro-batches may have different lengths.

Left out: Megatron's optimiser and its buckets of gradients, which are written for CUDA alone (so each data-parallel group holds the
whole optimiser state); `accumulate: exact`; sequence, context and expert parallelism; a number of layers that the number of stages
does not divide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.devices import check_device
from asyncflow.engines.train.adapters.checks import check_megatron
from asyncflow.engines.train.adapters.gathered import GatheredTraining
from asyncflow.engines.train.adapters.megatron.core import Core
from asyncflow.engines.train.adapters.megatron.stage import MegatronStage
from asyncflow.engines.train.adapters.megatron.tensors import StageTensors
from asyncflow.engines.train.checks import model_fields
from asyncflow.engines.train.leader_engine import LeaderEngine
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.check_sharing import check_shared_log_probs
from asyncflow.engines.train.model.packing import cut_into_passes, filled_alike, joined, pack_thrifty
from asyncflow.engines.train.model.tri_model import TriModel
from asyncflow.engines.train.model.weight_files import WeightFiles
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.types import Array, Objective, Ragged, UserError

# P packed tokens, H hidden elements.


class MegatronEngine(LeaderEngine):
    """`TrainEngine` that trains with Megatron-Core."""

    def __init__(self, model_path: Path | str, options: TrainEngineOptions) -> None:
        """Load the model at `model_path` (Hugging Face format); takes seconds, in the calling thread.

        Raises `UserError` if Megatron or the device is not there, the layout does not fit the model, or it cannot be trained here.
        """
        check_device(options.device, "train.device")
        fields = model_fields(model_path)
        check_megatron(options, fields)
        super().__init__(MegatronTraining(Path(model_path), fields, options), options)


class MegatronTraining(GatheredTraining):
    """`PolicyTraining` with Megatron-Core. The first data-parallel group exports and saves, since all have the same weights."""

    def __init__(self, model_path: Path, fields: Mapping[str, Any], options: TrainEngineOptions) -> None:
        """Load this process's part of the model. `fields`: the model's config.json. Raises `UserError` as `MegatronEngine`."""
        super().__init__(model_path, options)
        self._device, self._gathers = self._ranks.device, self._ranks.dp_rank == 0
        try:
            config = DecoderConfig.from_fields(fields)
        except ValueError as error:
            raise UserError(f"The megatron engine cannot train the model at {model_path}: {error}.") from error
        self._padding_id = fields.get("pad_token_id")
        self._core = Core(options.layout, self._device)
        torch.manual_seed(options.seed)
        files = WeightFiles(model_path)
        self._policy = self._stage(config, files, is_trained=True)
        self.models = TriModel(self._policy, options, partial(self._stage, config, files, is_trained=False))
        self._masters = {name: self._master(name, files) for name in self._policy.weights}
        self._optimizer = Optimizer(self._masters, options)
        old = self.models.old_model
        self._tensors = StageTensors(self._policy, self._masters, self._optimizer, old, options.layout, files.shapes)
        self.specs = self._tensors.specs
        self._is_to_check = options.check_shared_prompt
        self._has_gradient = self._is_broken = False
        self._fill_tokens = 0

    def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`.

        A pass with a micro-batch that is not finite adds nothing, and all of it is reported as not finite. In a pipeline of several
        stages the first stages cannot leave it out any more; there the whole step is skipped. Raises `RunError` when sharing the
        prompt changes the log-probs.
        """
        if not micro_batches:  # data-parallel groups meet in `optim_step` only
            return []
        each = [pack_thrifty(batch.prompt_ids, batch.response_ids, self._device, batch.target_ids) for batch in micro_batches]
        shared = next((i for i, packed in enumerate(each) if packed.layout.has_prompt), None)
        if self._is_to_check and shared is not None:
            check_shared_log_probs(self._policy.log_probs, micro_batches[shared], self._device, self._policy.dtype)
            self._is_to_check = False
        num_parts = self._options.pipeline_micro_batches if self._options.layout.pp > 1 else 1
        passes = cut_into_passes(each, self._options.tokens_per_pass, num_parts)
        batches = [joined(each[part]) for part in passes]
        if self._options.layout.pp > 1:
            batches = filled_alike(batches, self._options.pipeline_fill)
            self._fill_tokens += sum(packed.fill_tokens for packed in batches)
        known = [
            micro_step.given_all(self.models, packed, micro_batches[part]) for packed, part in zip(batches, passes, strict=True)
        ]
        results: dict[int, list[MicroBatchResult]] = {}  # by pass

        def loss(number: int, hidden_P1H: Tensor) -> Tensor:
            made = micro_step.losses(known[number], objective, *self._policy.head(batches[number], hidden_P1H))
            results[number] = [replace(result, is_finite=made.is_finite) for result in made.results]
            is_added = made.is_finite or self._options.layout.pp > 1
            return made.total if is_added else made.total.detach()

        self._policy.run(batches, loss, has_grad=True)
        results_here = self._from_last_stage([result for number in sorted(results) for result in results[number]])
        self._has_gradient |= any(result.is_finite for result in results_here)
        self._is_broken |= self._options.layout.pp > 1 and not all(result.is_finite for result in results_here)
        return results_here

    def _update(self, normaliser: int) -> OptimResult:
        has_gradient, is_broken = self._ranks.largest([self._has_gradient, self._is_broken], of="dp")
        (fill_tokens,) = self._ranks.total([self._fill_tokens], of="dp")
        if is_broken or not has_gradient:  # a broken pipeline step, or no micro-batch was finite
            self._clear()
            norm, learning_rate = math.nan if is_broken else 0.0, self._optimizer.learning_rate
            return OptimResult(grad_norm=norm, learning_rate=learning_rate, skipped=True, fill_tokens=fill_tokens)
        gradients = self._summed(normaliser)
        result = self._optimizer.update(gradients, self._norm(gradients))
        self._narrow()
        self._clear()
        return replace(result, fill_tokens=fill_tokens)

    def _response_log_probs(
        self, prompt_ids: Array, response_ids: Ragged, target_ids: Ragged | None, temperature: float | None
    ) -> Ragged:
        """See `LogProbEngine.log_probs`."""
        packed = replace(pack_thrifty(prompt_ids, response_ids, self._device, target_ids), temperature=temperature)
        log_probs_T = self._policy.log_probs(packed)
        last = dist.get_global_rank(self._core.pp_group, self._options.layout.pp - 1)
        dist.broadcast(log_probs_T, last, group=self._core.pp_group)
        return Ragged(log_probs_T.cpu().numpy(), response_ids.offsets)

    def _trained(self) -> Iterable[Tensor]:
        return self._policy.weights.values()

    def _weight(self, name: str) -> Tensor:
        return self._tensors.weight(name)

    def _everything(self) -> Iterator[tuple[str, Tensor]]:
        return self._tensors.everything()

    def _load(self, num_updates: int, folder: Path) -> None:
        self._optimizer.make_states(num_updates)
        self._tensors.load(folder)
        self._narrow()

    def _stage(self, config: DecoderConfig, files: WeightFiles, *, is_trained: bool) -> MegatronStage:
        stage = MegatronStage(self._core, config, self._options, is_trained=is_trained, padding_id=self._padding_id)
        stage.load(files)
        return stage

    def _master(self, name: str, files: WeightFiles) -> nn.Parameter:
        """Float32 weight that the optimiser updates: the model's own weight, or a copy if that is narrower."""
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
        """Copy the updated float32 weights to the policy's narrower weights."""
        for name, weight in self._policy.weights.items():
            if weight is not self._masters[name]:
                weight.copy_(self._masters[name])

    def _summed(self, normaliser: int) -> list[Tensor]:
        """Gradients of the step in the order of the weights, summed over all processes that share a weight, and divided."""
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
        """2-norm of the gradient of the whole model. If several processes hold a weight, one of them counts it."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, gradient in zip(self._masters, gradients, strict=True):
            if self._tensors.is_own(name, self._policy.origins[name]):
                squares += gradient.double().square().sum()
        dist.all_reduce(squares, group=self._core.model_group)
        return math.sqrt(squares.item())

    def _from_last_stage(self, own: list[MicroBatchResult]) -> list[MicroBatchResult]:
        """Results of the last stage, sent to all stages. `own`: this process's results."""
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
