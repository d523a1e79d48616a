"""Context extension from the command line: linear, NTK (another base), YaRN and its factors, against float64."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ikpy.cli.parser import parse
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel
from tests.cpu.models.test_zoo_holdouts import RMS, frame, gpt_oss, llama4_two_experts, shape

HEAD, BASE, TRAINED = 32, 10000.0, 48
TOKENS = np.random.default_rng(13).integers(0, N_VOCAB, 90)
POS = np.arange(len(TOKENS), dtype=np.float64)


def random_model(arch: str, **keys: object) -> RandomModel:
    d, heads, kv, f = 96, 3, 1, 64
    m = RandomModel(arch, 17, **{**shape(2, d, heads, kv, HEAD, f), **RMS, "context_length": TRAINED, **keys})
    frame(m, d, tied=False)
    for il in range(2):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", d)
        m.norm(f"{p}.ffn_norm", d)
        m.attention(p, d, heads, kv, HEAD)
        for name, width in (("q", heads), ("k", kv), ("v", kv)):
            m.vector(f"{p}.attn_{name}.bias", width * HEAD)
        m.ffn(p, d, f)
    return m


def logits(m: RandomModel, angles: np.ndarray, magnitude: float = 1.0) -> np.ndarray:
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(2):
        q, k, v = e.qkv(il, ref.rms_norm(x, e.w[f"blk.{il}.attn_norm"], e.eps))
        q, k = (ref.rotate(t, angles, neox=m.arch == "qwen2", magnitude=magnitude) for t in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
        x = x + e.ffn(il, ref.rms_norm(x, e.w[f"blk.{il}.ffn_norm"], e.eps))
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def yarn(factor: float, n_orig: int = TRAINED, ext: float = 1.0, fast: float = 32.0, slow: float = 1.0) -> np.ndarray:
    """Angles between all divided (ext 0) and divided by frequency (ext 1)."""
    full = ref.yarn_angles(HEAD, BASE, POS, factor, n_orig, fast, slow)
    return ext * full + (1 - ext) * ref.plain_angles(HEAD, BASE, POS) / factor


def magnitude(factor: float) -> float:
    return 1 + 0.1 * math.log(factor)


PLAIN = ref.plain_angles(HEAD, BASE, POS)
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24}
CASES: dict[str, tuple[dict, str, np.ndarray, float]] = {
    "as the file says": (LINEAR, "", PLAIN / 4, 1.0),
    "scale": ({}, "--rope-scale 4", PLAIN / 4, 1.0),
    "frequency scale": ({}, "--rope-freq-scale 0.5", PLAIN / 2, 1.0),
    "scale of the file replaced": (LINEAR, "--rope-scale 2", PLAIN / 2, 1.0),
    "scale of the file off": (LINEAR, "--rope-scaling none", PLAIN, 1.0),
    "base (NTK)": ({}, "--rope-freq-base 40000", ref.plain_angles(HEAD, 40000.0, POS), 1.0),
    "base and scale": ({}, "--rope-freq-base 5e5 --rope-scale 2", ref.plain_angles(HEAD, 5e5, POS) / 2, 1.0),
    "yarn": ({}, "--rope-scaling yarn --rope-scale 8", yarn(8), magnitude(8)),
    "yarn of the file": (YARN, "", yarn(4, 24), magnitude(4)),
    "yarn of the file turned linear": (YARN, "--rope-scaling linear", PLAIN / 4, 1.0),
    "original context": ({}, "--rope-scaling yarn --rope-scale 8 --yarn-orig-ctx 16", yarn(8, 16), magnitude(8)),
    "original context of the file replaced": (YARN, "--yarn-orig-ctx 40", yarn(4, 40), magnitude(4)),
    "half extrapolation": (YARN, "--yarn-ext-factor 0.5", yarn(4, 24, ext=0.5), magnitude(4)),
    "no extrapolation": (YARN, "--yarn-ext-factor 0", PLAIN / 4, 1.0),
    "magnitude": (YARN, "--yarn-attn-factor 0.7", yarn(4, 24), 0.7 * magnitude(4)),
    "corners": (YARN, "--yarn-beta-fast 3 --yarn-beta-slow 0.2", yarn(4, 24, fast=3, slow=0.2), magnitude(4)),
}


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
@pytest.mark.parametrize("name", CASES)
def test_options_reach_the_rotation(name: str, arch: str, tmp_path: Path) -> None:
    keys, line, angles, scale = CASES[name]
    model = random_model(arch, **keys)
    wanted = logits(model, angles, scale)
    options = parse(f"{line} -c 256 -ctk f32 -ctv f32 -t 2".split(), "perplexity")
    ctx = Context(Model.load(model.write(tmp_path / "model.gguf")), options.context_params())
    found = ctx.decode(Batch.single(TOKENS, logits="all"))
    error = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
    assert error.max() < 5e-5, f"position {error.argmax()} off by {error.max():.1e} relative"
    others = [logits(model, a, s) for k, _, a, s in CASES.values() if k == keys and (a is not angles or s != scale)]
    near = [other for other in others if np.abs(other - wanted).max() / np.abs(wanted).max() < 1e-3]
    assert len(near) <= 1, "the case differs from the others of its file"


def test_windows_keep_what_the_file_says(tmp_path: Path) -> None:
    options = parse("--rope-freq-base 5e5 --rope-scale 4 -c 256 -t 1".split(), "perplexity").context_params()
    log: list[str] = []
    context = Context(Model.load(gpt_oss()[0].write(tmp_path / "windows.gguf")), options, log=log.append)
    arch, rope = context.model.arch, context.graph_params.rope
    window, full = (arch.rope_params(layer, rope) for layer in (0, 1))
    assert (full.freq_base, full.freq_scale) == (5e5, 0.25)
    assert (window.freq_base, window.freq_scale) == (arch.hp.rope_freq_base, arch.hp.rope_freq_scale)
    assert not [line for line in log if "--rope-scale" in line]
    Context(Model.load(llama4_two_experts()[0].write(tmp_path / "all.gguf")), options, log=log.append)
    reason = "layers with a window use the scale of the file, 1, others know no positions"
    assert f"warning: --rope-scale has no effect: {reason}" in log
