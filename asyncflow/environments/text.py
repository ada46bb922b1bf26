"""Turns of plain text: an observation's tokens follow the turn, as they are; of messages, what they say, a line each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from asyncflow.environments.base import Action, Words
from asyncflow.types import Array


class TextTokenizer(Protocol):
    """The part of a tokenizer that this format needs."""

    def encode(self, text: str) -> Array:
        """int64 [n], with no special tokens added."""
        ...

    def decode_all(self, ids: Array) -> str:
        """Text with special tokens."""
        ...

    @property
    def end_token_ids(self) -> Collection[int]:
        """Tokens that end a turn."""
        ...


class TextFormat:
    """`TurnFormat` without a chat template."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, prompt_ids: Array, words: Words, tools: Sequence[Mapping[str, Any]]) -> Array:
        """See `TurnFormat`. Tools are not shown: the prompt must tell of them."""
        return self._tokenizer.encode(_text(words))

    def between(self, turn_ids: Array, words: Words | None, *, is_finished: bool) -> Array:
        """See `TurnFormat`."""
        return self._tokenizer.encode(_text(words)) if words else np.empty(0, np.int64)

    def branch(self, prompt_ids: Array, turns: Sequence[tuple[Array, Words | None]]) -> Array | None:
        """See `TurnFormat`. Text stays as it is."""
        return None

    def action(self, turn_ids: Array, *, is_finished: bool) -> Action:
        """See `TurnFormat`."""
        has_end = len(turn_ids) and int(turn_ids[-1]) in self._tokenizer.end_token_ids  # else a stop string has ended the turn
        said = turn_ids[:-1] if has_end else turn_ids
        return Action(self._tokenizer.decode_all(said), is_finished, turn_ids.tolist())


def _text(words: Words) -> str:
    return words if isinstance(words, str) else "\n".join(str(message["content"]) for message in words)
