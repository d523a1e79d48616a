"""`ikpy convert` of checkpoints that are made from a seed: logits that transformers recorded, types of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.gguf.reader import GGUFFile
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert import shelf_checkpoints
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.seeded_checkpoints import Tiny
from tests.cpu.convert.seeded_kinds import KINDS
from tests.cpu.convert.test_convert import types

TOLERANCE = 5e-4
DECODERS = tuple(kind for kind in KINDS if not kind.is_encoder)
OF_ONE_TYPE = tuple(kind for kind in KINDS if kind not in shelf_checkpoints.CHECKPOINTS)
"""Whose matrices all get the output type; types of the others are tested where their keys are."""


def converted(kind: Tiny, folder: Path, outtype: str = "f32", **config: Any) -> GGUFFile:
    """The GGUF file of a checkpoint with further values of config.json."""
    folder.mkdir(exist_ok=True)
    return convert(tiny.write(kind, folder / "checkpoint", **config), folder, outtype=outtype)


def logits_of(file: GGUFFile) -> np.ndarray:
    """Logits [T, V] of the golden tokens."""
    exact = {"type_k": "f32", "type_v": "f32", "type_indexer": "f32"}
    context = Context(Model.load(file.path), ContextParams(n_ctx=256, n_threads=1, **exact))
    return context.decode(Batch.single(tiny.tokens(), 0, logits="all"))


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_logits(kind: Tiny, tmp_path: Path) -> None:
    golden = np.load(kind.golden)
    expected = golden["logits"]
    logits = logits_of(converted(kind, tmp_path))[golden["rows"], : expected.shape[1]]
    error = np.abs(logits - expected).max(axis=1)
    assert error.max() <= TOLERANCE, f"token {golden['rows'][error.argmax()]} is off by {error.max():.1e}"


@pytest.mark.parametrize("outtype", ["bf16", "q8_0"])
@pytest.mark.parametrize("kind", OF_ONE_TYPE, ids=lambda kind: kind.name)
def test_types(kind: Tiny, outtype: str, tmp_path: Path) -> None:
    """What is small and multiplied through all tokens stays f32."""
    found = types(converted(kind, tmp_path, outtype))
    small = (
        "norm.weight",
        "norm_2.weight",
        "position_embd.weight",
        "token_types.weight",
        ".bias",
        "exp_probs_b",
        "attn_sinks.weight",
        "ffn_gate_inp.weight",
        "ssm_a",
        "ssm_d",
        "ffn_norm",
        "ffn_gate_inp_shexp.weight",
        *(f"ple_norm_{part}.weight" for part in ("key", "query", "conv")),
        "conv.weight",
        "rope_freqs.weight",
        "_long.weight",
        "_short.weight",
        "_ape.weight",
        "altup_correct_coef.weight",
        "altup_correct_scale.weight",
        "altup_predict_coef.weight",
        "altup_router.weight",
        "attn_rel_b.weight",
    )
    gates = ("_down.weight", "_up.weight")  # of residual streams, which are large
    for name, kind_of in found.items():
        is_small = name.endswith(small) or "conv1d" in name or ("hc_" in name and not name.endswith(gates))
        assert kind_of == ("f32" if is_small else outtype), name
