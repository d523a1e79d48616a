"""Quantizing layers that predict further tokens: types of their tensors, importance values, interleaved types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.gguf.reader import GGUFFile
from ikpy.quants import registry
from tests.cpu.models import test_prediction_head as heads
from tests.cpu.models.test_prediction_layers import collected

D = 256
"""Rows of one super-block."""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """GLM-4.5's kind, wide enough for blocks of 256; the prediction layer has an embedding and an output matrix."""
    sizes = {"D": D, "HEADS": 4, "KV": 2, "HEAD": 64, "ROT": 32, "FF": D, "EXPERTS": 4, "USED": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(heads, name, value)
    return Path(heads.glm4moe(own_matrices=True).write(tmp_path / "source.gguf"))


def types_of(path: Path) -> dict[str, str]:
    """Of the matrices of the prediction layer."""
    file = GGUFFile.open(path)
    found = {name.removeprefix("blk.2."): info for name, info in file.tensors.items() if name.startswith("blk.2.")}
    return {name: registry.by_id(info.type_id).name for name, info in found.items() if len(info.shape) > 1}


@pytest.mark.parametrize(
    ("ftype", "usual"),
    [("Q8_0", "q8_0"), ("Q4_K_M", "q4_K"), ("Q3_K_M", "q3_K"), ("IQ4_XS", "iq4_xs"), ("Q4_0", "q4_0")],
)
def test_types(ftype: str, usual: str, source: Path, tmp_path: Path) -> None:
    """No rule of llama-quantize knows `nextn` tensors: they get the usual type, the others that of their role."""
    out = tmp_path / "out.gguf"
    assert main(["quantize", str(source), str(out), ftype]) == 0
    found = types_of(out)
    for name in ("eh_proj", "embed_tokens", "shared_head_head"):
        assert found[f"nextn.{name}.weight"] == usual, name
    assert found["ffn_gate_inp.weight"] == "f32"
    assert GGUFFile.open(out).metadata["glm4moe.nextn_predict_layers"] == 1
    rule = ["--custom-q", r"nextn\.eh_proj=q8_0"]
    assert main(["quantize", *rule, str(source), str(out), ftype]) == 0
    assert types_of(out)["nextn.eh_proj.weight"] == "q8_0"


@pytest.mark.parametrize("command", ["quantize", "repack"])
def test_embeddings_are_never_interleaved(command: str, source: Path, tmp_path: Path) -> None:
    """Engines look their rows up one by one."""
    out = tmp_path / "out.gguf"
    if command == "quantize":
        assert main(["quantize", str(source), str(out), "Q4_0_R8"]) == 0
    else:
        plain = tmp_path / "plain.gguf"
        assert main(["quantize", str(source), str(plain), "Q4_0"]) == 0
        assert main(["quantize", "--repack", str(plain), str(out), "Q4_0"]) == 0
    found = types_of(out)
    assert found["nextn.embed_tokens.weight"] == "q4_0"
    assert found["nextn.eh_proj.weight"] == found["nextn.shared_head_head.weight"] == "q4_0_r8"
    states = np.random.default_rng(1).normal(size=(5, D)).astype(np.float32)
    tokens = Batch.single([3, 1, 4, 1, 5], logits="all")
    logits = [
        Context(Model.load(path).prediction_head(), ContextParams(n_ctx=64, n_threads=1)).decode(tokens, states)
        for path in (source, out)
    ]
    assert np.abs(logits[0] - logits[1]).max() < 0.3 * np.abs(logits[0]).max()


def test_importance_of_all_matrices(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`imatrix --mtp` sees every matrix but the embedding, which needs no values: the lowest types are possible.
    With data of the model alone they are refused.
    """
    loaded, out = Model.load(source), tmp_path / "out.gguf"
    line = ["quantize", "--imatrix", str(tmp_path / "imatrix.gguf"), str(source), str(out), "IQ2_XXS"]
    collected(loaded, tmp_path, 64, predicts=False)
    assert main(line) == 1
    assert "Missing importance matrix for tensor blk.2." in capsys.readouterr().err
    collected(loaded, tmp_path, 64, predicts=True)
    assert main(line) == 0
    found = types_of(out)
    assert found["nextn.embed_tokens.weight"] == found["nextn.eh_proj.weight"] == "iq2_xxs"
