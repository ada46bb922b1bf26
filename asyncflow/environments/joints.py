"""Joints: the tokens between the turns of a conversation, from the chat template. Pure: no engine, no torch.

    prompt | answer (sampled) | joint (observed) | answer (sampled) | joint ...

A sequence is only ever appended to: sampled tokens are never decoded and encoded again. A joint is the difference of two
renderings, the conversation with the next messages and the conversation up to the answer, taken behind a marked answer: it does not
depend on how the template would write the sampled one. A few templates change earlier turns when another message comes (they drop
its thoughts, or move the tools). Then the turn starts a *branch*: a new sequence, whose prompt is the whole conversation, rendered
again. Which roles may do so is surveyed once, when a run is prepared.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from asyncflow.environments.base import Message
from asyncflow.types import Array, UserError

ROLES: Final = ("user", "tool")
"""Roles that an observation's messages may have."""
QUESTION: Final[Message] = {"role": "user", "content": "A question."}
"""Messages in the place of a conversation's beginning, where only what follows matters."""
MOST_TOOL_LISTS: Final = 256
"""Lists of tools that are known at a time: episodes may each have their own."""
_MARK: Final = "the-marked-answer-of-a-joint"
_THOUGHT: Final = "A thought.\n</think>\n\n"


class ChatTokenizer(Protocol):
    """The part of a tokenizer that joints need (data/tokenizer.py)."""

    end_token_ids: list[int]
    template_source: str | None

    def encode(self, text: str) -> Array:
        """int64 [n], with no special tokens added."""

    def decode_all(self, ids: Array) -> str:
        """Text with special tokens."""

    def text_of(self, token_id: int) -> str:
        """Text of one token as the vocabulary has it."""

    def render(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> str:
        """Text of a conversation by the chat template, with the start of an answer. Raises `UserError` if it is refused."""


class Survey(NamedTuple):
    """Treatment of the messages of an observation by a chat template, by their roles.

    `changing`: roles whose messages change earlier turns, and may start a branch. `refused`: roles that the template does not
    render, each with the reason. `closing`: text of the token that closes an answer; empty if there is none. `begun`: what the
    template begins an answer with behind its header, such as `<think>`.
    """

    changing: frozenset[str]
    refused: Mapping[str, str]
    closing: str
    begun: str

    def sentences(self) -> list[str]:
        """Sentences for the user of a run, before it starts."""
        notes = []
        if self.changing:
            notes.append(
                f"the chat template may change earlier turns when a {' or '.join(sorted(self.changing))} message follows: where it "
                f"does, the turn starts a branch, a sequence of its own"
            )
        if "tool" in self.refused:
            notes.append(f"the chat template has no tool messages ({self.refused['tool']}): results of tools are user messages")
        return notes


class Joints:
    """Joints of one tokenizer under one set of template options, for any number of conversations."""

    def __init__(self, tokenizer: ChatTokenizer, options: Mapping[str, Any] | None = None, *, is_chat: bool = True) -> None:
        """`options`: variables of the chat template, `tools` among them. Without `is_chat` no template is used: what messages say
        is appended as it is.

        Raises `UserError` if there is no template, or it renders no conversation of two turns.
        """
        if is_chat and tokenizer.template_source is None:
            raise UserError(
                "turns are to go through a chat template, but the model's tokenizer has none; set data.chat_template=false"
            )
        self._tokenizer, self._options, self._is_chat = tokenizer, dict(options or {}), is_chat
        self._end_tokens = [text for text in map(tokenizer.text_of, tokenizer.end_token_ids) if text]
        self.survey = self._surveyed()

    def messages_of(self, observation: str | Sequence[Message]) -> list[Message]:
        """An observation as messages: a text is a user's, and so are tools' results where the template has no role `tool`."""
        messages: list[Message] = [{"role": "user", "content": observation}] if isinstance(observation, str) else [*observation]
        if "tool" not in self.survey.refused:
            return messages
        given: list[Message] = []
        for is_tool, some in itertools.groupby(messages, lambda message: message["role"] == "tool"):
            results = list(some)
            given += [{"role": "user", "content": "\n".join(str(each["content"]) for each in results)}] if is_tool else results
        return given

    def prompt_ids(self, messages: Sequence[Message]) -> Array:
        """int64 [n]: the conversation and the start of an answer. Raises `UserError` if the template refuses the messages."""
        return self._tokenizer.encode(self._rendered(messages))

    def answer(self, token_ids: Array) -> Message:
        """Sampled tokens as the assistant's message, special tokens inside it included."""
        return {"role": "assistant", "content": self.survey.begun + turn_text(self._tokenizer, token_ids)}

    def between(self, last_token: int, observation: Sequence[Message]) -> Array:
        """int64 [n]: tokens from a sampled answer to the next one. `last_token`: of the answer; what closes it is not repeated if
        it is an end token. Raises `UserError` if the template refuses the messages."""
        closing, rest = self._tail(self._rendered([QUESTION, {"role": "assistant", "content": _MARK}, *observation]))
        has_closed = last_token in self._tokenizer.end_token_ids
        if not closing and not self._end_tokens:
            return self._tokenizer.encode(rest)
        # Encoded behind a special token, as in a whole rendering: some tokenizers begin a text in another way.
        ids = self._tokenizer.encode((closing or self._end_tokens[0]) + rest)
        return ids if closing and not has_closed else ids[1:]

    def is_changed(self, messages: Sequence[Message], answer: Message, observation: Sequence[Message]) -> bool:
        """Whether these messages, rendered behind an answer, change what came before them. White space at an answer's ends does
        not count."""
        before = self._rendered(messages).removesuffix(self.survey.begun)
        after = self._rendered([*messages, answer, *observation])
        content = answer["content"].strip()
        if not after.startswith(before) or not after[len(before) :].lstrip().startswith(content):
            return True
        behind = after[len(before) :].lstrip()[len(content) :].lstrip()
        marked = self._rendered([QUESTION, {"role": "assistant", "content": _MARK}, *observation])
        return behind != _behind_mark(marked).lstrip()

    def behind_question(self, messages: Sequence[Message]) -> str | None:
        """Text of a conversation behind `QUESTION` and what begins the answer to it; None where the messages change that part."""
        head = self._rendered([QUESTION]).removesuffix(self.survey.begun)
        whole = self._rendered([QUESTION, *messages])
        return whole[len(head) :] if whole.startswith(head) else None

    def _rendered(self, messages: Sequence[Message]) -> str:
        if self._is_chat:
            return self._tokenizer.render(messages, self._options)
        return "".join(str(message["content"]) for message in messages)

    def _tail(self, text: str) -> tuple[str, str]:
        """The token that closes the marked answer, and what comes behind it."""
        tail = _behind_mark(text)
        stripped = tail.lstrip()
        for token in self._end_tokens:
            if stripped.startswith(token):
                return token, stripped[len(token) :]
        return "", tail

    def _surveyed(self) -> Survey:
        self.survey = Survey(frozenset(), {}, "", "")  # what is rendered below knows of nothing yet
        if not self._is_chat:
            return self.survey
        marked = {"role": "assistant", "content": _MARK}
        earlier = self._rendered([QUESTION, marked, QUESTION])
        closing, _ = self._tail(earlier)
        header, opened = earlier[: earlier.index(_MARK)], self._rendered([QUESTION])
        self.survey = Survey(frozenset(), {}, closing, opened[len(header) :] if opened.startswith(header) else "")
        changing, refused = set(), {}
        for role in ROLES:
            try:
                if self._changes_earlier_turns(role):
                    changing.add(role)
            except UserError as error:
                if role == "user":
                    raise
                refused[role] = str(error).rpartition(": ")[2]
        return self.survey._replace(changing=frozenset(changing), refused=refused)

    def _changes_earlier_turns(self, role: str) -> bool:
        """Whether three turns that are observed under this role change earlier ones. Raises `UserError` if one is not rendered."""
        begun = self.survey.begun
        answers = [begun + "An answer."]
        if "think" in (self._tokenizer.template_source or "") and "</think>" not in begun:
            answers = [(begun or "<think>\n") + _THOUGHT + "An answer.", *([] if begun else answers)]
        is_changing = False
        for content in answers:
            messages: list[Message] = [QUESTION]
            for turn in range(3):
                observation = [{"role": role, "name": "a_tool", "tool_call_id": "call00000", "content": f"Observation {turn}."}]
                answer = {"role": "assistant", "content": content}
                marked = self._rendered([QUESTION, {"role": "assistant", "content": _MARK}, *observation])
                if f"Observation {turn}." not in _behind_mark(marked):
                    raise UserError(f"the model's chat template leaves out messages of the role {role}: it says nothing of them")
                is_changing = is_changing or self.is_changed(messages, answer, observation)
                messages += [answer, *observation]
        return is_changing


class JointsByTools:
    """Joints for each list of tools that is met, made once."""

    def __init__(self, tokenizer: ChatTokenizer, options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self._options = tokenizer, dict(options or {})
        self._known: dict[str, Joints] = {}
        self.plain = Joints(tokenizer, is_chat=False)

    def of(self, tools: Sequence[Mapping[str, Any]]) -> Joints:
        """Raises `UserError` if the tokenizer has no chat template."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._known:
            if len(self._known) >= MOST_TOOL_LISTS:
                self._known.clear()
            self._known[key] = Joints(self.tokenizer, {**self._options, **({"tools": list(tools)} if tools else {})})
        return self._known[key]


def turn_text(tokenizer: ChatTokenizer, turn_ids: Array) -> str:
    """Text of a turn (int64 [n]), special tokens included but for its end token."""
    has_end = len(turn_ids) and int(turn_ids[-1]) in tokenizer.end_token_ids  # else a stop string has ended the turn
    return tokenizer.decode_all(turn_ids[:-1] if has_end else turn_ids)


def _behind_mark(text: str) -> str:
    if _MARK not in text:
        raise UserError("the model's chat template leaves out the assistant's messages, so it has no turns")
    return text[text.index(_MARK) + len(_MARK) :]
