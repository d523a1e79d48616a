"""The lists of file types and tensor types in `ikpy quantize --help`."""

from __future__ import annotations

import re
import textwrap

from ikpy.quants import registry

NON_LINEAR = re.compile(r"iq(?:4_nl|4_xs|\d_(?:k|ks|kss|kl))")
"""Tensor types whose levels come from a table that is denser around zero."""


def type_lists() -> str:
    """All file types that can be asked for, then the tensor types."""
    from ikpy._native import core

    rows = [row for row in registry.all_ftypes() if row.selectable]
    lines = [f"    {row.id:4d}  or  {row.name:<10} : {description(row)}" for row in rows]
    lines.append("          COPY       : only copy tensors, no quantizing")
    names = ", ".join(row.name for row in registry.all_types() if row.name == "f32" or core.can_quantize(row.id))
    lines += ["", "Tensor types:", textwrap.fill(names, 110, initial_indent="    ", subsequent_indent="    ")]
    return "\n".join(lines)


def description(row: registry.FileType) -> str:
    """What a file type is, in the words of llama-quantize, which guides and scripts search for."""
    base = registry.by_name(row.base_type)
    if base.repack_of:
        return f"{row.name.rpartition('_')[0]} repacked"
    detail = row.display.partition(" - ")[2] or f"{base.bits_per_weight:g} bpw"
    if "bpw" not in detail:
        return f"{base.name}, {detail.lower()} mixture"
    return f"{detail} {kind(base)}" if base.is_quantized else detail


def kind(base: registry.TensorType) -> str:
    """How the codes of a quantized type become numbers."""
    if NON_LINEAR.fullmatch(base.name):
        return "non-linear quantization"
    return "trellis quantization" if base.name.endswith("_kt") else "quantization"
