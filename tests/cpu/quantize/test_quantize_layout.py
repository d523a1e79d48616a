"""How `ikpy quantize` reads and writes: repacking, shards, memory, threads, damaged files."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from ikpy._native import core
from ikpy.cli.quantize import run
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import dequantize, registry
from ikpy.tools import tensor_convert
from ikpy.tools.tensor_convert import convert_rows
from tests.cpu.quantize.quantize_models import MODEL, small_tensors, types_of, write_model
from tests.shared import ROOT


@pytest.fixture
def tensors():
    return small_tensors()


def test_repack_keeps_every_value(tmp_path, monkeypatch, capfd):
    """The bundled model in IQ4_K: types change, decoded values do not; a pattern limits it; splits stay split."""
    plain, packed, some = (str(tmp_path / f"{name}.gguf") for name in ("plain", "packed", "some"))
    assert run([str(MODEL), plain, "IQ4_K"]) == 0
    assert run(["--repack", plain, packed, "IQ4_K_R4"]) == 0
    assert run(["--repack", "--repack-pattern", "attn_q,ffn_down_exps", plain, some, "IQ4_K_R4"]) == 0
    changed = {name for name, kind in types_of(some).items() if kind.endswith("_r4")}
    assert changed == {
        name for name in types_of(plain) if "attn_q_a.w" in name or "attn_q_b.w" in name or "ffn_down_exps" in name
    }
    with GGUFFile.open(plain) as a, GGUFFile.open(packed) as b:
        assert sum(registry.by_id(info.type_id).interleave > 1 for info in b.tensors.values()) > 30
        for name, info in a.tensors.items():
            other = b.tensors[name]
            first = dequantize(a.data(info), info.type_id, info.shape)
            second = dequantize(b.data(other), other.type_id, other.shape)
            assert np.array_equal(first, second), name


def test_partial_requant_of_shards(tmp_path, tensors, capfd):
    """Shards that exist stay; the missing one is made."""
    write_model(tmp_path / "in", tensors, limit=1)
    options = ["--keep-split", str(tmp_path / "in-00001-of-00003.gguf"), str(tmp_path / "out"), "Q8_0"]
    assert run(options) == 0
    whole = (tmp_path / "out-00002-of-00003.gguf").read_bytes()
    (tmp_path / "out-00002-of-00003.gguf").unlink()
    (tmp_path / "out-00003-of-00003.gguf").write_bytes(b"made before")
    capfd.readouterr()
    assert run(["--partial-requant", *options]) == 0
    err = capfd.readouterr().err
    assert f"split file {tmp_path}/out-00001-of-00003.gguf exists, skipping" in err
    assert (tmp_path / "out-00002-of-00003.gguf").read_bytes() == whole
    assert (tmp_path / "out-00003-of-00003.gguf").read_bytes() == b"made before"
    assert run(["--keep-split", options[1], str(tmp_path / "in"), "Q8_0"]) == 1
    assert "is the input" in capfd.readouterr().err


MEMORY_SCRIPT = """
import resource, sys
from ikpy.cli.quantize import run
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small, big, out, *options = sys.argv[1:]
assert run([*options, small, out, "Q8_0", "2"]) == 0
before = peak()
assert run([*options, big, out, "Q8_0", "2"]) == 0
print("peak", before, peak())
"""


@pytest.mark.parametrize("options", [["--pure"], ["--repack"]])
@pytest.mark.parametrize("experts", [1, 16])
def test_memory_does_not_grow_with_the_model(tmp_path, options, experts):
    """512 MiB in BF16, 408 MiB in Q8_0 to repack, in many tensors or one: memory grows by less than 160 MiB."""
    kind = "q8_0" if options == ["--repack"] else "bf16"
    for name, count in (("small", 1), ("big", (16 if kind == "bf16" else 24) // experts)):
        writer = GGUFWriter(tmp_path / f"{name}.gguf")
        writer.add("general.architecture", GGUFValueType.STRING, "llama")
        writer.add("llama.block_count", GGUFValueType.UINT32, count)
        for i in range(count):
            shape = (4096, 4096, experts) if name == "big" else (4096, 64, 1)
            writer.add_tensor(f"blk.{i}.ffn_up_exps.weight", shape, registry.by_name(kind).id)
        (layout,) = writer.plan()
        with open(layout.path, "wb") as file:
            file.write(layout.header)
            file.truncate(layout.nbytes)  # zeros that take no disk space
    paths = [str(tmp_path / name) for name in ("small.gguf", "big.gguf", "out.gguf")]
    command = [sys.executable, "-c", MEMORY_SCRIPT, *paths, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-800:]
    before, after = map(int, done.stdout.split("peak ")[1].split())
    print(f"{options}: {after - before >> 10} MiB above the start")
    assert after - before < 160 << 10


def test_truncated_input_is_refused(tmp_path, tensors, capfd):
    write_model(tmp_path / "in.gguf", tensors)
    whole = (tmp_path / "in.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    assert run([str(tmp_path / "cut.gguf"), str(tmp_path / "out.gguf"), "Q8_0"]) == 1
    assert "failed to quantize" in capfd.readouterr().err
    with pytest.raises(FileFormatError):
        GGUFFile.open(tmp_path / "cut.gguf")


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0_r8"])
def test_rows_read_by_several_threads(kind, monkeypatch):
    """Same bytes, and the first bad row is named, however the rows are shared out."""
    rng = np.random.default_rng(6)
    row = registry.by_name(kind)
    values = rng.standard_normal((176, 256)).astype(np.float32)
    if kind == "f32":
        data = values.view(np.uint8).reshape(-1)
    elif kind == "f16":
        data = values.astype(np.float16).view(np.uint8).reshape(-1)
    else:
        data = np.asarray(core.quantize(values, row.id, None, 1))
    one = np.concatenate(list(convert_rows(data, kind, "q6_K", (256, 176), n_threads=1)))
    monkeypatch.setattr(tensor_convert, "_PART_ELEMENTS", 1024)
    for n_threads in (2, 5, 16):
        several = np.concatenate(list(convert_rows(data, kind, "q6_K", (256, 176), n_threads=n_threads)))
        assert np.array_equal(one, several), n_threads
    if kind == "f32":
        values[[23, 150], 9] = np.nan
        with pytest.raises(FileFormatError, match="row 23 of tensor x contains NaN"):
            list(convert_rows(values.view(np.uint8).reshape(-1), kind, "q6_K", (256, 176), name="x", n_threads=7))


def test_conversion_holds_one_piece_of_a_tensor():
    """Memory is bounded by a piece of rows, not by the tensor: 128 MiB of F16 would be 256 MiB of floats."""
    rows, ne0 = 65536, 1024
    data = np.zeros((rows, ne0), np.float16).reshape(-1).view(np.uint8)
    tracemalloc.start()
    try:
        nbytes = sum(len(piece) for piece in convert_rows(data, "f16", "q8_0", (ne0, rows), n_threads=1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert nbytes == rows * ne0 // 32 * 34
    assert peak < 64 << 20, f"{peak >> 20} MiB held at once"
