"""Writes the tables of docs/quant-types.md from the type table; the text after them is kept.

Run it after changing a type: python scripts/make_type_tables.py. With --check it only compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ikpy.quants import registry
from ikpy.quants.registry import TensorType
from ikpy.quants.repack import PERMUTATIONS

TARGET = Path(__file__).resolve().parent.parent / "docs" / "quant-types.md"
END_OF_TABLES = "<!-- end of the generated tables -->\n"

INTRODUCTION = """# Tensor types

Every type a GGUF file may contain; what the encoders achieve is in [quants.md](quants.md). The program uses the table
in `ikpy/quants/registry.py`; the tables here are written from it by `scripts/make_type_tables.py`. Type names are
accepted in any letter case.

*Bits per weight* leaves out the row header ("+ n B/row"). *Row length*: ne0 must be a multiple of it; the quantizer
takes another type where a row does not fit. *Importance matrix*: whether quantizing to the type needs one. *File
types*: those that give most tensors the type; rules (`--custom-q`) give any tensor any type that is written.
"""
AFTER_MAINLINE = "\n`tq1_0` and `tq2_0` can be read and are not written.\n"
AFTER_DIALECT = """
`i2_s` (one scale for a whole tensor) can be read and is not written. `iq2_kt` and `iq3_kt`: inference multiplies the
stored row scale by 1.05 and 1.01; decoding a file to floats does not.
"""
INTERLEAVED = """
## Row-interleaved types

The same numbers with R rows interleaved, the order some kernels read. ne1 must be a multiple of R. Unless the note
says otherwise, conversion from and to the plain type is lossless (`--repack`, `-rtr`).

| type | id | R | repacked from | file type | note |
|---|---|---|---|---|---|
"""
PLAIN_HEAD = (
    "\n| type | id | bits per weight | row length | importance matrix | file types |\n|---|---|---|---|---|---|\n"
)
IMATRIX = {"E": "always", "P": "for most tensors", "": "optional", "-": "not used"}
NOTES = {
    "iq1_s_r4": "a format of its own, 1.5 bits per weight; not a repack of `iq1_s`",
    "iq1_m_r4": "a format of its own, 1.75 bits per weight; not a repack of `iq1_m`",
    "bf16_r16": "from `f16` truncates",
    "q8_k_r8": "made by quantizing, or from activations with the scale rounded to f16",
    "q8_k_r16": "made by quantizing, or from activations with the scale rounded to f16",
    "q8_KV_r8": "drops the stored sum of the row, which can be recomputed",
    "q4_0_4x4": "legacy Arm layout",
    "q4_0_4x8": "legacy Arm layout",
    "q4_0_8x8": "legacy Arm layout",
}


def file_types(row: TensorType) -> str:
    """File types that `ikpy quantize` takes and whose default the type is."""
    return ", ".join(f.name for f in registry.all_ftypes() if f.base_type == row.name and f.selectable) or "–"


def plain_row(row: TensorType) -> str:
    """Table row of a type that is not interleaved."""
    header = f" + {row.row_extra_bytes} B/row" if row.row_extra_bytes else ""
    imatrix = IMATRIX[row.requires_imatrix]
    size = f"{row.bits_per_weight:g}{header}"
    return f"| `{row.name}` | {row.id} | {size} | {row.block_elements} | {imatrix} | {file_types(row)} |\n"


def interleaved_row(row: TensorType) -> str:
    """Table row of an interleaved type."""
    sources = ", ".join(f"`{a}`" for a, b in sorted(PERMUTATIONS) if b == row.name) or "–"
    note = NOTES.get(row.name, "")
    return f"| `{row.name}` | {row.id} | {row.interleave} | {sources} | {file_types(row)} | {note} |\n"


def tables() -> str:
    """Everything above the marker."""
    stored = [row for row in registry.all_types() if not row.activation_only]
    interleaved = [row for row in stored if row.interleave > 1]
    numbers = [row for row in stored if not row.is_quantized and row.interleave == 1]
    plain = [row for row in stored if row.is_quantized and row.interleave == 1]
    dialect = [row for row in plain if row.id > 100 or row.name in ("i2_s", "q1_0_g128")]
    mainline = [row for row in plain if row not in dialect]
    return "".join(
        [
            INTRODUCTION,
            "\n## Numbers\n",
            PLAIN_HEAD,
            *map(plain_row, numbers),
            "\n## Quantized types shared with mainline\n",
            PLAIN_HEAD,
            *map(plain_row, mainline),
            AFTER_MAINLINE,
            "\n## Quantized types of this dialect\n",
            PLAIN_HEAD,
            *map(plain_row, dialect),
            AFTER_DIALECT,
            INTERLEAVED,
            *map(interleaved_row, interleaved),
            "\n",
        ]
    )


def main() -> None:
    """Rewrite the page, or exit with status 1 under --check if that would change it."""
    old = TARGET.read_text(encoding="utf-8")
    new = tables() + END_OF_TABLES + old.partition(END_OF_TABLES)[2]
    if "--check" in sys.argv[1:]:
        sys.exit(new != old)
    TARGET.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
