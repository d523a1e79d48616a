"""Access to nested fields by dotted path."""

from __future__ import annotations

from typing import Any


def get_field(owner: object, path: str) -> Any:
    """Value of `owner.a.b` for the path "a.b"."""
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def set_field(owner: object, path: str, value: Any) -> None:
    """Set `owner.a.b` for the path "a.b"; AttributeError if the field does not exist."""
    parent, _, name = path.rpartition(".")
    owner = get_field(owner, parent) if parent else owner
    if not hasattr(owner, name):
        raise AttributeError(f"no field {path}")
    setattr(owner, name, value)
