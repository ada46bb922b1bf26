"""Reference of a service's interface as one page: its description (`openapi.json`) for reading, without a script and a network.

routes --FastAPI--> openapi.json --> reference_page --> /docs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from asyncflow.telemetry.report import page_style

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_METHODS: Final = ("get", "post", "put", "patch", "delete")
_REFERENCE: Final = "#/components/schemas/"


def reference_page(description: Mapping[str, Any]) -> str:
    """The page (HTML) of an OpenAPI description."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((resources.files("asyncflow.service") / "reference.html.j2").read_text(encoding="utf-8"))
    schemas: Mapping[str, Any] = description.get("components", {}).get("schemas", {})
    return template.render(
        style=page_style(),
        info={"description": "", **description["info"]},
        operations=list(_operations(description["paths"])),
        schemas=[
            {"name": name, "about": schema.get("description", ""), "type": type_of(schema), "fields": list(_fields(schema))}
            for name, schema in sorted(schemas.items())
        ],
    )


def type_of(schema: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Words for a JSON schema's values, each with the name of the schema that it is of, or ""."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REFERENCE)
        return [(name, name)]
    for together in ("anyOf", "oneOf", "allOf"):
        if together in schema:
            words: list[tuple[str, str]] = []
            for one in schema[together]:
                words += [(" or ", "")] * bool(words) + type_of(one)
            return words
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return [(" or ".join(repr(each) if isinstance(each, str) else str(each) for each in choices), "")]
    if "prefixItems" in schema:
        words = [("[", "")]
        for one in schema["prefixItems"]:
            words += [(", ", "")] * (len(words) > 1) + type_of(one)
        return [*words, ("]", "")]
    kind = schema.get("type", "anything")
    if kind == "array":
        return [("list of ", ""), *type_of(schema.get("items", {}))]
    if kind == "object" and isinstance(of := schema.get("additionalProperties"), Mapping):
        return [("object of ", ""), *type_of(of)]
    bounds = {
        "minimum": "from",
        "exclusiveMinimum": "above",
        "maximum": "to",
        "exclusiveMaximum": "below",
    }
    limits = [f"{word} {schema[key]:g}" for key, word in bounds.items() if key in schema]
    return [(" ".join([str(schema.get("format", kind) if kind == "string" else kind), *limits]), "")]


def _operations(paths: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for path, operations in paths.items():
        for method in _METHODS:
            if (operation := operations.get(method)) is None:
                continue
            yield {
                "method": method.upper(),
                "path": path,
                "summary": operation.get("summary", ""),
                "about": operation.get("description", ""),
                "parameters": [
                    {
                        "name": each["name"],
                        "place": each["in"],
                        "type": type_of(each.get("schema", {})),
                        "is_required": each.get("required", False),
                        "about": each.get("description", ""),
                    }
                    for each in operation.get("parameters", ())
                ],
                "body": _contents(operation.get("requestBody", {})),
                "answers": [
                    {"status": status, "about": answer.get("description", ""), "type": _contents(answer)}
                    for status, answer in operation.get("responses", {}).items()
                ],
            }


def _contents(described: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Content types of a body, each with the type of its values."""
    return [(kind, type_of(content.get("schema", {}))) for kind, content in described.get("content", {}).items()]


def _fields(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        about = field.get("description", "")
        if "default" in field:
            about = f"{about} Default: {field['default']!r}.".strip()
        yield {"name": name, "type": type_of(field), "is_required": name in required, "about": about}
