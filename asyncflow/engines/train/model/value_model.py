"""A model of values: a causal language model whose output layer is one number for each token.

    Packed (packing.py) -> the model's layers (attention.py) -> hidden_TH -> . head_1H -> values_T

The value before a response token comes from the same hidden state that predicts the token. The head begins at zero: the first
values are all 0, which favours nothing. The language model's own output layer is no part of it, unless it is tied to the embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asyncflow.engines.train.model.causal_model import CausalModel
from asyncflow.engines.train.model.packing import Packed, pack_thrifty
from asyncflow.types import Array, Ragged, UserError

HEAD: Final = "value_head.weight"
HEAD_FILE: Final = "value_head.safetensors"

# T response tokens, H hidden elements.


class ValueModel(CausalModel):
    """A model's weights, and a head of its own."""

    def __init__(self, path: Path | str, *, device: str, dtype: torch.dtype, recomputes: bool = False) -> None:
        """See `CausalModel`. A head that lies beside the model is read. Raises `UserError` where it does not fit."""
        super().__init__(path, device=device, dtype=dtype, temperature=1.0, chunk_tokens=1, recomputes=recomputes)
        prefix = self.module.base_model_prefix + "."
        self.parameters = {name: p for name, p in self.parameters.items() if name.startswith(prefix)}
        size = self.module.config.hidden_size
        self.parameters[HEAD] = nn.Parameter(torch.zeros(1, size, device=device))
        if (file := Path(path) / HEAD_FILE).exists():
            head_1H = load_file(file)[HEAD]
            if head_1H.shape != (1, size):
                raise UserError(f"{file} has a value head of shape {tuple(head_1H.shape)}, and the model needs (1, {size}).")
            with torch.no_grad():
                self.parameters[HEAD].copy_(head_1H)

    def values(self, packed: Packed) -> Tensor:
        """The values (float32 [T], with gradient) before the response tokens."""
        hidden_TH = self._states(packed, self._cast())
        return torch.nn.functional.linear(hidden_TH.float(), self.parameters[HEAD]).squeeze(-1)

    @torch.no_grad()
    def response_values(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """See `CriticEngine.values`. The layout is the one that training takes, so that the bits are the same."""
        packed = pack_thrifty(prompt_ids, response_ids, self.device)
        return Ragged(self.values(packed).cpu().numpy(), response_ids.offsets)

    def save(self, folder: Path) -> None:
        """Write the model, and its head beside it."""
        self.module.save_pretrained(folder)
        save_file({HEAD: self.parameters[HEAD].detach().cpu().contiguous()}, folder / HEAD_FILE)
