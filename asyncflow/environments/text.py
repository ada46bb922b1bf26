"""Turns of plain text: an observation's tokens follow the turn, as they are; of messages, what they say, a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncflow.environments.base import Action, Words
from asyncflow.environments.joints import ChatTokenizer, turn_text
from asyncflow.types import Array


class TextFormat:
    """`TurnFormat` without a chat template."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
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
        return Action(turn_text(self._tokenizer, turn_ids), is_finished, turn_ids.tolist())


def _text(words: Words) -> str:
    return words if isinstance(words, str) else "\n".join(str(message["content"]) for message in words)
