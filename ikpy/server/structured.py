"""Constraints in the form of vLLM's server: ``structured_outputs``, and the ``guided_`` fields before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ikpy.engine.grammars.gbnf import literal
from ikpy.server.errors import bad_request

Body = Mapping[str, Any]
FIELDS = ("json", "json_object", "regex", "choice", "grammar")
OLDER = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
OWN = ("json_schema", "grammar", "lark", "regex")
MOST_CHOICES = 10_000


def with_structured(body: Body) -> Body:
    """The body with such a constraint as a field that read_grammar knows. Raises ApiError 400."""
    if "structured_outputs" not in body and not any(name in body for name in OLDER):
        return body
    given = body.get("structured_outputs") or {}
    if not isinstance(given, dict):
        raise bad_request("structured_outputs must be an object")
    if given.get("structural_tag") is not None:
        raise bad_request("structural_tag is not supported: use tools, or a grammar")
    wanted = {name: given[name] for name in FIELDS if given.get(name) not in (None, False)}
    wanted |= {name: body[field] for field, name in OLDER.items() if body.get(field) is not None}
    rest = {name: value for name, value in body.items() if name not in OLDER and name != "structured_outputs"}
    names = [*wanted, *(name for name in OWN if wanted and rest.get(name))]
    if len(names) > 1:
        raise bad_request(f"{' and '.join(names)} exclude each other")
    return rest | dict(_own_field(name, value) for name, value in wanted.items())


def _own_field(name: str, value: Any) -> tuple[str, Any]:
    """Name and value of the field with the same meaning."""
    if name == "json_object":
        return "json_schema", {"type": "object"}
    if name == "json" and isinstance(value, (dict, str)):
        return "json_schema", value
    if name == "choice":
        return "grammar", _one_of(value)
    if name in ("regex", "grammar") and isinstance(value, str) and value:
        return name if name == "regex" or "::=" in value else "lark", value
    raise bad_request(f"structured_outputs: {name} has a value that cannot be used")


def _one_of(choices: Any) -> str:
    """GBNF of a list of texts."""
    if not isinstance(choices, list) or not choices or not all(isinstance(item, str) for item in choices):
        raise bad_request("structured_outputs: choice must be a list of texts")
    if len(choices) > MOST_CHOICES:
        raise bad_request(f"structured_outputs: choice has more than {MOST_CHOICES} texts")
    return f"root ::= {' | '.join(map(literal, choices))}\n"
