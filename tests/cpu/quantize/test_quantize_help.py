"""The types that `ikpy quantize --help` lists."""

from __future__ import annotations

import pytest

from ikpy.cli.quantize_types import description, type_lists
from ikpy.quants import registry


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("IQ2_K", "2.375 bpw non-linear quantization"),  # as guides quote llama-quantize --help
        ("IQ2_K_R4", "IQ2_K repacked"),
        ("IQ4_XS_R8", "IQ4_XS repacked"),
        ("IQ4_KSS", "4.0 bpw non-linear quantization"),
        ("IQ4_NL", "4.5 bpw non-linear quantization"),
        ("IQ2_XS", "2.3125 bpw quantization"),
        ("IQ3_KT", "3.125 bpw trellis quantization"),
        ("IQ1_S_R4", "1.5 bpw quantization"),  # not a rearranged IQ1_S
        ("Q8_0", "8.5 bpw quantization"),
        ("Q4_K_M", "q4_K, medium mixture"),
        ("BF16", "16 bpw"),
    ],
)
def test_descriptions(name: str, text: str) -> None:
    (row,) = (row for row in registry.all_ftypes() if row.name == name)
    assert description(row) == text


def test_lines_are_what_scripts_search_for() -> None:
    lines = type_lists().splitlines()
    assert "     138  or  IQ2_K      : 2.375 bpw non-linear quantization" in lines
    assert len([line for line in lines if "  or  " in line]) == sum(row.selectable for row in registry.all_ftypes())
