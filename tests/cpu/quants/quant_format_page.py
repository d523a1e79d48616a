"""docs/quant-formats.md as a decoder: the formulas of its tables, evaluated on bytes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ikpy.quants import registry
from ikpy.quants.tables import table
from tests.shared import ROOT

PAGE = ROOT / "docs" / "quant-formats.md"
KINDS = {"": "u1", "u16": "<u2", "u32": "<u4", "i8": "i1", "i16": "<i2", "i32": "<i4", "f16": "<f2", "f32": "<f4"}
KINDS |= {"bf16": "<u2"}


@dataclass(frozen=True)
class PageField:
    """One field of a layout; ``count`` 0 is a single number."""

    name: str
    kind: str
    count: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        return np.dtype(KINDS[self.kind]).itemsize * max(1, self.count)

    def read(self, data: np.ndarray) -> np.ndarray:
        """Numbers of the field as int64 or float64."""
        raw = data[self.offset : self.offset + self.nbytes].view(KINDS[self.kind])
        if self.kind == "bf16":
            raw = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        numbers = raw.astype(np.float64 if "f" in self.kind else np.int64)
        return numbers if self.count else numbers[0]


@dataclass
class PageType:
    """What the page says of one type; ``value`` is empty where the plain type's formula holds."""

    block: list[PageField]
    header: list[PageField]
    definitions: dict[str, str]
    value: str
    shared: dict[str, str] = field(default_factory=dict)


def fields(layout: str) -> list[PageField]:
    """Fields of a text like ``d f16 @0; qs[16] @2``."""
    found = []
    for part in filter(None, layout.split("; ")):
        match = re.fullmatch(r"(\w+)(?: (\w+))?(?:\[(\d+)\])? @(\d+)", part)
        assert match, layout
        found.append(PageField(match[1], match[2] or "", int(match[3] or 0), int(match[4])))
    return found


def definitions(text: str) -> dict[str, str]:
    """Formulas `name = ...` in code marks, by name."""
    codes = (code for code in re.findall(r"`([^`]+)`", text))
    return dict(code.split(" = ", 1) for code in codes if re.match(r"\w+ = ", code))


def page_types() -> dict[str, PageType]:
    """All types that the page gives formulas for."""
    found: dict[str, PageType] = {}
    for section in re.split(r"^#+ ", PAGE.read_text(), flags=re.MULTILINE):
        rows = [line for line in section.splitlines() if re.match(r"\| `\w+` \| `[^`]+@", line)]
        shared = definitions(re.sub(r"^\|.*$", "", section, flags=re.MULTILINE))
        for row in rows:
            name, layout, numbers, *value = (cell.strip() for cell in row.strip("|").split("|"))
            block, header = [*re.findall(r"`([^`]+)`", layout), ""][:2]
            formula = value[0].strip("`") if value and "`" in value[0] else ""
            known = PageType(fields(block), fields(header), definitions(numbers), formula, shared)
            found[name.strip("`")] = known
    return found


def functions() -> dict[str, tuple[list[str], str]]:
    """Parameters and formula of every `name(parameters) = formula` of the page, by name."""
    found = re.findall(r"`(\w+)\(([\w, ]+)\) = ([^`]+)`", PAGE.read_text())
    return {name: (parameters.split(", "), formula) for name, parameters, formula in found}


TYPES = page_types()
FUNCTIONS = functions()
INTERLEAVED = definitions(PAGE.read_text().partition("\n### Interleaved building blocks\n")[2].partition("\n### ")[0])


def generator_value(z: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Value number n of the generator seeded by z."""
    values = []
    for _ in range(8):
        z = 0xCBAC1FED * z % 2**32
        values.append(sum(z >> 8 * byte & 63 for byte in range(4)) - 126)
    return np.choose(n, values)


def element_names(row: registry.TensorType, k: int) -> dict[str, Any]:
    """Names that the page gives to the place of each element in a block, and to the row in a group."""
    e = np.arange(row.block_elements)
    names = {"e": e, "c": e & 31, "b16": e >> 4, "b32": e >> 5, "b64": e >> 6, "b128": e >> 7, "g8": e >> 3}
    return names | {"g4": e >> 2, "k": k, "R": row.interleave}


NATIVE: dict[str, Any] = {
    "where": np.where,
    "place": lambda x, order: np.argsort(order)[x // 4],
    "f16": lambda bits: np.uint16(bits).view(np.float16).astype(np.float64),
    "v": generator_value,
}
BUILT_IN = {"abs": abs, "sum": sum, "range": range}


class Decoder:
    """Evaluates the formulas of one type for row ``k`` of a (group) block."""

    def __init__(self, name: str, k: int, block: np.ndarray, header: np.ndarray):
        row, page = registry.by_name(name), TYPES[name]
        plain = TYPES.get(row.plain_partner)
        self.value = page.value or (plain.value if plain else "")
        inherited = {**plain.shared, **plain.definitions} if plain else {}
        self.formulas = (INTERLEAVED if row.interleave > 1 else {}) | page.shared | inherited | page.definitions
        self.names = NATIVE | element_names(row, k)
        for known, data in ((page.block, block), (page.header, header)):
            for each in known:
                numbers = each.read(data)
                per_row = row.interleave > 1 and each.count == row.interleave and each.name in ("d", "dmin", "x")
                self.names[each.name] = numbers[k] if per_row else numbers

    def lookup(self, name: str) -> Any:
        """The number, table or function of that name, made when first asked for."""
        if name not in self.names:
            if name in FUNCTIONS:
                self.names[name] = self.function(*FUNCTIONS[name])
            else:
                formula = self.formulas.get(name)
                self.names[name] = self.evaluate(formula) if formula else table(name).astype(np.int64)
        return self.names[name]

    def function(self, parameters: list[str], formula: str) -> Callable[..., Any]:
        """A function of the page."""
        return lambda *values: self.evaluate(formula, dict(zip(parameters, values, strict=True)))

    def evaluate(self, formula: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """Result of a formula for all elements of the block."""
        nodes = [node for node in ast.walk(ast.parse(formula)) if isinstance(node, ast.Name)]
        used = {node.id for node in nodes} - {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
        others = {name: self.lookup(name) for name in used - arguments.keys() - BUILT_IN.keys()}
        return eval(formula, BUILT_IN | others | dict(arguments))


def decode(name: str, data: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """float64 [ne1, ne0] of the bytes of a matrix of ``shape`` (ne0 first), by the formulas of the page."""
    row = registry.by_name(name)
    groups = data.reshape(shape[1] // row.interleave, -1)
    n_header = row.row_extra_bytes * row.interleave
    out = []
    for group in groups:
        blocks = group[n_header:].reshape(-1, row.block_bytes * row.interleave)
        for k in range(row.interleave):
            values = []
            for block in blocks:
                decoder = Decoder(name, k, block, group[:n_header])
                values.append(np.broadcast_to(decoder.evaluate(decoder.value), row.block_elements))
            out.append(np.concatenate(values))
    return np.array(out, np.float64)
