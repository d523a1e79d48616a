"""`ikpy convert` of checkpoints that transformers has no model of: logits are those of the checkpoint's own weights."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import FileFormatError, UnsupportedError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import older_checkpoints as older
from tests.cpu.convert import plain_checkpoints as plain
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.seeded_checkpoints import FF, HEAD, HEADS, KV, D, Tiny
from tests.cpu.convert.test_convert_seeded import converted, logits_of
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.quants.plain_blocks import Blocks, Form

Named = dict[str, np.ndarray]
LLAMA = {
    "input_layernorm": "attn_norm",
    "norm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}
GPT2 = {"ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output"}
QWEN = {**GPT2, "mlp.w1": "ffn_up", "mlp.w2": "ffn_gate", "mlp.c_proj": "ffn_down"}
CODESHELL = {**GPT2, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
CHATGLM = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}


def named(kind: Tiny, outer: dict[str, str], layer: str, names: dict[str, str]) -> Named:
    """Weights of a checkpoint in the names of Blocks; rows stay as they are."""
    known = {**outer, **{f"{layer}.{il}.{x}": f"blk.{il}.{y}" for il in range(plain.N_LAYER) for x, y in names.items()}}
    weights = {}
    for name, values in tiny.weights(kind).items():
        module, _, suffix = name.rpartition(".")
        weights[known[module] + (".bias" if suffix == "bias" else "")] = values
    return weights


def usual_outer(embedding: str, norm: str, head: str = "lm_head") -> dict[str, str]:
    """Modules outside the layers."""
    return {embedding: "token_embd", norm: "output_norm", head: "output"}


def of_llama(kind: Tiny) -> Named:
    return named(kind, usual_outer("model.embed_tokens", "model.norm"), "model.layers", LLAMA)


def of_maincoder(kind: Tiny) -> Named:
    head_norms = {f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"}
    network = {f"feed_forward.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
    outer = usual_outer("model.embed_tokens", "model.norm")
    return named(kind, outer, "model.layers", {**LLAMA, **head_norms, **network})


def of_baichuan(kind: Tiny) -> Named:
    names = {**LLAMA, "self_attn.W_pack": "attn_qkv"}
    return named(kind, usual_outer("model.embed_tokens", "model.norm"), "model.layers", names)


def of_baichuan2(kind: Tiny) -> Named:
    """Rows of the output matrix have length 1."""
    weights = of_baichuan(kind)
    weights["output"] = weights["output"] / np.linalg.norm(weights["output"].astype(np.float64), axis=1, keepdims=True)
    return weights


def of_plamo(kind: Tiny) -> Named:
    """Head h of q reads head h modulo KV: every head of k and v is there as often as that."""
    weights = named(kind, usual_outer("model.embed_tokens", "model.norm"), "model.layers.layers", LLAMA)
    for il in range(plain.N_LAYER):
        for x in "kv":
            weights[f"blk.{il}.attn_{x}"] = np.tile(weights[f"blk.{il}.attn_{x}"], (HEADS // KV, 1))
    return weights


def of_qwen(kind: Tiny) -> Named:
    return named(kind, usual_outer("transformer.wte", "transformer.ln_f"), "transformer.h", QWEN)


def of_codeshell(kind: Tiny) -> Named:
    return named(kind, usual_outer("transformer.wte", "transformer.ln_f"), "transformer.h", CODESHELL)


def of_chatglm(kind: Tiny) -> Named:
    t = "transformer"
    outer = usual_outer(f"{t}.embedding.word_embeddings", f"{t}.encoder.final_layernorm", f"{t}.output_layer")
    return named(kind, outer, f"{t}.encoder.layers", CHATGLM)


HALVES: dict[str, Any] = {"norms": "rms", "act": ref.silu, "gated": True, "rotated": HEAD}
CASES = {
    "baichuan": (older.BAICHUAN, of_baichuan, Form("baichuan", 0, **HALVES, kv=HEADS, fused=True), {}),
    "xverse": (older.XVERSE, of_llama, Form("xverse", 0, **HALVES, kv=KV), {}),
    "pangu": (older.PANGU, of_llama, Form("pangu-embedded", 0, **HALVES, kv=KV), {}),
    "maincoder": (
        older.MAINCODER,
        of_maincoder,
        Form("maincoder", 0, **HALVES, neox=False, kv=KV, tied=True, head_norms="behind"),
        {},
    ),
    "orion": (older.ORION, of_llama, Form("orion", 0, **{**HALVES, "norms": "biased"}, kv=KV), {}),
    "qwen": (older.QWEN, of_qwen, Form("qwen", 0, **HALVES, kv=HEADS, fused=True), {}),
    "plamo": (older.PLAMO, of_plamo, Form("plamo", 0, **HALVES, kv=HEADS, parallel="one"), {}),
    "codeshell": (older.CODESHELL, of_codeshell, Form("codeshell", 0, rotated=HEAD, kv=KV, fused=True), {}),
    "chatglm": (
        older.CHATGLM,
        of_chatglm,
        Form("chatglm", 0, **{**HALVES, "rotated": HEAD // 2}, neox=False, base=5e6, kv=KV, fused=True, fused_ffn=True),
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path) -> None:
    kind, weights_of, form, values = CASES[name]
    check_logits(kind, weights_of(kind), form, tmp_path, **values)


def check_logits(kind: Tiny, weights: Named, form: Form, folder: Path, **values: Any) -> None:
    """Holds the converted checkpoint to the evaluation of its weights."""
    epsilon = "attention.layer_norm_rms_epsilon" if form.norms == "rms" else "attention.layer_norm_epsilon"
    given = float(kind.config.get("layer_norm_epsilon", 1e-5))
    m = RandomModel(form.arch, 0, **checks.shape(plain.N_LAYER, D, HEADS, form.kv, HEAD, FF), **{epsilon: given})
    m.weights = weights
    truth = Blocks(replace(form, n_layer=plain.N_LAYER), m).logits(tiny.tokens())
    error = np.abs(logits_of(converted(kind, folder, **values)) - truth).max(axis=1)
    assert error.max() <= 1e-4 * np.abs(truth).max(), f"token {error.argmax()} is off by {error.max():.1e}"


def test_rows_of_baichuan_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the size of its vocabulary."""
    from ikpy.convert.families import older

    monkeypatch.setattr(older, "_VOCABULARY_OF_2", tiny.V)
    kind, _, form, _ = CASES["baichuan"]
    check_logits(kind, of_baichuan2(kind), form, tmp_path)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (older.BAICHUAN, {"num_hidden_layers": 40}, "layer 2 are missing"),
        (older.XVERSE, {"model_type": "PanguEmbedded"}, "attn_k.bias"),
        (older.MAINCODER, {"use_qk_norm": False}, "use_qk_norm false"),
        (older.ORION, {"attention_bias": True}, "attention_bias true"),
        (older.QWEN, {"no_bias": False}, "no_bias false"),
        (older.PLAMO, {"n_shared_head": 3}, "n_shared_head 3 of 4 heads"),
        (older.PLAMO, {"n_shared_head": 0}, "n_shared_head 0 of 4 heads"),
        (older.CODESHELL, {"position_embedding_type": "learned"}, "position_embedding_type 'learned'"),
        (older.CODESHELL, {"group_query_attention": False}, "group_query_attention false"),
        (older.CHATGLM, {"rmsnorm": False}, "rmsnorm false"),
        (older.CHATGLM, {"add_bias_linear": True}, "add_bias_linear true"),
        (older.CHATGLM, {"multi_query_attention": False}, "multi_query_attention false"),
        (plain.GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true"),
        (plain.GPT2, {"activation_function": "relu"}, "activation 'relu'"),
        (plain.GPT2, {"n_positions": 128}, "position_embd.weight' has wrong shape"),
        (plain.STARCODER, {"multi_query": False}, "does not fit|wrong shape"),
        (plain.GLM, {"hidden_act": "gelu"}, "activation 'gelu'"),
        (plain.OLMO, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic'"),
    ],
)
def test_refused(kind: Tiny, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny.write(kind, tmp_path / "checkpoint", **values)
    with pytest.raises((FileFormatError, UnsupportedError), match=message):
        Conversion(folder)


def test_gpt2_without_the_name_of_its_model(tmp_path: Path) -> None:
    """Tensors of the first repository are called h.0.ln_1 and so on, and masks are among them."""
    folder = tiny.write(plain.GPT2, tmp_path / "checkpoint")
    stored = {
        name.removeprefix("transformer."): tiny.entry(name, values) for name, values in tiny.weights(plain.GPT2).items()
    }
    stored["h.0.attn.bias"] = ("F32", (1, 1, 2, 2), bytes(16))
    made.write_tensors(folder / "model.safetensors", stored)
    file = convert(folder, tmp_path, outtype="f32")
    np.testing.assert_array_equal(logits_of(file), logits_of(converted(plain.GPT2, tmp_path / "named")))


def ranks(folder: Path, name: str) -> dict[str, int]:
    """Replaces the tokenizer of a checkpoint by a file of ranks: all bytes and a few merges."""
    for old in ("tokenizer.json", "tokenizer_config.json"):
        (folder / old).unlink(missing_ok=True)
    tokens = [bytes([i]) for i in range(256)] + [b"he", b"ll", b"hell", b" w"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / name).write_text("\n".join(lines) + "\n")
    return {token.decode("latin-1"): rank for rank, token in enumerate(tokens)}


def test_ranks_of_qwen(tmp_path: Path) -> None:
    folder = tiny.write(older.QWEN, tmp_path / "checkpoint", eos_token_id=None)
    n = len(ranks(folder, "qwen.tiktoken"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": n}))
    conversion = Conversion(folder)
    keys = conversion.metadata
    assert keys["tokenizer.ggml.pre"] == "qwen2" and keys["tokenizer.ggml.eos_token_id"] == n
    texts = keys["tokenizer.ggml.tokens"]
    assert texts[n : n + 4] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>"]
    assert any(
        "use_dynamic_ntk and use_logn_attn set in beyond 256 tokens" in note for note in Conversion(folder).notes
    )


def test_ranks_of_glm4(tmp_path: Path) -> None:
    folder = tiny.write(older.CHATGLM, tmp_path / "checkpoint")
    n = len(ranks(folder, "tokenizer.model"))
    added = {str(n + i): {"content": text, "special": True} for i, text in enumerate(("<|endoftext|>", "[gMASK]"))}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    keys = Conversion(folder).metadata
    assert keys["tokenizer.ggml.pre"] == "chatglm-bpe"
    assert keys["tokenizer.ggml.tokens"][n : n + 2] == ["<|endoftext|>", "[gMASK]"]
    (folder / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    with pytest.raises(UnsupportedError, match="special tokens of ChatGLM 2 and 3 stand in Python code"):
        Conversion(folder)
