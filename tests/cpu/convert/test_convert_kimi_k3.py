"""`ikpy convert` of Kimi K3: a random model in the names of its repository becomes the file it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.convert.config import Config
from ikpy.convert.families import family
from ikpy.errors import IkpyError
from ikpy.gguf.reader import GGUFFile
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.integer_checkpoints import plain
from tests.cpu.models import test_arch_kimi_k3 as k3
from tests.cpu.models.reference_models import RandomModel

N_VOCAB, N_LAYER, ATTENDS, BLOCK = 384, 6, (2, 5), 2
PADDED = 128
"""Elements of A_log, however many heads there are."""
LINEAR = {
    "full_attn_layers": [il + 1 for il in ATTENDS],
    "kda_layers": [il + 1 for il in range(N_LAYER) if il not in ATTENDS],
    "gate_lower_bound": k3.LOWER,
    "head_dim": k3.SIZE,
    "num_heads": k3.HEADS,
    "short_conv_kernel_size": k3.TAPS,
    "use_full_rank_gate": True,
}
TEXT: dict[str, Any] = {
    "model_type": "kimi_linear",
    "activation_situ_beta": k3.BETA,
    "activation_situ_linear_beta": k3.LINEAR_BETA,
    "attn_res_block_size": BLOCK,
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "hidden_size": k3.D,
    "intermediate_size": k3.F,
    "kv_lora_rank": k3.RANK,
    "latent_moe_use_norm": True,
    "linear_attn_config": LINEAR,
    "max_position_embeddings": 512,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_intermediate_size": k3.F_EXP,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": k3.HEADS,
    "num_expert_group": 1,
    "num_experts": k3.N_EXPERT,
    "num_experts_per_token": k3.USED,
    "num_hidden_layers": N_LAYER,
    "num_key_value_heads": k3.HEADS,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": k3.N_SHARED,
    "q_lora_rank": k3.Q_RANK,
    "qk_nope_head_dim": k3.NOPE,
    "qk_rope_head_dim": k3.ROT,
    "rms_norm_eps": 1e-5,
    "routed_expert_hidden_size": k3.LATENT,
    "routed_scaling_factor": k3.SCALE,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": k3.VALUE,
    "vocab_size": N_VOCAB,
}
MOE = "block_sparse_moe"
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_gate": "self_attn.g_proj",
    "ssm_g": "self_attn.g_proj",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"ssm_conv1d_{x}": f"self_attn.{x}_conv1d" for x in "qkv"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    **{f"ffn_{x}_shexp": f"{MOE}.shared_experts.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp": f"{MOE}.gate",
    "ffn_routed_down": f"{MOE}.routed_expert_down_proj",
    "ffn_routed_up": f"{MOE}.routed_expert_up_proj",
    "ffn_routed_norm": f"{MOE}.routed_expert_norm",
}
EXPERTS = {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}
SCORES = {"attn_res_score": "self_attention_res", "ffn_res_score": "mlp_res", "output_res_score": "output_attn_res"}
Arrays = dict[str, np.ndarray]


def model() -> RandomModel:
    """A model whose vocabulary is that of the checkpoint's tokenizer."""
    m = k3.new_model(97, published=True, n_layer=N_LAYER, attends=ATTENDS, block=BLOCK)
    for name in ("token_embd", "output"):
        m.matrix(name, N_VOCAB, k3.D)
    return m


def scored(name: str, score: np.ndarray) -> Arrays:
    """A score as the norm's weight and the projection, exactly."""
    norm = np.where(np.arange(len(score)) % 3, 0.5, 2.0).astype(np.float32)
    return {f"{name}_norm.weight": norm, f"{name}_proj.weight": (score / norm)[None]}


