"""`ikpy convert` of Jina Embeddings v2 and NeoBERT: states are those of the checkpoint's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ikpy
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from tests.cpu.convert import encoder_checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.seeded_checkpoints import FF, HEADS, D, Tiny
from tests.cpu.models import reference_models as ref
from tests.cpu.models.test_encoders import gelu

HEAD = D // HEADS


def converted(kind: Tiny, folder: Path, **config: Any) -> GGUFFile:
    folder.mkdir(exist_ok=True)
    return convert(made.write(kind, folder / "checkpoint", **config), folder, outtype="f32")


def states_of(path: Path) -> np.ndarray:
    context = Context(Model.load(path), ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32"))
    context.decode(Batch.single(tiny.tokens(), 0, logits="all"))
    assert context.embeddings is not None
    return context.embeddings


def layers_of(kind: Tiny, prefix: str) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Weights in float64: all by name, and those of every layer."""
    w = {name: values.astype(np.float64) for name, values in tiny.weights(kind).items()}
    parts = [f"{prefix}.{il}." for il in range(made.N_LAYER)]
    return w, [{name.removeprefix(p): x for name, x in w.items() if name.startswith(p)} for p in parts]


def jina_states(kind: Tiny, prefix: str) -> np.ndarray:
    w, layers = layers_of(kind, f"{prefix}encoder.layer")

    def norm(x: np.ndarray, where: dict[str, np.ndarray], name: str) -> np.ndarray:
        return ref.layer_norm(x, where[f"{name}.weight"], 1e-12) + where[f"{name}.bias"]

    def linear(x: np.ndarray, where: dict[str, np.ndarray], name: str) -> np.ndarray:
        return x @ where[f"{name}.weight"].T + where.get(f"{name}.bias", 0.0)

    e = f"{prefix}embeddings"
    x = w[f"{e}.word_embeddings.weight"][tiny.tokens()] + w[f"{e}.token_type_embeddings.weight"][0]
    x = norm(x, w, f"{e}.LayerNorm")
    for layer in layers:
        q, k, v = (linear(x, layer, f"attention.self.{name}") for name in ("query", "key", "value"))
        if "attention.self.layer_norm_q.weight" in layer:
            q, k = norm(q, layer, "attention.self.layer_norm_q"), norm(k, layer, "attention.self.layer_norm_k")
        q, k, v = (y.reshape(len(x), HEADS, HEAD) for y in (q, k, v))
        attended = ref.attend(q, k, v, HEAD**-0.5, max_bias=8.0, causal=False)
        h = norm(x + linear(attended, layer, "attention.output.dense"), layer, "attention.output.LayerNorm")
        if "mlp.up_gated_layer.weight" in layer:
            h = norm(x + h, layer, "layer_norm_1")
            up, gate = np.split(linear(h, layer, "mlp.up_gated_layer"), 2, axis=1)
            x = norm(h + linear(up * gelu(gate), layer, "mlp.down_layer"), layer, "layer_norm_2")
        elif "mlp.gated_layers.weight" in layer:
            gate, up = np.split(linear(h, layer, "mlp.gated_layers"), 2, axis=1)
            x = norm(h + linear(gelu(gate) * up, layer, "mlp.wo"), layer, "mlp.layernorm")
        else:
            hidden = gelu(linear(h, layer, "intermediate.dense"))
            x = norm(h + linear(hidden, layer, "output.dense"), layer, "output.LayerNorm")
    return x


def neo_states() -> np.ndarray:
    w, layers = layers_of(made.NEO_BERT, "model.transformer_encoder")
    x, angles = w["model.encoder.weight"][tiny.tokens()], ref.plain_angles(HEAD, 1e4, np.arange(tiny.N_TOKENS) * 1.0)
    for layer in layers:
        rows = ref.rms_norm(x, layer["attention_norm.weight"], 1e-5) @ layer["qkv.weight"].T
        q, k, v = np.split(rows.reshape(len(x), HEADS, 3 * HEAD), 3, axis=2)
        q, k = (ref.rotate(y, angles, neox=False) for y in (q, k))
        x = x + ref.attend(q, k, v, HEAD**-0.5, causal=False) @ layer["wo.weight"].T
        gate, up = np.split(ref.rms_norm(x, layer["ffn_norm.weight"], 1e-5) @ layer["ffn.w12.weight"].T, 2, axis=1)
        x = x + (ref.silu(gate) * up) @ layer["ffn.w3.weight"].T
    return ref.rms_norm(x, w["model.layer_norm.weight"], 1e-5)


