"""Calls of tools in what a model writes, in the form of its family. Pure.

| form | a call | families |
|---|---|---|
| hermes | <tool_call>{"name": ..., "arguments": {...}}</tool_call> | Qwen 2.5 and 3, Hermes, SmolLM |
| llama | {"name": ..., "parameters": {...}}, alone, perhaps behind <|python_tag|>; several separated by ; | Llama 3 |
| mistral | [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] | Mistral |
| fenced | a fence ```tool_call with the JSON of the first row | base models, Gemma: the prompt explains it |

A text without a call is the answer. A call that cannot be read is a `Malformed` one: the model is told, and may try again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

# A call as it begins, up to its JSON.
_CALL_BEGINS: Final = re.compile(
    r"(?:<tool_call>|^```tool_call[ \t]*\n|\[TOOL_CALLS\]|<\|python_tag\|>)\s*+[\[{]|\A\s*+\{", re.MULTILINE
)
_HERMES: Final = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCED: Final = re.compile(r"^```tool_call[ \t]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


class ToolCall(NamedTuple):
    """Call of a tool, with its arguments."""

    name: str
    arguments: Mapping[str, Any]


class Malformed(NamedTuple):
    """Call that cannot be read, and why."""

    why: str


def calls_in(text: str) -> list[ToolCall | Malformed]:
    """Calls of a turn, in their order, by whichever form it has; what stands in the thought that it begins with (`<think>`) is
    none. Empty: the turn calls nothing."""
    answer = _without_thought(text)
    if bodies := _HERMES.findall(answer) or _FENCED.findall(answer):
        return [call for body in bodies for call in _read(body)]
    _, mark, body = answer.partition("[TOOL_CALLS]")
    if mark:
        return list(_read(body))
    _, mark, body = answer.rpartition("<|python_tag|>")
    is_call = body.strip().startswith("{") and '"name"' in body
    return list(_read(body)) if mark or is_call else []


def writable(text: str) -> str:
    """Text with ? for each half of a character, which JSON can spell (`"\\ud800"`) and no message can hold."""
    return text.encode(errors="replace").decode()


def without_calls(text: str) -> str:
    """Text of a turn without its calls."""
    if "<tool_call>" in text or _FENCED.search(text):
        return _FENCED.sub("", _HERMES.sub("", text)).strip()
    if "[TOOL_CALLS]" in text:
        return text.partition("[TOOL_CALLS]")[0].strip()
    return "" if calls_in(text) else text


def _without_thought(text: str) -> str:
    """Text of a turn without the thought that it begins with: nothing, where that never ends. The template may have written its
    `<think>`, so that a `</think>` ends one, too, unless it stands in the arguments of a call."""
    head, mark, rest = text.partition("</think>")
    if text.lstrip().startswith("<think>"):
        return rest
    return rest if mark and not _is_in_call(text, len(head)) else text


def _is_in_call(text: str, place: int) -> bool:
    """Whether this place is within the JSON of a call; of one that is only told of (`<tool_call>{...}`) it is not."""
    *_, begin = [-1, *(found.end() - 1 for found in _CALL_BEGINS.finditer(text, 0, place))]
    if begin < 0:
        return False
    try:
        return json.JSONDecoder().raw_decode(text, begin)[1] > place
    except json.JSONDecodeError as error:
        return error.pos > place or error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False


def explained(tools: Sequence[Mapping[str, Any]]) -> str:
    """Words that tell a model without a template for tools what there is, and the fenced form."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = '```tool_call\n{"name": "the tool", "arguments": {"a parameter": "its value"}}\n```'
    return f"Tools:\n{listed}\n\nA tool is called so, and its result follows:\n{example}\n"


def _read(body: str) -> Iterator[ToolCall | Malformed]:
    """Calls of a piece of JSON: one, a list of them, or several with separators between."""
    decoder, place = json.JSONDecoder(), 0
    body = body.strip()
    if not body:
        yield Malformed("the call is empty")
    while place < len(body):
        try:
            value, place = decoder.raw_decode(body, place)
        except (ValueError, RecursionError) as error:  # lists thousands deep, an integer of thousands of digits
            yield Malformed(f"the call is not JSON: {error}")
            return
        yield from map(_call, value if isinstance(value, list) else [value])
        while place < len(body) and body[place] in " \n\t;,":
            place += 1


def _call(value: Any) -> ToolCall | Malformed:
    if isinstance(value, Mapping) and isinstance(function := value.get("function"), Mapping):
        value = function
    if not isinstance(value, Mapping) or not isinstance(name := value.get("name"), str):
        return Malformed('a call is an object with a "name"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # as OpenAI writes them
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return Malformed(f"the arguments of {name} are not JSON: {error}")
    return ToolCall(name, arguments) if isinstance(arguments, Mapping) else Malformed(f"the arguments of {name} are no object")
