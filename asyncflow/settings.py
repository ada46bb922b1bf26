"""Settings: sections of typed keys, read from YAML and overridden by `key.path=value`. A mistake is described in one sentence.

A choice is a name, or a mapping with its options (`schedule: periodic`, `algorithm: {name: grpo, clip_high: 0.2}`), or a
user's own (`algorithm: {path: "my_file.py:MyLoss"}`). Which sections there are is config.py's.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from asyncflow.types import RunError, UserError
from asyncflow.user_file import is_shortage


class Section(BaseModel):
    """Section of a configuration: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` and `false` where a number is wanted: Python counts them as 1 and 0."""
        if isinstance(value, bool) and "bool" not in str(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError(f"{str(value).lower()} is neither a number nor a name here")
        return value

    def changed(self, **changes: Any) -> Self:
        """Copy with other values, unchecked. Of a section below it, a mapping changes these keys alone."""
        update = {}
        for key, value in changes.items():
            below = getattr(self, key)
            update[key] = below.changed(**value) if isinstance(below, Section) and isinstance(value, Mapping) else value
        return self.model_copy(update=update)

    @model_validator(mode="before")
    @classmethod
    def _name_default_choices(cls, tree: Any) -> Any:
        """Take options without a name as options of the default choice."""
        named = dict(tree) if isinstance(tree, Mapping) else {}
        for key, field in cls.model_fields.items():
            if isinstance(field.default, Choice) and isinstance(named.get(key), Mapping) and not {"name", "path"} & set(named[key]):
                named[key] = {"name": field.default.name, **named[key]}
        return named if isinstance(tree, Mapping) else tree


class Choice(BaseModel):
    """Choice by name or by path, with its options."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    options: dict[str, Any] = Field(default_factory=dict)


def _as_choice(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping):
        options = dict(value)
        name = pop_name(options)
        dumped = options.pop("options", {})  # `dump` writes them one level down
        if not isinstance(dumped, Mapping):
            raise ValueError("'options' must be a mapping")
        return {"name": name, "options": {**dumped, **options}}
    if isinstance(value, Choice):
        return value
    raise ValueError(f"must be a name, or a mapping with a name and its options, not {_shown(value)}")


def pop_name(options: dict[str, Any]) -> Any:
    """Take the name, or the path, out of a choice's mapping. Raises `ValueError` unless there is exactly one of them."""
    given = {key: options.pop(key) for key in ("name", "path") if key in options}
    if not given:
        raise ValueError("needs a name, or a path as in {path: 'my_file.py:Name'}")
    if len(given) > 1:
        raise ValueError(f"has both the name {given['name']!r} and the path {given['path']!r}: leave one of them out")
    return next(iter(given.values()))


Chosen = Annotated[Choice, BeforeValidator(_as_choice)]
S = TypeVar("S", bound=Section)


class _Yaml12Loader(yaml.SafeLoader):
    """YAML loader that reads `1e-6` as a number, as YAML 1.2 does, and not as text; and refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes a text which `_Yaml12Loader` would read as a number."""


for _kind in (_Yaml12Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789"))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the sections of a YAML file without checking them. Raises `UserError`; `RunError` where file handles are short."""
    try:
        tree = from_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        kind = RunError if is_shortage(error) else UserError
        raise kind(f"the config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"the config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"the config {path} holds no sections: it must be a mapping such as 'run: {{steps: 10}}'")
    return tree


def from_yaml(text: str) -> Any:
    """Read YAML. Raises `yaml.YAMLError`."""
    return yaml.load(text, _Yaml12Loader)


def to_yaml(tree: Mapping[str, Any]) -> str:
    """Write YAML that `from_yaml` reads back unchanged."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one key of nested mappings by `key.path=value`, the value being YAML. Raises `UserError`."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} is not of the form key.path=value")
    *parents, last = key.split(".")
    for parent in parents:
        below = tree.setdefault(parent, {})
        if below is None:  # a section's head with nothing below it
            below = tree[parent] = {}
        if isinstance(below, str):  # a choice given by name gets options
            below = tree[parent] = {"name": below}
        if not isinstance(below, dict):
            raise UserError(f"override {override!r}: {parent!r} has no keys below it")
        tree = below
    if parents and last == "path" and set(tree) == {"name"}:  # of a choice, whose name it replaces
        del tree["name"]
    try:
        tree[last] = from_yaml(value)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not YAML") from error


def refuse_overrides(overrides: Iterable[str], keys: Iterable[str], why: str) -> None:
    """Check that no override sets one of these keys, or a key below it. Raises `UserError` with `why`, in which {key} stands for
    the key."""
    given = list(keys)
    for override in overrides:
        tree: dict[str, Any] = {}
        apply_override(tree, override)
        for key in given:
            if _sets(tree, key.split(".")):
                raise UserError(f"{override!r}: {why.format(key=key)}")


def _sets(tree: Any, key: Sequence[str]) -> bool:
    """Whether nested mappings set a key, or something below it."""
    for part in key:
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def checked(kind: type[S], tree: Mapping[str, Any]) -> S:
    """Section that nested mappings describe. Raises `UserError` naming the key and what to do."""
    _check_size(tree, ())
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        by_place: dict[tuple[str | int, ...], list[dict[str, Any]]] = {}
        for each in error.errors():
            by_place.setdefault(_at(kind, each["loc"])[0], []).append(dict(each))
        sentences = (_sentence(kind, place, errors) for place, errors in by_place.items())
        raise UserError("; ".join(sentences)) from error


def _check_size(tree: Any, place: tuple[Any, ...]) -> None:
    """Raises `UserError` for a number that no message between processes holds."""
    if isinstance(tree, Mapping):
        for key, below in tree.items():
            _check_size(below, (*place, key))
    elif isinstance(tree, list):
        for below in tree:
            _check_size(below, place)
    elif isinstance(tree, int) and not -(1 << 63) <= tree < 1 << 63:
        raise UserError(f"{'.'.join(map(str, place))}: must be a smaller number, not {tree}")


def _sentence(kind: type[Section], place: Sequence[str | int], errors: Sequence[dict[str, Any]]) -> str:
    """Sentence about a value. `errors`: several are of the members of a union, of which it is none."""
    where = ".".join(map(str, place))
    if len(errors) > 1 and all(error["type"] in _WORDS for error in errors):
        value = min(errors, key=lambda error: len(error["loc"]))["input"]
        return f"{where}: must be {' or '.join(map(wanted, errors))}, not {_shown(value)}"
    error = errors[0]
    if error["type"] == "extra_forbidden":
        known = _keys(kind, error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
        elsewhere = [f"{section}.{error['loc'][-1]}" for section in _keys(kind, ()) if error["loc"][-1] in _keys(kind, (section,))]
        hint = f"known here are {', '.join(known)}"
        if near or elsewhere:
            hint = f"did you mean {(elsewhere or near)[0]!r}?"
        return f"unknown key {where!r}: {hint}"
    if error["type"] == "missing":
        if isinstance(place[-1], int):
            count = len(get_args(_at(kind, place[:-1])[1]))
            return f"{'.'.join(map(str, place[:-1]))}: must be a list of {count}, not {_shown(error['input'])}"
        return f"{where!r} is missing"
    if error["type"] == "invalid_key":
        return f"the key {_shown(error['input'])} is no text: known are {', '.join(_keys(kind, place[:-1]))}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] in _WORDS:
        message = f"must be {wanted(error)}, not {_shown(error['input'])}"
    return f"{where}: {message}" if where else message


def wanted(error: Mapping[str, Any]) -> str:
    """Description of what a value must be, from a mistake as pydantic describes it, of a type that `_WORDS` has."""
    limits = error.get("ctx", {})
    shown = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in limits.items()}
    return "a finite number" if limits.get("lt") == math.inf else _WORDS[error["type"]].format(**shown)


_WORDS: Final = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "literal_error": "{expected}",
    "dict_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "a section with keys",
    "model_attributes_type": "a section with keys",
    "too_short": "at least {min_length} long",
    "too_long": "at most {max_length} long",
    "string_too_short": "at least {min_length} long",
}
"""Descriptions of what a value must be, by pydantic's name of the mistake."""


def _shown(value: Any) -> str:
    """A value as YAML has it: `null`, `true`, `text`; what YAML has not, as Python shows it."""
    try:
        return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
    except yaml.YAMLError:
        return f"{value!r:.100}"


def _keys(kind: type[Section], location: Sequence[str | int]) -> list[str]:
    """Keys that are known at a place below a section."""
    return list(getattr(_at(kind, location)[1], "model_fields", {}))


def _at(kind: type[Section], location: Sequence[str | int]) -> tuple[tuple[str | int, ...], Any]:
    """Keys and indices of a location of pydantic's, and the annotation there. Of a union, whose members it names, the place is the
    union's."""
    found: Any = kind
    place: list[str | int] = []
    for part in location:
        members = [each for each in get_args(found) if each is not NoneType] if get_origin(found) in (Union, UnionType) else [found]
        if len(members) > 1:
            break
        if part != "[key]":
            place.append(part)
        arguments = get_args(members[0])
        if (fields := getattr(members[0], "model_fields", None)) is not None:
            found = fields[part].annotation if part in fields else None
        else:
            found = arguments[-1] if arguments and arguments[-1] is not ... else arguments[0] if arguments else None
        if get_origin(found) is Annotated:
            found = get_args(found)[0]
    return tuple(place), found
