"""One decoder for Qwen2, Qwen3, Llama and families near to them, made for generation: no autograd, no modules, no transformers.

    DecoderConfig -> Decoder: weight buffers, key/value cache (slot_cache.py, device_cache.py), prefill, decode

A decode step has a row for each new token, with its slot of the cache. A slot may have several rows, which come one after another
(an observation; drafts; a response whose keys were dropped): each has the bits that it has in a step of its own. A pass may have
pieces of prompts beside these rows (Sarathi, arXiv:2308.16369).

On one CPU thread the bits of a row do not depend on its neighbours: buffers are 64-byte aligned, every matmul has at least
`MIN_ROWS` rows (inert ones are added), a prompt attends to itself alone, in tiles that begin at multiples of `CHUNK` whatever pass
they are in, and slot_cache.py sums each slot by itself. Nor do they depend on the adapters that other rows have (low_rank.py).

In bfloat16 each operation rounds where transformers' modules round, so the logits of a prompt of `CHUNK` tokens at most are theirs
to the bit. Decode steps are not: slot_cache.py rounds scores and weights of the keys to bfloat16, where the attention kernel of a
whole row keeps float32. On an accelerator no bits are promised, and decode steps are recorded and replayed (step_graphs.py).

T = tokens in a pass, N = rows in a decode step, P = prompts, H = query heads, K = key/value heads, G = H / K, D = head size,
L = keys, E = hidden size, F = feed-forward size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from asyncflow.bit_sums import sum_of_bits
from asyncflow.devices import CPU
from asyncflow.engines.decoder_config import DecoderConfig, rope_frequencies
from asyncflow.engines.rollout.adapter_bank import INSTALLED, AdaptableLayer, AdapterBank
from asyncflow.engines.rollout.checks import check_tensors
from asyncflow.engines.rollout.device_cache import DeviceCache
from asyncflow.engines.rollout.key_cache import KeyCache
from asyncflow.engines.rollout.linears import AnyLinear, Linear, PackedLinear, can_pack, padded
from asyncflow.engines.rollout.low_rank import AdapterRows
from asyncflow.engines.rollout.prompt_attention import PromptAttention, PromptPiece
from asyncflow.engines.rollout.slot_cache import SlotCache, capped
from asyncflow.engines.rollout.step_graphs import StepGraphs
from asyncflow.model_folder import is_weight, weight_files
from asyncflow.types import Array, LoraSpec

SCORED_ROWS = 256  # tokens whose logits are made together where a sequence is scored


NORMS: Final[Mapping[str, tuple[tuple[str, str] | None, tuple[str, str] | None]]] = {
    "before": (("input_layernorm", "post_attention_layernorm"), None),
    "behind": (None, ("post_attention_layernorm", "post_feedforward_layernorm")),
    "both": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}
"""Names of the norms before and behind attention and MLP, by where they stand (`DecoderConfig.norms`)."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer. Norms stand before attention and MLP, behind them, or both."""

    norms_before: tuple[Tensor, Tensor] | None  # attention's and the MLP's
    norms_behind: tuple[Tensor, Tensor] | None
    qkv: AnyLinear
    qk_norm: Tensor | None  # [H + K, D]: the one vector of all query heads H times, that of the key heads K times
    whole_qk_norms: tuple[Tensor, Tensor] | None  # [H * D] and [K * D]: of all heads together
    output: AnyLinear
    gate_up: AnyLinear
    down: AnyLinear


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q_THD, k_TKD, v_TKD -> [T, H * D]


