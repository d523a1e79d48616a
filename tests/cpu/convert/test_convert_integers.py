"""`ikpy convert`: integers of compressed-tensors become Q4_0 blocks of the same values, or are decoded exactly."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion, ConvertOptions
from ikpy.convert.weights import Weights
from ikpy.convert.words import e4m3_values
from ikpy.gguf.reader import GGUFFile
from ikpy.quants import dequantize, registry
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import integer_checkpoints as integers
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.test_convert import types
from tests.cpu.convert.test_convert_logits import decoded, logits

UP = "model.layers.1.mlp.up_proj.weight"
"""[96, 64] of the tiny llama."""


def values(file: GGUFFile, name: str) -> np.ndarray:
    """Values f32 of a tensor, slowest dimension first."""
    info = file.tensors[name]
    return np.asarray(dequantize(file.data(info), info.type_id, info.shape)).reshape(tuple(reversed(info.shape)))


def with_up(tmp_path: Path, config: dict[str, Any], **parts: integers.Entry) -> Path:
    """The tiny llama with other tensors for UP: parts by the ending of their names."""
    folder = made.copy("llama", tmp_path)

    def change(tensors: made.Tensors) -> None:
        tensors.pop(UP)
        tensors.update({f"{UP}_{end}" if end else UP: entry for end, entry in parts.items()})

    made.change_tensors(folder, change)
    made.amend(folder, quantization_config=config)
    return folder


@pytest.mark.parametrize("nested", [False, True], ids=["kimi_k2", "kimi_k25"])
def test_experts_of_kimi_k2(nested, tmp_path):
    folder, floats = integers.kimi(tmp_path, nested=nested)
    file = convert(folder, tmp_path, outtype="f32")
    plain = convert(floats, floats.parent, outtype="f32")
    assert file.metadata["general.file_type"] == 2 and file.metadata["general.quantization_version"] == 2
    assert list(file.tensors) == list(plain.tensors)
    found = types(file)
    assert {name for name, kind in found.items() if kind == "q4_0"} == {n for n in found if "_exps.weight" in n}
    for name in file.tensors:
        assert np.array_equal(values(file, name), values(plain, name)), name
    tokens = np.arange(3, 23)
    expected = logits(Path(plain.path), tokens)
    assert np.array_equal(logits(decoded(Path(file.path)), tokens), expected)
    # Products of q4_0 take activations of 8 bits.
    error = np.sqrt(((logits(Path(file.path), tokens) - expected) ** 2).mean() / (expected**2).mean())
    assert error < 0.05, error


SCHEMES = {
    "32": ({}, "q4_0"),
    "64": ({"group_size": 64}, "q4_0"),
    "128, more than there are": ({"group_size": 128}, "q4_0"),
    "channel": ({"strategy": "channel", "group_size": None}, "q4_0"),
    "channel by size": ({"strategy": None, "group_size": -1}, "q4_0"),
    "tensor": ({"strategy": "tensor", "group_size": None}, "q4_0"),
    "weights ordered": ({"actorder": "weight"}, "q4_0"),
    "16": ({"group_size": 16}, "f32"),
    "24": ({"group_size": 24}, "f32"),
    "8 bits": ({"num_bits": 8}, "f32"),
    "8 bits of a channel": ({"num_bits": 8, "strategy": "channel", "group_size": None}, "f32"),
    "asymmetric": ({"symmetric": False}, "f32"),
    "asymmetric 24": ({"symmetric": False, "group_size": 24}, "f32"),
    "asymmetric channel": ({"symmetric": False, "strategy": "channel", "group_size": None}, "f32"),
    "asymmetric 8 bits": ({"symmetric": False, "num_bits": 8}, "f32"),
    "activation order": ({"actorder": "group"}, "f32"),
    "both": ({"actorder": "group", "symmetric": False, "group_size": 8}, "f32"),
}


@pytest.mark.parametrize("scale_type", [np.float32, np.float16])
@pytest.mark.parametrize("case", SCHEMES)
def test_schemes(case, scale_type, tmp_path):
    given, kind = SCHEMES[case]
    config = integers.config(**given)
    args = config["config_groups"]["group_0"]["weights"]
    random, bits, size = np.random.default_rng(4), args["num_bits"], args["group_size"]
    codes = random.integers(-(1 << bits - 1), 1 << bits - 1, (96, 64))
    shape = (1, 1) if args["strategy"] == "tensor" else (96, -(-64 // size) if size and size > 0 else 1)
    scales = integers.random_bf16(random, shape)
    groups = np.arange(64) // (size if size and size > 0 else 64)
    zeros = np.zeros(shape, np.int64)
    parts = {"packed": integers.packed(codes, bits), "shape": integers.plain(np.array([96, 64], np.int32))}
    parts["scale"] = integers.plain(scales.astype(scale_type))
    if not args["symmetric"]:
        zeros = random.integers(-4, 4, shape)
        parts["zero_point"] = integers.packed(zeros, bits, axis=0)
    if args["actorder"] == "group":
        groups = random.permutation(groups)
        parts["g_idx"] = integers.plain(groups.astype(np.int32))
    expected = ((codes - zeros[:, groups]) * scales.astype(scale_type)[:, groups].astype(np.float64)).astype(np.float32)
    folder = with_up(tmp_path, config, **parts)
    file = convert(folder, tmp_path, outtype="f32")
    assert types(file)["blk.1.ffn_up.weight"] == kind
    assert np.array_equal(values(file, "blk.1.ffn_up.weight"), expected)
    assert [note for note in Conversion(folder).notes if "integers are decoded" in note] == [] or kind == "f32"
    if not args["symmetric"] and bits == 4 and size in (None, 32) and args["actorder"] is None:
        (tmp_path / "rounded").mkdir()
        rounded = convert(folder, tmp_path / "rounded")
        assert types(rounded)["blk.1.ffn_up.weight"] == "q4_1"
        error = np.abs(values(rounded, "blk.1.ffn_up.weight") - expected) / scales[:, groups]
        assert 0 < error.max() <= 12 / 2048, f"off by {error.max():.5f} steps"


def test_words_that_hold_no_whole_columns(tmp_path):
    """24 columns of 4 bits and 27 of 8, in matrices that other dimensions of a model would have."""
    for bits, columns in ((4, 27), (8, 27), (4, 24)):
        random = np.random.default_rng(bits)
        codes = random.integers(-8, 8, (96, columns))
        folder = made.copy("llama", tmp_path / f"{bits}-{columns}")
        made.change_tensors(
            folder, lambda t, c=codes, b=bits: integers.put(t, UP, c, np.full((96, 1), 0.5, np.float32), b)
        )
        config = integers.config(num_bits=bits, strategy="channel", group_size=None)
        made.amend(folder, quantization_config=config)
        from ikpy.convert.checkpoint import Checkpoint

        weights = Weights(Checkpoint(folder))
        assert weights.shape(UP) == (96, columns) and weights.kind(UP) == "f32"
        assert np.array_equal(weights.load(UP), codes * 0.5)


def test_groups_of_layers_with_schemes_of_their_own(tmp_path):
    """4 bits for one matrix, 8 for another: what is stored says which."""
    folder = made.copy("llama", tmp_path)
    random = np.random.default_rng(5)
    expected = {}

    def change(tensors: made.Tensors) -> None:
        for il, bits in enumerate((4, 8)):
            name, scales = UP.replace(".1.", f".{il}."), integers.random_bf16(random, (96, 2 if bits == 4 else 1))
            expected[il] = integers.put(tensors, name, random.integers(-8, 8, (96, 64)), scales, bits)

    made.change_tensors(folder, change)
    config = integers.config("mixed-precision")
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*layers.1.*"],
        "format": "pack-quantized",
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    }
    made.amend(folder, quantization_config=config)
    file = convert(folder, tmp_path, outtype="f32")
    assert [types(file)[f"blk.{il}.ffn_up.weight"] for il in (0, 1)] == ["q4_0", "f32"]
    for il in (0, 1):
        assert np.array_equal(values(file, f"blk.{il}.ffn_up.weight"), expected[il].astype(np.float32))
    assert [note for note in Conversion(folder).notes if "(8 bits), the first is blk.1.ffn_up.weight" in note]


@pytest.mark.parametrize("scale", [1e-7, 2.0**-17 * 1.5, 1e5, 2.0**-25, 0.0], ids=str)
def test_scales_that_f16_cannot_hold(scale, tmp_path):
    """2^-17 * 1.5 can be held though it is no normal number of f16, and so can 0."""
    folder = made.copy("llama", tmp_path)
    scales = np.full((96, 2), 0.5, np.float32)
    scales[7, 1] = scale
    scales = (scales.view(np.uint32) & 0xFFFF0000).view(np.float32)
    expected = {}
    made.change_tensors(folder, lambda t: expected.update(up=integers.put(t, UP, np.full((96, 64), 3), scales)))
    made.amend(folder, quantization_config=integers.config())
    is_kept = scale in (0.0, 2.0**-17 * 1.5)
    conversion = Conversion(folder, ConvertOptions(outtype="f32"))
    assert ["(scales that f16 cannot hold)" in note for note in conversion.notes] == [True] * (not is_kept)
    file = convert(folder, tmp_path, outtype="f32")
    assert types(file)["blk.1.ffn_up.weight"] == ("q4_0" if is_kept else "f32")
    assert file.metadata["general.file_type"] == (2 if is_kept else 0)
    assert np.array_equal(values(file, "blk.1.ffn_up.weight"), expected["up"].astype(np.float32))


def test_rows_of_queries_and_keys_are_moved_in_blocks(tmp_path):
    folder, floats = made.copy("llama", tmp_path), made.copy("llama", tmp_path / "floats")
    random = np.random.default_rng(6)
    names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkvo"]
    expected: made.Tensors = {}

    def change(tensors: made.Tensors) -> None:
        for name in names:
            rows, columns = tensors[name][1]
            codes, scales = random.integers(-8, 8, (rows, columns)), integers.random_bf16(random, (rows, columns // 32))
            expected[name] = integers.plain(integers.put(tensors, name, codes, scales).astype(np.float32))

    made.change_tensors(folder, change)
    made.change_tensors(floats, lambda tensors: tensors.update(expected))
    made.amend(folder, quantization_config=integers.config())
    file, plain = convert(folder, tmp_path, outtype="f32"), convert(floats, floats.parent, outtype="f32")
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        assert types(file)[f"blk.0.{name}.weight"] == "q4_0"
        assert np.array_equal(values(file, f"blk.0.{name}.weight"), values(plain, f"blk.0.{name}.weight")), name


def test_transposed_matrices_become_floats(tmp_path):
    folder, floats = integers.kimi(tmp_path)
    name, random = "model.layers.0.self_attn.kv_b_proj.weight", np.random.default_rng(7)
    shape = made.read_tensors(folder / "model.safetensors")[name][1]
    codes, scales = random.integers(-8, 8, shape), integers.random_bf16(random, (shape[0], shape[1] // 32))
    expected = {}
    made.change_tensors(folder, lambda t: expected.update(kv=integers.put(t, name, codes, scales).astype(np.float32)))
    made.change_tensors(floats, lambda t: t.update({name: integers.plain(expected["kv"])}))
    assert "1 tensors of integers are decoded and written as bf16 (no whole rows)" in Conversion(folder).notes[-1]
    file, plain = convert(folder, tmp_path, outtype="f32"), convert(floats, floats.parent, outtype="f32")
    for end, kind in (("kv_b", "q4_0"), ("k_b", "f32"), ("v_b", "q4_0")):
        assert types(file)[f"blk.0.attn_{end}.weight"] == kind
        assert np.array_equal(values(file, f"blk.0.attn_{end}.weight"), values(plain, f"blk.0.attn_{end}.weight"))


def test_experts_of_several_types_become_floats(tmp_path):
    folder, floats = integers.kimi(tmp_path)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"

    def change(tensors: made.Tensors) -> None:
        for end in ("packed", "scale", "shape"):
            tensors.pop(f"{name}_{end}")
        tensors[name] = made.read_tensors(floats / "model.safetensors")[name]

    made.change_tensors(folder, change)
    assert "(some experts are no INT4), the first is blk.1.ffn_up_exps.weight" in Conversion(folder).notes[-1]
    file, plain = convert(folder, tmp_path, outtype="f32"), convert(floats, floats.parent, outtype="f32")
    assert types(file)["blk.1.ffn_up_exps.weight"] == "f32" and types(file)["blk.1.ffn_gate_exps.weight"] == "q4_0"
    assert np.array_equal(values(file, "blk.1.ffn_up_exps.weight"), values(plain, "blk.1.ffn_up_exps.weight"))


@pytest.mark.parametrize("scale_shape", [(96,), (96, 1), (1,), (96, 2)], ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_plain_integers_of_8_bits(has_zeros, scale_shape, tmp_path):
    random = np.random.default_rng(8)
    strategy = {1: "tensor", 96: "channel", 192: "group"}[int(np.prod(scale_shape))]
    codes, scales = random.integers(-128, 128, (96, 64)).astype(np.int8), integers.random_bf16(random, scale_shape)
    zeros = random.integers(-9, 9, scale_shape).astype(np.int8) * np.int8(has_zeros)
    parts = {"": integers.plain(codes), "scale": made.bf16(scales)}
    if has_zeros:
        parts["zero_point"] = integers.plain(zeros)
    size = 32 if strategy == "group" else None
    config = integers.config("int-quantized", num_bits=8, strategy=strategy, group_size=size, symmetric=not has_zeros)
    file = convert(with_up(tmp_path, config, **parts), tmp_path, outtype="f32")

    def spread(array: np.ndarray) -> np.ndarray:
        rows = array.reshape(-1, array.size // 96 if array.size > 1 else 1)
        return rows.repeat(64 // rows.shape[1], 1).astype(np.float32)

    assert np.array_equal(values(file, "blk.1.ffn_up.weight"), (codes - spread(zeros)) * spread(scales))


def test_fp8_with_one_scale_per_row_and_other_blocks(tmp_path):
    random = np.random.default_rng(9)
    codes = random.integers(0, 126, (96, 64), np.uint8)
    for shape, strategy in (((96,), {"strategy": "channel"}), ((3, 4), {"strategy": "block"})):
        scales = integers.random_bf16(random, shape)
        weights = {"num_bits": 8, "type": "float", "group_size": None, **strategy}
        if shape == (3, 4):
            weights["block_structure"] = [32, 16]
        config = integers.config("float-quantized", **weights)
        parts = {"": ("F8_E4M3", (96, 64), codes.tobytes()), "scale": integers.plain(scales)}
        target = tmp_path / strategy["strategy"]
        target.mkdir()
        file = convert(with_up(target, config, **parts), target, outtype="f32")
        spread = scales.reshape(96, 1) if shape == (96,) else scales.repeat(32, 0).repeat(16, 1)
        assert np.array_equal(values(file, "blk.1.ffn_up.weight"), e4m3_values()[codes] * spread)


def test_memory_is_that_of_one_expert(tmp_path):
    folder = made.copy("mixtral", tmp_path)
    n, n_expert = 512, 16
    made.amend(folder, hidden_size=n, intermediate_size=n, num_local_experts=n_expert, num_hidden_layers=1, head_dim=16)
    random, block = np.random.default_rng(10), "model.layers.0"
    codes, scales = random.integers(-8, 8, (n, n)), integers.random_bf16(random, (n, n // 32))
    rows = {"self_attn.q_proj": 64, "self_attn.k_proj": 32, "self_attn.v_proj": 32, "block_sparse_moe.gate": n_expert}
    shapes = {f"{block}.{name}": (count, n) for name, count in rows.items()}
    shapes |= {"model.embed_tokens": (384, n), "lm_head": (384, n), f"{block}.self_attn.o_proj": (n, 64)}
    norms = ("model.norm", f"{block}.input_layernorm", f"{block}.post_attention_layernorm")
    shapes |= dict.fromkeys(norms, (n,))
    tensors = {f"{name}.weight": made.bf16(np.ones(shape, np.float32)) for name, shape in shapes.items()}
    integers.put(tensors, "first", codes, scales)
    parts = {end: tensors.pop(f"first_{end}") for end in ("packed", "scale", "shape")}
    for e in range(n_expert):
        for kind in ("w1", "w2", "w3"):
            expert = f"{block}.block_sparse_moe.experts.{e}.{kind}.weight"
            tensors.update({f"{expert}_{end}": entry for end, entry in parts.items()})
    made.write_tensors(folder / "model.safetensors", tensors)
    made.amend(folder, quantization_config=integers.config())
    conversion = Conversion(folder, ConvertOptions(outfile=str(tmp_path / "out.gguf")))
    assert sum(registry.by_name(t.type).id == 2 for t in conversion.tensors) == 3
    tracemalloc.start()
    conversion.write()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20, f"{peak / 2**20:.1f} MiB; a stack in f32 has 16"
