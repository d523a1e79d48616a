"""GGUF reader: values, tensors, split files, clear errors."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from ikpy.errors import FileFormatError, UnsupportedError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType as T
from tests.cpu.gguf import gguf_files as made

WORDS = ["", "a", "Ġthe", "x" * 300, "\udcff\udcfe", "nul\0inside", ""]


@pytest.fixture
def put(tmp_path: Path):
    def write(content: bytes, name: str = "model.gguf") -> str:
        path = tmp_path / name
        path.write_bytes(content)
        return str(path)

    return write


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(put, version):
    with GGUFFile.open(put(made.sample(version=version))) as file:
        assert file.version == version
        assert file.alignment == 32
        found = {
            key: file.metadata[key]
            for key in file.metadata
            if file.element_type(key) is None and key != "general.architecture"
        }
        assert found == {
            "u8": 200,
            "i8": -5,
            "u16": 60000,
            "i16": -30000,
            "u32": 4000000000,
            "i32": -2000000000,
            "f32": 0.5,
            "bool": True,
            "u64": 2**63 + 1,
            "i64": -(2**62),
            "f64": 0.1,
        }
        assert found["bool"] is True
        assert all(file.value_type(key).label == key for key in found)
        assert file.get("general.architecture") == "llama"
        np.testing.assert_array_equal(file.get("numbers"), np.array([1, -2, 3], np.int32))
        assert file.get("numbers").dtype == np.int32
        assert file.get("halves").dtype == np.float32
        assert file.get("flags").dtype == np.bool_
        assert not file.get("numbers").flags.writeable
        assert file.element_type("flags") is T.BOOL
        assert list(file.get("none")) == []
        assert file.get("absent", 7) == 7


def test_string_arrays_in_every_way_of_reading(put):
    with GGUFFile.open(put(made.sample())) as file:
        words = file.get("words")
        assert file.value_type("words") is T.ARRAY
        assert file.element_type("words") is T.STRING
        assert list(words) == words.tolist() == [words[i] for i in range(7)] == words[:] == WORDS
        assert words[-1] == "" and words[-3] == WORDS[-3]
        assert words.raw(4) == b"\xff\xfe"
        assert [words.raw(i) for i in range(7)] == [w.encode("utf-8", "surrogateescape") for w in WORDS]
        with pytest.raises(IndexError):
            words[7]


def test_tensors_are_views_of_the_file(put):
    path = put(made.sample())
    content = np.fromfile(path, np.uint8)
    with GGUFFile.open(path) as file:
        assert list(file.tensors) == ["first", "second"]
        second = file.tensors["second"]
        assert (second.shape, second.type_id, second.nbytes, second.shard) == ((32, 2), 8, 68, 0)
        view = file.data(second)
        np.testing.assert_array_equal(view, content[second.offset : second.offset + 68])
        assert view.tobytes() == bytes(range(100, 168))
        assert not view.flags.writeable and not view.flags.owndata
        assert file.address(second) == view.ctypes.data
        assert file.address(second) - file.address(file.tensors["first"]) == 32
        assert file.file_size == content.size
    assert view[0] == 100, "views outlive the file"


@pytest.mark.parametrize("use_mmap", [True, False])
def test_released_tensors_can_be_read_again(put, use_mmap):
    path = put(made.sample())
    with GGUFFile.open(path, use_mmap=use_mmap) as file:
        before = {name: file.data(info).tobytes() for name, info in file.tensors.items()}
        for info in file.tensors.values():
            file.release(info)
        assert {name: file.data(info).tobytes() for name, info in file.tensors.items()} == before


def test_scalar_tensor_has_one_element(put):
    path = put(made.build([], [made.tensor("s", (), 0, 0)], bytes(4)))
    with GGUFFile.open(path) as file:
        assert file.tensors["s"].shape == (1,)


def test_require(put):
    with GGUFFile.open(put(made.sample())) as file:
        assert file.require("u32", T.UINT32) == 4000000000
        assert file.require("u16", (T.UINT32, T.UINT16)) == 60000
        assert len(file.require("words", T.ARRAY, T.STRING)) == 7
        with pytest.raises(FileFormatError, match=r"key not found in model: llama\.block_count"):
            file.require("llama.block_count", T.UINT32)
        with pytest.raises(FileFormatError, match=r"key u16 has wrong type u16 but expected type u32$"):
            file.require("u16", T.UINT32)
        with pytest.raises(FileFormatError, match=r"wrong type arr\[i32\] but expected type arr\[str\]"):
            file.require("numbers", T.ARRAY, T.STRING)


def _one(entries=(), tensors=(), data=bytes(256), **changes) -> bytes:
    return made.build(list(entries), list(tensors), data, **changes)


MALFORMED = {
    "empty": (b"", "is empty"),
    "short": (b"GGUF\3\0", "only 6 bytes long"),
    "magic": (_one(magic=b"Too "), "not a GGUF file: it starts with b'Too '"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
    "ggml": (_one(magic=b"tjgg"), "before GGUF"),
    "safetensors": (struct.pack("<Q", 90) + b'{"model.embed_tokens.weight"', "but safetensors; ikpy convert makes"),
    "imatrix": (struct.pack("<ii", 41, 21) + b"blk.0.attn_q_a.weight", "an importance matrix; .* with --imatrix"),
    "pytorch": (b"PK\3\4" + bytes(26), "a checkpoint of PyTorch"),
    "web page": (b"<!doctype html><html><head>", "but a web page"),
    "hole": (bytes(64), "begins with zeros; its download may be unfinished"),
    "tensor count": (_one(tensor_count=2**60), "more than a file of"),
    "key count": (_one(entry_count=2**63), "more than a file of"),
    "key length": (_one([struct.pack("<QIB", 2**64 - 1, 0, 0)]), "only .* are left"),
    "empty key": (_one([made.scalar("", made.U8, 1)]), "metadata key 0 is empty"),
    "endless key": (_one([made.scalar("k" * 65536, made.U8, 1)]), "65536 bytes, more than the 65535 allowed"),
    "endless name": (
        _one([], [made.tensor("blk." + "9" * 1020, (8,), 0, 0)]),
        "1024 bytes, more than the 1023 allowed",
    ),
    "key not utf-8": (_one([made.scalar(b"\xff\xfe", made.U8, 1)]), "not valid UTF-8"),
    "key twice": (_one([made.scalar("k", made.U8, 1)] * 2), "'k' appears twice"),
    "value type": (_one([made.string("k") + struct.pack("<IQ", 13, 0)]), "'k' has unknown value type 13"),
    "bool": (_one([made.scalar("k", made.BOOL, 2)]), "bool of value 2"),
    "bools": (_one([made.array("k", made.BOOL, [0, 2])]), "bools other than"),
    "nested array": (_one([made.array("k", made.ARR, [], 1)]), "array of arrays"),
    "element type": (
        _one([made.string("k") + struct.pack("<IIQ", made.ARR, 99, 0)]),
        "unknown value type 99",
    ),
    "array count": (_one([made.array("k", made.U64, [], 2**61)]), "only .* are left"),
    "string count": (_one([made.array("k", made.STR, [], 2**40)]), "more than the 16777216 allowed"),
    "strings run out": (
        _one([made.array("k", made.STR, ["a"], 100)], data=b""),
        "string .* runs past the end",
    ),
    "string length": (_one([made.string("k") + struct.pack("<IIQQ", 9, 8, 1, 2**64 - 9)]), "string 0 of 1"),
    "value length": (_one([made.string("k") + struct.pack("<IQ", 8, 2**63)]), "only .* are left"),
    "alignment 0": (_one([made.scalar("general.alignment", made.U32, 0)]), "0, not a power of two"),
    "alignment 24": (_one([made.scalar("general.alignment", made.U32, 24)]), "24, not a power of two"),
    "alignment 2^31": (
        _one([made.scalar("general.alignment", made.U32, 2**31)]),
        "2147483648, more than the 16777216 allowed",
    ),
    "alignment type": (
        _one([made.scalar("general.alignment", made.U64, 32)]),
        "wrong type u64 but expected type u32",
    ),
    "dimensions": (_one([], [made.tensor("t", (1, 1, 1, 1, 1), 0, 0)]), "5 dimensions"),
    "zero dimension": (_one([], [made.tensor("t", (8, 0), 0, 0)]), r"impossible shape \[8, 0\]"),
    "overflow": (_one([], [made.tensor("t", (2**32, 2**32), 0, 0)]), "impossible shape"),
    "tensor twice": (
        _one([], [made.tensor("t", (8,), 0, 0), made.tensor("t", (8,), 0, 32)]),
        "tensor 't' is duplicated",
    ),
    "name not utf-8": (_one([], [made.tensor(b"\xc3", (8,), 0, 0)]), "name of tensor 0 .* not valid UTF-8"),
    "block": (_one([], [made.tensor("t", (33,), 8, 0)]), "'t': row length 33 is not a multiple of 32"),
    "row group": (_one([], [made.tensor("t", (32, 3), 202, 0)]), "'t': 3 rows are not a multiple of 8"),
    "misaligned": (_one([], [made.tensor("t", (8,), 0, 4)]), "not a multiple of the alignment 32"),
    "past the end": (_one([], [made.tensor("t", (8,), 0, 256)]), "'t' needs bytes .* truncated"),
    "huge offset": (_one([], [made.tensor("t", (8,), 0, 2**64 - 32)]), "impossible offset"),
    "overlap": (
        _one([], [made.tensor("a", (16,), 0, 0), made.tensor("b", (8,), 0, 32)]),
        "tensors 'a' and 'b' overlap",
    ),
    "same place": (
        _one([], [made.tensor("b", (8,), 0, 32), made.tensor("a", (8,), 0, 32)]),
        "tensors 'b' and 'a' overlap",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_get_one_clear_line(put, case):
    content, message = MALFORMED[case]
    path = put(content)
    with pytest.raises(FileFormatError, match=message) as caught:
        GGUFFile.open(path)
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


def test_every_truncation_is_an_error(put):
    content = made.sample()
    for length in range(len(content) - 28):
        with pytest.raises(FileFormatError):
            GGUFFile.open(put(content[:length]))
    GGUFFile.open(put(content[:-28])).close()


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (1, "no longer supported"),
        (0x03000000, "big-endian GGUF files .* gguf-convert-endian FILE little"),
        (4, "version 4 is not supported"),
        (0, "version 0"),
    ],
)
def test_other_versions_are_refused(put, version, message):
    with pytest.raises(UnsupportedError, match=message):
        GGUFFile.open(put(made.sample(version=version)))


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UsageError, match=r"none\.gguf: cannot open model: does not exist"):
        GGUFFile.open(tmp_path / "none.gguf")
    with pytest.raises(UsageError, match=r"is a folder without \.gguf files"):
        GGUFFile.open(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UsageError, match="is a checkpoint, not a GGUF file; ikpy convert"):
        GGUFFile.open(tmp_path)
    for i in range(6):
        (tmp_path / f"{i}.gguf").touch()
    with pytest.raises(UsageError, match=r"is a folder; give one of its files: 0\.gguf, .*4\.gguf, \.\.\.$"):
        GGUFFile.open(tmp_path)
    with pytest.raises(UsageError, match="is not a regular file"):
        GGUFFile.open("/dev/null")


def test_unknown_tensor_type_is_listed_but_not_loaded(put):
    path = put(_one([], [made.tensor("odd", (8,), 9999, 0), made.tensor("t", (8,), 0, 32)]))
    with pytest.raises(UnsupportedError, match="tensor 'odd' has unknown type id 9999"):
        GGUFFile.open(path)
    with GGUFFile.open(path, header_only=True) as file:
        odd = file.tensors["odd"]
        assert odd.type_id == 9999 and not odd.has_known_type
        assert file.data(file.tensors["t"]).size == 32
        with pytest.raises(UnsupportedError, match="unknown type id 9999"):
            file.data(odd)


def test_header_only(put):
    content = made.sample()
    path = put(content[:-128])
    with pytest.raises(FileFormatError, match="truncated"):
        GGUFFile.open(path)
    with GGUFFile.open(path, header_only=True) as file:
        assert file.tensors["second"].nbytes == 68
        with pytest.raises(FileFormatError, match="data of tensor 'second' is not in the file"):
            file.data(file.tensors["second"])


def test_sparse_file_of_a_terabyte_opens(tmp_path):
    path = tmp_path / "sparse.gguf"
    header = _one([], [made.tensor("big", (2**20, 2**18), 0, 0)], b"")
    with open(path, "wb") as handle:
        handle.write(header)
        try:
            handle.truncate(len(header) + 2**40)
        except OSError:
            pytest.skip("the file system has no sparse files of a terabyte")
    with GGUFFile.open(path) as file:
        assert file.data(file.tensors["big"]).size == 2**40


# split files


def _shard(number: int, count: int, total: int, name: str, **changes) -> bytes:
    entries = {
        "split.no": made.scalar("split.no", made.U16, number),
        "split.count": made.scalar("split.count", made.U16, count),
        "split.tensors.count": made.scalar("split.tensors.count", made.I32, total),
    } | changes
    content = [made.scalar("general.architecture", made.STR, f"shard{number}"), *entries.values()]
    return _one(content, [made.tensor(name, (8,), 0, 0)], bytes([number] * 32))


def _put_set(put, *contents: bytes) -> str:
    count = len(contents)
    paths = [put(content, f"m-{i + 1:05d}-of-{count:05d}.gguf") for i, content in enumerate(contents)]
    return paths[0]


def test_split_files_are_found_from_the_first(put):
    first = _put_set(put, *(_shard(i, 3, 3, f"t{i}") for i in range(3)))
    with GGUFFile.open(first) as file:
        assert list(file.tensors) == ["t0", "t1", "t2"]
        assert file.get("general.architecture") == "shard0"
        for i in range(3):
            assert file.tensors[f"t{i}"].shard == i
            assert file.data(file.tensors[f"t{i}"]).tobytes() == bytes([i] * 32)
        assert file.file_size == sum(shard.file_size for shard in file.shards)
    with GGUFFile.open(first.replace("00001-of", "00002-of"), follow_splits=False) as file:
        assert list(file.tensors) == ["t1"]


def test_split_errors(put):
    first = _put_set(put, _shard(0, 2, 2, "a"), _shard(1, 2, 2, "b"))
    second = first.replace("00001-of", "00002-of")
    with pytest.raises(FileFormatError, match="illegal split file: 1, model must be loaded with the first split"):
        GGUFFile.open(second)
    with pytest.raises(FileFormatError, match="invalid split file"):
        GGUFFile.open(put(_shard(0, 2, 2, "a"), "renamed.gguf"))
    with pytest.raises(FileFormatError, match="tensor 'a' is duplicated"):
        GGUFFile.open(_put_set(put, _shard(0, 2, 2, "a"), _shard(1, 2, 2, "a")))
    with pytest.raises(FileFormatError, match="corrupted model: 5 tensors expected but 2 found"):
        GGUFFile.open(_put_set(put, _shard(0, 2, 5, "a"), _shard(1, 2, 5, "b")))
    with pytest.raises(FileFormatError, match=r"00002-of-00002\.gguf: this part is of a model of 3 tensors, the first"):
        GGUFFile.open(_put_set(put, _shard(0, 2, 2, "a"), _shard(1, 2, 3, "b")))
    with pytest.raises(FileFormatError, match=r"split\.no is 0 but expected 1"):
        GGUFFile.open(_put_set(put, _shard(0, 2, 2, "a"), _shard(0, 2, 2, "b")))
    with pytest.raises(FileFormatError, match="wrong type u32 but expected type u16"):
        count = {"split.count": made.scalar("split.count", made.U32, 2)}
        GGUFFile.open(_put_set(put, _shard(0, 2, 2, "a", **count), _shard(1, 2, 2, "b")))
    with pytest.raises(FileFormatError, match=r"failed to load GGUF split from .*00002-of-00002"):
        GGUFFile.open(_put_set(put, _shard(0, 2, 2, "a"), b"junk" * 20))
    with pytest.raises(FileFormatError, match=r"no key split\.no, so it is no part of a split model; put all parts"):
        GGUFFile.open(_put_set(put, _shard(0, 2, 2, "a"), made.sample()))
    os.unlink(second)
    message = r"failed to load GGUF split from .*00002-of-00002\.gguf: it does not exist; put all 2 parts .* together$"
    with pytest.raises(FileFormatError, match=message):
        GGUFFile.open(first)


# speed


def test_vocabulary_of_150_000_opens_in_less_than_a_second(put):
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 16, 150_000)
    words = [f"{i:x}".ljust(int(n), "Ġ") for i, n in enumerate(lengths)]
    merges = [f"{word} {i}" for i, word in enumerate(words)]
    entries = [
        made.array("tokenizer.ggml.tokens", made.STR, words),
        made.array("tokenizer.ggml.scores", made.F32, [0.0] * len(words)),
        made.array("tokenizer.ggml.merges", made.STR, merges),
        made.scalar("last", made.U32, 5),
    ]
    path = put(_one(entries))
    start = time.process_time()
    with GGUFFile.open(path) as file:
        opened = time.process_time() - start
        read_words, read_merges = (
            file.get("tokenizer.ggml.tokens").tolist(),
            list(file.get("tokenizer.ggml.merges")),
        )
        decoded = time.process_time() - start
        assert file.get("last") == 5
    assert read_words == words
    assert read_merges == merges
    assert opened < 0.25, f"opening took {opened:.3f} s"
    assert decoded < 1, f"opening and decoding took {decoded:.3f} s"


@pytest.mark.parametrize("words", [[""] * 200_000, ["", "ab"] * 100_000, ["x" * 256, "y"] * 20_000])
def test_unusual_string_arrays_stay_fast(put, words):
    path = put(_one([made.array("k", made.STR, words)]))
    start = time.process_time()
    with GGUFFile.open(path) as file:
        opened = time.process_time() - start
        assert file.get("k").tolist() == words
    assert opened < 1, f"opening took {opened:.3f} s"


# real files


def _real_files() -> list[Path]:
    shared = made.shared_folder()
    files = [p for folder in ("models", "public/vocab", "golden/zoo") for p in (shared / folder).glob("*.gguf")]
    if not files:
        pytest.skip(f"no .gguf files under {shared}")
    return sorted(files)


def test_real_files_agree_with_the_gguf_package():
    """Metadata and tensor tables compared item by item with an independent reader (which takes its time)."""
    import gguf

    vocabularies = ("ggml-vocab-llama-spm", "ggml-vocab-bert-bge")
    files = _real_files()
    chosen = [path for path in files if path.stem in vocabularies]
    chosen += [path for path in files if path.parent.name == "zoo"][::4]
    for path in chosen:
        peer = gguf.GGUFReader(path)
        with GGUFFile.open(path) as file:
            keys = [key for key in peer.fields if not key.startswith("GGUF.")]
            assert list(file.metadata) == keys, path
            for key in keys:
                mine = file.metadata[key]
                theirs = peer.fields[key].contents()
                mine = list(mine) if file.value_type(key) is T.ARRAY else mine
                assert mine == theirs, f"{path}: {key}"
            assert len(file.tensors) == len(peer.tensors)
            for info, other in zip(file.tensors.values(), peer.tensors, strict=True):
                expected = (other.name, tuple(int(n) for n in other.shape), int(other.data_offset))
                assert (info.name, info.shape, info.offset) == expected, path
                assert info.nbytes == other.n_bytes, f"{path}: {info.name}"


def test_real_files_open_completely():
    for path in _real_files():
        start = time.process_time()
        with GGUFFile.open(path) as file:
            opened = time.process_time() - start
            for info in file.tensors.values():
                assert file.data(info).size == info.nbytes > 0
            tokens = file.get("tokenizer.ggml.tokens")
            assert [tokens[i] for i in range(len(tokens))] == tokens.tolist(), path
        assert opened < 1, f"{path}: {opened:.3f} s"
