"""Logits of tiny random models of every supported architecture against the golden captures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.models import ARCHITECTURES
from tests.shared import DATA, SHARED

MANIFEST = json.loads((DATA / "zoo" / "manifest.json").read_text())["models"]
CACHE_TYPES = ("f16", "q8_0", "bf16")


def _model_path(name: str) -> Path | None:
    for folder in (DATA / "zoo", SHARED / "golden" / "zoo"):
        if (folder / f"{name}.gguf").exists():
            return folder / f"{name}.gguf"
    return None


def _supported(setting: dict) -> bool:
    return (
        setting["cache_k"] in CACHE_TYPES
        and setting["cache_v"] in CACHE_TYPES
        and not setting["grouped_routing"]
        and not setting["k_hadamard"]
        and not setting["v_hadamard"]
    )


CASES = [
    pytest.param(name, key, id=f"{name}-{key}")
    for name, model in MANIFEST.items()
    if model["arch"] in ARCHITECTURES
    for key, setting in model["settings"].items()
    if _supported(setting)
]


def _logits(path: Path, setting: dict, tokens: np.ndarray) -> np.ndarray:
    """Logits [n, V] of all positions in the way the setting says: one batch, or a prompt and single steps."""
    mla = max(setting["mla"], 0)
    model = Model.load(path, ModelParams(mla=mla))
    reduction = setting["smart_expert_reduction"]
    context = Context(
        model,
        ContextParams(
            n_ctx=256,
            n_ubatch=setting["ubatch"],
            n_threads=2,
            flash_attn=bool(setting["flash_attn"]),
            mla=mla,
            type_k=setting["cache_k"],
            type_v=setting["cache_v"],
            smart_expert_reduction=tuple(reduction) if reduction else (-1, 0.0),
        ),
    )
    n_prompt = setting["prompt"] or len(tokens)
    parts = [context.decode(Batch.single(tokens[:n_prompt], 0, logits="all"))]
    parts += [context.decode(Batch.single(tokens[i : i + 1], i)) for i in range(n_prompt, len(tokens))]
    return np.concatenate(parts)


def _kl(reference: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """KL divergence of the softmax per row, in float64."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        x = x - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    p, q = log_softmax(reference), log_softmax(ours)
    return (np.exp(p) * (p - q)).sum(axis=1)


@pytest.mark.parametrize(("name", "key"), CASES)
def test_logits(name: str, key: str) -> None:
    """Distance to the definition at most twice the reference's own; and near the reference where it is the truth."""
    path = _model_path(name)
    if path is None:
        pytest.skip("golden/zoo is not present beside the checkout")
    setting = MANIFEST[name]["settings"][key]
    if setting["smart_expert_reduction"]:
        pytest.skip("expert reduction has no effect in the reference's captures")
    golden = np.load(path.with_suffix(".npz"))
    long = setting["sequence"] != "tokens"
    tokens = golden[setting["sequence"]]
    ours = _logits(path, setting, tokens)
    rows = np.arange(len(tokens)) if not long else golden["rows_spec_long"]
    truth = golden["logits_spec_long" if long else "logits_spec"].astype(np.float32)
    error = np.abs(ours[rows] - truth).max(axis=1)
    worst = int(error.argmax())
    quantized = {setting["cache_k"], setting["cache_v"]} != {"f16"}
    where = f"{name} {key}: worst position {rows[worst]}, off by {error[worst]:.5f}"
    stats = setting.get("vs_spec") or {"max_abs": 0.02, "kl_mean": 1e-5}
    if quantized:
        kl = _kl(truth, ours[rows])
        assert kl.mean() <= max(3 * stats["kl_mean"], 1e-4), f"{where}; mean KL {kl.mean():.2e}"
    else:
        assert error[worst] <= max(2 * stats["max_abs"], 0.012), f"{where}; reference {stats['max_abs']}"
