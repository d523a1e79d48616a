"""`ikpy convert`: errors name what is wrong and leave no file."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.convert import Conversion, ConvertOptions
from ikpy.errors import FileFormatError, IkpyError, UnsupportedError, UsageError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.checkpoints import convert
from tests.shared import ROOT


def _without(name: str):
    return lambda tensors: tensors.pop(name)


def _add(name: str, entry: tuple[str, tuple[int, ...], bytes]):
    return lambda tensors: tensors.update({name: entry})


SMALL = made.bf16(np.zeros((2, 2), np.float32))
HUGE = made.bf16(np.full((384, 64), 1e5, np.float32))
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
BAD_TENSORS = {
    "unknown": (
        "llama",
        _add("model.layers.0.mlp.extra.weight", SMALL),
        "'model.layers.0.mlp.extra.weight' has no place",
    ),
    "expert": ("mixtral", _without(EXPERT), "needs 4 experts, found 3 (expert 2 is missing)"),
    "embedding": ("llama", _without("model.embed_tokens.weight"), "token embedding is missing"),
    "weight of a layer": (
        "llama",
        _without("model.layers.1.mlp.up_proj.weight"),
        "llama: layer 1 lacks blk.1.ffn_up.weight (from 'mlp.up_proj'); the checkpoint is incomplete",
    ),
    "network of a layer": (
        "glm4moe",
        _without("model.layers.0.mlp.down_proj.weight"),
        "layer 0 lacks blk.0.ffn_down.weight (from 'mlp.down_proj')",
    ),
    "last norm": ("smollm3", _without("model.norm.weight"), "output_norm.weight (from 'model.norm') is missing"),
    "shape": (
        "llama",
        _add("model.layers.0.mlp.down_proj.weight", SMALL),
        "got 2, 2, 1, 1 (from 'model.layers.0.mlp.down_proj.weight')",
    ),
    "integers": ("llama", _add("model.layers.0.mlp.up_proj.weight", ("I32", (1, 1), b"\0" * 4)), "has type I32"),
    "scale": (
        "deepseek-v3",
        _without("model.layers.0.self_attn.o_proj.weight_scale_inv"),
        "'model.layers.0.self_attn.o_proj.weight' has no scale",
    ),
    "scales": (
        "gpt-oss",
        _without("model.layers.0.mlp.experts.down_proj_scales"),
        "down_proj_blocks' has no 'model.layers.0.mlp.experts.down_proj_scales'",
    ),
    "shape of a scale": (
        "deepseek-v3",
        _add("model.layers.0.self_attn.o_proj.weight_scale_inv", made.bf16(np.ones((3, 3), np.float32))),
        "scales of tensor 'model.layers.0.self_attn.o_proj.weight' have shape [3, 3]",
    ),
    "type of a scale": (
        "deepseek-v3",
        _add("model.layers.0.self_attn.o_proj.weight_scale_inv", ("I32", (1, 1), bytes(4))),
        "tensor 'model.layers.0.self_attn.o_proj.weight_scale_inv' has type I32",
    ),
    "shape of scales": (
        "gpt-oss",
        _add("model.layers.0.mlp.experts.down_proj_scales", ("U8", (1, 1), b"\0")),
        "down_proj_blocks' and 'model.layers.0.mlp.experts.down_proj_scales' do not fit",
    ),
    "output": ("llama", _without("lm_head.weight"), "the output matrix (lm_head.weight) is missing"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit(case, tmp_path):
    name, change, message = BAD_TENSORS[case]
    folder = made.copy(name, tmp_path)
    made.change_tensors(folder, change)
    with pytest.raises(IkpyError) as error:
        Conversion(folder, ConvertOptions(outfile=str(tmp_path / "out.gguf")))
    assert message in str(error.value)
    assert not list(tmp_path.glob("*.gguf"))


BAD_CONFIGS = {
    "unknown": ("llama", {"model_type": "mamba9"}, UnsupportedError, "model types; similar: mamba, mamba2, jamba)"),
    "layers": ("llama", {"num_hidden_layers": 3}, FileFormatError, "tensors of layer 2 are missing"),
    "fewer layers": (
        "llama",
        {"num_hidden_layers": 1},
        FileFormatError,
        "is of layer 1, but num_hidden_layers of config.json is 1",
    ),
    "no positions": ("llama", {"max_position_embeddings": 0}, FileFormatError, "(the longest text) is 0; 1 to"),
    "positions below 0": ("llama", {"max_position_embeddings": -1}, FileFormatError, "(the longest text) is -1; 1"),
    "missing": ("llama", {"rms_norm_eps": None}, FileFormatError, "'rms_norm_eps' is missing"),
    "rope": ("qwen2", {"rope_parameters": {"rope_type": "mrope"}}, UnsupportedError, "RoPE scaling 'mrope'"),
    "heads": ("llama", {"num_attention_heads": 5}, FileFormatError, "does not fit config.json"),
    "activation": ("llama", {"hidden_act": "relu"}, FileFormatError, "activation 'relu'"),
    "gemma3 base": (
        "gemma3",
        {"rope_local_base_freq": 5e4, "rope_parameters": None},
        FileFormatError,
        "RoPE base 50000",
    ),
    "indexers": ("glm-dsa", {"indexer_types": ["full"]}, FileFormatError, "1 indexer types"),
    "qwen3moe norm": ("qwen3moe", {"norm_topk_prob": False}, FileFormatError, "norm_topk_prob False"),
    "betas": (
        "qwen2",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 64.0}},
        FileFormatError,
        "beta_fast 64",
    ),
    "longrope": ("llama", {"rope_parameters": {"rope_type": "longrope"}}, UnsupportedError, "RoPE scaling 'longrope'"),
    "ntk": ("hunyuan-dense", {"rope_parameters": {"rope_type": "dynamic"}}, UnsupportedError, "RoPE scaling 'dynamic'"),
    "mscale": (
        "deepseek-v3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        FileFormatError,
        "YaRN with mscale None and mscale_all_dim None",
    ),
    "windows": (
        "smollm3",
        {"sliding_window": 8, "layer_types": ["sliding_attention"] * 5},
        FileFormatError,
        "a window in some layers",
    ),
    "gemma3 both ways": (
        "gemma3",
        {"use_bidirectional_attention": True},
        FileFormatError,
        "use_bidirectional_attention true",
    ),
    "exact gelu": ("gemma2", {"hidden_activation": "gelu"}, FileFormatError, "activation 'gelu'"),
    "linear scaling of latents": (
        "deepseek-v3",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        FileFormatError,
        "linear RoPE scaling",
    ),
    "part of a head": ("llama", {"partial_rotary_factor": 0.5}, FileFormatError, "partial_rotary_factor 0.5"),
    "part of a head, new spelling": (
        "gemma",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        FileFormatError,
        "partial_rotary_factor 0.5",
    ),
    "llama4 temperature": ("llama4", {"floor_scale": 4096}, FileFormatError, "floor_scale 4096"),
    # Numbers of things that are listed one by one.
    "layers 2^31": ("qwen3next", {"num_hidden_layers": 2**31}, FileFormatError, "'num_hidden_layers' is 2147483648;"),
    "layers -1": ("llama", {"num_hidden_layers": -1}, FileFormatError, "'num_hidden_layers' is -1;"),
    "experts": (
        "mixtral",
        {"num_local_experts": 2**31},
        FileFormatError,
        "'num_local_experts' is 2147483648; 0 to 65536",
    ),
    "routed": (
        "deepseek-v3",
        {"num_experts": None, "n_routed_experts": 2**31},
        FileFormatError,
        "'n_routed_experts' is 2147483648;",
    ),
    "ernie": ("ernie4_5-moe", {"moe_num_experts": 2**31}, FileFormatError, "'moe_num_experts' is 2147483648;"),
    "shared": ("gemma4", {"num_kv_shared_layers": 2**31}, FileFormatError, "'num_kv_shared_layers' is 2147483648;"),
    "head": ("llama", {"head_dim": 2**31}, FileFormatError, "'head_dim' is 2147483648;"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_configurations_that_cannot_be_expressed(case, tmp_path):
    name, changes, kind, message = BAD_CONFIGS[case]
    folder = made.copy(name, tmp_path)
    made.amend(folder, **changes)
    with pytest.raises(kind) as error:
        Conversion(folder)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["gemma", "command-r"])
def test_output_matrices_that_a_file_cannot_have(name, tmp_path):
    """Left out where they equal the token embedding."""
    folder = made.copy(name, tmp_path)
    made.amend(folder, tie_word_embeddings=False)
    embedding = made.read_tensors(folder / "model.safetensors")["model.embed_tokens.weight"]
    made.change_tensors(folder, _add("lm_head.weight", embedding))
    assert Conversion(folder).plan()
    dtype, shape, data = embedding
    made.change_tensors(folder, _add("lm_head.weight", (dtype, shape, data[::-1])))
    with pytest.raises(FileFormatError, match=r"'lm_head.weight' is not the token embedding"):
        Conversion(folder)


def test_other_quantizations_are_named(tmp_path):
    folder = made.copy("llama", tmp_path)
    made.change_tensors(folder, _add("model.layers.0.mlp.up_proj.W_q", SMALL))
    made.amend(folder, quantization_config={"quant_method": "hqq"})
    with pytest.raises(UnsupportedError, match=r"up_proj\.W_q' has no place .* \(quantization 'hqq'\)"):
        Conversion(folder)


def test_missing_shard_is_named(tmp_path):
    folder = made.copy("llama", tmp_path)
    made.split_into_shards(folder, 4)
    (folder / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(
        FileFormatError, match=r"1 of 4 shards are missing, the first is model-00003-of-00004\.safetensors"
    ):
        Conversion(folder)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("llama", "config.json"),
        ("llama", "model.safetensors"),
        ("llama", "tokenizer.json"),
        ("gemma", "tokenizer.model"),
    ],
)
def test_files_that_git_has_not_fetched(name, file, tmp_path):
    folder = made.copy(name, tmp_path)
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n")
    with pytest.raises(FileFormatError, match=rf"{file}: this is a Git LFS pointer, .* git lfs pull fetches it"):
        Conversion(folder)


def test_adapters_are_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileFormatError, match="is a LoRA adapter of PEFT, and only whole models are converted"):
        Conversion(tmp_path)


@pytest.mark.parametrize("nbytes", [0, 7, 100, 3000, 50_000])
def test_files_that_are_cut_off(nbytes, tmp_path):
    folder = made.copy("llama", tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:nbytes])
    with pytest.raises(FileFormatError, match=r"cut off|not a safetensors file|not valid JSON"):
        Conversion(folder)


def test_values_that_no_type_holds(tmp_path):
    folder = made.copy("llama", tmp_path)
    made.change_tensors(folder, _add("lm_head.weight", HUGE))
    with pytest.raises(FileFormatError, match=r"beyond the range of f16; use --outtype bf16"):
        convert(folder, tmp_path, outtype="f16")
    made.change_tensors(folder, _add("lm_head.weight", made.bf16(np.full((384, 64), 1e9, np.float32))))
    with pytest.raises(FileFormatError, match=r"beyond the range of q8_0; use --outtype bf16"):
        convert(folder, tmp_path, outtype="q8_0")
    nan = made.bf16(np.full((384, 64), np.nan, np.float32))
    made.change_tensors(folder, _add("lm_head.weight", nan))
    with pytest.raises(FileFormatError, match=r"'lm_head\.weight' contains NaN"):
        convert(folder, tmp_path, outtype="q8_0")
    with pytest.raises(FileFormatError, match=r"'lm_head\.weight' contains NaN"):
        convert(folder, tmp_path, outtype="bf16")
    assert not list(tmp_path.glob("*.gguf"))


def test_scales_of_mxfp4_blocks_are_checked(tmp_path):
    folder = made.copy("gpt-oss", tmp_path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    dtype, shape, data = made.read_tensors(folder / "model.safetensors")[name]
    made.change_tensors(folder, _add(name, (dtype, shape, b"\xff" + data[1:])))
    with pytest.raises(FileFormatError, match=r"down_proj_blocks' contains NaN or infinite values"):
        convert(folder, tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "[]", "not a JSON object"),
        ("config.json", '{"architectures": 5}', "unknown model architecture"),
        ("config.json", '{"architectures": [[]]}', "unknown model architecture"),
        ("config.json", '{"text_config": 5}', "'text_config' is not an object"),
        ("config.json", '{"quantization_config": 5}', "unknown model architecture"),
        ("model.safetensors.index.json", "[]", "not a JSON object"),
        ("model.safetensors.index.json", '{"weight_map": [1]}', "does not give a file"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 5}}', "does not give a file"),
        ("tokenizer.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", "5", "not a JSON object"),
        ("generation_config.json", '"x"', "not a JSON object"),
        ("chat_template.jinja", b"{{ \xff }}", "not UTF-8: invalid start byte at byte 3"),
    ],
)
def test_json_of_another_form(name, text, message, tmp_path):
    folder = made.copy("llama", tmp_path)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(IkpyError, match=message):
        Conversion(folder)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"rope_parameters": {"rope_type": "yarn"}}),
        ("config.json", {"rope_parameters": 5}),
        ("config.json", {"head_dim": [[]]}),
        ("config.json", {"head_dim": 10**80}),
        ("config.json", {"num_attention_heads": 0, "head_dim": None}),
        ("tokenizer.json", {"post_processor": {
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}], "pair": [],
            "special_tokens": {},
        }}),
    ],
)  # fmt: skip
def test_values_of_another_form(file, values, tmp_path):
    folder = made.copy("llama", tmp_path)
    made.amend(folder, file, **values)
    with pytest.raises(FileFormatError) as error:
        Conversion(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize(("file", "name", "value", "words"), [
    ("config.json", "intermediate_size", -3,
     "/config.json: 'intermediate_size' is -3, below 0 (llama.feed_forward_length)"),
    ("config.json", "rms_norm_eps", 1e60,
     "/config.json: 'rms_norm_eps' is 1e+60, not a number that is possible (llama.attention.layer_norm_rms_epsilon)"),
    ("tokenizer_config.json", "chat_template", "\ud800",
     ": tokenizer.chat_template of the GGUF file cannot be '\\ud800'; "
     "config.json or a file of the tokenizer holds a value that it cannot have"),
])  # fmt: skip
def test_values_that_no_key_holds(file, name, value, words, tmp_path, capsys):
    folder = made.copy("llama", tmp_path)
    made.amend(folder, file, **{name: value})
    (folder / "chat_template.jinja").unlink()
    assert main(["convert", str(folder), "--outfile", str(tmp_path / "out.gguf")]) == 1
    error = capsys.readouterr().err.rstrip().rpartition("\n")[2]
    assert error == f"error: {folder}{words}"
    assert not (tmp_path / "out.gguf").exists()


def test_ends_of_generations_that_are_no_tokens_are_left_out(tmp_path):
    folder = made.copy("llama", tmp_path)
    made.amend(folder, "generation_config.json", eos_token_id=[[], {}, 2])
    assert Conversion(folder).metadata["tokenizer.ggml.eot_token_id"] == 2


@pytest.mark.parametrize("shape", [[math.inf, 1], [1.5], "11", [-1, -1], [0, 10**30], [1] * 40, 5])
def test_shapes_that_no_tensor_has(shape, tmp_path):
    folder = made.copy("llama", tmp_path)
    header = json.dumps({"x": {"dtype": "U8", "shape": shape, "data_offsets": [0, 1]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"x")
    with pytest.raises(FileFormatError, match=r"'x' (is malformed|does not fit)"):
        Conversion(folder)


def test_number_of_a_layer_with_thousands_of_digits(tmp_path):
    folder = made.copy("llama", tmp_path)
    name = f"model.layers.{'9' * 5000}.mlp.down_proj.weight"
    header = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"x")
    with pytest.raises(FileFormatError, match=r"a tensor's name has 5034 characters, more than the 1023 allowed"):
        Conversion(folder)


def test_data_at_any_byte(tmp_path):
    """The header of a safetensors file may have any length."""
    folder = made.copy("llama", tmp_path)
    made.change_tensors(folder, lambda tensors: tensors.update({k: _as_f32(*v) for k, v in tensors.items()}))
    convert(folder, tmp_path, outtype="q8_0")
    aligned = (tmp_path / "out.gguf").read_bytes()
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    odd = length + 1 + length % 2
    path.write_bytes(struct.pack("<Q", odd) + data[8 : 8 + length].ljust(odd) + data[8 + length :])
    convert(folder, tmp_path, outtype="q8_0")
    assert (tmp_path / "out.gguf").read_bytes() == aligned


def _as_f32(dtype: str, shape: tuple[int, ...], data: bytes) -> tuple[str, tuple[int, ...], bytes]:
    assert dtype == "BF16"
    return "F32", shape, (np.frombuffer(data, "<u2").astype(np.uint32) << 16).tobytes()


def test_unknown_output_type():
    with pytest.raises(UsageError, match="unknown output type 'q4_0'"):
        Conversion(made.CHECKPOINTS / "llama", ConvertOptions(outtype="q4_0"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/folder"], "no such folder"),
        ([str(ROOT / "README.md")], "README.md: is a file; give the folder"),
        ([str(ROOT)], "config.json: no such file"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert main(["convert", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("error: ")


def test_options_without_an_effect_are_named(capsys):
    """Scripts of convert_hf_to_gguf.py give them."""
    assert main(["convert", "--no-lazy", "--use-temp-file", "/no/such/folder"]) == 1
    warned = "warning: no effect: --{} (a tensor is read when it is written)"
    assert capsys.readouterr().err.splitlines()[:2] == [warned.format("no-lazy"), warned.format("use-temp-file")]
