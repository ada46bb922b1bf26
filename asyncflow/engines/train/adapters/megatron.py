"""Training of a Qwen2, Qwen3 or Llama model as Megatron-Core's GPTModel, with tensor, pipeline and data parallelism.

    checkpoint <-> Hugging Face names (Origin) <-> GPTModel, a stage's layers, a rank's share of each matrix
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

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asyncflow.devices import NPU
from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.decoder_config import DecoderConfig, rope_frequencies
from asyncflow.engines.devices import check_device
from asyncflow.engines.train.adapters.checks import check_megatron
from asyncflow.engines.train.adapters.gathered import GatheredTraining, loaded
from asyncflow.engines.train.checks import model_fields
from asyncflow.engines.train.leader_engine import LeaderEngine
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.attention import packed_attention
from asyncflow.engines.train.model.causal_model import recompute_activations
from asyncflow.engines.train.model.check_sharing import check_shared_log_probs
from asyncflow.engines.train.model.log_probs import VocabularyShard, log_probs_and_entropy
from asyncflow.engines.train.model.packing import Packed, cut_into_passes, filled_alike, joined, pack_thrifty
from asyncflow.engines.train.model.tri_model import TriModel
from asyncflow.engines.train.model.weight_files import WeightFiles
from asyncflow.engines.train.optimizer import MOMENTS, Optimizer
from asyncflow.types import Array, Layout, Objective, Ragged, TensorSpec, UserError

# P packed tokens, T response tokens, H hidden elements or heads, V rows of the vocabulary that a rank has, D elements of a head.


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
        passes = cut_into_passes(each, self._options.tokens_per_pass)
        batches = [joined(each[part]) for part in passes]
        if self._options.layout.pp > 1:
            batches = filled_alike(batches, self._options.pipeline_fill)
            self._fill_tokens += sum(packed.fill_tokens for packed in batches)
        known = [
            micro_step.given_all(self.models, packed, micro_batches[part]) for packed, part in zip(batches, passes, strict=True)
        ]
        results: dict[int, list[MicroBatchResult]] = {}  # by pass

        def loss(number: int, hidden_P1H: Tensor) -> Tensor:
            hidden_TH, head_VH, shard = self._policy.head(batches[number], hidden_P1H)
            chunk_tokens = self._options.log_prob_chunk_tokens
            made = micro_step.losses(known[number], objective, hidden_TH, head_VH, chunk_tokens=chunk_tokens, shard=shard)
            results[number] = [replace(result, is_finite=made.is_finite) for result in made.results]
            is_added = made.is_finite or self._options.layout.pp > 1
            return made.total if is_added else made.total.detach()

        self._policy.run(batches, loss, has_grad=True)
        told = self._told([result for number in sorted(results) for result in results[number]])
        self._has_gradient |= any(result.is_finite for result in told)
        self._is_broken |= self._options.layout.pp > 1 and not all(result.is_finite for result in told)
        return told

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

    def log_probs(self, prompt_ids: Array, response_ids: Ragged, target_ids: Ragged | None = None) -> Ragged:
        """See `LogProbEngine.log_probs`."""
        packed = pack_thrifty(prompt_ids, response_ids, self._device, target_ids)
        log_probs_T = self._policy.log_probs(packed)
        last = dist.get_global_rank(self._core.pp_group, self._options.layout.pp - 1)
        dist.broadcast(log_probs_T, last, group=self._core.pp_group)
        return Ragged(log_probs_T.cpu().numpy(), response_ids.offsets)

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

    def _told(self, own: list[MicroBatchResult]) -> list[MicroBatchResult]:
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


# -- Megatron's model on packed tokens: a process's share of it, and the passes through it -------------------------------------


class PackedCoreAttention(nn.Module):
    """Attention between the projections, as Megatron calls it. The layout comes in the argument `attention_mask`."""

    def __init__(self, config: Any, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.layer_idx, self._scale = layer_number - 1, config.kv_channels**-0.5

    def forward(self, query_P1HD: Tensor, key_P1KD: Tensor, value_P1KD: Tensor, attention_mask: Any, **_: Any) -> Tensor:
        """Attention output [P, 1, H * D]. `attention_mask`: an `AttentionLayout`."""
        query_1HPD, key_1KPD, value_1KPD = (x_P1HD.permute(1, 2, 0, 3) for x_P1HD in (query_P1HD, key_P1KD, value_P1KD))
        positions_1P = attention_mask.positions_P[None]
        out_1PHD, _none = packed_attention(
            self, query_1HPD, key_1KPD, value_1KPD, None, scaling=self._scale, layout=attention_mask, position_ids=positions_1P
        )
        return out_1PHD.transpose(0, 1).flatten(2)


class MegatronStage:
    """Part of a model in one process, and the passes through it, which all processes of a data-parallel group make together.

    It can serve as each of the models of a `TriModel`. Its `log_probs` are right in the processes of the last stage, and zeros in
    the others.
    """

    def __init__(
        self, core: Core, config: DecoderConfig, options: TrainEngineOptions, *, is_trained: bool, padding_id: int | None
    ) -> None:
        """Build this stage's layers, with weights that are not set yet; call `load` next. `padding_id`: config's `pad_token_id`."""
        layout = options.layout
        dtype = getattr(torch, options.dtype if is_trained else options.frozen_dtype or options.dtype)
        self.core, self.config, self.dtype, self.device = core, config, dtype, core.device
        self.stage, self.tp = core.pp_group.rank(), core.tp_group.rank()
        self.is_first, self.is_last = self.stage == 0, self.stage == layout.pp - 1
        self._padding_id = padding_id
        self._temperature, self._chunk_tokens = options.temperature, options.log_prob_chunk_tokens
        self._model = core.build(config, layout, dtype, is_first=self.is_first, is_last=self.is_last)
        self._model.to(self.device, dtype).requires_grad_(is_trained)  # norms come as float32 whatever the rest is
        self.weights: dict[str, nn.Parameter] = dict(self._model.named_parameters())
        self.origins = stage_origins(config, layout.pp)[self.stage]
        if self.weights.keys() != self.origins.keys():
            raise RuntimeError(
                f"Megatron has other weights than is known here: {sorted(self.weights.keys() ^ self.origins.keys())}"
            )
        if is_trained and options.activation_checkpointing:
            for layer in self._model.decoder.layers:
                recompute_activations(layer)
        self._frequencies_D = rope_frequencies(config.head_dim, config.rope).repeat(2).to(self.device)
        if layout.tp == 1:
            self._shard = None
        else:
            each = padded_vocabulary(config.vocab_size, layout.tp) // layout.tp
            self._shard = VocabularyShard(core.tp_group, self.tp * each)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this process's part of the whole `tensors` (by Hugging Face name). Raises `UserError` if one is missing."""
        for name, origin in self.origins.items():
            if lacking := [source for source in origin.names if source not in tensors]:
                raise UserError(f"The model lacks the weight {lacking[0]}: get its files again.")
            whole = [tensors[source] for source in origin.names]
            self.weights[name].copy_(origin.shard(whole, self.tp, self.core.tp_group.size()))

    @torch.no_grad()
    def move_from(self, policy: MegatronStage) -> None:
        """Copy the policy's present weights into this model."""
        for name, weight in self.weights.items():
            weight.copy_(policy.weights[name])

    def enter(self, packed: Packed) -> Tensor:
        """Output [P, 1, H] of this stage's layers. Megatron hands it to the next stage by `set_input_tensor`."""
        hidden_P1H = None
        if self.is_first:
            hidden_P1H = self._model.embedding(input_ids=packed.tokens_P[None], position_ids=None)
            if self._padding_id is not None:  # transformers' embedding gives the row of this token no gradient
                is_padding_P11 = (packed.tokens_P == self._padding_id)[:, None, None]
                hidden_P1H = torch.where(is_padding_P11, hidden_P1H.detach(), hidden_P1H)
        angles_P11D = (packed.positions_P.float()[:, None] * self._frequencies_D)[:, None, None]
        return self._model.decoder(hidden_states=hidden_P1H, attention_mask=packed.layout, rotary_pos_emb=angles_P11D)

    def head(self, packed: Packed, hidden_P1H: Tensor) -> tuple[Tensor, Tensor, VocabularyShard | None]:
        """Inputs of the loss, on the last stage: hidden states [T, H], head [V, H], and the head's place in the vocabulary.

        The hidden states are those that predict the response tokens, with the temperature applied. `hidden_P1H`: `enter`'s output.
        """
        hidden_TH = packed.predicting(hidden_P1H[:, 0], self._temperature)
        own_VH = self._model.output_layer.weight  # None: tied to the embedding, which is on this stage, too
        head_VH = self._model.embedding.word_embeddings.weight if own_VH is None else own_VH
        # Rows that only fill up the vocabulary are no tokens: without the cut their logits, 0, would be in the softmax.
        num_rows = self.config.vocab_size - (0 if self._shard is None else self._shard.offset)
        return hidden_TH, head_VH[:num_rows], self._shard

    def run(self, batches: Sequence[Packed], loss: Callable[[int, Tensor], Tensor], *, has_grad: bool) -> None:
        """Run all micro-batches forward through the stages and, with `has_grad`, backward.

        On the last stage `loss` takes the number of a micro-batch and its hidden states [P, 1, H], and returns a scalar.
        """
        if self.is_first and self.is_last:
            for number, packed in enumerate(batches):
                total = loss(number, self.enter(packed))
                if has_grad and total.requires_grad:
                    torch.autograd.backward(total)
            return

        numbers = iter(range(len(batches)))

        def forward_step(_: object, model: object) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, None]]]:
            number = next(numbers)
            return self.enter(batches[number]), lambda out_P1H: (loss(number, out_P1H), torch.zeros((), dtype=torch.int), None)

        with torch.set_grad_enabled(has_grad):
            self.core.pipeline(forward_step, self._model, len(batches), has_grad=has_grad)

    @torch.no_grad()
    def log_probs(self, packed: Packed) -> Tensor:
        """Log-probs (float32 [T]) of the response tokens, on the last stage; zeros on the others."""
        found: list[Tensor] = []

        def keep(_: int, hidden_P1H: Tensor) -> Tensor:
            hidden_TH, head_VH, shard = self.head(packed, hidden_P1H)
            chunk_tokens = self._chunk_tokens
            found.append(log_probs_and_entropy(hidden_TH, head_VH, packed.targets_T, chunk_tokens=chunk_tokens, shard=shard)[0])
            return found[0].sum()

        self.run([packed], keep, has_grad=False)
        return found[0] if found else torch.zeros(len(packed.targets_T), device=self.device)


