"""Dimensions that are no multiples of vectors, blocks or tiles: logits against a float64 evaluation.

One head, one expert, one layer, one token per batch, sizes that are prime, contexts that are no multiple of 32.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import UsageError
from tests.cpu.models.shaped_models import Built, Dims, deepseek2, gemma3, gpt_oss, llama, mistral4, qwen3moe, tokens

CASES = {
    "llama, heads of 72": (llama, Dims(head=72, kv=1)),
    "llama, one head, one layer": (llama, Dims(layers=1, heads=1, kv=1, head=96, vocab=131)),
    "llama, values longer than keys": (llama, Dims(head=64, kv=2, value=96)),
    "llama, values shorter than keys": (llama, Dims(layers=1, heads=6, kv=3, head=80, value=16, vocab=97)),
    "llama, prime sizes": (llama, Dims(d=37, heads=3, kv=1, head=10, ff=17, vocab=41)),
    "qwen3moe, one expert of four": (qwen3moe, Dims(experts=4, used=1, head=112, kv=1, vocab=97)),
    "qwen3moe, all of five experts": (qwen3moe, Dims(experts=5, used=5, head=32, ff=13)),
    "qwen3moe, more experts than tokens": (qwen3moe, Dims(layers=1, experts=130, used=9, ff=33)),
    "gemma3, seven layers": (gemma3, Dims(layers=7, head=72, kv=1, vocab=131)),
    "gemma3, window of one token": (gemma3, Dims(layers=1, head=96, window=1)),
    "deepseek2, latents of 80 + 16": (
        deepseek2,
        Dims(experts=8, used=3, heads=3, head=72, rank=80, rot=16, dense=1, vocab=131),
    ),
    "deepseek2, latents of 96 + 32": (deepseek2, Dims(experts=5, used=2, heads=5, head=24, rank=96, rot=32, vocab=97)),
    "mistral4, keys of 96": (mistral4, Dims(experts=5, used=2, heads=3, head=64, rank=96, rot=32, dense=1, vocab=97)),
    "deepseek2, one head": (deepseek2, Dims(layers=1, experts=3, used=1, heads=1, head=20, rank=52, rot=12, vocab=33)),
    "gpt-oss, three layers": (gpt_oss, Dims(layers=3, experts=3, used=3, heads=5, kv=1, head=72, ff=33, vocab=131)),
    "gpt-oss, one expert": (gpt_oss, Dims(layers=1, experts=4, used=1, head=64, window=1)),
}
# Share of the largest logit that the median position may be off by.
PRECISION = {
    "f16": 0.001,
    "bf16": 0.01,
    "q8_0": 0.03,
    "q8_kv": 0.03,
    "q6_0": 0.1,
    "q5_1": 0.15,
    "q5_0": 0.2,
    "q4_1": 0.3,
}
PRECISION |= {"q4_0": 0.3, "iq4_nl": 0.3}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Dims, np.ndarray]:
    """A loaded model, its dimensions and its logits."""
    make, dims = request.param
    made: Built = make(dims)
    return Model.load(made[0].write(tmp_path_factory.mktemp("odd") / "model.gguf")), dims, made[1]


def modes(model: Model) -> list[tuple[int, bool]]:
    """MLA modes that the model has, with and without flash attention."""
    return list(itertools.product((0, 1, 3) if model.arch.effective_mla(1) else (0,), (False, True)))


def error(model: Model, dims: Dims, truth: np.ndarray, **params: object) -> np.ndarray:
    """Distances of a prompt's and single steps' logits, as shares of the largest one."""
    context = Context(model, ContextParams(**{"n_ctx": 45, "n_threads": 2, **params}))  # type: ignore[arg-type]
    ids = tokens(dims.vocab)
    parts = [context.decode(Batch.single(ids[:33], logits="all"))]
    parts += [context.decode(Batch.single(ids[i : i + 1], i)) for i in range(33, len(ids))]
    return np.abs(np.concatenate(parts) - truth).max(axis=1) / np.abs(truth).max()


@pytest.mark.parametrize("n_ubatch", [512, 7, 1])
def test_exact_caches(built: tuple[Model, Dims, np.ndarray], n_ubatch: int) -> None:
    model, dims, truth = built
    for mla, flash in modes(model):
        off = error(model, dims, truth, mla=mla, flash_attn=flash, n_ubatch=n_ubatch, type_k="f32", type_v="f32")
        assert off.max() < 5e-5, f"mla {mla} flash {flash}: position {off.argmax()} off by {off.max():.1e}"


@pytest.mark.parametrize("kind", PRECISION)
def test_cache_types(built: tuple[Model, Dims, np.ndarray], kind: str) -> None:
    """As near as the type is precise, and never out of bounds: rows that do not fit the blocks are refused."""
    model, dims, truth = built
    block = 1 if kind in ("f16", "bf16") else 32
    for mla, flash in modes(model):
        type_v = kind if flash or block == 1 else "f16"
        value = model.hparams.n_embd_head_v if type_v == kind else 0
        rows = [dims.rank, dims.rot] if mla else [model.hparams.n_embd_head_k, value]
        settings = {"mla": mla, "flash_attn": flash, "n_ubatch": 16, "type_k": kind, "type_v": type_v}
        if any(n % block for n in rows):
            with pytest.raises(UsageError, match="multiple"):
                error(model, dims, truth, **settings)
            continue
        off = np.median(error(model, dims, truth, **settings))
        assert off < PRECISION[kind], f"mla {mla} flash {flash}: median error {off:.1e}"


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize(("n_ubatch", "budget"), [(512, 0), (137, 1)])
def test_prompts_that_expand_latents(kind: str, n_ubatch: int, budget: int, tmp_path: Path) -> None:
    """Prompts of modes 2 and 3 expand cached latents, some heads at a time; seven heads, 301 tokens, 303 cells."""
    dims = Dims(layers=2, experts=3, used=1, heads=7, head=24, rank=64, rot=32, dense=1, vocab=97)
    model = Model.load(deepseek2(dims)[0].write(tmp_path / "model.gguf"))
    ids = np.random.default_rng(0).integers(0, dims.vocab, 301)

    def logits(**params: object) -> np.ndarray:
        context = Context(model, ContextParams(**{"n_ctx": 303, "n_threads": 2, **params}))  # type: ignore[arg-type]
        return context.decode(Batch.single(ids, logits="all"))

    wanted = logits(mla=0, flash_attn=False, type_k="f32", type_v="f32")
    for mla in (2, 3):
        ours = logits(mla=mla, type_k=kind, n_ubatch=n_ubatch, attn_max_batch=budget)
        off = np.median(np.abs(ours - wanted).max(axis=1)) / np.abs(wanted).max()
        assert off < PRECISION.get(kind, 0.001), f"mla {mla}: median error {off:.1e}"
