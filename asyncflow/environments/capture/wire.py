"""OpenAI's chat completions and completions, as JSON: requests read, answers written, whole or as a stream's pieces.

Taken: messages, tools, tool_choice `auto` and `none`, max_tokens, max_completion_tokens, stop, stream, stream_options, logprobs.
Sampling is the run's own, since training takes that distribution: temperature, top_p, seed and penalties of a request do not count.
RefusedCall, with OpenAI's form of an error: `n` above 1, images, `response_format` other than text, a tool that must be called.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from asyncflow.environments.base import Message
from asyncflow.environments.tool_calls import ToolCall, calls_in, without_calls, writable

FinishReason = Literal["stop", "length"]
_TEXT_FORMATS: Final = (None, "text")


class RefusedCall(Exception):
    """A request that is not served: the status, OpenAI's code of it, and a sentence."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        """Error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ModelRequest(msgspec.Struct, kw_only=True):
    """Fields of a request that count, of either kind."""

    model: str = ""
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = "auto"
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    logprobs: bool | int | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool = False
    suffix: str | None = None
    response_format: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        """Tokens of the answer at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the model is told of."""
        return [] if self.tool_choice == "none" else list(self.tools or ())


def read_request(body: bytes, *, is_chat: bool) -> ModelRequest:
    """Read a request. Raises `RefusedCall`."""
    try:
        request = msgspec.json.decode(body, type=ModelRequest)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise RefusedCall(400, "invalid_request", f"the request cannot be read: {error}") from error
    if is_chat:
        if not request.messages:
            raise RefusedCall(400, "invalid_request", "messages is missing, or empty")
        for message in request.messages:
            _check_message(message)
    elif not isinstance(request.prompt, str):
        raise RefusedCall(400, "invalid_request", "prompt must be one text")
    if (request.n or 1) != 1 or (request.best_of or 1) != 1:
        raise RefusedCall(400, "unsupported", "n must be 1: ask once for each answer")
    if request.echo or request.suffix:
        raise RefusedCall(400, "unsupported", "echo and suffix are not served")
    if (request.response_format or {}).get("type") not in _TEXT_FORMATS:
        raise RefusedCall(400, "unsupported", "response_format other than text is not served: a sampled answer is free text")
    if request.tool_choice not in ("auto", "none", None):
        raise RefusedCall(400, "unsupported", "tool_choice must be auto or none: a sampled answer calls what it likes")
    if request.limit is not None and request.limit < 1:
        raise RefusedCall(400, "invalid_request", "max_tokens must be 1 or more")
    return request


def _check_message(message: Mapping[str, Any]) -> None:
    if not isinstance(message.get("role"), str):
        raise RefusedCall(400, "invalid_request", "a message has no role")
    content = message.get("content")
    if isinstance(content, list) and any(part.get("type") not in ("text", "refusal") for part in content):
        raise RefusedCall(400, "unsupported", "only text can be read: a message has parts of another type")
    for call in message.get("tool_calls") or ():
        if not isinstance(call.get("function"), Mapping) or "name" not in call["function"]:
            raise RefusedCall(400, "invalid_request", "a tool call has no function with a name")


def answer_message(text: str, number: int, *, has_tools: bool) -> dict[str, Any]:
    """The assistant's message that a client gets for a sampled text. `number` of the call makes ids of tool calls.

    Where a call cannot be read the whole text stays the content, so that the program sees it.
    """
    found = calls_in(text) if has_tools else []
    calls = [call for call in found if isinstance(call, ToolCall)]
    if not calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": text if len(calls) < len(found) else without_calls(text) or None,
        "tool_calls": [
            {
                "id": f"c{number:05}{index:03}",
                "type": "function",
                "function": {
                    "name": writable(call.name),
                    "arguments": writable(json.dumps(dict(call.arguments), ensure_ascii=False)),
                },
            }
            for index, call in enumerate(calls)
        ],
    }


class ModelAnswer(msgspec.Struct, frozen=True):
    """Answer to a request, in parts that both of its forms need."""

    request: ModelRequest
    number: int
    message: Message
    finish_reason: FinishReason
    num_prompt_tokens: int
    token_ids: Sequence[int]
    tokens: Sequence[str]
    logprobs: Sequence[float]

    def whole(self) -> dict[str, Any]:
        """A completion's object."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._reason, "logprobs": self._logprobs()}
        if self.request.messages is None:
            choice["text"] = self.message["content"]
        else:
            choice["message"] = {**self.message, "refusal": None}
        return {**self._head(""), "choices": [choice], "usage": self._usage}

    def pieces(self) -> Iterator[dict[str, Any]]:
        """A stream's chunks. All content is in one of them: the engine hands over an answer when it is whole."""
        head = self._head(".chunk")
        if self.request.messages is None:
            choice = {"index": 0, "text": self.message["content"], "finish_reason": self._reason, "logprobs": self._logprobs()}
            yield {**head, "choices": [choice]}
        else:
            calls = [{"index": index, **call} for index, call in enumerate(self.message.get("tool_calls", ()))]
            delta = {**self.message, **({"tool_calls": calls} if calls else {})}
            yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": self._logprobs()}]}
            yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self._reason}]}
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield {**head, "choices": [], "usage": self._usage}

    @property
    def _reason(self) -> str:
        return "tool_calls" if self.message.get("tool_calls") and self.finish_reason == "stop" else self.finish_reason

    @property
    def _usage(self) -> dict[str, int]:
        sampled = len(self.token_ids)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.num_prompt_tokens + sampled,
        }

    def _head(self, suffix: str) -> dict[str, Any]:
        is_chat = self.request.messages is not None
        kind = f"chat.completion{suffix}" if is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self.number}",
            "object": kind,
            "created": int(time.time()),
            "model": self.request.model or "policy",
        }

    def _logprobs(self) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        if self.request.messages is None:
            return {"tokens": list(self.tokens), "token_logprobs": list(self.logprobs), "top_logprobs": None, "text_offset": []}
        each = zip(self.tokens, self.logprobs, strict=True)
        content = [{"token": token, "logprob": one, "bytes": list(token.encode()), "top_logprobs": []} for token, one in each]
        return {"content": content, "refusal": None}


def event(piece: Mapping[str, Any] | None) -> bytes:
    """One server-sent event; None: the stream's end."""
    return b"data: " + (b"[DONE]" if piece is None else json.dumps(piece).encode()) + b"\n\n"
