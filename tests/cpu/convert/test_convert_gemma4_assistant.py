"""`ikpy convert` of drafters of Gemma 4: the files are those of the tests of their layers; forms, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.errors import FileFormatError, UsageError
from tests.cpu.convert import gemma4_assistant_checkpoints as drafters
from tests.cpu.convert.checkpoints import amend, change_tensors, convert

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": True},
    "tokenizer of the model": {"tokenizer": False},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_file(form: str, tmp_path: Path) -> None:
    """Tensors bit by bit, and keys, are those of the file whose layers are held to their definition."""
    wanted = drafters.write(tmp_path / "drafter", **FORMS[form])
    target = None if FORMS[form].get("tokenizer", True) else str(drafters.TOKENIZER)
    file = convert(tmp_path / "drafter", tmp_path, outtype="f32", target=target)
    assert set(file.tensors) == {f"{name}.weight" for name in wanted.weights}
    for name, values in wanted.weights.items():
        found = file.data(file.tensors[f"{name}.weight"]).view("<f4").reshape(values.shape)
        np.testing.assert_array_equal(found, values, name)
    per_layer = {"feed_forward_length": [drafters.assistant.OWN_FF] * 3}
    for key, value in (wanted.keys | per_layer | {"vocab_size": drafters.N_VOCAB}).items():
        found = file.metadata[f"gemma4-assistant.{key}"]
        assert (list(found) if isinstance(value, list) else found) == pytest.approx(value), key
    (tmp_path / "model").mkdir()
    tokens = convert(drafters.TOKENIZER, tmp_path / "model").metadata
    assert list(file.metadata["tokenizer.ggml.tokens"]) == list(tokens["tokenizer.ggml.tokens"])
    assert file.metadata["tokenizer.ggml.model"] == tokens["tokenizer.ggml.model"]


def test_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file drafts for a model, whose text stays; groups of tokens are told of."""
    folder = tmp_path / "drafter"
    drafters.write(folder, groups=True, hidden_size=64, head_dim=16, global_head_dim=32, sliding_window=8)
    amend(folder, backbone_hidden_size=64)

    def fit(tensors: dict[str, Any]) -> None:
        for name, (kind, shape, data) in list(tensors.items()):
            rows = np.frombuffer(data, np.float32).reshape(shape) if kind == "F32" else None
            if "q_proj" in name or "q_norm" in name:
                rows = rows[: len(rows) // 2]  # type: ignore[index]
            elif "o_proj" in name or name == "pre_projection.weight":
                rows = rows[:, : shape[1] // 2 if "o_proj" in name else 128]  # type: ignore[index]
            elif name == "post_projection.weight":
                rows = rows[:64]  # type: ignore[index]
            if rows is not None:
                tensors[name] = kind, rows.shape, np.ascontiguousarray(rows).tobytes()

    change_tensors(folder, fit)
    model, draft = str(tmp_path / "model.gguf"), str(tmp_path / "draft.gguf")
    assert main(["convert", str(drafters.TOKENIZER), "--outfile", model]) == 0
    assert main(["convert", str(folder), "--outfile", draft]) == 0
    assert "groups of tokens (masked_embedding) are left out" in capsys.readouterr().out
    common = ["-p", "the old", "-n", "12", "--temp", "0", "-t", "1", "-c", "128", "-no-cnv"]
    assert main(["cli", "-m", model, *common]) == 0
    text = capsys.readouterr().out
    assert main(["cli", "-m", model, "-md", draft, "--spec-type", "mtp", "--draft-p-min", "0", *common]) == 0
    shown = capsys.readouterr()
    assert shown.out == text and "statistics mtp" in shown.err


def test_errors(tmp_path: Path) -> None:
    for name, value, message in (
        ("num_kv_shared_layers", 2, "num_kv_shared_layers 2 of 3 layers"),
        ("hidden_size_per_layer_input", 16, "hidden_size_per_layer_input 16"),
        ("enable_moe_block", True, "enable_moe_block true"),
        ("use_double_wide_mlp", True, "use_double_wide_mlp true"),
        ("num_experts", 4, "num_experts 4"),
    ):
        drafters.write(tmp_path / name, **{name: value})
        with pytest.raises(FileFormatError, match=message):
            convert(tmp_path / name, tmp_path)
    folder = tmp_path / "lacks"
    drafters.write(folder)
    change_tensors(folder, lambda tensors: tensors.pop("pre_projection.weight"))
    with pytest.raises(FileFormatError, match=r"nextn.pre_projection.weight.*the checkpoint is incomplete"):
        convert(folder, tmp_path)
    with pytest.raises(UsageError, match="--target is for drafters, and this is a model"):
        convert(drafters.TOKENIZER, tmp_path, target=str(drafters.TOKENIZER))