def stage_origins(config: DecoderConfig, num_stages: int) -> list[dict[str, Origin]]:
    """Origins of each stage's weights, by Megatron's names: one mapping for each stage."""
    each = config.num_hidden_layers // num_stages
    stages = range(num_stages)
    return [origins(config, range(i * each, (i + 1) * each), is_first=i == 0, is_last=i == num_stages - 1) for i in stages]


class Core:
    """Megatron-Core under one layout. Its groups are global: a process has one layout at a time."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Import Megatron and make its groups; all processes do so at the same time. torch.distributed must be initialised."""
        if device.type == NPU and importlib.util.find_spec("mindspeed") is not None:
            importlib.import_module("mindspeed.megatron_adaptor")  # replaces parts of Megatron, so it must come first
        self.device = device
        state = self._import("parallel_state")
        if state.is_initialized():
            state.destroy_model_parallel()
        with self.calls():
            state.initialize_model_parallel(layout.tp, layout.pp, order="tp-cp-ep-pp-dp")
        self.tp_group, self.pp_group = state.get_tensor_model_parallel_group(), state.get_pipeline_model_parallel_group()
        self.dp_group, self.model_group = state.get_data_parallel_group(), state.get_model_parallel_group()
        self.embedding_group = state.get_embedding_group(check_initialized=False)

    def build(self, config: DecoderConfig, layout: Layout, dtype: torch.dtype, *, is_first: bool, is_last: bool) -> Any:
        """Build the GPTModel of one pipeline stage, with parameters of `dtype`."""
        transformer = self._import("transformer.transformer_config").TransformerConfig(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=config.head_dim,
            ffn_hidden_size=config.intermediate_size,
            normalization="RMSNorm",
            layernorm_epsilon=config.rms_norm_eps,
            qk_layernorm=config.qk_norm,
            add_bias_linear=False,
            add_qkv_bias=config.qkv_bias,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",  # there is none, but the default refuses the line above
            calculate_per_token_loss=True,  # the schedule itself divides by nothing
            use_cpu_initialization=True,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
        )
        specs = self._import("models.gpt.gpt_layer_specs")
        spec = specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = PackedCoreAttention
        return self._import("models.gpt").GPTModel(
            transformer,
            spec,
            vocab_size=padded_vocabulary(config.vocab_size, layout.tp),
            max_sequence_length=config.max_position_embeddings,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=config.tie_word_embeddings and is_first and is_last,
            position_embedding_type="rope",
        )

    def pipeline(self, forward_step: Callable[..., Any], model: Any, num_micro_batches: int, *, has_grad: bool) -> None:
        """Run Megatron's 1F1B schedule over `num_micro_batches`. Without `has_grad`: only the forward passes."""
        schedules = self._import("pipeline_parallel.schedules")
        with self.calls():
            schedules.forward_backward_pipelining_without_interleaving(
                forward_step_func=forward_step,
                data_iterator=None,
                model=model,
                num_microbatches=num_micro_batches,
                seq_length=1,  # each tensor's own shape is sent before it
                micro_batch_size=1,
                forward_only=not has_grad,
            )

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Context for calls of Megatron that ask for CUDA on every device; on a CPU, they get the CPU inside it."""
        if self.device.type != "cpu":
            yield
            return
        with (
            patch.object(torch.cuda, "current_device", lambda: "cpu"),
            patch.object(torch.cuda, "synchronize", lambda *_: None),
            _CpuForCuda(),
        ):
            yield

    def _import(self, name: str) -> Any:
        return importlib.import_module(f"megatron.core.{name}")


class _CpuForCuda(TorchFunctionMode):
    """Function mode that makes tensors on the CPU where the code asks for `device="cuda"`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": "cpu"} if kwargs.get("device") == "cuda" else kwargs))


