"""One decoder for the Qwen2, Qwen3 and Llama families, made for generation: no autograd, no modules, no transformers.

    config.json -> DecoderConfig (refuses what it does not know) -> Decoder: weight buffers, key/value cache, prefill, decode

The active slots of the cache are always 0 .. N-1, so a decode step has a row for each and gathers nothing.

On one CPU thread the bits of a row do not depend on its neighbours: buffers are 64-byte aligned, every matmul has at least
`MIN_ROWS` rows (inert ones are added), a prompt attends to itself alone, and slot_cache.py sums each slot by itself.

T = tokens in a pass, N = rows in a decode step, P = prompts, H = query heads, K = key/value heads, G = H / K, D = head size,
L = keys,
E = hidden size, F = feed-forward size, V = vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from asyncflow.engines.rollout.slot_cache import SlotCache
from asyncflow.types import Array

MIN_ROWS = 4
ROW_STEP = 8  # decode steps come in multiples of it, at least MIN_ROWS
PACKED_ROWS = 64  # the number of rows for which oneDNN chooses the order of a packed weight; any number may come

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
READ = {
    *SIZES,
    *("model_type", "architectures", "layer_types", "head_dim", "rms_norm_eps", "attention_bias", "mlp_bias"),
    *("tie_word_embeddings", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
}
# Only these values are implemented. `sliding_window` and `max_window_layers` have no effect while `use_sliding_window` is false.
FIXED = {"hidden_act": "silu", "use_sliding_window": False, "use_mrope": False, "partial_rotary_factor": 1.0}
HARMLESS = {
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "initializer_range", "attention_dropout", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sliding_window", "max_window_layers", "pretraining_tp"),
    *("output_attentions", "output_hidden_states", "return_dict"),
}
ROPE_SCALING = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The part of a Hugging Face `config.json` that determines the computation."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    rope: Mapping[str, Any]

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> DecoderConfig:
        """From the fields of a `config.json`; `ValueError` naming the first one that this decoder does not implement."""
        family = fields.get("model_type")
        if family not in ARCHITECTURES:
            raise ValueError(f"model_type {family!r} is not one of {', '.join(ARCHITECTURES)}")
        for name, value in fields.items():
            if name in FIXED and value not in (None, FIXED[name]):
                raise ValueError(f"config field {name} = {value!r} is not implemented (only {FIXED[name]!r})")
            # None is how a config says that a feature is absent.
            if name not in READ | FIXED.keys() | HARMLESS and value is not None:
                raise ValueError(f"unknown config field {name} = {value!r}: it could change the computation")
        if fields.get("architectures") not in (None, [ARCHITECTURES[family]]):
            raise ValueError(f"config field architectures = {fields['architectures']!r} is not [{ARCHITECTURES[family]!r}]")
        if set(fields.get("layer_types") or ()) - {"full_attention"}:
            raise ValueError(f"config field layer_types = {fields['layer_types']!r}: only full_attention is implemented")
        if family == "llama" and fields.get("sliding_window") is not None:
            raise ValueError("config field sliding_window is not implemented for llama")
        sizes: dict[str, Any] = {name: fields.get(name) for name in SIZES}
        if family == "llama" or "num_key_value_heads" in fields:
            sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"config field {name} = {value!r} is not a positive integer")
        default_head_dim = 128 if family == "qwen3" else sizes["hidden_size"] // sizes["num_attention_heads"]
        attention_bias = bool(fields.get("attention_bias"))
        if (attention_bias and family == "qwen2") or (fields.get("mlp_bias") and family != "llama"):
            raise ValueError(f"config fields attention_bias and mlp_bias are not those of {family}")
        return cls(
            **sizes,
            head_dim=fields.get("head_dim") or default_head_dim,
            rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
            max_position_embeddings=fields.get("max_position_embeddings", 2048),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings")),
            qk_norm=family == "qwen3",
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias,
            mlp_bias=bool(fields.get("mlp_bias")),
            rope=_rope_fields(fields),
        )


def _rope_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_theta`, `rope_type` and the scaling's own numbers, from either spelling (`rope_parameters` since transformers 5)."""
    rope = {"rope_theta": fields.get("rope_theta") or 10000.0, **(fields.get("rope_scaling") or {})}
    rope |= fields.get("rope_parameters") or {}
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind not in ROPE_SCALING:
        raise ValueError(f"rope scaling {kind!r} is not one of {', '.join(ROPE_SCALING)}")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rope parameter partial_rotary_factor is not implemented")
    expected = {"rope_theta", "rope_type"} | ROPE_SCALING[kind]
    if rope.keys() != expected:
        raise ValueError(f"rope parameters {sorted(rope)} are not {sorted(expected)}, those of {kind!r}")
    return rope


