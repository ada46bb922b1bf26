"""Megatron-Core's GPTModel on packed tokens: one process's share of a model, and the passes through it.

    Packed (packing.py) -> embedding -> layers with packed attention (attention.py) -> next stage ... -> hidden_TH, head_VH

Imported with care: Megatron is an extra, on NPUs MindSpeed must come before it, and on a CPU some of its calls are answered for it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asyncflow.devices import NPU
from asyncflow.engines.base import TrainEngineOptions
from asyncflow.engines.rollout.config import DecoderConfig, rope_frequencies
from asyncflow.engines.train.megatron.weights import Origin, origins, padded_vocabulary
from asyncflow.engines.train.model.attention import packed_attention
from asyncflow.engines.train.model.causal_model import recompute_activations
from asyncflow.engines.train.model.log_probs import VocabularyShard, log_probs_and_entropy
from asyncflow.engines.train.model.packing import Packed
from asyncflow.types import Layout, UserError

# P packed tokens, T response tokens, H hidden elements or heads, V rows of the vocabulary that a rank has, D elements of a head.


class PackedCoreAttention(nn.Module):
    """Attention between the projections, as Megatron calls it; the layout comes as its `attention_mask`."""

    def __init__(self, config: Any, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.layer_idx, self._scale = layer_number - 1, config.kv_channels**-0.5

    def forward(self, query_P1HD: Tensor, key_P1KD: Tensor, value_P1KD: Tensor, attention_mask: Any, **_: Any) -> Tensor:
        """The output [P, 1, H * D]."""
        query_1HPD, key_1KPD, value_1KPD = (x_P1HD.permute(1, 2, 0, 3) for x_P1HD in (query_P1HD, key_P1KD, value_P1KD))
        positions_1P = attention_mask.positions_P[None]
        out_1PHD, _none = packed_attention(
            self, query_1HPD, key_1KPD, value_1KPD, None, scaling=self._scale, layout=attention_mask, position_ids=positions_1P
        )
        return out_1PHD.transpose(0, 1).flatten(2)


class Stage:
    """What one process holds of a model, and the passes through it, which all processes of a data-parallel group make alike.

    A `Policy` for `TriModel`: the processes of the last stage get what `log_probs` says, the others zeros.
    """

    def __init__(
        self, core: Core, config: DecoderConfig, options: TrainEngineOptions, *, is_trained: bool, padding_id: int | None
    ) -> None:
        """Weights as they come out of Megatron: random or none; `load` follows. `padding_id`: the config's `pad_token_id`."""
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
        """Take this process's part of whole tensors, by Hugging Face name. Raises `UserError` if one is missing."""
        for name, origin in self.origins.items():
            if lacking := [source for source in origin.names if source not in tensors]:
                raise UserError(f"The model lacks the weight {lacking[0]}: get its files again.")
            whole = [tensors[source] for source in origin.names]
            self.weights[name].copy_(origin.shard(whole, self.tp, self.core.tp_group.size()))

    @torch.no_grad()
    def move_from(self, policy: Stage) -> None:
        """Take over the policy's weights as they are now."""
        for name, weight in self.weights.items():
            weight.copy_(policy.weights[name])

    def enter(self, packed: Packed) -> Tensor:
        """Through this stage's layers: its output [P, 1, H], which the next one takes by `set_input_tensor`."""
        hidden_P1H = None
        if self.is_first:
            hidden_P1H = self._model.embedding(input_ids=packed.tokens_P[None], position_ids=None)
            if self._padding_id is not None:  # transformers' embedding gives the row of this token no gradient
                is_padding_P11 = (packed.tokens_P == self._padding_id)[:, None, None]
                hidden_P1H = torch.where(is_padding_P11, hidden_P1H.detach(), hidden_P1H)
        angles_P11D = (packed.positions_P.float()[:, None] * self._frequencies_D)[:, None, None]
        return self._model.decoder(hidden_states=hidden_P1H, attention_mask=packed.layout, rotary_pos_emb=angles_P11D)

    def head(self, packed: Packed, hidden_P1H: Tensor) -> tuple[Tensor, Tensor, VocabularyShard | None]:
        """On the last stage: hidden states [T, H] that predict the response tokens, temperature applied; head [V, H]; its place."""
        hidden_TH = packed.predicting(hidden_P1H[:, 0])
        if self._temperature != 1.0:
            hidden_TH = hidden_TH / self._temperature
        own_VH = self._model.output_layer.weight  # None: tied to the embedding, which is on this stage, too
        head_VH = self._model.embedding.word_embeddings.weight if own_VH is None else own_VH
        # Rows that fill the vocabulary up are no tokens: their logits, 0, would take part in the softmax.
        num_rows = self.config.vocab_size - (0 if self._shard is None else self._shard.offset)
        return hidden_TH, head_VH[:num_rows], self._shard

    def run(self, batches: Sequence[Packed], loss: Callable[[int, Tensor], Tensor], *, has_grad: bool) -> None:
        """All micro-batches through the stages, and back again if `has_grad`.

        On the last stage `loss` gets the number of a micro-batch and the hidden states [P, 1, H], and answers with a scalar.
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
    """Megatron's names of each stage's weights, with where they come from."""
    each = config.num_hidden_layers // num_stages
    stages = range(num_stages)
    return [origins(config, range(i * each, (i + 1) * each), is_first=i == 0, is_last=i == num_stages - 1) for i in stages]


class Core:
    """Megatron-Core under one layout. Its groups are global: a process has one layout at a time."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Import Megatron and make its groups, which all processes do at the same time. torch.distributed is initialised."""
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
        """A stage's GPTModel."""
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
            calculate_per_token_loss=True,  # the schedule divides by no count of its own
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
        """Megatron's 1F1B schedule over so many micro-batches."""
        schedules = self._import("pipeline_parallel.schedules")
        with self.calls():
            schedules.forward_backward_pipelining_without_interleaving(
                forward_step_func=forward_step,
                data_iterator=None,
                model=model,
                num_microbatches=num_micro_batches,
                seq_length=1,  # each micro-batch says its own
                micro_batch_size=1,
                forward_only=not has_grad,
            )

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Around what asks for CUDA whatever the device is: on a CPU it is told the CPU."""
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
    """Makes tensors on the CPU where `device="cuda"` is written out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": "cpu"} if kwargs.get("device") == "cuda" else kwargs))
