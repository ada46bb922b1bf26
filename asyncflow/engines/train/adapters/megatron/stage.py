"""Megatron's model on packed tokens: a process's share of it, and the passes through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from asyncflow.engines.base import TrainEngineOptions
from asyncflow.engines.decoder_config import DecoderConfig, rope_frequencies
from asyncflow.engines.train.adapters.megatron.core import Core
from asyncflow.engines.train.adapters.megatron.origins import padded_vocabulary, stage_origins
from asyncflow.engines.train.model.causal_model import recompute_activations
from asyncflow.engines.train.model.log_probs import Head, VocabularyShard, log_probs_and_entropy
from asyncflow.engines.train.model.packing import Packed
from asyncflow.types import UserError

# P packed tokens, T response tokens, H hidden elements, V rows of the vocabulary that a rank has, D elements of a head.


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

    def head(self, packed: Packed, hidden_P1H: Tensor) -> tuple[Tensor, Head]:
        """Inputs of the loss, on the last stage: hidden states [T, H], and the output layer.

        The hidden states are those that predict the response tokens, with the temperature applied. `hidden_P1H`: `enter`'s output.
        """
        hidden_TH = packed.predicting(hidden_P1H[:, 0], packed.temperature or self._temperature)
        own_VH = self._model.output_layer.weight  # None: tied to the embedding, which is on this stage, too
        head_VH = self._model.embedding.word_embeddings.weight if own_VH is None else own_VH
        # Rows that only fill up the vocabulary are no tokens: without the cut their logits, 0, would be in the softmax.
        num_rows = self.config.vocab_size - (0 if self._shard is None else self._shard.offset)
        return hidden_TH, Head(head_VH[:num_rows], self._chunk_tokens, self._shard)

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
            found.append(log_probs_and_entropy(*self.head(packed, hidden_P1H), packed.targets_T)[0])
            return found[0].sum()

        self.run([packed], keep, has_grad=False)
        return found[0] if found else torch.zeros(len(packed.targets_T), device=self.device)
