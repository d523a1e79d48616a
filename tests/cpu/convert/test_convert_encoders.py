"""`ikpy convert` of encoders: states that transformers recorded, what stands behind pooling, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ikpy
from ikpy.convert import Conversion
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import IkpyError
from ikpy.gguf.reader import GGUFFile
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert import shelf_checkpoints as shelf
from tests.cpu.convert.seeded_checkpoints import Tiny
from tests.cpu.convert.shelf_checkpoints import (
    GEMMA_EMBEDDING,
    MODERN_BERT,
    MODERN_BERT_RANKER,
    MODERN_WINDOW,
    WIDE,
)
from tests.cpu.convert.t5_checkpoints import T5_ENCODER, UMT5_ENCODER
from tests.cpu.convert.test_convert_seeded import TOLERANCE, converted
from tests.cpu.convert.unigram_checkpoints import JINA_V3
from tests.cpu.models import reference_models as ref
from tests.cpu.models.test_encoders import gelu

ENCODERS = (*(kind for kind in shelf.CHECKPOINTS if kind.is_encoder), JINA_V3, T5_ENCODER, UMT5_ENCODER)


def states_of(file: GGUFFile) -> np.ndarray:
    """States [T, D] of the golden tokens."""
    context = Context(Model.load(file.path), ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32"))
    context.decode(Batch.single(tiny.tokens(), 0, logits="all"))
    assert context.embeddings is not None
    return context.embeddings


@pytest.mark.parametrize("kind", ENCODERS, ids=lambda kind: kind.name)
def test_states(kind: Tiny, tmp_path: Path) -> None:
    golden = np.load(kind.golden)
    error = np.abs(states_of(converted(kind, tmp_path))[golden["rows"]] - golden["logits"]).max(axis=1)
    assert error.max() <= TOLERANCE, f"token {golden['rows'][error.argmax()]} is off by {error.max():.1e}"


@pytest.mark.parametrize("kind", ENCODERS, ids=lambda kind: kind.name)
def test_encoders_need_no_output_matrix(kind: Tiny, tmp_path: Path) -> None:
    """Whether words would share the token embedding says nothing about states."""
    assert "output.weight" not in converted(kind, tmp_path, tie_word_embeddings=False).tensors


# EmbeddingGemma


def add_modules(folder: Path, *, pooling: dict[str, Any], **dense: Any) -> dict[str, np.ndarray]:
    """What Sentence Transformers writes beside the model; the matrices behind pooling."""
    kinds = [("", "models.Transformer"), ("1_Pooling", "models.Pooling"), ("2_Dense", "models.Dense")]
    kinds += [("3_Dense", "base.modules.dense.Dense"), ("4_Normalize", "models.Normalize")]
    listed = [
        {"idx": i, "name": str(i), "path": p, "type": f"sentence_transformers.{t}"} for i, (p, t) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    random, matrices = np.random.default_rng(3), {}
    for name, (n_out, n_in) in {"2_Dense": (WIDE, tiny.D), "3_Dense": (tiny.D, WIDE)}.items():
        values = {"in_features": n_in, "out_features": n_out, "bias": False, **dense}
        (folder / name).mkdir()
        values.setdefault("activation_function", "torch.nn.modules.linear.Identity")
        (folder / name / "config.json").write_text(json.dumps(values))
        matrices[name] = random.normal(0, 0.1, (n_out, n_in)).astype(np.float32)
        stored = {"linear.weight": ("F32", matrices[name].shape, matrices[name].tobytes())}
        made.write_tensors(folder / name / "model.safetensors", stored)
    return matrices


MEAN = {"word_embedding_dimension": tiny.D, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


@pytest.mark.parametrize("outtype", ["f32", "q8_0"])
def test_matrices_behind_pooling(outtype: str, tmp_path: Path) -> None:
    folder = tiny.write(GEMMA_EMBEDDING, tmp_path / "checkpoint")
    matrices = add_modules(folder, pooling=MEAN)
    file = made.convert(folder, tmp_path, outtype=outtype)
    keys = {name.removeprefix("gemma-embedding."): value for name, value in file.metadata.items()}
    sizes = {"dense_2_feat_in": tiny.D, "dense_2_feat_out": WIDE, "dense_3_feat_in": WIDE, "dense_3_feat_out": tiny.D}
    assert {name: keys[name] for name in sizes} == sizes and keys["pooling_type"] == 1
    llm = ikpy.LLM(file.path, n_threads=1, type_k="f32", type_v="f32")
    text = "the old man and the sea"
    wanted = llm.token_embeddings(text).mean(axis=0) @ matrices["2_Dense"].T @ matrices["3_Dense"].T
    np.testing.assert_allclose(llm.embed(text)[0], wanted / np.linalg.norm(wanted), atol=2e-5)


def test_pooling_of_newer_files(tmp_path: Path) -> None:
    folder = tiny.write(GEMMA_EMBEDDING, tmp_path / "checkpoint")
    add_modules(folder, pooling={"pooling_mode": "cls"})
    assert made.convert(folder, tmp_path).metadata["gemma-embedding.pooling_type"] == 2


def test_without_modules(tmp_path: Path) -> None:
    """Mean pooling; names as transformers writes them for other uses."""
    official = converted(GEMMA_EMBEDDING, tmp_path / "official")
    (tmp_path / "other").mkdir()
    folder = tiny.write(GEMMA_EMBEDDING, tmp_path / "other" / "checkpoint")

    def rename(tensors: made.Tensors) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    made.change_tensors(folder, rename)
    file = made.convert(folder, tmp_path / "other", outtype="f32")
    assert file.metadata["gemma-embedding.pooling_type"] == 1
    for name, info in official.tensors.items():
        assert np.array_equal(file.data(file.tensors[name]), official.data(info)), name


BAD: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("config", {"query_pre_attn_scalar": 64}, {}, "query_pre_attn_scalar 64 instead of 32"),
    ("config", {"layer_types": ["full_attention"] * 7}, {}, "another order of window layers"),
    ("pooling", {"pooling_mode_max_tokens": True}, {}, "pooling .'max_tokens'. cannot be said"),
    (
        "pooling",
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {},
        "cannot be said in a GGUF file",
    ),
    ("dense", MEAN, {"bias": True}, "2_Dense: a matrix with a bias or an activation"),
    ("dense", MEAN, {"activation_function": "torch.nn.modules.activation.Tanh"}, "a bias or an activation"),
    ("modules", MEAN, {}, "no list of modules"),
    ("outside", MEAN, {}, "'../2_Dense' is no folder beside it"),
    ("above", MEAN, {}, "'..' is no folder beside it"),
    ("shape", MEAN, {}, "behind pooling"),
    ("unknown", MEAN, {}, "a module 'LSTM' cannot be said"),
]


@pytest.mark.parametrize(("where", "values", "dense", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_expressed(
    where: str, values: dict[str, Any], dense: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tiny.write(GEMMA_EMBEDDING, tmp_path / "checkpoint", **(values if where == "config" else {}))
    add_modules(folder, pooling=MEAN if where == "config" else values, **dense)
    path = folder / "modules.json"
    if where == "modules":
        path.write_text("{}{")
    elif where == "outside":
        path.write_text(path.read_text().replace("2_Dense", "../2_Dense"))
    elif where == "above":
        path.write_text(path.read_text().replace("2_Dense", ".."))
    elif where == "unknown":
        path.write_text(path.read_text().replace("models.Dense", "models.LSTM"))
    elif where == "shape":
        stored = {"linear.weight": ("F32", (3, 2), np.ones(6, "<f4").tobytes())}
        made.write_tensors(folder / "2_Dense" / "model.safetensors", stored)
    with pytest.raises(IkpyError, match=message):
        Conversion(folder)


# ModernBERT


def test_modern_bert_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(MODERN_BERT, tmp_path)
    keys = {name.removeprefix("modern-bert."): value for name, value in file.metadata.items()}
    windows = keys["attention.sliding_window"], keys["attention.sliding_window_pattern"]
    assert windows == (MODERN_WINDOW, 3)
    assert (keys["rope.freq_base"], keys["rope.freq_base_swa"], keys["attention.causal"]) == (160000, 10000, False)
    assert "hidden_activation" not in keys and "blk.0.attn_norm.weight" not in file.tensors
    assert file.tensors["blk.1.ffn_up.weight"].shape == (tiny.D, 2 * tiny.FF)


def test_windows_of_modern_bert_without_a_base(tmp_path: Path) -> None:
    """A null means that of the other layers, as in transformers 4; no key the usual one."""
    folder = tiny.write(MODERN_BERT, tmp_path / "checkpoint", local_rope_theta=None)
    assert made.convert(folder, tmp_path).metadata["modern-bert.rope.freq_base_swa"] == 160000
    made.amend(folder, drop=("local_rope_theta",))
    assert made.convert(folder, tmp_path).metadata["modern-bert.rope.freq_base_swa"] == 10000


def test_modern_bert_for_masked_words(tmp_path: Path) -> None:
    """What predicts words is left out; kinds of layers as transformers 5 lists them."""
    official = converted(MODERN_BERT, tmp_path / "official")
    kinds = ["sliding_attention" if il % 3 else "full_attention" for il in range(5)]
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    (tmp_path / "other").mkdir()
    folder = tiny.write(MODERN_BERT, tmp_path / "other" / "checkpoint", layer_types=kinds, rope_parameters=rope)
    made.amend(folder, drop=("global_rope_theta", "local_rope_theta", "global_attn_every_n_layers"))
    made.amend(folder, architectures=["ModernBertForMaskedLM"])

    def add(tensors: made.Tensors) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)
        for name, shape in {"head.dense.weight": (4, 4), "head.norm.weight": (4,), "decoder.bias": (9,)}.items():
            tensors[name] = made.bf16(np.ones(shape, np.float32))

    made.change_tensors(folder, add)
    notes = Conversion(folder).notes
    assert any("3 tensors of other parts are left out" in note for note in notes)
    assert not any("chat template" in note for note in notes)
    file = made.convert(folder, tmp_path / "other", outtype="f32")
    assert {k: v for k, v in file.metadata.items() if k.startswith("modern-bert.")} == {
        k: v for k, v in official.metadata.items() if k.startswith("modern-bert.")
    }
    for name, info in official.tensors.items():
        assert np.array_equal(file.data(file.tensors[name]), official.data(info)), name


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_rankers_of_modern_bert(pooling: str, tmp_path: Path) -> None:
    file = converted(MODERN_BERT_RANKER, tmp_path, classifier_pooling=pooling)
    assert file.metadata["modern-bert.pooling_type"] == 4
    assert list(file.metadata["modern-bert.classifier.output_labels"]) == ["LABEL_0"]
    llm = ikpy.LLM(file.path, n_threads=1, type_k="f32", type_v="f32")
    states, w = llm.token_embeddings("the boat"), tiny.weights(MODERN_BERT_RANKER)
    x = gelu(w["head.dense.weight"] @ (states[0] if pooling == "cls" else states.mean(axis=0)))
    wanted = w["classifier.weight"] @ ref.layer_norm(x, w["head.norm.weight"], 1e-5) + w["classifier.bias"]
    np.testing.assert_allclose(llm.embed("the boat")[0], wanted, atol=1e-4)


def test_labels_of_rankers_are_as_many_as_their_scores(tmp_path: Path) -> None:
    """transformers saves no names of two scores, as it gives models as many; files need a name for every score."""

    def widen(tensors: made.Tensors) -> None:
        tensors["classifier.weight"] = made.bf16(np.ones((2, tiny.D), np.float32))
        tensors["classifier.bias"] = made.bf16(np.ones(2, np.float32))

    folder = tiny.write(MODERN_BERT_RANKER, tmp_path / "checkpoint")
    made.change_tensors(folder, widen)
    with pytest.raises(IkpyError, match="output_labels names 1 scores, the classification head gives 2"):
        Conversion(folder)
    made.amend(folder, drop=("id2label",))
    file = made.convert(folder, tmp_path, outtype="f32")
    assert list(file.metadata["modern-bert.classifier.output_labels"]) == ["LABEL_0", "LABEL_1"]
    assert ikpy.LLM(file.path, n_threads=1).embed("the boat")[0].shape == (2,)


BAD_MODERN: list[tuple[dict[str, Any], str]] = [
    ({"layer_types": ["full_attention", "sliding_attention"] + ["full_attention"] * 3}, "another order of window"),
    ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers 0"),
    ({"hidden_activation": "relu"}, "activation 'relu'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn'"),
    ({"classifier_activation": "tanh"}, "classifier_activation 'tanh'"),
    ({"classifier_pooling": "max"}, "classifier_pooling 'max'"),
]


@pytest.mark.parametrize(("values", "message"), BAD_MODERN, ids=lambda x: x if isinstance(x, str) else "")
def test_modern_bert_that_cannot_be_expressed(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(IkpyError, match=message):
        Conversion(tiny.write(MODERN_BERT_RANKER, tmp_path / "checkpoint", **values))


def test_biases_of_modern_bert(tmp_path: Path) -> None:
    folder = tiny.write(MODERN_BERT, tmp_path / "checkpoint", attention_bias=True)
    bias = made.bf16(np.ones(tiny.D, np.float32))
    made.change_tensors(folder, lambda tensors: tensors.__setitem__("layers.1.attn.Wo.bias", bias))
    with pytest.raises(IkpyError, match="architecture modern-bert has no bias for 'layers"):
        Conversion(folder)