CASES = {
    "jina": (made.JINA, lambda: jina_states(made.JINA, "")),
    "code": (made.JINA_CODE, lambda: jina_states(made.JINA_CODE, "bert.")),
    "plain": (made.JINA_PLAIN, lambda: jina_states(made.JINA_PLAIN, "")),
    "neo": (made.NEO_BERT, neo_states),
}


@pytest.mark.parametrize("name", CASES)
def test_states(name: str, tmp_path: Path) -> None:
    kind, states = CASES[name]
    truth = states()
    error = np.abs(states_of(converted(kind, tmp_path).path) - truth).max(axis=1)
    assert error.max() <= 1e-4 * np.abs(truth).max(), f"token {error.argmax()} is off by {error.max():.1e}"


def test_keys_and_words(tmp_path: Path) -> None:
    """Texts become what the checkpoint's tokenizer makes of them, between their marks."""
    file = converted(made.JINA, tmp_path)
    keys = file.metadata
    assert keys["jina-bert-v2.attention.causal"] is False and keys["tokenizer.ggml.token_type_count"] == 2
    roles = {"bos": 2, "cls": 2, "eos": 3, "seperator": 3, "unknown": 1, "padding": 0, "mask": 4}
    assert {name: keys[f"tokenizer.ggml.{name}_token_id"] for name in roles} == roles
    llm = ikpy.LLM(file.path, n_threads=1)
    wanted = ["[CLS]", "▁the", "▁old", "▁man", "▁'", "▁s", "▁boat", "er", "▁!", "[SEP]"]
    assert [llm.vocab.token_text(i) for i in llm.tokenize("The OLD man's boater!", add_special=True)] == wanted


def test_width_of_neo_bert(tmp_path: Path) -> None:
    keys = converted(made.NEO_BERT, tmp_path).metadata
    assert keys["neo-bert.feed_forward_length"] == FF and keys["neo-bert.pooling_type"] == 2


def test_reranker(tmp_path: Path) -> None:
    file = converted(made.JINA_RANKER, tmp_path)
    llm = ikpy.LLM(file.path, n_threads=1, type_k="f32", type_v="f32")
    assert llm.pooling == "rank"
    w = {name: values.astype(np.float64) for name, values in tiny.weights(made.JINA_RANKER).items()}
    first = jina_states(made.JINA_RANKER, "bert.")[0]
    context = Context(Model.load(file.path), ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32"))
    classifier = context.model.arch.classifier
    assert classifier is not None
    hidden = np.tanh(w["bert.pooler.dense.weight"] @ first + w["bert.pooler.dense.bias"])
    wanted = w["classifier.weight"] @ hidden + w["classifier.bias"]
    np.testing.assert_allclose(classifier(states_of(file.path)), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (made.JINA, {"position_embedding_type": "absolute"}, "position_embedding_type 'absolute'"),
        (made.JINA, {"feed_forward_type": "reglu"}, "feed_forward_type 'reglu'"),
        (made.JINA, {"hidden_act": "relu"}, "activation 'relu'"),
        (made.JINA_RANKER, {"id2label": [1]}, r"'id2label' is \[1\], not an object"),
        (made.NEO_BERT, {"rope": False}, "rope false"),
        (made.NEO_BERT, {"rms_norm": False}, "rms_norm false"),
        (made.NEO_BERT, {"ngpt": True}, "ngpt true"),
    ],
)
def test_refused(kind: Tiny, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=message):
        converted(kind, tmp_path, **values)