class Decoder:
    """Weights, key/value cache and the passes. Not thread-safe; call the passes under `torch.inference_mode`."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        num_slots: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        lora: LoraSpec | None = None,
    ) -> None:
        """Uninitialised weights and an empty cache of `num_slots` times `max_context` tokens (prompt and response). One slot more
        is for inert rows.

        `lora`: installs may bring a low-rank adapter; until the first one the model is its base. Others may be put beside it.
        """
        if max_context > config.max_position_embeddings:
            raise ValueError(f"max_context {max_context} exceeds the model's {config.max_position_embeddings} positions")
        if config.max_window is not None and max_context > config.max_window:
            raise ValueError(f"max_context {max_context} exceeds the model's windows of {config.max_window} tokens")
        self.config, self.dtype, self.device = config, dtype, device
        self.num_slots, self.max_context = num_slots, max_context
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the tensors in a checkpoint, by name
        self.slices: dict[str, Tensor] = {}  # of buffers: what a tensor is copied to, of a shape that its own broadcasts to
        self.packed: list[PackedLinear] = []
        self.lora = AdapterBank(lora)
        self.adapters = np.full(num_slots + 1, INSTALLED)
        """Number (int64) of the adapter that each slot's keys are computed with, and its logits."""
        self._packs = can_pack(dtype, device)
        self.embedding = self._buffer(config.vocab_size, config.hidden_size)
        self._name(self.embedding, "model.embed_tokens.weight")
        self.layers = [self._layer(f"model.layers.{i}") for i in range(config.num_hidden_layers)]
        self.norm = self._buffer(config.hidden_size)
        self._name(self.norm, "model.norm.weight")
        tied = self.embedding if config.tie_word_embeddings else None
        head = "lm_head.weight" if tied is None else "model.embed_tokens.weight"
        self.lm_head = self._linear([head], [config.vocab_size], config.hidden_size, None, tied)

        self._multiplier = config.embedding_multiplier
        if config.family.scales_embedding:
            self._multiplier = torch.tensor(self._multiplier, dtype=dtype).item()
        self._rotation = self._rotation_by(config.rope, max_context)
        self._local_rotation = self._rotation_by(config.local_rope, max_context) if any(config.is_local) else self._rotation
        self._inert_slot = num_slots
        self.cache: KeyCache
        self._recorded: tuple[DeviceCache, StepGraphs] | None = None  # decode steps of an accelerator, and what they read
        size = {"num_slots": num_slots + 1, "max_context": max_context}
        if device.type == CPU:
            self.cache = SlotCache(config, **size, like=self.norm)
        else:
            self.cache = cache = DeviceCache(config, **size, like=self.norm)
            self._recorded = cache, StepGraphs(partial(self._decoded, cache), device)
        self._prompts = PromptAttention(config, self.cache, device)

    def _rotation_by(self, rope: Mapping[str, Any], max_context: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [max_context, rotary_dim] by position."""
        angles = torch.arange(max_context)[:, None].float() * rope_frequencies(self.config.rotary_dim, rope)
        cos, sin = angles.cos(), angles.sin()
        signed = torch.cat((-sin, sin), -1)  # so that a rotation swaps halves without negating
        dtype = torch.float32 if self.config.rotates_in_float32 else self.dtype
        return torch.cat((cos, cos), -1).to(self.device, dtype), signed.to(self.device, dtype)

    def _buffer(self, *shape: int) -> Tensor:
        buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
        assert buffer.data_ptr() % 64 == 0, "torch's allocator aligns to 64 bytes, on which equal bits rest"
        return buffer

    def _name(self, buffer: Tensor, *names: str, sizes: Sequence[int] = (), shape: tuple[int, ...] | None = None) -> None:
        """Give consecutive pieces (of `sizes`, else all of it) of a buffer's first dimension their checkpoint names."""
        for name, piece in zip(names, torch.split(buffer, list(sizes) or [len(buffer)]), strict=True):
            self.slices[name], self.shapes[name] = piece, shape or tuple(piece.shape)

    def _linear(
        self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: Tensor | None, tied: Tensor | None = None
    ) -> AnyLinear:
        """Linear layer of the checkpoint's tensors `names`, which have `sizes` rows; `tied` is a plain buffer that has them
        already."""
        if self._packs:
            self.shapes |= {name: (size, inputs) for name, size in zip(names, sizes, strict=True)}
            self.packed.append(PackedLinear(names, self.dtype, bias))
            return self.packed[-1]
        if tied is not None:
            return Linear(tied, bias)
        weight = self._buffer(sum(sizes), inputs)
        self._name(weight, *names, sizes=sizes)
        return Linear(weight, bias)

    def _layer(self, prefix: str) -> DecoderLayer:
        c = self.config
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        heads = (c.num_attention_heads, c.num_key_value_heads)

        def norm(name: str, size: int = c.hidden_size) -> Tensor:
            buffer = self._buffer(size)
            self._name(buffer, f"{prefix}.{name}.weight")
            return buffer

        def linear(names: str, sizes: Sequence[int], inputs: int, has_bias: bool) -> AnyLinear:
            bias = self._buffer(sum(sizes)) if has_bias else None
            if bias is not None:
                self._name(bias, *(f"{prefix}.{name}.bias" for name in names.split()), sizes=sizes)
            linear = self._linear([f"{prefix}.{name}.weight" for name in names.split()], sizes, inputs, bias)
            parts = [f"{prefix}.{name}" for name in names.split()]
            self.lora.add(AdaptableLayer(linear, parts, sizes, inputs, like=self.embedding))
            return linear

        if c.family.is_fused:
            qkv = linear("self_attn.qkv_proj", (q + 2 * kv,), c.hidden_size, c.qkv_bias)
            gate_up = linear("mlp.gate_up_proj", (2 * c.intermediate_size,), c.hidden_size, c.mlp_bias)
        else:
            qkv = linear("self_attn.q_proj self_attn.k_proj self_attn.v_proj", (q, kv, kv), c.hidden_size, c.qkv_bias)
            gate_up = linear("mlp.gate_proj mlp.up_proj", (c.intermediate_size,) * 2, c.hidden_size, c.mlp_bias)
        qk_norm = self._buffer(sum(heads), c.head_dim) if c.family.has_qk_norm else None
        if qk_norm is not None:
            names = (f"{prefix}.self_attn.q_norm.weight", f"{prefix}.self_attn.k_norm.weight")
            self._name(qk_norm, *names, sizes=heads, shape=(c.head_dim,))
        whole_qk_norms = (norm("self_attn.q_norm", q), norm("self_attn.k_norm", kv)) if c.family.has_whole_qk_norm else None
        output = linear("self_attn.o_proj", (c.hidden_size,), q, c.output_bias)
        down = linear("mlp.down_proj", (c.hidden_size,), c.intermediate_size, c.mlp_bias)
        before, behind = NORMS[c.family.norms]
        norms_before = (norm(before[0]), norm(before[1])) if before else None
        norms_behind = (norm(behind[0]), norm(behind[1])) if behind else None
        return DecoderLayer(norms_before, norms_behind, qkv, qk_norm, whole_qk_norms, output, gate_up, down)

    def prepare(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The slow part of an install, done beside generation: packed weights. `ValueError` when a tensor does not fit.

        Of a low-rank adapter nothing is slow.
        """
        if self.lora.takes(tensors):
            self.lora.check(tensors)
            return []
        tensors = check_tensors(tensors, self.shapes, ties_head=self.config.tie_word_embeddings)
        with torch.inference_mode():
            return [linear.pack(tensors) for linear in self.packed]

    def install(self, tensors: Mapping[str, Tensor], prepared: Sequence[Tensor] | None = None) -> None:
        """Copy every weight into its buffer, converting its dtype. `ValueError`, changing nothing, when one does not fit.

        With `lora` it takes an adapter alone, too, over the weights that are there, or nothing at all, for these alone.
        `prepared`: what `prepare` made of the same tensors; else weights are packed one at a time.
        """
        if self.lora.takes(tensors):
            self.lora.install(tensors)
            return
        tensors = check_tensors(tensors, self.shapes, ties_head=self.config.tie_word_embeddings)
        with torch.inference_mode():
            for name, piece in self.slices.items():
                piece.copy_(tensors[name])
            for linear, packed in zip(self.packed, prepared or (x.pack(tensors) for x in self.packed), strict=True):
                linear.install(packed)

    def installed(self, name: str) -> Tensor:
        """Tensor of the checkpoint (see `shapes`), or of the adapter, as it is installed: a view, or a copy of what is packed."""
        if name in self.lora.slices:
            return self.lora.slices[name]
        if name in self.slices:
            piece = self.slices[name]
            return piece if tuple(piece.shape) == self.shapes[name] else piece[0]  # which is there for each head
        linear = next(linear for linear in self.packed if name in linear.names)
        sizes = [self.shapes[each][0] for each in linear.names]
        return torch.split(linear.unpacked(), sizes)[linear.names.index(name)]

    def sums(self) -> list[tuple[tuple[str, ...], int]]:
        """Sums of the bits of the weights that the passes read (asyncflow/attestation.py), with the names of those in one buffer.

        An embedding that is the output layer, too, may be there in both orders, and comes twice then.
        """
        sums = [((name,), sum_of_bits(self.installed(name))) for name in self.slices]
        return sums + [(tuple(linear.names), sum_of_bits(linear.bits())) for linear in self.packed]

    def prefill(self, prompts: Sequence[Array], slots: Sequence[Sequence[int]]) -> Tensor:
        """Logits (float32 [P, V]) after each prompt (int64), whose keys are what each of its slots has from then on."""
        logits_PV = self.compute([PromptPiece(first, 0, prompt) for prompt, (first, *_) in zip(prompts, slots, strict=True)])
        for prompt, (first, *others) in zip(prompts, slots, strict=True):
            self.cache.share(first, others, len(prompt))
        return logits_PV

    def log_probs(self, token_ids: Array, adapter: int = INSTALLED) -> Array:
        """Log-probs (float32 [L - 1]) of the tokens of one sequence (int64 [L]) after its first, with the adapter of this number.
        The cache is neither used nor changed. At most `SCORED_ROWS` rows of logits exist at a time."""
        num_tokens = len(token_ids)
        inert = np.zeros(padded(num_tokens) - num_tokens, np.int64)
        tiles, rows_T = self._prompts.tiles([PromptPiece(self._inert_slot, 0, token_ids)], 0, len(inert))

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            return torch.cat([self._prompts.attend(layer, each, q_THD, k_TKD, v_TKD) for each in tiles]).index_select(0, rows_T)

        positions = np.append(np.arange(num_tokens), inert)
        h_TE = self._hidden(np.append(token_ids, inert), positions, np.full(len(positions), adapter), attend)
        targets_T = self._on_device(np.append(token_ids[1:], [0, *inert]))
        chosen = []
        for begin in range(0, len(h_TE), SCORED_ROWS):
            logits_CV = self._logits(h_TE[begin : begin + SCORED_ROWS])
            targets_C1 = targets_T[begin : begin + SCORED_ROWS, None]
            chosen.append(logits_CV.log_softmax(-1).gather(1, targets_C1).squeeze(1))
        scored: Array = torch.cat(chosen)[: num_tokens - 1].cpu().numpy()
        return scored

    def decode(self, tokens: Array, positions: Array, slots: Array | None = None, wanted: Array | None = None) -> Tensor:
        """Logits (float32 [N, V]) after one more token (int64 [N]) of each slot (int64 [N]; None: 0 .. N-1), at its position
        (int64 [N]). `wanted` (int64): the rows whose logits are wanted; None: all."""
        slots = np.arange(len(tokens)) if slots is None else slots
        num_rows = len(tokens)
        inert = np.zeros(padded(num_rows) - num_rows, np.int64)
        slots = np.append(slots, inert + self._inert_slot)
        tokens, positions = np.append(tokens, inert), np.append(positions, inert)
        adapters = self._adapters_of(slots)
        if self._recorded is not None:
            cache, graphs = self._recorded
            h_NE = graphs(np.column_stack([tokens, cache.places(slots, positions)]), self.lora.rows_of(adapters))
            return self._logits(h_NE[:num_rows] if wanted is None else h_NE[self._on_device(wanted)])
        store, attend_rows = self.cache.storing(slots, positions), self.cache.attending(slots, positions)

        def attend(layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
            store(layer, k_NKD, v_NKD)
            return attend_rows(layer, q_NHD)

        if wanted is None:
            return self._forward(tokens, positions, adapters, attend)[:num_rows]
        last = np.append(wanted, np.full(padded(len(wanted)) - len(wanted), wanted[-1]))
        return self._forward(tokens, positions, adapters, attend, last)[: len(wanted)]

    def _decoded(self, cache: DeviceCache, inputs_NX: Tensor, adapted: tuple[AdapterRows, ...]) -> Tensor:
        """Inputs of the output layer ([N, E]) in the decode step of these tokens and places (`DeviceCache.places`)."""
        step = cache.step(inputs_NX[:, 1:])

        def attend(layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
            cache.store(layer, step.rows_N, k_NKD, v_NKD)
            return cache.attend(layer, step, q_NHD)

        return self._computed(inputs_NX[:, 0], inputs_NX[:, 1], adapted, attend)

    def compute(self, pieces: Sequence[PromptPiece]) -> Tensor:
        """`fill` with pieces alone, of which there are some."""
        none = np.empty(0, np.int64)
        return self.fill(none, none, none, none, pieces)

    def fill(self, tokens: Array, positions: Array, slots: Array, wanted: Array, pieces: Sequence[PromptPiece]) -> Tensor:
        """`decode`, if there are any rows, with pieces of prompts beside them in the pass: the logits of the rows that are wanted,
        then those after the last token of each piece whose logits are."""
        if not pieces:
            return self.decode(tokens, positions, slots, wanted)
        num_rows, lengths = len(tokens), np.array([len(piece.tokens) for piece in pieces])
        ends = num_rows + np.cumsum(lengths)
        num_tokens = int(ends[-1])
        inert = np.zeros(padded(num_tokens) - num_tokens, np.int64)
        for piece in pieces:
            if not piece.first:
                self.cache.release(piece.slot)
        attend_rows = self.cache.attending(slots, positions) if num_rows else None
        tokens = np.concatenate([tokens, *(piece.tokens for piece in pieces)])
        positions = np.concatenate([positions, *(piece.first + np.arange(len(piece.tokens)) for piece in pieces)])
        slots = np.append(slots, np.repeat([piece.slot for piece in pieces], lengths))
        store = self.cache.storing(slots, positions)
        tiles, rows_T = self._prompts.tiles(pieces, num_rows, len(inert))

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            store(layer, k_TKD[:num_tokens], v_TKD[:num_tokens])
            attended = [] if attend_rows is None else [attend_rows(layer, q_THD[:num_rows])]
            attended += [self._prompts.attend(layer, each, q_THD, k_TKD, v_TKD) for each in tiles]
            return torch.cat(attended).index_select(0, rows_T)

        last = np.append(wanted, ends[[piece.wants_logits for piece in pieces]] - 1)
        num_wanted = len(last)
        last = np.append(last, np.full(padded(num_wanted) - num_wanted, num_tokens - 1))
        adapters = self._adapters_of(np.append(slots, inert + self._inert_slot))
        logits_TV = self._forward(np.append(tokens, inert), np.append(positions, inert), adapters, attend, last)
        return logits_TV[:num_wanted]

    def _adapters_of(self, slots: Array) -> Array:
        """Number of the adapter of each row of a pass (int64 [T]) by its slot; inert rows have the first one's."""
        self.adapters[self._inert_slot] = self.adapters[slots[0]]
        numbers: Array = self.adapters[slots]
        return numbers

    def _forward(self, tokens: Array, positions: Array, adapters: Array, attend: Attend, wanted_P: Array | None = None) -> Tensor:
        """Logits (float32 [T, V]); of the tokens `wanted_P` alone, if given: the others stop when the last layer has their keys."""
        return self._logits(self._hidden(tokens, positions, adapters, attend, wanted_P))

    def _logits(self, h_TE: Tensor) -> Tensor:
        """Logits (float32 [T, V]) from what the output layer is given."""
        logits_TV = self.lm_head(h_TE)
        if self.config.logits_scaling != 1.0:
            logits_TV = logits_TV.div_(self.config.logits_scaling)
        if self.config.logits_softcap is not None:
            logits_TV = capped(logits_TV, self.config.logits_softcap)
        return logits_TV.float()

    def _hidden(self, tokens: Array, positions: Array, adapters: Array, attend: Attend, wanted_P: Array | None = None) -> Tensor:
        """Inputs of the output layer ([T, E]), as in `_forward`."""
        last = None if wanted_P is None else (self._on_device(wanted_P), self.lora.rows_of(adapters[wanted_P]))
        return self._computed(self._on_device(tokens), self._on_device(positions), self.lora.rows_of(adapters), attend, last)

    def _computed(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        adapted: tuple[AdapterRows, ...],
        attend: Attend,
        last: tuple[Tensor, tuple[AdapterRows, ...]] | None = None,
    ) -> Tensor:
        """Inputs of the output layer, on the device alone; `last`: the rows that are wanted (int64 [P]), and their adapters."""
        c = self.config
        num_heads, num_qk = c.num_attention_heads, c.num_attention_heads + c.num_key_value_heads
        rotation, local_rotation = (
            tuple(table_LD[positions_T].unsqueeze(1) for table_LD in tables) for tables in (self._rotation, self._local_rotation)
        )
        x_TE = self.embedding[tokens_T]
        if self._multiplier != 1.0:
            x_TE = x_TE.mul_(self._multiplier)
        for index, layer in enumerate(self.layers):
            h_TE = self._normed(x_TE, layer.norms_before[0]) if layer.norms_before else x_TE
            qkv = layer.qkv(h_TE, adapted).view(len(x_TE), -1, c.head_dim)
            qk = qkv[:, :num_qk]
            if layer.qk_norm is not None:
                qk = self._normed(qk, layer.qk_norm)
            if layer.whole_qk_norms is not None:
                parts = (qk[:, :num_heads].flatten(1), qk[:, num_heads:].flatten(1))
                normed = [self._normed(part, norm) for part, norm in zip(parts, layer.whole_qk_norms, strict=True)]
                qk = torch.cat(normed, 1).view(len(x_TE), -1, c.head_dim)
            if c.rotates[index]:
                qk = rotated(qk, *(local_rotation if c.is_local[index] else rotation))
            attended = attend(index, qk[:, :num_heads], qk[:, num_heads:], qkv[:, num_qk:])
            if last is not None and layer is self.layers[-1]:
                x_TE, attended = (x[last[0]] for x in (x_TE, attended))
                adapted = last[1]
            x_TE = self._added(layer.output(attended, adapted), layer.norms_behind and layer.norms_behind[0], x_TE)
            h_TE = self._normed(x_TE, layer.norms_before[1]) if layer.norms_before else x_TE
            gate, up = layer.gate_up(h_TE, adapted).chunk(2, -1)
            activated = F.gelu(gate, approximate="tanh") if c.family.has_gelu else F.silu(gate)
            x_TE = self._added(layer.down(activated.mul_(up), adapted), layer.norms_behind and layer.norms_behind[1], x_TE)
        return self._normed(x_TE, self.norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """`rms_norm` by the model's constants."""
        c = self.config
        return rms_norm(x, weight, c.rms_norm_eps, is_rounded_late=c.has_late_rounding, offset=c.family.norm_offset)

    def _added(self, made_TE: Tensor, norm: Tensor | None, x_TE: Tensor) -> Tensor:
        """The sum of what attention or MLP has made and what went in; `norm`: that behind it."""
        if norm is not None:
            made_TE = self._normed(made_TE, norm)
        if self.config.residual_multiplier != 1.0:
            made_TE = made_TE.mul_(self.config.residual_multiplier)
        return made_TE.add_(x_TE)

    def _on_device(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_rounded_late: bool = False, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension in float32, rounded to the dtype of `x`, then times `weight`.

    `is_rounded_late`: rounded after that; `weight + offset` then.
    """
    x_float = x.float()
    scale = x_float.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if is_rounded_late:
        return (x_float * scale * (weight.float() + offset)).to(x.dtype)
    return (x_float * scale).to(x.dtype).mul_(weight)


def rotated(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Heads whose first R elements are rotated by their positions, in the cosines' dtype; the sines of the first half are
    negated."""
    size = cos_T1R.shape[-1]
    if size == x_THD.shape[-1]:
        wide_THD = x_THD.to(cos_T1R.dtype)
        return (wide_THD * cos_T1R).add_(wide_THD.roll(size // 2, -1).mul_(sin_T1R)).to(x_THD.dtype)
    first, rest = x_THD[..., :size], x_THD[..., size:]
    return torch.cat((rotated(first, cos_T1R, sin_T1R), rest), -1)


def load_tensors(model_path: Path) -> dict[str, Tensor]:
    """Weights of a model, by name."""
    return {name: tensor for file in weight_files(model_path) for name, tensor in load_file(file).items() if is_weight(name)}
