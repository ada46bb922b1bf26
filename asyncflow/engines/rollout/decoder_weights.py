"""Weights of a decoder: buffers that its passes read, named as in a checkpoint, and what is installed in them.

    config.json -> DecoderWeights: buffers, matrices packed for oneDNN (linears.py), room for adapters (adapter_bank.py)
    tensors     --prepare, beside generation--> packed matrices --install--> the buffers --sums--> attestation

H = query heads, K = key/value heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncflow.bit_sums import sum_of_bits
from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.rollout.adapter_bank import AdaptableLayer, AdapterBank
from asyncflow.engines.rollout.checks import check_tensors
from asyncflow.engines.rollout.linears import AnyLinear, Linear, PackedLinear, can_pack
from asyncflow.model_folder import is_weight, weight_files
from asyncflow.types import LoraSpec

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


class DecoderWeights:
    """Weights of all layers, uninitialised at first."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, lora: LoraSpec | None = None) -> None:
        """`lora`: see `Decoder`."""
        self.config, self.dtype, self.device = config, dtype, device
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the tensors in a checkpoint, by name
        self.slices: dict[str, Tensor] = {}  # of buffers: what a tensor is copied to, of a shape that its own broadcasts to
        self.packed: list[PackedLinear] = []
        self.lora = AdapterBank(lora)
        self._packs = can_pack(dtype, device)
        self.embedding = self._buffer(config.vocab_size, config.hidden_size)
        self._name(self.embedding, "model.embed_tokens.weight")
        self.layers = [self._layer(f"model.layers.{i}") for i in range(config.num_hidden_layers)]
        self.norm = self._buffer(config.hidden_size)
        self._name(self.norm, "model.norm.weight")
        tied = self.embedding if config.tie_word_embeddings else None
        head = "lm_head.weight" if tied is None else "model.embed_tokens.weight"
        self.lm_head = self._linear([head], [config.vocab_size], config.hidden_size, None, tied)

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


def load_tensors(model_path: Path) -> dict[str, Tensor]:
    """Weights of a model, by name."""
    return {name: tensor for file in weight_files(model_path) for name, tensor in load_file(file).items() if is_weight(name)}
