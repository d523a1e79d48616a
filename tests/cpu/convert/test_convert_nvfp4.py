"""`ikpy convert`: NVFP4 of ModelOpt and compressed-tensors becomes blocks with factors, FP8 of ModelOpt floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.convert import Conversion
from ikpy.convert.words import e4m3_values
from ikpy.errors import IkpyError, UnsupportedError
from ikpy.gguf.reader import GGUFFile
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.grouped_checkpoints import Nvfp4, checkpoint, modelopt_config
from tests.cpu.convert.integer_checkpoints import plain
from tests.cpu.convert.test_convert import types
from tests.cpu.convert.test_convert_integers import values
from tests.cpu.convert.test_convert_logits import logits

UP, UP_OUT = "model.layers.1.mlp.up_proj", "blk.1.ffn_up.weight"
Q, Q_OUT = "model.layers.0.self_attn.q_proj", "blk.0.attn_q.weight"


def scaled(file: GGUFFile, name: str) -> np.ndarray:
    """A tensor's numbers, float64, times its factor."""
    scale = f"{name.removesuffix('.weight')}.scale"
    factors = values(file, scale).astype(np.float64) if scale in file.tensors else np.ones(1)
    numbers = values(file, name).astype(np.float64)
    return numbers * factors.reshape(-1, *[1] * (numbers.ndim - 1))


