"""Llama-Embed and EuroBERT: states of random models and of a converted checkpoint against their definition."""

from __future__ import annotations

from collections.abc import Callable
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
from ikpy.errors import FileFormatError, UsageError
from ikpy.models.size_class import size_class
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.older_checkpoints import LLAMA_EMBED
from tests.cpu.convert.plain_checkpoints import N_LAYER as N_TINY
from tests.cpu.convert.test_convert_encoders import states_of
from tests.cpu.convert.test_convert_older import LLAMA, named, usual_outer
from tests.cpu.convert.test_convert_seeded import converted
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import RMS
from tests.cpu.models.reference_models import Evaluation, RandomModel
from tests.cpu.models.test_arch_gemma_embedding import TOKENS, attended
from tests.cpu.models.test_encoders import assert_states, unit

N, HEADS, KV, HEAD, F = 3, 4, 2, 32, 100
D = HEADS * HEAD


def new_model(seed: int, arch: str = "llama-embed", **keys: object) -> RandomModel:
    """The blocks of both; llama-embed has factors of frequencies and, as some files, an output matrix."""
    known = {**checks.shape(N, D, HEADS, KV, HEAD, F), **RMS, "pooling_type": 1, "attention.causal": False}
    m = RandomModel(arch, seed, **known | keys)
    checks.frame(m, D, tied=arch != "llama-embed")
    if arch == "llama-embed":
        m.norm("rope_freqs", HEAD // 2)
    for il in range(N):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        m.attention(p, D, HEADS, KV, HEAD)
        m.ffn(p, D, F)
    return m


def states(e: Evaluation, tokens: np.ndarray, *, neox: bool = False) -> np.ndarray:
    """Normed states [T, D] of the last layer."""
    x, pos = e.w["token_embd"][tokens], np.arange(len(tokens), dtype=np.float64)
    angles = ref.plain_angles(e.head, 10000.0, pos, e.w.get("rope_freqs", 1.0))
    for il in range(e.n_layer):
        q, k, v = e.qkv(il, ref.rms_norm(x, e.w[f"blk.{il}.attn_norm"], e.eps))
        q, k = (ref.rotate(y, angles, neox=neox) for y in (q, k))
        x = x + e.output(il, attended(q, k, v, None))
        x = x + e.ffn(il, ref.rms_norm(x, e.w[f"blk.{il}.ffn_norm"], e.eps))
    return ref.rms_norm(x, e.w["output_norm"], e.eps)


def llama_embed() -> tuple[RandomModel, np.ndarray]:
    m = new_model(231)
    return m, states(Evaluation(m), TOKENS)


def eurobert() -> tuple[RandomModel, np.ndarray]:
    m = new_model(233, "eurobert")
    return m, states(Evaluation(m), TOKENS, neox=True)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("make", [llama_embed, eurobert], ids=lambda f: f.__name__)
def test_states_are_those_of_the_definition(make: Callable, flash: bool, tmp_path: Path) -> None:
    """Two texts in one batch that do not see each other."""
    m, wanted = make()
    params = ContextParams(n_ctx=256, n_threads=1, flash_attn=flash, type_k="f32", type_v="f32", n_seq_max=2)
    context = Context(Model.load(m.write(tmp_path / "model.gguf")), params)
    n, other = len(TOKENS), TOKENS[::-1][:20]
    pos = np.concatenate([np.arange(n), np.arange(20)])
    batch = Batch(np.concatenate([TOKENS, other]), pos, [(0,)] * n + [(1,)] * 20, np.ones(n + 20, bool))
    assert context.decode(batch).shape[0] == 0, "an encoder has no logits"
    assert context.embeddings is not None
    assert_states(context.embeddings[:n], wanted, "first of two")
    assert_states(context.embeddings[n:], states(Evaluation(m), other, neox=make is eurobert), "second of two")


def test_embeddings(tmp_path: Path) -> None:
    for pooling, pooled in ((1, lambda x: x.mean(axis=0)), (3, lambda x: x[-1])):
        m = new_model(232, pooling_type=pooling)
        llm = ikpy.LLM(m.write(tmp_path / "model.gguf"), n_threads=1, type_k="f32", type_v="f32")
        ids = np.array(llm.tokenize("word5 word77 word8", add_special=True))
        wanted = unit(pooled(states(Evaluation(m), ids)))
        np.testing.assert_allclose(llm.embed("word5 word77 word8")[0], wanted, atol=2e-5)
    with pytest.raises(UsageError, match="embeds texts and writes none"):
        llm.generate("word5")


@pytest.mark.parametrize(("pooling", "number"), [("avg", 1), ("cls", 2), ("last", 3)])
def test_convert(pooling: str, number: int, tmp_path: Path) -> None:
    file = converted(LLAMA_EMBED, tmp_path, pooling=pooling)
    assert file.metadata["llama-embed.pooling_type"] == number and "output.weight" not in file.tensors
    shape = checks.shape(N_TINY, tiny.D, tiny.HEADS, tiny.KV, tiny.HEAD, tiny.FF)
    m = RandomModel("llama-embed", 0, **{**shape, **RMS})
    m.weights = named(LLAMA_EMBED, usual_outer("embed_tokens", "norm"), "layers", LLAMA)
    truth = states(Evaluation(m), tiny.tokens(), neox=True)
    assert np.abs(states_of(file) - truth).max() <= 1e-4 * np.abs(truth).max()


@pytest.mark.parametrize(
    ("values", "message"),
    [({"pooling": "weighted_avg"}, "pooling 'weighted_avg'"), ({"hidden_act": "gelu"}, "activation 'gelu'")],
)
def test_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny.write(LLAMA_EMBED, tmp_path / "checkpoint", **values)
    with pytest.raises(FileFormatError, match=message):
        Conversion(folder)


@pytest.mark.parametrize(("arch", "layers", "expected"), [("llama-embed", 32, "8B"), ("eurobert", 26, "610M")])
def test_size_class(arch: str, layers: int, expected: str) -> None:
    assert size_class({"general.architecture": arch, f"{arch}.block_count": layers}) == expected
