"""Texts that end a response: whether the newest token of a response completes one of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from asyncflow.types import Array


class StopStrings:
    """Stop strings by the tokenizer of a model's folder, which is read when the first response has any.

    A response is looked at after each token, so only a text that the newest token completes can be new. Its bytes are at most as
    many tokens, besides special ones, which have no text; one more token keeps the text's beginning as it is in the whole response.
    """

    def __init__(self, model_path: Path) -> None:
        self._file = model_path / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        self._special_ids: list[int] = []

    def load(self) -> None:
        """Read the tokenizer, once. Raises `ValueError` when the model has none."""
        if self._tokenizer is not None:
            return
        if not self._file.is_file():
            raise ValueError(f"rollout.stop needs a tokenizer, and there is no {self._file}")
        self._tokenizer = Tokenizer.from_file(str(self._file))
        self._special_ids = [id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special]

    def are_completed(self, token_ids: Array, stop: Sequence[str]) -> bool:
        """Whether the text of the tokens (int64 [L]) has one of the texts `stop` in its end. Call `load` first."""
        assert self._tokenizer is not None, "`load` first"
        longest = max(len(text.encode()) for text in stop)
        spoken = token_ids[~np.isin(token_ids, self._special_ids)]
        text = self._tokenizer.decode(spoken[-(longest + 1) :].tolist())
        return any(each in text for each in stop)
