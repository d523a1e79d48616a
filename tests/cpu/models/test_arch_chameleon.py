"""Chameleon (text): random models against their definition."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.models.size_class import size_class
from tests.cpu.convert import checkpoints as made
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

N, D, HEADS, KV, HEAD, F, N_VOCAB = 3, 64, 4, 2, 16, 96, 8210
LEAST = -1e30


def new_model(seed: int, *, behind: bool = False, biases: bool = True) -> RandomModel:
    """behind: norms stand behind the branches."""
    keys = {**checks.shape(N, D, HEADS, KV, HEAD, F), **RMS, "swin_norm": behind, "vocab_size": N_VOCAB}
    m = RandomModel("chameleon", seed, **keys)
    m.numbered_words = True
    m.matrix("token_embd", N_VOCAB, D)
    m.norm("output_norm", D)
    m.matrix("output", N_VOCAB, D)
    for il in range(N):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        m.attention(p, D, HEADS, KV, HEAD)
        for name, heads in (("q", HEADS), ("k", KV)):
            m.norm(f"{p}.attn_{name}_norm", heads, HEAD)
            if biases:
                m.vector(f"{p}.attn_{name}_norm.bias", heads, HEAD)
        m.ffn(p, D, F)
    return m


def evaluated(m: RandomModel) -> np.ndarray:
    """Logits [T, V]; of tokens of pictures the least number."""
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(HEAD, 10000.0, POS)
    for il in range(N):
        w = checks.layer_weights(e, il)
        behind = m.keys["swin_norm"]
        norms = [lambda y, n=name: ref.rms_norm(y, w[n], e.eps) for name in ("attn_norm", "ffn_norm")]  # noqa: B023
        q, k, v = e.qkv(il, x if behind else norms[0](x))
        q, k = (
            ref.layer_norm(y, w[name], 1e-5) + w.get(f"{name}.bias", 0.0)
            for y, name in ((q, "attn_q_norm"), (k, "attn_k_norm"))
        )
        q, k = (ref.rotate(y, angles, neox=False) for y in (q, k))
        h = e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
        x = x + (norms[0](h) if behind else h)
        h = e.ffn(il, x if behind else norms[1](x))
        x = x + (norms[1](h) if behind else h)
    logits = ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T
    logits[:, 4:8196] = LEAST
    return logits


def chameleon() -> tuple[RandomModel, np.ndarray]:
    m = new_model(251)
    return m, evaluated(m)


def chameleon_34b() -> tuple[RandomModel, np.ndarray]:
    """Norms behind the branches."""
    m = new_model(252, behind=True, biases=False)
    return m, evaluated(m)


@pytest.mark.parametrize("make", [chameleon, chameleon_34b], ids=lambda f: f.__name__)
def test_definition(make: Any, tmp_path: Path) -> None:
    model, truth = make()
    path = model.write(tmp_path / "model.gguf")
    of_words = truth > LEAST
    for form in range(4):
        settings = {"flash_attn": form % 2 == 1, "n_ubatch": 12 if form > 1 else 512}
        context = checks.context_of(path, type_k="f32", type_v="f32", **settings)
        logits = context.decode(Batch.single(TOKENS, logits="all"))
        assert (logits[~of_words] < LEAST).all(), "tokens of pictures could be drawn"
        shape = (len(TOKENS), -1)
        checks.hold(f"form {form}", logits[of_words].reshape(shape), truth[of_words].reshape(shape), checks.FLOAT_BOUND)
    found = checks.context_of(path, type_k="f32", type_v="f32").decode(Batch.single(TOKENS))[-1]
    assert np.isfinite(found).all() and of_words[-1][found.argmax()]


def test_size_classes() -> None:
    for layers, expected in ((32, "7B"), (48, "34B")):
        assert size_class({"general.architecture": "chameleon", "chameleon.block_count": layers}) == expected


def as_published(name: str, values: np.ndarray) -> np.ndarray:
    """Heads of q and k with the halves of rotated pairs one behind the other."""
    heads = {"attn_q": HEADS, "attn_k": KV}.get(name)
    if heads:
        return values.reshape(heads, HEAD // 2, 2, D).swapaxes(1, 2).reshape(values.shape)
    if name.startswith(("attn_q_norm", "attn_k_norm")):
        return values.reshape(len(values), HEAD // 2, 2).swapaxes(1, 2).reshape(values.shape)
    return values


NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@pytest.mark.parametrize("behind", [False, True])
def test_converted_checkpoint(behind: bool, tmp_path: Path) -> None:
    """Of which the encoder of pictures is left out."""
    model = new_model(253, behind=behind)
    stored = {"model.vqmodel.encoder.conv_in.weight": ("F32", (2, 3), np.zeros(6, np.float32).tobytes())}
    for name, values in model.weights.items():
        place, _, rest = name.removeprefix("blk.").partition(".")
        module, _, suffix = rest.partition(".")
        path = f"model.layers.{place}.{NAMES[module]}" if place.isdigit() else OUTER[name]
        given = np.ascontiguousarray(as_published(rest, values) if place.isdigit() else values)
        stored[f"{path}.{suffix or 'weight'}"] = ("F32", given.shape, given.tobytes())
    folder = made.copy("deepseek-v3", tmp_path)
    made.write_tensors(folder / "model.safetensors", stored)
    config = {
        "architectures": ["ChameleonForConditionalGeneration"],
        "hidden_act": "silu",
        "hidden_size": D,
        "intermediate_size": F,
        "max_position_embeddings": 512,
        "model_type": "chameleon",
        "num_attention_heads": HEADS,
        "num_hidden_layers": N,
        "num_key_value_heads": KV,
        "rms_norm_eps": 1e-5,
        "swin_norm": behind,
        "tie_word_embeddings": False,
        "vocab_size": N_VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    file = made.convert(folder, tmp_path, outtype="f32")
    logits = checks.context_of(Path(file.path), type_k="f32", type_v="f32").decode(Batch.single(TOKENS, logits="all"))
    truth = evaluated(model)
    of_words = truth > LEAST
    shape = (len(TOKENS), -1)
    checks.hold("converted", logits[of_words].reshape(shape), truth[of_words].reshape(shape), checks.FLOAT_BOUND)
