"""Mamba-2 alone: random models against their definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.cli.quantize import run as quantize
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import IkpyError
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import RMS, TOKENS
from tests.cpu.models.reference_mamba2 import Sizes
from tests.cpu.models.reference_models import Evaluation, RandomModel

N_LAYER, D = 3, 64
MAMBA2 = Sizes(D)
BOUND = 1e-4


def new_model(seed: int, *, tied: bool = True) -> RandomModel:
    """A file as llama.cpp converts it: no heads, no network."""
    keys = {
        "block_count": N_LAYER,
        "embedding_length": D,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        **RMS,
        **MAMBA2.keys,
    }
    m = RandomModel("mamba2", seed, **keys)
    checks.frame(m, D, tied=tied)
    for il in range(N_LAYER):
        m.norm(f"blk.{il}.attn_norm", D)
        MAMBA2.add(m, f"blk.{il}")
    return m


def evaluated(m: RandomModel) -> np.ndarray:
    """Logits [T, V] of TOKENS in float64."""
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        x = x + MAMBA2.branch(w, ref.rms_norm(x, w["attn_norm"], e.eps), e.eps)
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w.get("output", e.w["token_embd"]).T


def mamba2() -> tuple[RandomModel, np.ndarray]:
    """With tied embeddings."""
    m = new_model(111)
    return m, evaluated(m)


@pytest.mark.parametrize("tied", [True, False])
def test_definition(tied: bool, tmp_path: Path) -> None:
    model = new_model(112, tied=tied)
    checks.check_definition(model, evaluated(model), tmp_path, BOUND)


def test_what_cannot_be(tmp_path: Path) -> None:
    for key, value, message in (
        ("ssm.conv_kernel", 0, "impossible recurrent layers"),
        ("embedding_length", 0, "impossible dimensions: embedding 0"),
        ("attention.head_count", 4, "layer 0 has 4 heads|impossible dimensions|not found"),
    ):
        model = mamba2()[0]
        model.keys[key] = value
        with pytest.raises(IkpyError, match=message) as error:
            Model.load(model.write(tmp_path / "model.gguf"))
        assert "\n" not in str(error.value)


def test_quantized(tmp_path: Path) -> None:
    model, truth = mamba2()
    assert quantize([str(model.write(tmp_path / "model.gguf")), str(tmp_path / "small.gguf"), "Q8_0"]) == 0
    context = Context(Model.load(tmp_path / "small.gguf"), ContextParams(n_ctx=64, n_threads=1))
    logits = context.decode(Batch.single(TOKENS, logits="all"))
    assert np.median(np.abs(logits - truth).max(axis=1)) < 0.1 * np.abs(truth).max()