# -- a process's part of each weight and of its optimiser state, exchanged by Hugging Face names -------------------------------
#
#     weights (float32), moments, the old policy's --sent by the stage that has them--> all stages --gathered over tp--> whole ones
#     whole tensors of a checkpoint --sharded (Origin)--> the same, in place
#
# Megatron keeps up to three of Hugging Face's tensors as one weight, which is sent as one tensor.


class StageTensors:
    """Process's part of a model's state. All processes of a data-parallel group make the same calls in the same order."""

    def __init__(
        self,
        policy: MegatronStage,
        masters: Mapping[str, Tensor],
        optimizer: Optimizer,
        old_model: MegatronStage | None,
        layout: Layout,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Set up the names. `masters`: float32 weights by Megatron's name; `shapes`: of all whole tensors, by Hugging Face name."""
        self._policy, self._masters, self._optimizer, self._old_model = policy, masters, optimizer, old_model
        self._num_shards, self._shapes = layout.tp, shapes
        self._stages = stage_origins(policy.config, layout.pp)
        # The last stage's copy of a tied embedding is not a separate weight.
        tied = (layout.pp - 1, "output_layer.weight") if policy.config.tie_word_embeddings else None
        self._places = [(i, name) for i, stage in enumerate(self._stages) for name in stage if (i, name) != tied]
        self._place_of = {source: (i, name) for i, name in self._places for source in self._stages[i][name].names}
        self.specs = {name: TensorSpec(shapes[name], "float32") for name in self._place_of}
        # Tensors that were gathered together with the last one asked for. They cannot be of an earlier update: the first weight of
        # an export, the embedding, is gathered alone, and replaces them.
        self._rest: dict[str, Tensor] = {}

    def is_own(self, name: str, origin: Origin) -> bool:
        """Whether this process is the one of the group that counts the weight `name` (Megatron's) in the norm."""
        return not (origin.cut == "whole" and self._policy.tp > 0) and (self._policy.stage, name) in self._places

    def weight(self, name: str) -> Tensor:
        """Whole float32 tensor of that Hugging Face name, on the CPU, contiguous, gathered from all processes of the group."""
        found = self._rest if name in self._rest else self._gather(*self._place_of[name], "weights")
        self._rest = {other: tensor for other, tensor in found.items() if other != name}
        return found[name].cpu().contiguous()

    def everything(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the state by name, each gathered when the iteration comes to it."""
        for stage, name in self._places:
            for kind in self._kinds():
                for source, tensor in self._gather(stage, name, kind).items():
                    yield _state_name(source, kind), tensor

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Copy this process's parts of the state in `folder`. Raises `RunError` if a tensor is missing or has another shape."""
        for name, origin in self._policy.origins.items():
            for kind in self._kinds():
                part = self._kept(name, kind)
                whole = [loaded(_state_name(source, kind), self._shapes[source], part.dtype, folder) for source in origin.names]
                part.copy_(origin.shard(whole, self._policy.tp, self._num_shards))

    def _kinds(self) -> list[str]:
        return ["weights", *(MOMENTS if self._optimizer.num_updates else ()), *(["old"] if self._old_model else [])]

    @torch.no_grad()
    def _gather(self, stage: int, name: str, kind: str) -> dict[str, Tensor]:
        """Whole tensors, by Hugging Face name, of a stage's weight `name` (Megatron's); `kind`: `weights`, a moment, or `old`."""
        origin, group = self._stages[stage][name], self._policy.core.pp_group
        if stage == self._policy.stage:
            own = self._kept(name, kind).detach().contiguous()
        else:
            whole = [torch.empty(self._shapes[source], device="meta") for source in origin.names]
            dtype = self._old_model.dtype if kind == "old" and self._old_model else torch.float32
            own = torch.empty(origin.shard(whole, 0, self._num_shards).shape, dtype=dtype, device=self._policy.device)
        dist.broadcast(own, dist.get_global_rank(group, stage), group=group)
        shards = [torch.empty_like(own) for _ in range(self._num_shards)]
        dist.all_gather(shards, own, group=self._policy.core.tp_group)
        return dict(zip(origin.names, origin.join(shards), strict=True))

    def _kept(self, name: str, kind: str) -> Tensor:
        """Part of a tensor that this process keeps: the weight (float32), the optimiser's state, or the old policy's weight."""
        if kind == "old" and self._old_model is not None:
            return self._old_model.weights[name]
        master = self._masters[name]
        return master if kind == "weights" else self._optimizer.adamw.state[master][kind]


def _state_name(name: str, kind: str) -> str:
    """Name of a tensor in the files of state.py."""
    return f"optimizer/{name}/{kind}" if kind in MOMENTS else f"{kind}/{name}"


# -- where each weight comes from in a Hugging Face checkpoint, and how tensor parallelism shards it ---------------------------
#
#     Megatron                         Hugging Face                sharded over tensor-parallel ranks
#     embedding.word_embeddings        model.embed_tokens          rows, of a vocabulary filled up to equal shards
#     output_layer                     lm_head, or the embedding   the same
#     ...linear_qkv                    q_proj, k_proj, v_proj      key heads, each with its queries: [q q k v] [q q k v] ...
#     ...linear_proj, mlp.linear_fc2   o_proj, down_proj           columns
#     mlp.linear_fc1                   gate_proj, up_proj          rows of each, the rank's gate above its up
#     norms                            norms                       not at all


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of one of Megatron's weights: the Hugging Face names of its tensors, and the way it is sharded."""

    names: tuple[str, ...]
    cut: Literal["whole", "rows", "columns", "vocabulary", "heads"]
    num_key_heads: int = 1  # of the whole model
    head_dim: int = 1
    vocab_size: int = 1

    def shard(self, tensors: Sequence[Tensor], rank: int, num_ranks: int) -> Tensor:
        """Part of the whole `tensors` (in the order of `names`) that tensor-parallel rank `rank` of `num_ranks` holds."""
        if self.cut == "whole":
            return tensors[0]
        if self.cut == "columns":
            return tensors[0].chunk(num_ranks, dim=1)[rank]
        if self.cut == "vocabulary":
            rows = padded_vocabulary(self.vocab_size, num_ranks) // num_ranks
            own = tensors[0][rank * rows : (rank + 1) * rows]
            return torch.cat([own, own.new_zeros(rows - len(own), *own.shape[1:])])
        if self.cut == "rows":
            return torch.cat([tensor.chunk(num_ranks)[rank] for tensor in tensors])
        heads = [tensor.reshape(self.num_key_heads, -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(heads, dim=1).chunk(num_ranks)[rank].flatten(0, 1)

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Whole tensors, in the order of `names`, from the shards of all ranks. The inverse of `shard`."""
        if self.cut == "whole":
            return [shards[0]]
        if self.cut == "columns":
            return [torch.cat(list(shards), dim=1)]
        if self.cut == "vocabulary":
            return [torch.cat(list(shards))[: self.vocab_size]]
        if self.cut == "rows":
            parts = [shard.chunk(len(self.names)) for shard in shards]
            return [torch.cat([part[i] for part in parts]) for i in range(len(self.names))]
        heads = torch.cat([shard.reshape(self.num_key_heads // len(shards), -1, *shard.shape[1:]) for shard in shards])
        sizes = [heads.shape[1] - 2 * self.head_dim, self.head_dim, self.head_dim]
        return [part.flatten(0, 1) for part in torch.split(heads, sizes, dim=1)]


def padded_vocabulary(vocab_size: int, num_ranks: int) -> int:
    """Number of rows of the embedding after it is filled up to equal shards for `num_ranks` ranks."""
    return -(-vocab_size // num_ranks) * num_ranks


def embedding(config: DecoderConfig) -> Origin:
    """Origin of the embedding; also that of the output layer, if the two are tied."""
    return Origin(("model.embed_tokens.weight",), "vocabulary", vocab_size=config.vocab_size)


def origins(config: DecoderConfig, layers: range, *, is_first: bool, is_last: bool) -> dict[str, Origin]:
    """Origins of the weights of a pipeline stage with these `layers` of the model, by Megatron's names.

    The first stage has the embedding, the last one the output layer. A last stage that is not the first has a separate output
    layer, even if it is tied to the embedding.
    """
    weights: dict[str, Origin] = {}
    if is_first:
        weights["embedding.word_embeddings.weight"] = embedding(config)
    for own, layer in enumerate(layers):
        weights |= {f"decoder.layers.{own}.{name}": origin for name, origin in _layer(config, f"model.layers.{layer}.").items()}
    if is_last:
        weights["decoder.final_layernorm.weight"] = Origin(("model.norm.weight",), "whole")
        if not config.tie_word_embeddings:
            weights["output_layer.weight"] = Origin(("lm_head.weight",), "vocabulary", vocab_size=config.vocab_size)
        elif not is_first:
            weights["output_layer.weight"] = embedding(config)
    return weights


def _layer(config: DecoderConfig, prefix: str) -> dict[str, Origin]:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

    def heads(kind: str) -> Origin:
        names = tuple(f"{attention}{matrix}_proj.{kind}" for matrix in "qkv")
        return Origin(names, "heads", num_key_heads=config.num_key_value_heads, head_dim=config.head_dim)

    weights = {
        "input_layernorm.weight": Origin((f"{prefix}input_layernorm.weight",), "whole"),
        "self_attention.linear_qkv.weight": heads("weight"),
        "self_attention.linear_proj.weight": Origin((f"{attention}o_proj.weight",), "columns"),
        "pre_mlp_layernorm.weight": Origin((f"{prefix}post_attention_layernorm.weight",), "whole"),
        "mlp.linear_fc1.weight": Origin((f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"), "rows"),
        "mlp.linear_fc2.weight": Origin((f"{mlp}down_proj.weight",), "columns"),
    }
    if config.qkv_bias:
        weights["self_attention.linear_qkv.bias"] = heads("bias")
    if config.qk_norm:
        for kind in "qk":
            weights[f"self_attention.{kind}_layernorm.weight"] = Origin((f"{attention}{kind}_norm.weight",), "whole")
    return weights
