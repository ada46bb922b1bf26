"""One decoder for Qwen2, Qwen3, Llama and families near to them, made for generation: no autograd, no modules, no transformers.

    DecoderConfig -> Decoder: weights (decoder_weights.py), key/value cache (slot_cache.py, device_cache.py), prefill, decode

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
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncflow.devices import CPU
from asyncflow.engines.decoder_config import DecoderConfig, rope_frequencies
from asyncflow.engines.rollout.adapter_bank import INSTALLED
from asyncflow.engines.rollout.decoder_weights import DecoderWeights
from asyncflow.engines.rollout.device_cache import DeviceCache
from asyncflow.engines.rollout.key_cache import KeyCache
from asyncflow.engines.rollout.linears import padded
from asyncflow.engines.rollout.low_rank import AdapterRows
from asyncflow.engines.rollout.prompt_attention import PromptAttention, PromptPiece
from asyncflow.engines.rollout.slot_cache import SlotCache, capped
from asyncflow.engines.rollout.step_graphs import StepGraphs
from asyncflow.types import Array, LoraSpec

SCORED_ROWS = 256  # tokens whose logits are made together where a sequence is scored


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q_THD, k_TKD, v_TKD -> [T, H * D]


class Decoder(DecoderWeights):
    """`DecoderWeights` with a key/value cache, and the passes. Not thread-safe; call the passes under `torch.inference_mode`."""

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
        super().__init__(config, dtype=dtype, device=device, lora=lora)
        self.num_slots, self.max_context = num_slots, max_context
        self.adapters = np.full(num_slots + 1, INSTALLED)
        """Number (int64) of the adapter that each slot's keys are computed with, and its logits."""
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
