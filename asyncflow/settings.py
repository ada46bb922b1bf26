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
from typing import Annotated, Any, Final, TypeVar

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

from asyncflow.types import UserError


class Section(BaseModel):
    """Section of a configuration: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` and `false` where a number is wanted: Python counts them as 1 and 0."""
        if isinstance(value, bool) and "bool" not in str(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError(f"{str(value).lower()} is neither a number nor a name here")
        return value

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
        names = [options.pop(key) for key in ("name", "path") if key in options]
        if len(names) != 1:
            raise ValueError("needs exactly one of 'name' and 'path'")
        dumped = options.pop("options", {})  # `dump` writes them one level down
        if not isinstance(dumped, Mapping):
            raise ValueError("'options' must be a mapping")
        return {"name": names[0], "options": {**dumped, **options}}
    return value


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
    """Read the sections of a YAML file without checking them. Raises `UserError`."""
    try:
        tree = from_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the config {path} cannot be read: {error.strerror}") from error
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
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UserError("; ".join(_sentence(kind, dict(e)) for e in error.errors())) from error


def _sentence(kind: type[Section], error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"] if part != "[key]")
    if error["type"] == "extra_forbidden":
        known = _keys(kind, error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
        elsewhere = [f"{section}.{error['loc'][-1]}" for section in _keys(kind, ()) if error["loc"][-1] in _keys(kind, (section,))]
        hint = f"known here are {', '.join(known)}"
        if near or elsewhere:
            hint = f"did you mean {(elsewhere or near)[0]!r}?"
        return f"unknown key {where!r}: {hint}"
    if error["type"] == "missing":
        return f"{where!r} is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    limits = error.get("ctx", {})
    if limits.get("lt") == math.inf:
        message = f"must be a finite number, not {_shown(error['input'])}"
    elif words := _WORDS.get(error["type"]):
        message = f"must be {words.format(**limits)}, not {_shown(error['input'])}"
    return f"{where}: {message}" if where else message


_WORDS: Final = {
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
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
"""What a value must be, by pydantic's name of the mistake."""


def _shown(value: Any) -> str:
    """A value as YAML has it: `null`, `true`, `text`."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def _keys(kind: type[Section], location: Sequence[str | int]) -> list[str]:
    """Keys that are known at a place below a section."""
    section: Any = kind
    for part in location:
        field = getattr(section, "model_fields", {}).get(part)
        section = field.annotation if field is not None else None
    return list(getattr(section, "model_fields", {}))
