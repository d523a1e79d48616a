"""Bounds on what a chat template does: steps, characters and time of one rendering.

Templates come with model files, so they may be broken or meant to do harm. jinja2's sandbox keeps them from Python's
objects; here every loop, call, filter and growing operator is counted before its memory is taken, and nothing of
that is evaluated while the template is compiled. Not counted are comparisons of lists that share their parts.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_environment
from jinja2.visitor import NodeTransformer

STEPS = 1 << 21  # iterations, calls, filters and operators
CHARACTERS = 1 << 28  # of all texts that are made on the way; a prompt of a million tokens has about 4 million
SECONDS = 10.0
NUMBER_BITS = 1 << 16
REFERENCE = 8  # what an element of a list counts, in characters
NODE = 64  # what a value within lists counts that become text: it takes as long
_DIGITS = 5  # of widths in formats


_PLAIN = frozenset((int, float, bool, type(None), range))  # types without parts
_CHANGES = frozenset(("append", "insert", "pop"))  # of a template's own lists


class OutOfBoundsError(TemplateRuntimeError):
    """A template did more than any prompt needs."""


class _Rest(threading.local):
    """What the rendering in this thread may still do: nothing, while templates are compiled."""

    steps = 0
    characters = 0
    deadline = 0.0
    given: frozenset[int] = frozenset()
    """Identities of the lists that belong to the caller."""


_rest = _Rest()


@contextmanager
def bounded_rendering(variables: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """Allows this thread ``STEPS``, ``CHARACTERS`` and ``SECONDS`` for the templates rendered within, which cannot
    change the lists in ``variables``."""
    _rest.steps, _rest.characters, _rest.deadline = STEPS, CHARACTERS, time.monotonic() + SECONDS
    _rest.given = frozenset(map(id, _lists(variables)))
    try:
        yield
    finally:
        _rest.steps = _rest.characters = 0
        _rest.given = frozenset()


def _lists(value: object) -> Iterator[list[Any]]:
    """All lists in a value, which has no circles."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
            if isinstance(item, list):
                yield item


def step(steps: int = 1) -> None:
    """Counts steps; one too many, or one too late, raises OutOfBoundsError."""
    _rest.steps -= steps
    if _rest.steps < 0:
        raise OutOfBoundsError(f"runs on for more than {STEPS} steps")
    if time.monotonic() > _rest.deadline:
        raise OutOfBoundsError(f"runs for more than {SECONDS:g} seconds")


def count(characters: int) -> None:
    """Counts characters about to be made; too many raise OutOfBoundsError."""
    _rest.characters -= characters
    if _rest.characters < 0:
        raise OutOfBoundsError(f"makes more than {CHARACTERS} characters of text")


def size(value: object) -> int:
    """About how many characters ``str(value)`` has; what is in there several times counts every time."""
    if isinstance(value, str):
        return len(value)
    most, total, pending = _rest.characters, 0, [value]
    while pending:
        item: Any = pending.pop()
        total += NODE
        kind = type(item)
        if kind is str:
            total += len(item)
        elif kind is dict or (kind not in _PLAIN and isinstance(item, Mapping)):
            pending.extend(item)
            pending.extend(item.values())
        elif kind not in _PLAIN and isinstance(item, Collection):
            pending.extend(item)
        if total > most:
            count(total)
    return total


def text_of(value: object) -> str:
    """``str(value)``, counted unless it is text already."""
    if type(value) is str:
        return value
    if not isinstance(value, int):
        count(size(value))
    return str(value)


class _Items:
    """What a loop goes over: each item is so many ``steps``."""

    __slots__ = ("items", "steps")

    def __init__(self, items: Iterable[Any], steps: int = 1):
        self.items = items
        self.steps = steps

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]  # TypeError where there is none, as jinja2 expects

    def __iter__(self) -> Iterator[Any]:
        steps = self.steps
        for item in self.items:
            step(steps)
            yield item