def rope_frequencies(head_dim: int, rope: Mapping[str, Any]) -> Tensor:
    """Radians per position of each pair of dimensions: float32 [D / 2]; `llama3` as in Llama 3.1's reference code."""
    frequency = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope["rope_type"] == "default":
        return frequency
    scaled = frequency / rope["factor"]
    if rope["rope_type"] == "linear":
        return scaled
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * scaled + smooth * frequency


class Linear:
    """`x @ weight.T + bias`. weight [outputs, inputs] is the buffer that installs write.

    On an x86 CPU the product is taken from a copy that oneDNN has put into the order its kernels read ("packed"): MKL reorders the
    weight in every call, which makes it 1.4 times slower at 36 rows and 2 times at 4. Packing costs ten times a memcpy, so it is
    done ahead of an install (`pack`), or else at the first use after it. It doubles the memory of the weights.
    """

    def __init__(self, names: Sequence[str], weight: Tensor, bias: Tensor | None) -> None:
        """`names`: the checkpoint's tensors that the weight's rows are, in order."""
        self.names, self.weight, self.bias = names, weight, bias
        self._is_packable = weight.device.type == "cpu" and can_pack(weight.dtype)
        self.packed: Tensor | None = None

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The packed copy of a weight that may be installed later; None where there can be none."""
        if not self._is_packable:
            return None
        pieces = [tensors[name].to(self.weight.dtype) for name in self.names]
        fused = torch.cat(pieces) if len(pieces) > 1 else pieces[0].contiguous()
        return torch.ops.mkldnn._reorder_linear_weight(fused, PACKED_ROWS)

    def __call__(self, x: Tensor, plus: Tensor | None = None, *, packed: bool) -> Tensor:
        """[rows, inputs] -> [rows, outputs]; `plus` [rows, outputs] is added. `packed`: from the packed copy, if there can be one.

        oneDNN keeps 0.7 MB of code for every number of rows that it has seen, so only passes of few different sizes may ask for it.
        """
        if not (packed and self._is_packable):
            y = F.linear(x, self.weight, self.bias)
            return y if plus is None else y.add_(plus)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_ROWS)
        if plus is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, plus, self.packed, self.bias, "add")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and machine have oneDNN's packed product for `dtype` (what torch.compile's inference mode uses)."""
    if not torch._C._has_mkldnn or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [H + K, D]: the one vector of all query heads H times, that of the key heads K times
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q_THD, k_TKD, v_TKD -> [T, H * D]


