"""Specification of a tool, as chat templates take it: a Python function with type hints and a docstring in Google's style.

The JSON schema is the one that transformers' `get_json_schema` makes of the same function, without transformers.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from asyncflow.types import UserError

_NAMES: Final[Mapping[Any, str]] = {
    int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null",
    list: "array", tuple: "array", dict: "object",
}  # fmt: skip
_SCALARS: Final = (int, float, str, bool, type(None))
_SECTION: Final = re.compile(r"^(Args|Returns|Raises):[ \t]*$", re.MULTILINE)
_ARGUMENT: Final = re.compile(r"^([ \t]*)(\w+):[ \t]*(.*(?:\n(?:\1[ \t]+.*|(?!\1\w+:)[ \t]*\S.*))*)", re.MULTILINE)
_CHOICES: Final = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def specification(function: Callable[..., Any]) -> dict[str, Any]:
    """`{"type": "function", "function": {name, description, parameters, ...}}` of a tool.

    Raises `UserError` where the function has no docstring, or a parameter no type hint, no description, or a type that JSON lacks.
    """
    name = getattr(function, "__name__", type(function).__name__)
    document = inspect.getdoc(function)
    if not document:
        raise UserError(f"tool {name} has no docstring: a model reads there what it does")
    description, described, returned = _sections(document.strip())
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise UserError(f"tool {name} has a type hint that cannot be read: {error}") from error
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls") and parameter.annotation is parameter.empty:
            continue
        if parameter.name not in hints:
            raise UserError(f"tool {name}: its parameter {parameter.name} has no type hint")
        if parameter.name not in described:
            raise UserError(f"tool {name}: its docstring has no description of {parameter.name} under 'Args:'")
        properties[parameter.name] = _described(_schema(name, hints[parameter.name]), described[parameter.name])
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    spec: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if "return" in hints and (schema := _returned(name, hints["return"], returned)) is not None:
        spec["return"] = schema
    return {"type": "function", "function": spec}


def _returned(name: str, hint: Any, text: str | None) -> dict[str, Any] | None:
    """Schema of what a tool returns; None where JSON has none: the model never writes it."""
    try:
        schema = _schema(name, hint)
    except UserError:
        return None
    return schema if text is None else {**schema, "description": text}


def _sections(document: str) -> tuple[str, dict[str, str], str | None]:
    """Description, descriptions of the parameters, and of what is returned."""
    pieces = _SECTION.split(document)
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    lines = "\n".join(line for line in sections.get("Args", "").splitlines() if line.strip())
    arguments = {found[1]: re.sub(r"\s*\n\s*", " ", found[2].strip()) for found in _ARGUMENT.findall(lines)}
    returns = sections.get("Returns")
    return pieces[0].strip(), arguments, returns.strip() if returns is not None else None


def _described(schema: dict[str, Any], text: str) -> dict[str, Any]:
    if choices := _CHOICES.search(text):
        schema = {**schema, "enum": [each.strip() if isinstance(each, str) else each for each in json.loads(choices.group(1))]}
        text = text[: choices.start()].strip()
    return {**schema, "description": text}


def _schema(tool: str, hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _one_of(tool, [member.value for member in hint])
    if origin is Literal:
        return _one_of(tool, list(arguments))
    if origin in (Union, types.UnionType):
        return _union(tool, arguments)
    if origin is list:
        return {"type": "array", "items": _schema(tool, arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(tool, arguments[1])}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_schema(tool, each) for each in arguments]}
    if origin is None and hint in _NAMES:
        return {"type": _NAMES[hint]}
    raise UserError(f"tool {tool}: the type {hint} has no JSON schema; take int, float, str, bool, list, dict, Literal or an Enum")


def _one_of(tool: str, values: list[Any]) -> dict[str, Any]:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise UserError(f"tool {tool}: the values {values} are to be numbers, strings, booleans or None")
    names = list(dict.fromkeys(_NAMES[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _union(tool: str, hints: tuple[Any, ...]) -> dict[str, Any]:
    schemas = [_schema(tool, hint) for hint in hints if hint is not type(None)]
    if len(schemas) == 1:
        union = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        union = {"type": names[0] if len(names) == 1 else names}
    else:
        union = {"anyOf": schemas}
    return {**union, "nullable": True} if type(None) in hints else union
