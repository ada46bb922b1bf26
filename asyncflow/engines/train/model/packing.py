"""Rows end to end: the prompt and one response, unpadded, and then the next row.

    tokens       p p p a a   p p p b b b
    positions    0 1 2 3 4   0 1 2 3 4 5
    predict          ^ ^         ^ ^ ^         the positions whose logits are used: one before each response token

The first token of a response is predicted by the prompt's last position (papers: the flag on PA 13); the logits at the last
token of a row are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncflow.types import Array, Ragged

# P tokens of all rows, prompts included; T response tokens; R rows.


@dataclass(frozen=True, slots=True)
class PackedRows:
    """All int64, on the device of the model. `row_lengths` [R] adds up to P."""

    tokens_P: Tensor
    positions_P: Tensor
    row_lengths: tuple[int, ...]
    predict_T: Tensor  # the position in P that predicts a response token; no two are equal
    targets_T: Tensor  # the response token itself
    row_T: Tensor  # 0..R-1

    @property
    def num_tokens(self) -> int:
        """P: tokens that the model computes."""
        return sum(self.row_lengths)


def pack_rows(prompt_ids: Array, responses: Ragged, device: str | torch.device = "cpu") -> PackedRows:
    """Pack the responses (R ragged int64 entries) of one prompt (int64 [Lp]), each with a copy of the prompt.

    Raises:
        ValueError: the prompt or a response is empty, so that nothing would predict its first token or be predicted.
    """
    lengths = responses.lengths
    if not len(prompt_ids) or not len(lengths) or not lengths.min():
        raise ValueError(f"cannot pack a prompt of {len(prompt_ids)} tokens with responses of {lengths.tolist()}")
    row_lengths = len(prompt_ids) + lengths
    starts = np.cumsum(row_lengths) - row_lengths
    tokens = np.concatenate([part for response in responses for part in (prompt_ids, response)])
    positions = np.concatenate([np.arange(n) for n in row_lengths])
    predict = np.concatenate([np.arange(n) + first for n, first in zip(lengths, starts + len(prompt_ids) - 1, strict=True)])

    def on_device(values: Array) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return PackedRows(
        tokens_P=on_device(tokens),
        positions_P=on_device(positions),
        row_lengths=tuple(row_lengths.tolist()),
        predict_T=on_device(predict),
        targets_T=on_device(responses.values),
        row_T=on_device(np.repeat(np.arange(len(lengths)), lengths)),
    )
