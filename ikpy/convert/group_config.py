"""What config.json says about matrices in groups of columns, of GPTQ and AWQ: bits, groups, order of the codes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ikpy.errors import FileFormatError, UnsupportedError

GPTQ, AWQ = "gptq", "awq"
GPTQ_BITS = (2, 3, 4, 8)
AWQ_BITS = 4
_MAX_COLUMNS = 1 << 31
# What may stand beside weights: older checkpoints have the configuration in files of their own.
OWN_FILES = {"quantize_config.json": GPTQ, "quant_config.json": AWQ}


@dataclass(frozen=True)
class GroupScheme:
    """How codes become values; group_size: columns that share a scale, 0: all of a row.

    order: "gptq" (words of codes along the columns), "gemm" (along the rows, interleaved), "gemv" (along the columns,
    rows of a tensor are those of the matrix). zero_offset: what zero points are more than what is stored.
    """

    bits: int
    group_size: int
    order: str
    zero_offset: int = 0


class GroupConfig:
    """Schemes by the name of a module. UnsupportedError for formats that are not read."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.method = str(values["quant_method"])
        self._path = path
        self._scheme = self._gptq(values) if self.method == GPTQ else self._awq(values)
        self._dynamic = values.get("dynamic") or {}
        if not isinstance(self._dynamic, dict) or not all(isinstance(v, dict) for v in self._dynamic.values()):
            raise FileFormatError(f"{path}: 'dynamic' is no table of modules")

    def scheme(self, module: str) -> GroupScheme:
        """The scheme of a module: what the first pattern of `dynamic` that matches changes of the one of all."""
        for pattern, changes in self._dynamic.items():
            if pattern.startswith("-:"):
                continue  # modules that are not quantized
            try:
                is_match = re.match(pattern.removeprefix("+:"), module)
            except re.error as error:
                raise FileFormatError(f"{self._path}: '{pattern}' of 'dynamic' is no pattern: {error}") from None
            if is_match:
                self._require(changes.get("format", "gptq") in ("gptq", "gptq_v2"), f"format '{changes.get('format')}'")
                bits, size = changes.get("bits", self._scheme.bits), changes.get("group_size")
                self._check_bits(bits, GPTQ_BITS if self.method == GPTQ else (AWQ_BITS,))
                group_size = self._scheme.group_size if size is None else self._group_size(size)
                return replace(self._scheme, bits=bits, group_size=group_size)
        return self._scheme

    def _gptq(self, values: dict[str, Any]) -> GroupScheme:
        form = str(values.get("checkpoint_format") or values.get("format") or "gptq").lower()
        self._require(form in ("gptq", "gptq_v2"), f"format '{form}'")
        self._require(not values.get("is_marlin_format"), "format 'marlin'")
        words = str(values.get("pack_dtype") or "int32").removeprefix("torch.")
        self._require(words == "int32", f"packing in words of {words}")
        self._check_bits(values.get("bits"), GPTQ_BITS)
        size = self._group_size(values.get("group_size", -1))
        return GroupScheme(values["bits"], size, "gptq", zero_offset=int(form == "gptq"))

    def _awq(self, values: dict[str, Any]) -> GroupScheme:
        names = ("version", "checkpoint_format", "format")
        order = str(next((values[n] for n in names if values.get(n)), "gemm")).lower()
        self._require(order in ("gemm", "gemv"), f"version '{order}'")
        backend = str(values.get("backend") or "autoawq").lower()
        self._require(backend != "llm-awq", "packing of llm-awq")
        bits = values.get("bits", values.get("w_bit", AWQ_BITS))
        self._check_bits(bits, (AWQ_BITS,))
        return GroupScheme(bits, self._group_size(values.get("group_size", values.get("q_group_size", -1))), order)

    def _check_bits(self, bits: Any, known: tuple[int, ...]) -> None:
        self._require(isinstance(bits, int) and bits in known, f"weights of {bits} bits")

    def _group_size(self, size: Any) -> int:
        if not isinstance(size, int) or isinstance(size, bool) or not -1 <= size < _MAX_COLUMNS or size == 0:
            raise FileFormatError(f"{self._path}: 'group_size' is {size!r}, not a number of columns")
        return max(size, 0)

    def _require(self, is_met: bool, what: str) -> None:
        if not is_met:
            raise UnsupportedError(f"{self._path}: {what} of {self.method.upper()} cannot be converted")