def compressed_config(**values: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "format": "nvfp4-pack-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | values


@pytest.mark.parametrize("outtype", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("kind", ["modelopt", "compressed"])
def test_matrices_keep_their_values(kind, outtype, tmp_path):
    matrix = Nvfp4(96, 64, seed=1)
    config = modelopt_config() if kind == "modelopt" else compressed_config()
    parts = matrix.modelopt() if kind == "modelopt" else matrix.compressed()
    file = convert(checkpoint(tmp_path, config, {UP: parts}), tmp_path, outtype=outtype)
    assert types(file)[UP_OUT] == "nvfp4" and types(file)["blk.1.ffn_up.scale"] == "f32"
    assert file.metadata["general.file_type"] == 39
    assert np.array_equal(scaled(file, UP_OUT), matrix.values())
    assert not [name for name in file.tensors if "input" in name]


def test_configuration_in_a_file_of_its_own(tmp_path):
    matrix = Nvfp4(96, 64, seed=2)
    folder = checkpoint(tmp_path, {}, {UP: matrix.modelopt()})
    made.amend(folder, drop=("quantization_config",))
    own = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    made.amend(folder, "hf_quant_config.json", producer={"name": "modelopt"}, quantization=own)
    assert np.array_equal(scaled(convert(folder, tmp_path), UP_OUT), matrix.values())


def test_rows_that_families_rearrange(tmp_path):
    matrix = Nvfp4(64, 64, seed=3)
    floats = made.copy("llama", tmp_path / "plain")
    made.change_tensors(floats, lambda t: t.update({f"{Q}.weight": plain(matrix.values().astype(np.float32))}))
    file = convert(checkpoint(tmp_path, modelopt_config(), {Q: matrix.modelopt()}), tmp_path, outtype="f32")
    assert types(file)[Q_OUT] == "nvfp4"
    expected = values(convert(floats, floats, outtype="f32"), Q_OUT)
    assert np.array_equal(scaled(file, Q_OUT).astype(np.float32), expected)


def test_rows_that_blocks_do_not_fit_are_decoded(tmp_path):
    """Blocks have 64 columns, the format groups of 16."""
    matrix = Nvfp4(64, 96, seed=4)
    folder = checkpoint(tmp_path, modelopt_config(), {"model.layers.0.mlp.down_proj": matrix.modelopt()})
    conversion = Conversion(folder)
    assert "1 tensors of integers are decoded and written as bf16 (rows of 96), the first is blk.0.ffn_down.weight" in (
        conversion.notes
    )
    file = convert(folder, tmp_path, outtype="f32")
    assert types(file)["blk.0.ffn_down.weight"] == "f32" and "blk.0.ffn_down.scale" not in file.tensors
    assert np.array_equal(values(file, "blk.0.ffn_down.weight"), matrix.values().astype(np.float32))


@pytest.mark.parametrize("code", [127, 255, 140])
def test_scales_that_blocks_do_not_have_are_decoded(code, tmp_path):
    """The type's scales have no sign, and what is no number counts as 0 there: the first is right in floats, the
    other two are refused."""
    matrix = Nvfp4(96, 64, seed=5)
    matrix.scales[3, 1] = code
    folder = checkpoint(tmp_path, modelopt_config(), {UP: matrix.modelopt()})
    assert {t.output.name: t.type for t in Conversion(folder).tensors}[UP_OUT] == "bf16"
    if code == 140:
        assert np.array_equal(values(convert(folder, tmp_path, outtype="f32"), UP_OUT), matrix.values().astype("f4"))
    else:
        with pytest.raises(IkpyError, match="contains NaN or infinite values; the checkpoint is damaged"):
            convert(folder, tmp_path)


def test_factor_of_one_is_no_tensor(tmp_path):
    matrix = Nvfp4(96, 64, seed=6, factor=1.0)
    file = convert(checkpoint(tmp_path, modelopt_config(), {UP: matrix.modelopt()}), tmp_path)
    assert "blk.1.ffn_up.scale" not in file.tensors
    assert np.array_equal(values(file, UP_OUT), matrix.values())


def experts(tmp_path: Path, **config: Any) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """A tiny Qwen3 MoE whose experts are NVFP4, the same in floats, and stacks of what the experts are."""
    folder, floats = made.copy("qwen3moe", tmp_path), made.copy("qwen3moe", tmp_path / "floats")
    stacks: dict[str, list[np.ndarray]] = {}
    quantized, decoded = (made.read_tensors(f / "model.safetensors") for f in (folder, floats))
    for i, (name, (_, shape, _)) in enumerate(list(quantized.items())):
        if ".experts." in name:
            matrix = Nvfp4(*shape, seed=i, factor=2.0 ** -(18 + i % 5))
            quantized.pop(name)
            parts = matrix.modelopt()
            quantized |= {f"{name.removesuffix('weight')}{end}": entry for end, entry in parts.items()}
            decoded[name] = plain(matrix.values().astype(np.float32))
            stacks.setdefault(name.split(".mlp.")[0] + name.split(".")[-2], []).append(matrix.values())
    for target, tensors in ((folder, quantized), (floats, decoded)):
        made.write_tensors(target / "model.safetensors", tensors)
    made.amend(folder, quantization_config=modelopt_config(**config))
    return folder, floats, {name: np.stack(parts) for name, parts in stacks.items()}


def test_experts_have_a_factor_each(tmp_path):
    folder, floats, _ = experts(tmp_path)
    file, plain_file = convert(folder, tmp_path, outtype="f32"), convert(floats, floats, outtype="f32")
    stacked = [name for name in file.tensors if name.endswith("_exps.weight")]
    assert stacked
    for name in stacked:
        n_expert, columns = file.tensors[name].shape[2], file.tensors[name].shape[0]
        assert types(file)[name] == ("nvfp4" if columns % 64 == 0 else "f32")
        if columns % 64 == 0:
            scale = f"{name.removesuffix('.weight')}.scale"
            assert file.tensors[scale].shape[0] == n_expert and len(set(values(file, scale))) > 1
        assert np.array_equal(scaled(file, name).astype(np.float32), values(plain_file, name)), name
    tokens = np.arange(3, 23)
    expected = logits(Path(plain_file.path), tokens)
    error = np.sqrt(((logits(Path(file.path), tokens) - expected) ** 2).mean() / (expected**2).mean())
    assert error < 0.05, error


def test_fp8_beside_nvfp4(tmp_path):
    """MIXED_PRECISION: matrices with one scale, with one per row and per block; scales of caches are left out."""
    random = np.random.default_rng(7)
    codes = random.integers(0, 120, (64, 64)).astype(np.uint8)
    fp8 = ("F8_E4M3", codes.shape, codes.tobytes())
    per_row = random.uniform(0.001, 0.01, (96, 1)).astype(np.float32)
    gate = random.integers(0, 120, (96, 64)).astype(np.uint8)
    matrix = Nvfp4(96, 64, seed=8)
    config = modelopt_config(
        "MIXED_PRECISION",
        quantized_layers={UP: {"quant_algo": "NVFP4", "group_size": 16}, Q: {"quant_algo": "FP8"}},
        kv_cache_scheme={"num_bits": 8, "type": "float"},
    )
    parts = {
        UP: matrix.modelopt(),
        Q: {"weight": fp8, "weight_scale": plain(np.array(0.004, np.float32)), "input_scale": plain(np.ones(1, "f4"))},
        "model.layers.0.mlp.gate_proj": {
            "weight": ("F8_E4M3", gate.shape, gate.tobytes()),
            "weight_scale": plain(per_row[:, 0].copy()),
        },
        "model.layers.0.self_attn": {"k_scale": plain(np.ones(1, "f4")), "v_scale": plain(np.ones(1, "f4"))},
        "model.layers.1.self_attn.k_proj": {"k_scale": plain(np.ones(1, "f4"))},
    }
    key = made.read_tensors(made.CHECKPOINTS / "llama" / "model.safetensors")["model.layers.1.self_attn.k_proj.weight"]
    parts["model.layers.1.self_attn.k_proj"]["weight"] = key
    folder = checkpoint(tmp_path, config, parts)
    notes = [note for note in Conversion(folder).notes if "cache" in note]
    assert notes == ["3 scales of FP8 caches are left out: caches have the type that is asked for"]
    file = convert(folder, tmp_path, outtype="f32")
    assert np.array_equal(scaled(file, UP_OUT), matrix.values())
    gates = values(file, "blk.0.ffn_gate.weight")
    assert np.array_equal(gates, (e4m3_values()[gate] * per_row).astype(np.float32))
    query = np.sort(values(file, Q_OUT).reshape(-1))
    assert np.array_equal(query, np.sort((e4m3_values()[codes] * np.float32(0.004)).reshape(-1)))


@pytest.mark.parametrize("shape", [(6, 4), (6, 1, 4, 1)])
def test_fp8_with_a_scale_per_block(shape, tmp_path):
    """FP8_PB_WO has dimensions of 1 behind those of blocks."""
    random = np.random.default_rng(9)
    codes = random.integers(0, 120, (96, 64)).astype(np.uint8)
    scales = random.uniform(0.001, 0.01, (6, 4)).astype(np.float32)
    parts = {"weight": ("F8_E4M3", codes.shape, codes.tobytes()), "weight_scale": plain(scales.reshape(shape))}
    config = modelopt_config("FP8_PB_WO", weight_block_size=[16, 16])
    file = convert(checkpoint(tmp_path, config, {UP: parts}), tmp_path, outtype="f32")
    assert np.array_equal(values(file, UP_OUT), e4m3_values()[codes] * scales.repeat(16, 0).repeat(16, 1))


def _without(end: str) -> Any:
    return lambda tensors: tensors.pop(f"{UP}.{end}")


def _with(end: str, array: np.ndarray) -> Any:
    return lambda tensors: tensors.update({f"{UP}.{end}": plain(array)})


BAD = {
    "factor": (_without("weight_scale_2"), f"tensor '{UP}.weight_scale_2' is missing; '{UP}.weight' needs it"),
    "factors": (_with("weight_scale_2", np.ones(2, "f4")), f"'{UP}.weight_scale_2' is F32 [2]; 96 x 64 in NVFP4 need"),
    "no number": (_with("weight_scale_2", np.array(np.nan, "f4")), f"'{UP}.weight_scale_2' is nan; the checkpoint is"),
    "scales": (
        lambda t: t.update({f"{UP}.weight_scale": ("F8_E4M3", (96, 3), bytes(288))}),
        f"'{UP}.weight_scale' is F8_E4M3 [96, 3]; 96 x 64 in NVFP4 need F8_E4M3 [96, 4]",
    ),
    "no scales": (_without("weight_scale"), f"tensor '{UP}.weight' has type U8 (quantization 'modelopt')"),
    "stack": (
        lambda t: t.update({f"{UP}.weight": ("U8", (2, 96, 32), bytes(6144))}),
        f"'{UP}.weight' [2, 96, 32] is no matrix in NVFP4",
    ),
    "inputs": (_with("pre_quant_scale", np.ones(64, "f4")), f"tensor '{UP}.pre_quant_scale' scales inputs, which"),
}


@pytest.mark.parametrize("case", BAD)
def test_parts_that_are_missing_or_do_not_fit(case, tmp_path, capsys):
    change, message = BAD[case]
    folder = checkpoint(tmp_path, modelopt_config(), {UP: Nvfp4(96, 64).modelopt()})
    made.change_tensors(folder, change)
    assert main(["convert", str(folder), "--outfile", str(tmp_path / "out.gguf")]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith(f"error: {folder}")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("divisor", [0, 1e-40, np.nan, np.inf])
def test_divisor_without_an_inverse(divisor, tmp_path):
    """1 / 1e-40 is beyond f32, which the loader would refuse in the file."""
    parts = Nvfp4(96, 64).compressed() | {"weight_global_scale": plain(np.full(1, divisor, np.float32))}
    shown = f"{np.float32(divisor):g}"
    with pytest.raises(IkpyError, match=rf"'.*weight_global_scale' is {shown}; the checkpoint is damaged"):
        Conversion(checkpoint(tmp_path, compressed_config(), {UP: parts}))


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A8_AWQ", "INT4_AWQ", "MXFP8", "W8A8_SQ_PER_CHANNEL"])
def test_other_algorithms_of_modelopt(algorithm, tmp_path):
    layers = {UP: {"quant_algo": algorithm}}
    for config in (modelopt_config(algorithm), modelopt_config("MIXED_PRECISION", quantized_layers=layers)):
        folder = checkpoint(tmp_path / config["quant_algo"], config, {UP: Nvfp4(96, 64).modelopt()})
        with pytest.raises(
            UnsupportedError, match=f"config.json: weights in {algorithm} of ModelOpt cannot be converted"
        ):
            Conversion(folder)
