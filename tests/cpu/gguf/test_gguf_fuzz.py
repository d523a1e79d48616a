"""Damaged GGUF files: whatever is wrong, the answer is a FileFormatError or UnsupportedError, and soon."""

from __future__ import annotations

import struct
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.strings import StringArray, StringArrayError, index_strings
from tests.cpu.gguf import gguf_files as made

SAMPLE = made.sample()
HEADER_BYTES = len(SAMPLE) - 128
_SETTINGS = {
    "deadline": timedelta(seconds=2),
    "derandomize": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}
NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 7, 8, 9, 31, 32, 2**16, 2**31, 2**32 - 1, 2**40, 2**61, 2**63, 2**64 - 1]),
    st.integers(0, 2**64 - 1),
)


def read_all(path) -> None:
    """Open and touch everything: values of every key, data of every tensor."""
    for header_only in (False, True):
        try:
            with GGUFFile.open(path, header_only=header_only) as file:
                for key in file.metadata:
                    value = file.metadata[key]
                    if isinstance(value, StringArray):
                        assert value.tolist() == [value[i] for i in range(len(value))]
                for info in file.tensors.values():
                    file.data(info).sum()
        except (FileFormatError, UnsupportedError) as error:
            assert "\n" not in str(error)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "fuzzed.gguf"


@given(edits=st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=400, **_SETTINGS)
def test_changed_bytes(path, edits):
    content = bytearray(SAMPLE)
    for position, byte in edits:
        content[position] = byte
    path.write_bytes(content)
    read_all(path)


@given(position=st.integers(4, HEADER_BYTES - 8), number=NUMBERS, size=st.sampled_from(["<I", "<Q"]))
@settings(max_examples=400, **_SETTINGS)
def test_changed_numbers(path, position, number, size):
    content = bytearray(SAMPLE)
    struct.pack_into(size, content, position, number % 2 ** (8 * struct.calcsize(size)))
    path.write_bytes(content)
    read_all(path)


@given(cut=st.integers(0, len(SAMPLE)), length=st.integers(0, 64), filling=st.binary(max_size=64))
@settings(max_examples=300, **_SETTINGS)
def test_removed_and_inserted_parts(path, cut, length, filling):
    path.write_bytes(SAMPLE[:cut] + filling + SAMPLE[cut + length :])
    read_all(path)


KEYS = st.one_of(
    st.sampled_from(["general.alignment", "split.count", "split.no", "split.tensors.count", "k"]),
    st.binary(max_size=6),
)
ENTRIES = st.builds(
    lambda key, kind, element, count, payload: (
        made.string(key)
        + struct.pack("<I", kind)
        + (struct.pack("<IQ", element, count) if kind == made.ARR else b"")
        + payload
    ),
    KEYS,
    st.integers(0, 13),
    st.integers(0, 13),
    NUMBERS,
    st.one_of(st.binary(max_size=24), NUMBERS.map(lambda n: struct.pack("<Q", n) + b"abc")),
)
TENSORS = st.builds(
    made.tensor,
    st.one_of(st.sampled_from(["a", "b"]), st.binary(max_size=4)),
    st.lists(NUMBERS, max_size=5).map(tuple),
    st.one_of(st.sampled_from([0, 1, 2, 8, 12, 36, 134, 202, 230, 398]), st.integers(0, 2**32 - 1)),
    NUMBERS,
)


@given(
    entries=st.lists(ENTRIES, max_size=4),
    tensors=st.lists(TENSORS, max_size=4),
    extra=st.tuples(st.sampled_from([0, 0, 1, 2**40, -1]), st.sampled_from([0, 0, 1, 2**62, -1])),
    data=st.binary(max_size=96),
)
@settings(max_examples=400, **_SETTINGS)
def test_files_of_the_right_structure_with_wild_values(path, entries, tensors, extra, data):
    counts = {
        "tensor_count": max(0, len(tensors) + extra[0]),
        "entry_count": max(0, len(entries) + extra[1]),
    }
    path.write_bytes(made.build(entries, tensors, data, **counts))
    read_all(path)


@given(
    items=st.lists(st.one_of(st.binary(max_size=5), st.sampled_from([b"", b"\0" * 9, b"x" * 256])), max_size=40),
    before=st.binary(max_size=9),
    cut=st.integers(0, 400),
)
@example(items=[b"a"] * 3, before=b"", cut=9)
@settings(max_examples=500, **_SETTINGS)
def test_string_index_is_the_chain_of_lengths(items, before, cut):
    chain = b"".join(made.string(item) for item in items)
    data = np.frombuffer(before + chain + b"rest", np.uint8)
    starts = index_strings(data, len(before), len(items))
    array = StringArray(data, starts)
    assert array.tolist() == [item.decode("utf-8", "surrogateescape") for item in items]
    assert [array.raw(i) for i in range(len(items))] == items
    assert starts[-1] == len(before) + len(chain)
    if cut < len(chain):
        with pytest.raises(StringArrayError):
            index_strings(data[: len(before) + cut], len(before), len(items))
