"""Model of values: a causal language model whose output layer gives one number for each token.

    Packed (packing.py) -> the model's layers (attention.py) -> hidden_TH -> . head_1H -> values_T

The value before a response token comes from the same hidden state that predicts the token. A new head is zero, so the first values
are all 0 and favour nothing. The language model's own output layer is not a part of it, unless it is tied to the embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asyncflow.engines.train.model.causal_model import CausalModel, PassOptions
from asyncflow.engines.train.model.packing import Packed, pack_thrifty
from asyncflow.types import Array, Ragged, UserError

HEAD: Final = "value_head.weight"
HEAD_FILE: Final = "value_head.safetensors"

# T response tokens, H hidden elements.


class ValueModel(CausalModel):
    """Causal language model with a value head, `HEAD` [1, H], instead of its output layer."""

    def __init__(self, path: Path | str, *, device: str, dtype: torch.dtype, recomputes: bool = False) -> None:
        """Load the model as `CausalModel` does, and its head from `HEAD_FILE` in the same folder, if that is there.

        Raises `UserError` if there is no such model, if it cannot be trained here, or if the head has a wrong shape.
        """
        super().__init__(path, PassOptions(dtype, 1.0, 1, recomputes), device=device)
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
        """Values (float32 [T], with gradient) before the response tokens."""
        hidden_TH = self._states(packed, self._cast())
        return torch.nn.functional.linear(hidden_TH.float(), self.parameters[HEAD]).squeeze(-1)

    @torch.no_grad()
    def response_values(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """See `CriticEngine.values`. The layout is the same as in training, so that the bits are the same."""
        packed = pack_thrifty(prompt_ids, response_ids, self.device)
        return Ragged(self.values(packed).cpu().numpy(), response_ids.offsets)

    def save(self, folder: Path) -> None:
        """Write the model in Hugging Face format to `folder`, and its head to `HEAD_FILE` there."""
        self.module.save_pretrained(folder)
        save_file({HEAD: self.parameters[HEAD].detach().cpu().contiguous()}, folder / HEAD_FILE)