class Decoder:
    """Weights, key/value cache and the two passes. Not thread-safe; call the passes under `torch.inference_mode`."""

    def __init__(
        self, config: DecoderConfig, *, num_slots: int, max_context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Uninitialised weights and an empty cache of `num_slots` times `max_context` tokens (prompt and response)."""
        if max_context > config.max_position_embeddings:
            raise ValueError(f"max_context {max_context} exceeds the model's {config.max_position_embeddings} positions")
        self.config, self.dtype, self.device = config, dtype, device
        # name -> (buffer slice, shape of the tensor in a checkpoint, which the slice's shape may broadcast)
        self.slices: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        self.embedding = self._buffer(config.vocab_size, config.hidden_size)
        self._name(self.embedding, "model.embed_tokens.weight")
        self.layers = [self._layer(f"model.layers.{i}") for i in range(config.num_hidden_layers)]
        self.norm = self._buffer(config.hidden_size)
        self._name(self.norm, "model.norm.weight")
        head, head_name = self.embedding, "model.embed_tokens.weight"
        if not config.tie_word_embeddings:
            head, head_name = self._buffer(config.vocab_size, config.hidden_size), "lm_head.weight"
            self._name(head, head_name)
        self.lm_head = Linear([head_name], head, None)
        self.linears = [x for layer in self.layers for x in (layer.qkv, layer.output, layer.gate_up, layer.down)] + [self.lm_head]

        angles = torch.arange(max_context)[:, None].float() * rope_frequencies(config.head_dim, config.rope)
        cos, sin = angles.cos(), angles.sin()
        self._cos_LD = torch.cat((cos, cos), -1).to(device, dtype)
        self._sin_LD = torch.cat((-sin, sin), -1).to(device, dtype)  # signed, so that a rotation swaps halves without negating

        self.cache = SlotCache(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            num_slots=num_slots + -num_slots % ROW_STEP,
            max_context=max_context,
            like=self.norm,
        )

    def _buffer(self, *shape: int) -> Tensor:
        buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
        assert buffer.data_ptr() % 64 == 0, "torch's allocator aligns to 64 bytes, on which equal bits rest"
        return buffer

    def _name(self, buffer: Tensor, *names: str, sizes: Sequence[int] = (), shape: tuple[int, ...] | None = None) -> None:
        """Give consecutive pieces (of `sizes`, else all of it) of a buffer's first dimension their checkpoint names."""
        for name, piece in zip(names, torch.split(buffer, list(sizes) or [len(buffer)]), strict=True):
            self.slices[name] = (piece, shape or tuple(piece.shape))

    def _layer(self, prefix: str) -> Layer:
        c = self.config
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        heads = (c.num_attention_heads, c.num_key_value_heads)

        def norm(name: str) -> Tensor:
            buffer = self._buffer(c.hidden_size)
            self._name(buffer, f"{prefix}.{name}.weight")
            return buffer

        def linear(names: str, sizes: Sequence[int], inputs: int, has_bias: bool) -> Linear:
            weight, bias = self._buffer(sum(sizes), inputs), self._buffer(sum(sizes)) if has_bias else None
            self._name(weight, *(f"{prefix}.{name}.weight" for name in names.split()), sizes=sizes)
            if bias is not None:
                self._name(bias, *(f"{prefix}.{name}.bias" for name in names.split()), sizes=sizes)
            return Linear([f"{prefix}.{name}.weight" for name in names.split()], weight, bias)

        qkv = linear("self_attn.q_proj self_attn.k_proj self_attn.v_proj", (q, kv, kv), c.hidden_size, c.qkv_bias)
        qk_norm = self._buffer(sum(heads), c.head_dim) if c.qk_norm else None
        if qk_norm is not None:
            names = (f"{prefix}.self_attn.q_norm.weight", f"{prefix}.self_attn.k_norm.weight")
            self._name(qk_norm, *names, sizes=heads, shape=(c.head_dim,))
        output = linear("self_attn.o_proj", (c.hidden_size,), q, c.output_bias)
        gate_up = linear("mlp.gate_proj mlp.up_proj", (c.intermediate_size,) * 2, c.hidden_size, c.mlp_bias)
        down = linear("mlp.down_proj", (c.hidden_size,), c.intermediate_size, c.mlp_bias)
        return Layer(norm("input_layernorm"), qkv, qk_norm, output, norm("post_attention_layernorm"), gate_up, down)

    def prepare(self, tensors: Mapping[str, Tensor]) -> list[Tensor | None]:
        """The slow part of an install, done beside generation: the packed copies. `ValueError` when a weight does not fit."""
        tensors = self._checked(tensors)
        with torch.inference_mode():
            return [linear.pack(tensors) for linear in self.linears]

    def install(self, tensors: Mapping[str, Tensor], packed: Sequence[Tensor | None] | None = None) -> None:
        """Copy every weight into its buffer, converting its dtype. `ValueError`, changing nothing, when one does not fit.

        `packed`: what `prepare` made of the same tensors.
        """
        tensors = self._checked(tensors)
        with torch.no_grad():
            for name, (piece, _) in self.slices.items():
                piece.copy_(tensors[name])
        for linear, copy in zip(self.linears, packed or [None] * len(self.linears), strict=True):
            linear.packed = copy

    def _checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors by the names of the buffers. `ValueError` naming what does not fit."""
        tensors = dict(tensors)
        head = tensors.pop("lm_head.weight", None) if self.config.tie_word_embeddings else None
        if head is not None and not torch.equal(head, tensors["model.embed_tokens.weight"]):
            raise ValueError("lm_head.weight differs from model.embed_tokens.weight although tie_word_embeddings is true")
        if tensors.keys() != self.slices.keys():
            missing, unexpected = sorted(self.slices.keys() - tensors.keys()), sorted(tensors.keys() - self.slices.keys())
            raise ValueError(f"weights do not fit the model: missing {missing or 'none'}, unexpected {unexpected or 'none'}")
        for name, (_, shape) in self.slices.items():
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, the model has {shape}")
            if not tensors[name].is_floating_point():
                raise ValueError(f"{name} has dtype {tensors[name].dtype}, which is not a floating-point one")
        return tensors

    def prefill(self, prompts: Sequence[Array], slots: Sequence[tuple[int, int]]) -> Tensor:
        """Logits (float32 [P, V]) after each prompt (int64), whose keys go to `count` slots from `first`: `(first, count)`."""
        offsets = np.cumsum([0, *(len(p) for p in prompts)])
        padding = max(0, MIN_ROWS - int(offsets[-1]))
        tokens = np.concatenate([*prompts, np.zeros(padding, np.int64)])
        positions = np.concatenate([*(np.arange(len(p)) for p in prompts), np.zeros(padding, np.int64)])
        pieces = [(slice(int(a), int(b)), *where) for a, b, where in zip(offsets[:-1], offsets[1:], slots, strict=True)]

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            attended_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
            for piece, first, count in pieces:
                self.cache.fill(layer, k_TKD[piece], v_TKD[piece], first, count)
                attended_THD[piece] = causal_attention(q_THD[piece], k_TKD[piece], v_TKD[piece])
            return attended_THD.flatten(1)

        last = [piece.stop - 1 for piece, _, _ in pieces]
        return self._forward(tokens, positions, attend, last + last[-1:] * (MIN_ROWS - len(last)))[: len(last)]

    def decode(self, tokens: Array, positions: Array) -> Tensor:
        """Logits (float32 [N, V]) after one more token of slots 0 .. N-1 (int64 [N]), at its position (int64 [N])."""
        num_rows = len(tokens)
        inert = np.zeros(-num_rows % ROW_STEP, np.int64)  # they write into slots that are free
        tokens, positions = np.append(tokens, inert), np.append(positions, inert)
        step, scale = self.cache.step(positions), self.config.head_dim**-0.5

        def attend(layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
            return self.cache.attend(layer, step, q_NHD * scale, k_NKD, v_NKD)

        return self._forward(tokens, positions, attend, packed=True)[:num_rows]

    def _forward(
        self, tokens: Array, positions: Array, attend: Attend, wanted: list[int] | None = None, *, packed: bool = False
    ) -> Tensor:
        """Logits (float32 [T, V]); of the tokens `wanted` alone, if given: the others stop when the last layer has their keys."""
        c = self.config
        num_heads, num_qk = c.num_attention_heads, c.num_attention_heads + c.num_key_value_heads
        positions_T = torch.from_numpy(positions).to(self.device)
        cos_T1D, sin_T1D = self._cos_LD[positions_T].unsqueeze(1), self._sin_LD[positions_T].unsqueeze(1)
        x_TE = self.embedding[torch.from_numpy(tokens).to(self.device)]
        for index, layer in enumerate(self.layers):
            h_TE = F.rms_norm(x_TE, (c.hidden_size,), layer.input_norm, c.rms_norm_eps)
            qkv = layer.qkv(h_TE, packed=packed).view(len(x_TE), -1, c.head_dim)
            qk = qkv[:, :num_qk]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (c.head_dim,), None, c.rms_norm_eps) * layer.qk_norm
            qk = (qk * cos_T1D).addcmul_(qk.roll(c.head_dim // 2, -1), sin_T1D)
            attended = attend(index, qk[:, :num_heads], qk[:, num_heads:], qkv[:, num_qk:])
            if wanted is not None and layer is self.layers[-1]:
                x_TE, attended = x_TE[wanted], attended[wanted]
            x_TE = layer.output(attended, x_TE, packed=packed)
            h_TE = F.rms_norm(x_TE, (c.hidden_size,), layer.mlp_norm, c.rms_norm_eps)
            gate, up = layer.gate_up(h_TE, packed=packed).chunk(2, -1)
            x_TE = layer.down(F.silu(gate).mul_(up), x_TE, packed=packed)
        h_TE = F.rms_norm(x_TE, (c.hidden_size,), self.norm, c.rms_norm_eps)
        return self.lm_head(h_TE, packed=packed).float()


def causal_attention(q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor) -> Tensor:
    """Attention [L, H, D] of one prompt to itself."""
    group = q_LHD.shape[1] // k_LKD.shape[1]
    q = q_LHD.transpose(0, 1).contiguous()
    k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k_LKD, v_LKD))
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1)


def load_tensors(model_path: Path) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names."""
    index = model_path / "model.safetensors.index.json"
    if not index.exists():
        return load_file(model_path / "model.safetensors")
    files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in load_file(model_path / file).items()}