def _joined(items: Iterable[object], separator: str = "") -> str:
    texts = [text_of(item) for item in items]
    count(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _concatenated(pieces: Iterable[str]) -> str:
    """Output of a template or block, counted as it comes."""
    kept: list[str] = []
    total, most = 0, _rest.characters
    for piece in pieces:
        total += len(piece) + REFERENCE
        if total > most:
            break
        kept.append(piece)
    count(total)
    return "".join(kept)


def _counted(value: Any) -> Any:
    """A new text or list, counted."""
    if isinstance(value, str | bytes):
        count(len(value))
    elif isinstance(value, list | tuple):
        count(REFERENCE * len(value))
    return value


def _width(*values: object) -> int:
    """The longest text, or the largest number, of a call's arguments."""
    given = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return max((len(v) if isinstance(v, str) else v for v in given if isinstance(v, str | int)), default=0)


def _check_number(bits: int) -> None:
    if bits > NUMBER_BITS:
        raise OutOfBoundsError(f"makes numbers of more than {NUMBER_BITS} bits")


def _multiplied(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_number(left.bit_length() + right.bit_length())
    for items, times in ((left, right), (right, left)):
        if isinstance(items, str | bytes | list | tuple) and isinstance(times, int):
            count(len(items) * max(times, 0) * (1 if isinstance(items, str | bytes) else REFERENCE))
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_number(left.bit_length() * max(right, 0))
    return left**right


def _added(left: Any, right: Any) -> Any:
    return _counted(left + right)


def _remainder(left: Any, right: Any) -> Any:
    """``left % right``: the remainder of numbers, or a text with values in its places."""
    if isinstance(left, str):
        if re.search(rf"%(\([^)]*\))?[^%a-zA-Z]*(\*|\d{{{_DIGITS + 1}}})", left.replace("%%", "")):
            raise OutOfBoundsError("a format's width is out of bounds")
        count(len(left) + left.count("%") * size(right))
    return left % right


class _Formatter(SandboxedFormatter):
    """``str.format`` with bounded widths."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            count(size(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if re.search(rf"\d{{{_DIGITS + 1}}}", format_spec):
            raise OutOfBoundsError("a format's width is out of bounds")
        step()
        count(size(value) + REFERENCE)
        return str(super().format_field(value, format_spec))


def _replaced(text: object, old: object, new: object, times: int | None = None) -> str:
    text, old, new = text_of(text), text_of(old), text_of(new)
    count(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if times is None else times)


@pass_environment
def _join_filter(environment: BoundedEnvironment, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    items = map(make_attrgetter(environment, attribute), value) if attribute is not None else value
    return _joined(items, text_of(d))


@pass_environment
def _sum_filter(environment: BoundedEnvironment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    items = map(make_attrgetter(environment, attribute), iterable) if attribute is not None else iterable
    return functools.reduce(_added, _Items(items), start)


def _format_filter(value: object, *args: object, **kwargs: object) -> str:
    return str(_remainder(text_of(value), kwargs or args))


# Filters whose numbers or further texts decide how much they make: an estimate from the same arguments.
_GROWTH: dict[str, Callable[..., int]] = {
    "batch": lambda _value, linecount, *_: REFERENCE * linecount,
    "center": lambda _value, width=80: width,
    "indent": lambda s, width=4, *_, **__: (s.count("\n") + 1) * _width(width),
    "round": lambda _value, precision=0, *_, **__: _check_number(4 * precision) or 0,  # type: ignore[func-returns-value]
    "slice": lambda _value, slices, *_: REFERENCE * slices,
    "tojson": lambda value, *given, **named: size(value) * (1 + _width(*given, *named.values())),
    "wordwrap": lambda s, *given, **named: (
        len(s) * max((len(v) for v in given if isinstance(v, str)), default=1) * len(named.get("wrapstring") or "\n")
    ),
}
# Filters that look at the elements of lists, not at their text.
_OF_LISTS = frozenset(
    "attr batch count d default dictsort first float groupby int items last length list map max min random reject"
    " rejectattr reverse round select selectattr slice sort sum tojson unique".split()
)
_OWN = {"format": _format_filter, "join": _join_filter, "replace": _replaced, "string": text_of, "sum": _sum_filter}
_HTML = ("urlize", "xmlattr")
_LOOP, _CONCAT, _SLICE = "items of a loop", "joined parts", "part of a text"  # filters that no template can name


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter ``function``, counted under the rules for ``name``."""
    growth = _GROWTH.get(name)
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        step()
        if name == "tojson" and args and isinstance(args[0], Iterator):  # what map, select and their like give
            args = (list(_Items(args[0])), *args[1:])
        if name not in _OF_LISTS:
            count(size(args[skipped]) if len(args) > skipped else 0)
        if growth is not None:
            count(growth(*args[skipped:], **kwargs))
        return _counted(function(*args, **kwargs))

    return bounded


class _Counting(NodeTransformer):
    """Puts counting filters around what jinja2 has no hook for: loops, ``~`` and slices."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        outputs = sum(len(output.nodes) for output in node.find_all(nodes.Output))
        node.iter = self._filter(node.iter, _LOOP, nodes.Const(1 + outputs // 16))  # what a block writes is kept
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, _SLICE) if isinstance(node.arg, nodes.Slice) else node

    @staticmethod
    def _filter(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Expr:
        return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with every rendering bounded; it renders within ``bounded_rendering()`` only."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    concat = staticmethod(_concatenated)

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any):
        super().__init__(finalize=text_of, **options)
        self.binop_table |= {"+": _added, "*": _multiplied, "**": _power, "%": _remainder}
        self.globals.pop("lipsum")
        named = {name: f for name, f in {**self.filters, **_OWN, **filters}.items() if name not in _HTML}
        self.filters = {name: bounded_filter(name, function) for name, function in named.items()}
        self.filters |= {_LOOP: _Items, _CONCAT: _joined, _SLICE: _counted}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Counting().visit(tree)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute: no changes but of lists that it made itself, as llama.cpp's
        templates do."""
        if type(obj) is list and attr in _CHANGES:
            return id(obj) not in _rest.given
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """``left operator right``, counted."""
        step()
        return self.binop_table[operator](left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call from a template, counted with what it makes."""
        step()
        if isinstance(function, LoopContext):
            args = tuple(map(_Items, args))
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, list):
            count(REFERENCE)
        if isinstance(owner, str | bytes | int):
            return _counted(self._method(context, function, owner, *args, **kwargs))
        return _counted(super().call(context, function, *args, **kwargs))

    def _method(self, context: Context, method: Any, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A method of a text or number."""
        if isinstance(owner, bytes):
            raise OutOfBoundsError("bytes are not text")
        match method.__name__:
            case "format":
                return _Formatter(self).vformat(owner, args, kwargs)
            case "format_map" if len(args) == 1:
                return _Formatter(self).vformat(owner, (), args[0])
            case "center" | "ljust" | "rjust" | "zfill" | "to_bytes":
                count(_width(*args, *kwargs.values()))
            case "expandtabs":
                count(owner.count("\t") * _width(8, *args, *kwargs.values()))
            case "replace" if len(args) > 1 and isinstance(args[0], str):
                count(len(owner) + owner.count(args[0]) * size(args[1]))
            case "join" if args:
                args = (list(_Items(args[0])), *args[1:])
                count(len(owner) * len(args[0]) + sum(map(size, args[0])))
            case "translate" if args and isinstance(args[0], Mapping):
                count(len(owner) * max(map(size, args[0].values()), default=1))
        return super().call(context, method, *args, **kwargs)