def tensors(m: RandomModel) -> Arrays:
    """The weights f32 in the names of the repository."""
    w, out = m.weights, {"lm_head.weight": m.weights["output"]}
    out |= {"model.embed_tokens.weight": w["token_embd"], "model.norm.weight": w["output_norm"]}
    out |= scored(f"model.{SCORES['output_res_score']}", w["output_res_score"])
    for name, values in w.items():
        if not name.startswith("blk."):
            continue
        _, il, short = name.split(".", 2)
        p = f"model.layers.{il}"
        if short in NAMES:
            out[f"{p}.{NAMES[short]}.weight"] = values
        elif short in SCORES:
            out |= scored(f"{p}.{SCORES[short]}", values)
        elif short in EXPERTS:
            out |= {f"{p}.{MOE}.experts.{e}.{EXPERTS[short]}.weight": each for e, each in enumerate(values)}
        elif short == "ssm_a":
            out[f"{p}.self_attn.A_log"] = np.pad(np.log(-values), (0, PADDED - k3.HEADS))
        elif short == "ssm_dt.bias":
            out[f"{p}.self_attn.dt_bias"] = values
        elif short == "exp_probs_b.bias":
            out[f"{p}.{MOE}.gate.e_score_correction_bias"] = values
        elif short == "attn_k_b":
            both = np.concatenate([values.swapaxes(1, 2), w[f"blk.{il}.attn_v_b"]], axis=1)
            out[f"{p}.self_attn.kv_b_proj.weight"] = both.reshape(-1, k3.RANK)
    return {name if name == "lm_head.weight" else f"language_model.{name}": values for name, values in out.items()}


def write(folder: Path, m: RandomModel, **text: Any) -> Path:
    """The checkpoint with a vision tower; text: further values of the language model's configuration."""
    made.copy("deepseek-v3", folder.parent).rename(folder)
    head = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"]}
    config = {**head, "bos_token_id": 0, "eos_token_id": 1, "text_config": {**TEXT, **text}}
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: plain(np.ascontiguousarray(values)) for name, values in tensors(m).items()}
    stored["vision_tower.patch_embed.weight"] = stored["mm_projector.proj.weight"] = plain(np.ones((4, 4), np.float32))
    made.write_tensors(folder / "model.safetensors", stored)
    return folder


def floats(file: GGUFFile, name: str) -> np.ndarray:
    """A tensor of type F32 in numpy order."""
    info = file.tensors[name]
    return file.data(info).view(np.float32).reshape(info.shape[::-1])


def hold(file: GGUFFile, m: RandomModel, but: tuple[str, ...] = ()) -> None:
    """The file has the keys and tensors of a model."""
    reference = {
        f"kimi-k3.{key}": value for key, value in m.keys.items() if key not in ("context_length", "vocab_size")
    }
    found = {key: np.asarray(file.metadata[key]).tolist() for key in reference}
    assert found == {key: np.float32(v).item() if isinstance(v, float) else v for key, v in reference.items()}
    names = {name: name if name.endswith((".bias", ".ssm_a")) else f"{name}.weight" for name in m.weights}
    assert set(names.values()) == set(file.tensors)
    for name, values in m.weights.items():
        if not name.endswith(but or "\0"):
            close = {"rtol": 3e-7} if name.endswith("ssm_a") else {"rtol": 0}
            np.testing.assert_allclose(floats(file, names[name]), values, err_msg=name, **close)


