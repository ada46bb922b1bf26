"""Training examples of a request: checked, and cut into micro-batches for a train engine.

    datum     model_input  x0 x1 x2 .. xN-1        target_tokens  t0 t1 .. tN-1        weights, or advantages and log-probs: N each
    as rows   prompt [x0]  response x1 .. xN-1 +   targets        t0 t1 .. tN-1

Position i predicts target i, whatever the next token of the input is: targets of a prompt are often zeros. A response has one
token more, which predicts nothing. Examples that begin with the same token are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncflow.engines.base import MicroBatch
from asyncflow.service.tinker.losses import Loss
from asyncflow.types import Array, Ragged

TARGETS = "target_tokens"


@dataclass(frozen=True, slots=True)
class Example:
    """Datum of a request: token_ids int64 [N], and the loss's inputs by name, int64 or float32, of any shape."""

    token_ids: Array
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a loss, checked: of each example token_ids, targets int64 [N]; coefficients, sampling_logprobs float32 [N].

    `coefficients`: weights of the log-probs, or advantages. Only tokens with one that is not 0 have a loss. `sampling_logprobs`:
    of the engine that sampled; zeros for a loss without.
    """

    token_ids: Sequence[Array]
    targets: Sequence[Array]
    coefficients: Sequence[Array]
    sampling_logprobs: Sequence[Array]

    def micro_batches(self, max_tokens: int) -> Iterator[tuple[list[int], MicroBatch]]:
        """Micro-batches of at most `max_tokens` tokens, or of one example, with the numbers of their examples."""
        by_first: dict[int, list[int]] = {}
        for number, tokens in enumerate(self.token_ids):
            by_first.setdefault(int(tokens[0]), []).append(number)
        for numbers in by_first.values():
            piece: list[int] = []
            size = 0
            for number in numbers:
                length = len(self.token_ids[number]) + 1
                if piece and size + length > max_tokens:
                    yield piece, self._micro_batch(piece)
                    piece, size = [], 0
                piece.append(number)
                size += length
            yield piece, self._micro_batch(piece)

    def _micro_batch(self, numbers: Sequence[int]) -> MicroBatch:
        coefficients = Ragged.from_arrays([self.coefficients[n] for n in numbers], "float32")
        return MicroBatch(
            indices=np.array(numbers, np.int64),
            prompt_ids=self.token_ids[numbers[0]][:1],
            response_ids=Ragged.from_arrays([np.append(self.token_ids[n][1:], self.targets[n][-1:]) for n in numbers], "int64"),
            loss_mask=Ragged((coefficients.values != 0).astype(np.uint8), coefficients.offsets),
            rollout_logprobs=Ragged.from_arrays([self.sampling_logprobs[n] for n in numbers], "float32"),
            advantages=coefficients.values,
            staleness=np.zeros(len(numbers), np.int64),
            target_ids=Ragged.from_arrays([self.targets[n] for n in numbers], "int64"),
        )


def loss_inputs(examples: Sequence[Example], loss: Loss, *, vocab_size: int, max_context: int) -> LossInputs:
    """Check the examples of a request, for a loss with inputs of certain names.

    Raises `ValueError` that names the first example, and input, which is none.
    """
    if not examples:
        raise ValueError("a request has one example at least")
    names = (TARGETS, loss.coefficients, loss.sampling_logprobs)
    columns: dict[str, list[Array]] = {name: [] for name in names if name is not None}
    for number, example in enumerate(examples):
        _check_tokens(example.token_ids, f"model_input of datum {number}", vocab_size)
        length = len(example.token_ids)
        if not 0 < length < max_context:
            raise ValueError(f"datum {number} has {length} tokens, and a model takes 1 to {max_context - 1} here")
        if strangers := sorted(example.inputs.keys() - columns.keys()):
            raise ValueError(f"datum {number} has {strangers[0]}, which this loss does not use: it takes {', '.join(columns)}")
        for name, column in columns.items():
            if name not in example.inputs:
                raise ValueError(f"datum {number} lacks {name}: this loss takes {', '.join(columns)}")
            values = example.inputs[name]
            if values.shape != (length,):
                more = "; several targets for a token are not supported" if values.ndim == 2 else ""
                raise ValueError(f"{name} of datum {number} has shape {list(values.shape)}, and its input {length} tokens{more}")
            if name == TARGETS:
                values = values.astype(np.int64)
                _check_tokens(values, f"{name} of datum {number}", vocab_size)
            elif not np.isfinite(values).all():
                raise ValueError(f"{name} of datum {number} has numbers that are not finite")
            column.append(values if name == TARGETS else values.astype(np.float32))
    targets, weights = columns[TARGETS], columns[loss.coefficients]
    sampled = [np.zeros_like(one) for one in weights] if loss.sampling_logprobs is None else columns[loss.sampling_logprobs]
    return LossInputs([example.token_ids for example in examples], targets, weights, sampled)


def _check_tokens(token_ids: Array, what: str, vocab_size: int) -> None:
    if len(token_ids) and (token_ids.min() < 0 or token_ids.max() >= vocab_size):
        raise ValueError(f"{what} has a token outside 0..{vocab_size - 1}")
