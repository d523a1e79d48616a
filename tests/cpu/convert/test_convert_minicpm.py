"""`ikpy convert` of MiniCPM and MiniCPM 3: logits, keys, errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import IkpyError
from ikpy.gguf.reader import GGUFFile
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.seeded_checkpoints import Tiny
from tests.cpu.convert.shelf_checkpoints import CPM_ROT, MINICPM, MINICPM3, N_MINICPM
from tests.cpu.convert.test_convert_seeded import converted

ORIGINAL = 256


def logits_of(file: GGUFFile, n_ctx: int = ORIGINAL) -> np.ndarray:
    """Logits [T, V] of the golden tokens in a context of this length."""
    context = Context(Model.load(file.path), ContextParams(n_ctx=n_ctx, n_threads=1, type_k="f32", type_v="f32"))
    return context.decode(Batch.single(tiny.tokens(), 0, logits="all"))


def test_minicpm3_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(MINICPM3, tmp_path)
    keys = {name.removeprefix("minicpm3."): value for name, value in file.metadata.items()}
    sizes = {"key_length": 48, "value_length": 16, "q_lora_rank": 48, "kv_lora_rank": 32, "head_count_kv": 4}
    assert {name: keys[f"attention.{name}"] for name in sizes} == sizes
    assert (keys["rope.dimension_count"], keys["rope.scaling.original_context_length"]) == (CPM_ROT, ORIGINAL)
    assert keys["rope.scaling.attn_factor"] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(ORIGINAL)))
    assert "rope.scaling.type" not in keys and "output.weight" not in file.tensors
    assert file.tensors["rope_factors_long.weight"].shape == (CPM_ROT // 2,)


def as_granite(kind: Tiny) -> Tiny:
    """The same model as Granite, which is held to transformers; without LongRoPE."""
    values = {name: value for name, value in kind.config.items() if not name.startswith(("scale_", "dim_", "rope_sc"))}
    scales = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / math.sqrt(N_MINICPM),
        "logits_scaling": tiny.D / 256,
        "attention_multiplier": 0.25,
    }
    return Tiny("granite", {**values, **tiny.head("Granite", "granite"), **scales}, kind.shapes)


def test_logits_of_minicpm(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    ours = logits_of(converted(MINICPM, tmp_path / "plain", rope_scaling=None))
    granite = logits_of(converted(as_granite(MINICPM), tmp_path / "granite"))
    np.testing.assert_allclose(ours, granite, atol=1e-4)
    stretched = logits_of(converted(MINICPM, tmp_path / "stretched"))
    assert np.abs(stretched - granite)[5:].max() > 0.05, "the factors of LongRoPE have no effect"


def test_minicpm_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(MINICPM, tmp_path)
    keys = {name.removeprefix("minicpm."): value for name, value in file.metadata.items()}
    assert (keys["embedding_scale"], keys["logit_scale"], keys["rope.scaling.type"]) == (12, tiny.D / 256, "longrope")
    assert keys["residual_scale"] == pytest.approx(1.4 / math.sqrt(N_MINICPM))
    short, long = logits_of(file), logits_of(file, 2 * ORIGINAL)
    assert np.abs(short - long)[5:].max() > 0.05, "long contexts take the same factors"


def test_scales_that_a_configuration_leaves_out(tmp_path: Path) -> None:
    """Are 1 in the configuration class of MiniCPM: branches are divided by sqrt(layers), logits by the width."""
    folder = tiny.write(MINICPM, tmp_path / "checkpoint")
    made.amend(folder, drop=("scale_emb", "scale_depth", "dim_model_base"))
    keys = made.convert(folder, tmp_path).metadata
    names = ("embedding_scale", "residual_scale", "logit_scale")
    scales = [keys[f"minicpm.{name}"] for name in names]
    assert scales == pytest.approx([1, 1 / math.sqrt(N_MINICPM), tiny.D])


def test_sparse_attention_is_told(tmp_path: Path) -> None:
    folder = tiny.write(MINICPM, tmp_path / "checkpoint", sparse_config={"kernel_size": 32})
    assert any("sparse attention (InfLLM)" in note for note in Conversion(folder).notes)


BAD: list[tuple[Tiny, dict[str, Any], str]] = [
    (MINICPM3, {"scale_emb": 10}, "scale_emb 10 instead of 12"),
    (MINICPM3, {"scale_depth": 1.2}, "scale_depth 1.2 instead of 1.4"),
    (MINICPM3, {"dim_model_base": 128}, "dim_model_base 128 instead of 256"),
    (MINICPM3, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "RoPE scaling 'yarn'"),
    (MINICPM3, {"num_key_value_heads": 2}, "2 KV heads of 4 heads"),
    (MINICPM3, {"q_lora_rank": None}, "'q_lora_rank' is missing"),
    (MINICPM3, {"kv_lora_rank": 16}, "has wrong shape"),
    (MINICPM, {"num_experts": 8}, "experts"),
    (MINICPM, {"dim_model_base": 0}, "dim_model_base 0"),
]


@pytest.mark.parametrize(("kind", "values", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_expressed(kind: Tiny, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(IkpyError, match=message):
        Conversion(tiny.write(kind, tmp_path / "checkpoint", **values))
