"""Writes the tables of docs/quant-types.md and docs/quant-formats.md from the type table and the look-up tables.

Run it after changing a type: python scripts/make_type_tables.py. With --check it only compares.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ikpy.quants import registry
from ikpy.quants.registry import TensorType
from ikpy.quants.repack import PERMUTATIONS
from ikpy.quants.tables import table

DOCS = Path(__file__).resolve().parent.parent / "docs"
TYPES, FORMATS = DOCS / "quant-types.md", DOCS / "quant-formats.md"
END_OF_TABLES = "<!-- end of the generated tables -->\n"

INTRODUCTION = """# Tensor types

Every type a GGUF file may contain; what the encoders achieve is in [quants.md](quants.md), what every bit means in
[quant-formats.md](quant-formats.md). The program uses the table in `ikpy/quants/registry.py`, from which
`scripts/make_type_tables.py` writes the tables here. Type names are accepted in any letter case.

*Bits per weight* leaves out the row header ("+ n B/row"). *Row length*: ne0 must be a multiple of it; the quantizer
takes another type where a row does not fit. *Importance matrix*: whether quantizing to the type needs one. *File
types*: those that give most tensors the type; rules (`--custom-q`) give any tensor any type that is written.
"""
AFTER_MAINLINE = """
`tq1_0` and `tq2_0` can be read and are not written. Files with `nvfp4` have
[factors](quant-formats.md#factors-of-matrices) beside their matrices, which `ikpy quantize` does not make.
"""
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

FORMATS_HEAD = """| type | number | elements | bytes | header | bits | R | bits described in |
|---|---|---|---|---|---|---|---|
"""
FILE_TYPES_HEAD = "| number | names | most tensors | repacked |\n|---|---|---|---|\n"
ACTIVATIONS_HEAD = "| type | number | elements | bytes | row header |\n|---|---|---|---|---|\n"
LEVELS_HEAD = "| name | half | values, in order of the index |\n|---|---|---|\n"
# Name and length of the half that the extra bit chooses, 0 for tables without one.
SMALL_TABLES = {
    "iq2nl_values": 4,
    "iq3nl_values": 8,
    "iq4k_values": 16,
    "iq5nl_values": 32,
    "iq6nl_values": 64,
    "kvalues_mxfp4": 0,
    "iq2kl_pairs": 0,
    "iq1bn_mult": 0,
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


def sections(page: str) -> dict[str, str]:
    """Heading under which a page's table has a row `| `type` | ...`, by type name."""
    heading, found = "", {}
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif match := re.match(r"\| `(\w+)` \| .*`.*@|\| `(i2_s)` \|", line):
            found[match[1] or match[2]] = heading
    return found


def anchor(heading: str) -> str:
    """Name of a heading in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def format_row(row: TensorType, described: dict[str, str]) -> str:
    """Row of the table of all types that files may contain."""
    heading = described.get(row.name, "Numbers")
    size = f"{row.block_bytes} | {row.row_extra_bytes or ''} | {row.bits_per_weight:g} | {row.interleave}"
    return f"| `{row.name}` | {row.id} | {row.block_elements} | {size} | [{heading}](#{anchor(heading)}) |\n"


def activation_row(row: TensorType) -> str:
    """Row of the table of types that occur in products only."""
    sizes = f"{row.block_elements} | {row.block_bytes} | {row.row_extra_bytes or ''}"
    return f"| `{row.name}` | {row.id} | {sizes} |\n"


def file_type_rows() -> str:
    """A row for each number of `general.file_type`."""
    rows: dict[int, list[registry.FileType]] = {}
    for row in registry.all_ftypes():
        rows.setdefault(row.id, []).append(row)
    return "".join(
        f"| {number} | {', '.join(row.name for row in same)} | `{same[0].base_type}` "
        f"| {same[0].after_repack if same[0].after_repack >= 0 else ''} |\n"
        for number, same in rows.items()
    )


def levels_row(name: str, half: int) -> str:
    """A small look-up table, its shifted half in a row of its own."""
    values = table(name)
    if values.ndim > 1:
        text = ", ".join(" ".join(map(str, point)) for point in values.tolist())
        return f"| `{name}` | | {text} |\n"
    numbers = list(map(str, values.tolist()))
    if not half:
        return f"| `{name}` | | {' '.join(numbers)} |\n"
    return f"| `{name}` | normal | {' '.join(numbers[:half])} |\n| | shifted | {' '.join(numbers[half:])} |\n"


def between(page: str, name: str, text: str) -> str:
    """The page with the text between the markers of that name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, rest = page.split(begin)
    return before + begin + text + end + rest.split(end)[1]


def formats_page(page: str) -> str:
    """docs/quant-formats.md with its generated tables."""
    described = sections(page)
    stored = [row for row in registry.all_types() if not row.activation_only]
    activations = [row for row in registry.all_types() if row.activation_only]
    page = between(page, "types", FORMATS_HEAD + "".join(format_row(row, described) for row in stored))
    page = between(page, "file types", FILE_TYPES_HEAD + file_type_rows())
    page = between(page, "tables", LEVELS_HEAD + "".join(levels_row(*each) for each in SMALL_TABLES.items()))
    return between(page, "activations", ACTIVATIONS_HEAD + "".join(map(activation_row, activations)))


def main() -> None:
    """Rewrite the pages, or exit with status 1 under --check if that would change one."""
    types, formats = (path.read_text(encoding="utf-8") for path in (TYPES, FORMATS))
    new_types = tables() + END_OF_TABLES + types.partition(END_OF_TABLES)[2]
    new_formats = formats_page(formats)
    if "--check" in sys.argv[1:]:
        sys.exit((new_types, new_formats) != (types, formats))
    TYPES.write_text(new_types, encoding="utf-8")
    FORMATS.write_text(new_formats, encoding="utf-8")


if __name__ == "__main__":
    main()
