"""Megatron-Core under one layout: its groups, the model of a stage with this package's attention, and the pipeline's schedule."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asyncflow.devices import NPU
from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.train.adapters.megatron.origins import padded_vocabulary
from asyncflow.engines.train.model.attention import packed_attention
from asyncflow.types import Layout

# P packed tokens, H heads, K key heads, D elements of a head.


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
            qk_layernorm=config.family.has_qk_norm,
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
        spec = specs.get_gpt_layer_local_spec(qk_layernorm=config.family.has_qk_norm, normalization="RMSNorm")
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
