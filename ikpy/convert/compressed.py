"""What config.json says about integer weights of compressed-tensors: bits, groups, zero points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikpy.errors import FileFormatError, UnsupportedError

METHOD = "compressed-tensors"
MXFP4 = "mxfp4-pack-quantized"
NVFP4 = "nvfp4-pack-quantized"
# Of the whole checkpoint or of one group of layers. "mixed-precision": each group has its own.
_FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    MXFP4,
    NVFP4,
    "mixed-precision",
    "naive-quantized",
    "pack-quantized",
)
_BITS = (4, 8)


@dataclass(frozen=True)
class Scheme:
    """How integers of a group of layers become values; group_size: columns that share a scale.

    group_size 0: one scale per row ("channel"), -1: one per tensor. has_g_idx: a tensor says which group each column
    belongs to.
    """

    bits: int
    group_size: int
    symmetric: bool
    has_g_idx: bool

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a matrix."""
        if self.group_size < 0:
            return 1, 1
        return rows, -(-columns // self.group_size) if self.group_size else 1


def integer_schemes(values: dict[str, Any], path: Path) -> tuple[Scheme, ...]:
    """Schemes of the groups with integer weights in a `quantization_config`; () for other methods.

    UnsupportedError for what is stored or computed otherwise: sparse weights, transforms, other formats.
    """
    if values.get("quant_method") != METHOD:
        return ()
    sparsity = (values.get("sparsity_config") or {}).get("format") or "dense"
    _require(sparsity == "dense", path, f"sparse weights ('{sparsity}')")
    transforms = (values.get("transform_config") or {}).get("config_groups")
    _require(not transforms, path, "transforms of activations (transform_config)")
    groups = [group for group in (values.get("config_groups") or {}).values() if group.get("weights")]
    for format_name in (values.get("format"), *(group.get("format") for group in groups)):
        _require(format_name in (None, *_FORMATS), path, f"format '{format_name}'")
    weights = (group["weights"] for group in groups if not _is_four_bit_float(values, group))
    schemes = (_scheme(args, path) for args in weights if args.get("type", "int") == "int")
    return tuple(dict.fromkeys(schemes))


def _is_four_bit_float(values: dict[str, Any], group: dict[str, Any]) -> bool:
    return (group.get("format") or values.get("format")) in (MXFP4, NVFP4)


def float_blocks(values: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Rows and columns that one scale of FP8 weights covers, of the groups that say so."""
    for group in (values.get("config_groups") or {}).values():
        block = (group.get("weights") or {}).get("block_structure")
        if block:
            yield int(block[0]), int(block[1])


def _scheme(args: dict[str, Any], path: Path) -> Scheme:
    bits, size = args.get("num_bits", 8), args.get("group_size")
    _require(bits in _BITS, path, f"weights of {bits} bits")
    # As the format's own reader does it: the size alone tells where no strategy is given.
    strategy = args.get("strategy") or ("tensor" if size is None else "group" if size > 0 else "channel")
    _require(strategy in ("group", "channel", "tensor"), path, f"integer weights with scales by '{strategy}'")
    group_size = {"group": size, "channel": 0, "tensor": -1}[strategy]
    if not isinstance(group_size, int) or (strategy == "group" and group_size <= 0):
        raise FileFormatError(f"{path}: 'group_size' is {size!r}, not a number of columns")
    return Scheme(
        bits=bits,
        group_size=group_size,
        symmetric=bool(args.get("symmetric", True)),
        has_g_idx=args.get("actorder") in (True, "group", "dynamic"),
    )


def _require(is_met: bool, path: Path, what: str) -> None:
    if not is_met:
        raise UnsupportedError(f"{path}: {what} of {METHOD} cannot be converted")
