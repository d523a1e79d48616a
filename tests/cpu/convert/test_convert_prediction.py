"""`ikpy convert` of layers that predict further tokens: logits are those of the layer alone, and drafts its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import FileFormatError, UsageError
from tests.cpu.convert import prediction_checkpoints as predicting
from tests.cpu.convert.checkpoints import Tensors, change_tensors, convert
from tests.cpu.convert.prediction_checkpoints import Kind, Parts

TOLERANCE = 1e-4
EXACT = ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32", type_indexer="f32", embeddings=True)


@pytest.mark.parametrize("kind", predicting.KINDS_OF_LAYERS, ids=lambda kind: kind.name)
def test_logits(kind: Kind, tmp_path: Path) -> None:
    made = predicting.make(kind, tmp_path)
    file = convert(made.folder, tmp_path / "with", outtype="f32")
    alone = Model.load(convert(made.alone, tmp_path / "only", outtype="f32").path)
    expected = Context(alone, EXACT).decode(Batch.single(np.arange(len(made.tokens)), logits="all"))
    head = Model.load(file.path).prediction_head()
    found = Context(head, EXACT).decode(Batch.single(made.tokens, logits="all"), made.states)
    error = np.abs(found - expected).max(axis=1) / np.abs(expected).max()
    assert error.max() < TOLERANCE, f"token {error.argmax()} is off by {error.max():.1e}"


@pytest.mark.parametrize("kind", predicting.KINDS_OF_LAYERS, ids=lambda kind: kind.name)
def test_files_of_their_own(kind: Kind, tmp_path: Path) -> None:
    """--mtp: layers, embeddings, last norm and output matrix alone, which give the same logits bit by bit; --no-mtp."""
    made = predicting.make(kind, tmp_path)
    whole = convert(made.folder, tmp_path / "with", outtype="f32")
    own = convert(made.folder, tmp_path / "only", outtype="f32", prediction="only")
    without = convert(made.folder, tmp_path / "without", outtype="f32", prediction="none")
    blocks = {name.split(".")[1] for name in own.tensors if name.startswith("blk.")}
    arch = whole.metadata["general.architecture"]
    n_layer = without.metadata[f"{arch}.block_count"]
    assert blocks == {str(n_layer)} and {"token_embd.weight", "tokenizer.ggml.tokens"} <= {*own.tensors, *own.metadata}
    assert {name for name in whole.tensors if not name.startswith(f"blk.{n_layer}.")} == set(without.tensors)
    assert f"{arch}.nextn_predict_layers" not in without.metadata
    assert own.metadata[f"{arch}.block_count"] == n_layer + 1
    heads = (Model.load(file.path).prediction_head() for file in (whole, own))
    first, second = (
        Context(head, EXACT).decode(Batch.single(made.tokens, logits="all"), made.states) for head in heads
    )
    if (
        kind.name != "deepseek-v4"
    ):  # whose layers have a last mixer of their own, which only such files have a place for
        np.testing.assert_array_equal(first, second)
    with pytest.raises(UsageError, match="prediction layers alone"):
        Context(Model.load(own.path), EXACT)


@pytest.mark.parametrize(
    "made_of", [predicting.GLM5_NEXT, predicting.NEMOTRON_H_MOE], ids=["glm5-next", "nemotron-h-moe"]
)
def test_tensors_are_those_of_the_layers_it_is_made_like(made_of: Parts, tmp_path: Path) -> None:
    """Bit by bit; layers by their definition are tested as files of llama.cpp have them."""
    with_layer, same = predicting.make_parts(made_of, tmp_path)
    file, other = (convert(folder, folder, outtype="f32") for folder in (with_layer, same))
    n_layer = file.metadata[f"{file.metadata['general.architecture']}.block_count"] - 1
    expected = {name: None for _, name in made_of.ends}
    for layer, _, renamed in made_of.parts:
        for name, info in other.tensors.items():
            block, _, rest = name.removeprefix("blk.").partition(".")
            if block == str(layer) and "hc_" not in name:
                module, dot, suffix = rest.rpartition(".")
                expected[f"{renamed.get(module, module)}{dot}{suffix}"] = other.data(info)
    found = {
        name.removeprefix(f"blk.{n_layer}."): file.data(info)
        for name, info in file.tensors.items()
        if name.startswith(f"blk.{n_layer}.")
    }
    assert {name.removesuffix(".weight") for name in found} == {name.removesuffix(".weight") for name in expected}
    for name, data in expected.items():
        if data is not None:
            np.testing.assert_array_equal(found[name], data, err_msg=name)
    assert len(Model.load(file.path).prediction_heads()) == 1


def _kind(name: str) -> Kind:
    return next(kind for kind in predicting.KINDS_OF_LAYERS if kind.name == name)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("glm4moe", "model.layers.2.shared_head.norm", "prediction layer 0 lacks 'shared_head.norm'"),
        ("exaone-moe", "mtp.norm", "prediction layer 0 lacks 'norm'"),
        ("bailing-hybrid", "model.layers.4.final_layernorm", "prediction layer 0 lacks 'final_layernorm'"),
        ("deepseek-v4", "mtp.0.norm", "prediction layer 0 lacks 'norm'"),
        (
            "deepseek-v3",
            "model.layers.3.mlp.gate.e_score_correction_bias",
            "layer 3 lacks exp_probs_b.bias, which layer 1",
        ),
    ],
)
def test_a_layer_that_lacks_a_tensor(name: str, tensor: str, message: str, tmp_path: Path) -> None:
    """Loaders would take the model's last norm, or no bias."""
    folder = predicting.make(_kind(name), tmp_path).folder
    change_tensors(folder, lambda tensors: [tensors.pop(n) for n in (tensor, f"{tensor}.weight") if n in tensors])
    with pytest.raises(FileFormatError, match=message):
        convert(folder, tmp_path)
    convert(folder, tmp_path, prediction="none")


def test_one_of_two_layers_without_what_joins_its_inputs(tmp_path: Path) -> None:
    folder = predicting.make(_kind("glm4moe"), tmp_path).folder

    def repeat(tensors: Tensors) -> None:
        more = {n.replace(".layers.2.", ".layers.3."): e for n, e in tensors.items() if ".layers.2." in n}
        tensors |= {name: entry for name, entry in more.items() if "eh_proj" not in name}

    change_tensors(folder, repeat)
    with pytest.raises(FileFormatError, match="prediction layer 1 lacks 'eh_proj'"):
        convert(folder, tmp_path)


def test_layers_without_what_joins_their_inputs_are_left_out(tmp_path: Path) -> None:
    folder = predicting.make(_kind("glm4moe"), tmp_path).folder
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.2.eh_proj.weight"))
    assert any(note.endswith("what joins their inputs is missing") for note in Conversion(folder).notes)


@pytest.mark.parametrize("prediction", ["keep", "none"])
def test_names_of_the_text_part_of_a_larger_model(prediction: str, tmp_path: Path) -> None:
    """Layers with names of their own are no layers beyond num_hidden_layers there, either."""
    folder = predicting.make(_kind("exaone-moe"), tmp_path).folder
    expected = Path(convert(folder, tmp_path / "plain", prediction=prediction).path).read_bytes()

    def prefix(tensors: Tensors) -> None:
        for name in list(tensors):
            if not name.startswith("lm_head"):
                tensors[f"model.language_model.{name.removeprefix('model.')}"] = tensors.pop(name)

    change_tensors(folder, prefix)
    assert Path(convert(folder, tmp_path / "prefixed", prediction=prediction).path).read_bytes() == expected