def test_a_model_and_back(tmp_path: Path) -> None:
    m = model()
    hold(convert(write(tmp_path / "checkpoint", m), tmp_path, outtype="f32"), m)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Of compressed-tensors: two values per byte, the first in the low half, with an exponent for every 32."""
    m, random = model(), np.random.default_rng(4)
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "ignore": ["re:.*shared_experts.*"],
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
            }
        },
    }
    folder = write(tmp_path / "checkpoint", m, quantization_config=quantization)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    values: Arrays = {}

    def pack(entries: made.Tensors) -> None:
        for name in [name for name in entries if ".experts." in name]:
            rows, columns = entries.pop(name)[1]
            codes = random.integers(0, 16, (rows, columns), np.uint8)
            exponents = random.integers(120, 128, (rows, columns // 32), np.uint8)
            values[name] = grid[codes] * np.exp2(exponents.astype(np.float32) - 127).repeat(32, axis=1)
            packed = np.ascontiguousarray(codes[:, ::2] | codes[:, 1::2] << 4)
            entries[f"{name}_packed"] = "U8", packed.shape, packed.tobytes()
            entries[f"{name}_scale"] = "U8", exponents.shape, exponents.tobytes()

    made.change_tensors(folder, pack)
    file = convert(folder, tmp_path, outtype="f32")
    hold(file, m, tuple(EXPERTS))
    assert file.metadata["general.file_type"] == 38
    from ikpy.quants import dequantize, registry

    for il in range(1, N_LAYER):
        for short, name in EXPERTS.items():
            info = file.tensors[f"blk.{il}.{short}.weight"]
            assert registry.by_id(info.type_id).name == "mxfp4"
            found = dequantize(file.data(info), info.type_id, info.shape).reshape(info.shape[::-1])
            for e, matrix in enumerate(found):
                key = f"language_model.model.layers.{il}.{MOE}.experts.{e}.{name}.weight"
                np.testing.assert_array_equal(matrix, values[key])


REFUSED: dict[str, dict[str, Any]] = {
    "activation 'silu'": {"hidden_act": "silu"},
    "mla_use_nope false": {"mla_use_nope": False},
    "mla_use_output_gate false": {"mla_use_output_gate": False},
    "latent_moe_use_norm false": {"latent_moe_use_norm": False},
    "use_full_rank_gate false": {"linear_attn_config": {**LINEAR, "use_full_rank_gate": False}},
    "gate_lower_bound 1": {"linear_attn_config": {**LINEAR, "gate_lower_bound": 1}},
    "activation.situ_beta is 0, not above 0": {"activation_situ_beta": 0.0},
    "'activation_situ_beta' is missing": {"activation_situ_beta": None},
    "attn_res.block_size is 0": {"attn_res_block_size": 0},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_file_can_say(what: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", model(), **REFUSED[what])
    with pytest.raises(IkpyError, match=what) as error:
        Conversion(folder)
    assert "\n" not in str(error.value)


MISSING = {
    "language_model.model.layers.1.mlp_res_norm.weight": "what '.*layers.1.mlp_res_proj.weight' is multiplied with is",
    "language_model.model.layers.1.mlp_res_proj.weight": "what '.*mlp_res_norm.weight' multiplies .* is missing",
    "language_model.model.output_attn_res_norm.weight": "what '.*output_attn_res_proj.weight' is multiplied with is",
    "language_model.model.layers.2.self_attn.g_proj.weight": "layer 2 lacks attn_gate.weight, which layer 5 has",
    f"language_model.model.layers.4.{MOE}.routed_expert_norm.weight": "layer 4 lacks ffn_routed_norm.weight",
    "language_model.model.layers.3.self_attn.g_proj.weight": "lacks blk.3.ssm_g.weight",
}


@pytest.mark.parametrize("name", MISSING)
def test_a_tensor_that_is_missing(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", model())
    made.change_tensors(folder, lambda entries: entries.pop(name))
    with pytest.raises(IkpyError, match=MISSING[name]):
        Conversion(folder)


def test_factors_of_another_size(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", model())
    change = {"language_model.model.layers.1.mlp_res_norm.weight": plain(np.ones(3, np.float32))}
    made.change_tensors(folder, lambda entries: entries.update(change))
    with pytest.raises(IkpyError, match=r"shape \[3\] of '.*mlp_res_norm.weight' does not fit"):
        Conversion(folder)


def test_the_language_model_alone_is_found_by_its_residuals() -> None:
    for values in (TEXT, {"model_type": "kimi_k3", "text_config": {**TEXT, "model_type": None}}):
        config = Config({"architectures": ["KimiLinearForCausalLM"], **values}, Path("config.json"))
        if config.values.get("model_type") is None:
            config.model_type = "kimi_k3"
        assert family(config).arch == "kimi-k3"
