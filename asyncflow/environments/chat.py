"""Turns as the model's chat template writes them: `TurnFormat` over joints.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from asyncflow.environments.base import Action, EnvironmentFailure, Message, Words
from asyncflow.environments.joints import QUESTION, ChatTokenizer, JointsByTools, turn_text
from asyncflow.types import Array, UserError


class ChatFormat:
    """`TurnFormat` with a chat template. Options are variables that the template knows, such as `enable_thinking: false`; those of
    `data.chat_template_options` count, too."""

    is_chat = True
    """Whether the format takes the options of the prompts' template: it does."""

    def __init__(self, tokenizer: ChatTokenizer, *, branches: bool = True, **options: Any) -> None:
        """`branches`: False: a sequence goes on as it is also where the template would change earlier turns.

        Raises `UserError` without a chat template, or if it renders no conversation of two turns.
        """
        self._tokenizer, self._has_branches = tokenizer, branches
        self._by_tools = JointsByTools(tokenizer, options)
        self._joints = self._by_tools.of(())

    @property
    def may_branch(self) -> bool:
        """Whether messages may change earlier turns."""
        return self._has_branches and bool(self._joints.survey.changing)

    @property
    def notes(self) -> list[str]:
        """Sentences about the template that a run says before it starts."""
        survey = self._joints.survey
        return (survey if self._has_branches else survey._replace(changing=frozenset())).sentences()

    def opening(self, prompt_ids: Array, words: Words, tools: Sequence[Mapping[str, Any]]) -> Array:
        """See `TurnFormat`. Messages are the whole conversation, which begins with the prompt's tokens."""
        if isinstance(words, str):
            raise EnvironmentFailure("invalid", "no text can stand behind a chat's prompt: reset is to return messages, or None")
        joints = self._by_tools.of(tools)
        with _failing_its_row():
            ids = joints.prompt_ids(joints.messages_of(words))
        if ids[: len(prompt_ids)].tolist() != prompt_ids.tolist():
            raise EnvironmentFailure(
                "invalid",
                "the messages of reset, rendered, do not begin with the data's prompt: leave them out, or set "
                'data.prompt_template="" where they are the whole conversation',
            )
        return ids[len(prompt_ids) :]

    def between(self, turn_ids: Array, words: Words | None, *, is_finished: bool) -> Array:
        """See `TurnFormat`."""
        last = int(turn_ids[-1]) if len(turn_ids) else -1
        with _failing_its_row():
            return self._joints.between(last, self._joints.messages_of(words or []))

    def branch(self, prompt_ids: Array, turns: Sequence[tuple[Array, Words | None]]) -> Array | None:
        """See `TurnFormat`. The conversation's beginning is taken as tokens, and what came after it is rendered anew. None as well
        where the template changes the beginning itself: that stays as it was."""
        joints, survey = self._joints, self._joints.survey
        new = joints.messages_of(turns[-1][1] or [])
        if not self._has_branches or not any(message["role"] in survey.changing for message in new):
            return None
        messages: list[Message] = []
        for turn_ids, words in turns:
            messages += [joints.answer(turn_ids), *joints.messages_of(words or [])]
        answer = messages[-len(new) - 1]
        with _failing_its_row():
            if not joints.is_changed([QUESTION, *messages[: -len(new) - 1]], answer, new):
                return None
        begun = self._tokenizer.encode(survey.begun).tolist()
        kept = prompt_ids.tolist()
        if begun and kept[-len(begun) :] == begun:
            kept = kept[: -len(begun)]
        rest = joints.behind_question(messages)
        return None if rest is None else np.array([*kept, *self._tokenizer.encode(rest).tolist()], np.int64)

    def action(self, turn_ids: Array, *, is_finished: bool) -> Action:
        """See `TurnFormat`."""
        return Action(turn_text(self._tokenizer, turn_ids), is_finished, turn_ids.tolist())


@contextlib.contextmanager
def _failing_its_row() -> Iterator[None]:
    """Context in which messages that the template refuses are an environment's failure."""
    try:
        yield
    except UserError as error:
        raise EnvironmentFailure("invalid", str(error)) from error
