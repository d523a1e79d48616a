"""`ikpy quantize --prune-layers`: models without some of their blocks."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import ikpy
from ikpy.cli.quantize import run
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import registry
from ikpy.tools.quantize_files import output_files
from ikpy.tools.quantize_job import job_digest
from ikpy.tools.quantize_plan import QuantizeOptions, make_plan
from tests.cpu.quantize.quantize_models import MODEL, types_of

N_BLOCKS = 4
COLUMNS, ROWS = 256, 8


def write_blocks(path, *, limit=None, arch="llama", **values):
    """A model of N_BLOCKS blocks whose values differ; ``values`` are integers, or lists, of its architecture."""
    rng = np.random.default_rng(3)
    with GGUFWriter(path, split_max_tensors=limit) as writer:
        writer.add("general.architecture", GGUFValueType.STRING, arch)
        writer.add(f"{arch}.block_count", GGUFValueType.UINT32, N_BLOCKS)
        for key, value in values.items():
            name = f"{arch}.{key.replace('__', '.')}"
            if isinstance(value, list):
                kind = GGUFValueType.BOOL if isinstance(value[0], bool) else GGUFValueType.INT32
                writer.add_array(name, kind, value)
            else:
                writer.add(name, GGUFValueType.UINT32, value)
        names = ["token_embd.weight"]
        for block in range(N_BLOCKS):
            names += [f"blk.{block}.attn_norm.weight", f"blk.{block}.ffn_up.weight", f"blk.{block}.ffn_down.weight"]
        for name in names:
            writer.add_tensor(name, (COLUMNS,) if "norm" in name else (COLUMNS, ROWS), 0)
        for name in names:
            shape = COLUMNS if "norm" in name else (ROWS, COLUMNS)
            writer.write(name, rng.standard_normal(shape).astype(np.float32))


def write_imatrix(path):
    """Importance values that differ from block to block."""
    rng = np.random.default_rng(4)
    names = [f"blk.{block}.{kind}.weight" for block in range(N_BLOCKS) for kind in ("ffn_up", "ffn_down")]
    data = struct.pack("<i", len(names))
    for name in names:
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, COLUMNS)
        data += rng.gamma(0.3, 1.0, COLUMNS).astype("<f4").tobytes()
    path.write_bytes(data)


def data_of(path):
    """Bytes of every tensor by name."""
    with GGUFFile.open(path) as file:
        return {name: file.data(info).tobytes() for name, info in file.tensors.items()}


@pytest.mark.parametrize(
    ("options", "ftype"), [([], "COPY"), (["--pure"], "IQ2_K"), (["--custom-q", "ffn=iq3_k"], "Q4_0")]
)
def test_blocks_keep_their_values_and_importances(tmp_path, options, ftype):
    model, imatrix, whole, pruned = (tmp_path / name for name in ("in.gguf", "i.dat", "whole.gguf", "pruned.gguf"))
    write_blocks(model)
    write_imatrix(imatrix)
    common = ["--imatrix", str(imatrix), *options]
    assert run([*common, str(model), str(whole), ftype]) == 0
    assert run([*common, "--prune-layers", "0,2", str(model), str(pruned), ftype]) == 0
    before, after = data_of(whole), data_of(pruned)
    assert len(after) == len(before) - 2 * 3
    assert after["token_embd.weight"] == before["token_embd.weight"]
    for new, old in ((0, 1), (1, 3)):
        for kind in ("attn_norm", "ffn_up", "ffn_down"):
            assert after[f"blk.{new}.{kind}.weight"] == before[f"blk.{old}.{kind}.weight"], (new, kind)
    with GGUFFile.open(pruned) as file:
        assert file.get("llama.block_count") == 2


def test_metadata_of_the_blocks(tmp_path):
    model, pruned = tmp_path / "in.gguf", tmp_path / "pruned.gguf"
    write_blocks(
        model,
        leading_dense_block_count=2,
        nextn_predict_layers=1,
        attention__head_count_kv=[1, 2, 3, 4],
        attention__sliding_window_pattern=[True, False, False, True],
        rope__dimension_sections=[5, 6, 7, 8],
        other=[1, 2, 3],
    )
    assert run(["--prune-layers", "1", "--prune-layers", "3", str(model), str(pruned), "COPY"]) == 0
    with GGUFFile.open(pruned) as file:
        values = {key.removeprefix("llama."): value for key, value in file.metadata.items()}
        assert file.value_type("llama.block_count") is GGUFValueType.UINT32
        assert file.stored_metadata.entry("llama.attention.head_count_kv").element_type is GGUFValueType.INT32
        assert (values["block_count"], values["leading_dense_block_count"], values["nextn_predict_layers"]) == (2, 1, 0)
        assert values["attention.head_count_kv"].tolist() == [1, 3]
        assert values["attention.sliding_window_pattern"].tolist() == [True, False]
        assert values["rope.dimension_sections"].tolist() == [5, 6, 7, 8]
        assert values["other"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("arch", "values", "pruned", "moved"),
    [
        ("gpt-oss", {}, "1", "modulo 2: 2 of 3 kept blocks (from 2 on)"),
        ("gpt-oss", {}, "1,2", ""),
        ("gpt-oss", {}, "3", ""),
        ("cohere2", {}, "2,3", ""),
        ("cohere2", {}, "0", "modulo 4: 3 of 3 kept blocks (from 1 on)"),
        ("llama", {"interleave_moe_layer_step": 2}, "0", "modulo 2: 3 of 3 kept blocks (from 1 on)"),
        ("llama", {"interleave_moe_layer_step": 1}, "0", ""),
        ("llama", {"attention__sliding_window_pattern": [True, False, True, False]}, "0", ""),
    ],
)
def test_blocks_that_get_a_place_of_another_kind(tmp_path, capfd, arch, values, pruned, moved):
    write_blocks(tmp_path / "in.gguf", arch=arch, **values)
    assert run(["--prune-layers", pruned, "--dry-run", str(tmp_path / "in.gguf"), "out.gguf", "COPY"]) == 0
    err = capfd.readouterr().err
    assert (f"WARNING: --prune-layers: what a block of {arch} is depends on its number {moved}" in err) == bool(moved)
    assert ("WARNING" in err) == bool(moved)


def test_rules_see_the_new_numbers(tmp_path, capfd):
    model, pruned = tmp_path / "in.gguf", tmp_path / "pruned.gguf"
    write_blocks(model)
    options = ["--prune-layers", "0", "--custom-q", r"blk\.2\.ffn_up=q8_0,blk\.3=q8_0"]
    assert run([*options, str(model), str(pruned), "Q5_K_S"]) == 0
    err = capfd.readouterr().err
    assert types_of(pruned)["blk.2.ffn_up.weight"] == "q8_0"
    assert "leaving out 3 tensors in pruned blocks" in err
    assert "[  10/  10]" in err
    assert "11/  " not in err
    # Block 3 of the model is block 2 of the output.
    assert any(line.startswith("WARNING") and r"blk\.3" in line for line in err.splitlines())


def test_split_models_and_repacking(tmp_path):
    write_blocks(tmp_path / "in", limit=4)
    first = str(tmp_path / "in-00001-of-00004.gguf")
    assert run(["--prune-layers", "1,2", "--keep-split", first, str(tmp_path / "out"), "Q4_0"]) == 0
    types = types_of(tmp_path / "out-00001-of-00004.gguf")
    assert [name for name in types if "ffn_up" in name] == ["blk.0.ffn_up.weight", "blk.1.ffn_up.weight"]
    repacked = tmp_path / "repacked.gguf"
    joined = str(tmp_path / "out-00001-of-00004.gguf")
    assert run(["--prune-layers", "0", "--repack", joined, str(repacked), "Q4_0_R8"]) == 0
    assert types_of(repacked)["blk.0.ffn_up.weight"] == "q4_0_r8"
    with GGUFFile.open(repacked) as file:
        assert file.get("llama.block_count") == 1
    # Interleaved already: blocks go all the same.
    assert run(["--prune-layers", "1", "--repack", joined, str(repacked), "Q4_0_R8", "--repack-pattern", "none"]) == 0
    assert types_of(repacked)["blk.0.ffn_up.weight"] == "q4_0"


def test_pruned_model_runs(tmp_path):
    pruned = tmp_path / "pruned.gguf"
    with GGUFFile.open(MODEL) as file:
        arch = file.get("general.architecture")
        n, dense = file.get(f"{arch}.block_count"), file.get(f"{arch}.leading_dense_block_count")
    assert run(["--prune-layers", str(n - 1), str(MODEL), str(pruned), "COPY"]) == 0
    model = ikpy.Model.load(str(pruned))
    assert model.hparams.n_layer == n - 1
    with GGUFFile.open(pruned) as file:
        assert file.get(f"{arch}.leading_dense_block_count") == dense
    context = ikpy.Context(model, ikpy.ContextParams(n_ctx=64))
    logits = context.decode(ikpy.Batch.single([1, 2, 3], logits="all"))
    assert np.isfinite(logits).all()


def test_other_blocks_are_another_job(tmp_path):
    """Outputs without block 1 and without block 2 have the same names, sizes and keys."""
    write_blocks(tmp_path / "in.gguf")
    digests = set()
    with GGUFFile.open(tmp_path / "in.gguf") as file:
        for block in (1, 2):
            options = QuantizeOptions(registry.ftype_by_name("Q4_0"), prune_layers=frozenset([block]))
            files = output_files(file, str(tmp_path / "out.gguf"), options, make_plan(file, options))
            digests.add(job_digest(file, files, symmetric_q4_0=False))
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("4", "--prune-layers: there is no block 4; the model has blocks 0 to 3"),
        ("0,1,2,3", "--prune-layers: no block would be left"),
        ("1,x", "--prune-layers: 'x' is no number of a block"),
        ("-1", "--prune-layers: '-1' is no number of a block"),
        ("", "--prune-layers: '' is no number of a block"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--repack"]])
def test_wrong_blocks(tmp_path, capfd, value, message, options):
    write_blocks(tmp_path / "in.gguf")
    arguments = ["--prune-layers", value, *options, str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_0"]
    assert run(arguments) == 1
    assert message in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]
