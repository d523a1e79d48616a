"""Comparison of an answer with a recorded one: names, order, types and values of every field."""

from __future__ import annotations

import base64
import math
import re
from typing import Any

import numpy as np

ANY_VALUE = frozenset(
    {
        "id", "created", "created_at", "completed_at", "call_id", "item_id", "prompt_ms", "prompt_per_token_ms",
        "prompt_per_second", "predicted_ms", "predicted_per_token_ms", "predicted_per_second", "save_ms", "restore_ms",
        "id_task", "n_written", "n_read", "filesize", "mtime", "signature",
    }
)  # fmt: skip
"""Fields whose values cannot agree: times, random names, sizes of private files."""

ID_PREFIX = re.compile(r"^(chatcmpl-|resp_|msg_|rs_|fc_)?")
TOLERANCE = 2e-3


class Difference(Exception):
    """The first field that differs."""


def compare(want: Any, got: Any, path: str, free: frozenset[str]) -> None:
    """Raises Difference naming the first place where ``got`` is not what ``want`` is; ``free`` fields may differ."""
    if isinstance(want, dict) and isinstance(got, dict):
        compare_objects(want, got, path, free)
    elif path.endswith(".embedding") and isinstance(want, str) and isinstance(got, str):
        compare(decoded(want), decoded(got), path, free)
    elif isinstance(want, list) and isinstance(got, list):
        if len(want) != len(got):
            raise Difference(f"{path}: {len(want)} items wanted, got {len(got)}: {short(want)} / {short(got)}")
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            compare(a, b, f"{path}[{i}]", free)
    elif isinstance(want, float) and isinstance(got, (int, float)) and not isinstance(got, bool):
        if not math.isclose(want, got, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            raise Difference(f"{path}: {want} wanted, got {got}")
    elif type(want) is not type(got) or want != got:
        raise Difference(f"{path}: {short(want)} wanted, got {short(got)}")


def compare_objects(want: dict[str, Any], got: dict[str, Any], path: str, free: frozenset[str]) -> None:
    """Field names, then values; the order of names counts."""
    if sorted(want) != sorted(got):
        missing, extra = sorted(set(want) - set(got)), sorted(set(got) - set(want))
        raise Difference(f"{path}: missing fields {missing}, extra fields {extra}")
    if list(want) != list(got):
        raise Difference(f"{path}: order of fields {list(want)} wanted, got {list(got)}")
    for name, value in want.items():
        if name in ANY_VALUE or name in free:
            same_kind(value, got[name], f"{path}.{name}")
        else:
            compare(value, got[name], f"{path}.{name}", free)


def decoded(text: str) -> list[float]:
    """Numbers of a base64 vector."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(float).tolist()


def same_kind(want: Any, got: Any, path: str) -> None:
    """The types agree, and the prefix of an identifier."""
    numbers = isinstance(want, (int, float)) and isinstance(got, (int, float))
    if not numbers and type(want) is not type(got):
        raise Difference(f"{path}: {short(want)} wanted, got {short(got)}")
    if isinstance(want, str) and ID_PREFIX.match(want)[0] != ID_PREFIX.match(got)[0]:  # type: ignore[index]
        raise Difference(f"{path}: {short(want)} wanted, got {short(got)}")


def short(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]}...{text[-30:]}"


def compare_shape(want: Any, got: Any, path: str) -> None:
    """Raises Difference where names, their order or types differ; values and lengths may."""
    if isinstance(want, dict) and isinstance(got, dict):
        if list(want) != list(got):
            raise Difference(f"{path}: fields {list(want)} wanted, got {list(got)}")
        for name, value in want.items():
            compare_shape(value, got[name], f"{path}.{name}")
    elif isinstance(want, list) and isinstance(got, list):
        for i, (a, b) in enumerate(zip(want, got, strict=False)):
            compare_shape(a, b, f"{path}[{i}]")
    elif not (isinstance(want, (int, float)) and isinstance(got, (int, float))) and type(want) is not type(got):
        raise Difference(f"{path}: {short(want)} wanted, got {short(got)}")
