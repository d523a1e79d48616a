"""Cache types, Hadamard transforms, expert reduction: what they cost in perplexity, and that they do what they say."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import ikpy
from benchmarks.quality import perplexity, text_tokens, token_losses
from ikpy._native import core
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.errors import UsageError
from ikpy.graph.builder import Graph
from ikpy.graph.ir import external
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.planner import Arena
from ikpy.quants import registry
from tests.cpu.models.test_zoo_holdouts import gpt_oss
from tests.shared import DATA

TEXT = Path(ikpy.__file__).parent / "assets" / "demo-text.txt"
TYPES = registry.CACHE_TYPES[2:]
# Perplexity against an F32 cache, relative: twice what docs/models.md shows, at least 0.2 %.
LIMITS = {"bf16": 0.002, "q8_0": 0.004, "q8_KV": 0.004, "q6_0": 0.004, "iq4_nl": 0.02, "q4_0": 0.03}
LIMITS |= dict.fromkeys(("q5_1", "q5_0", "q4_1"), 0.02)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(ikpy.default_model_path())


@pytest.fixture(scope="module")
def tokens(model: Model) -> np.ndarray:
    return text_tokens(model, TEXT, 768)


def hadamard_matrix(n: int) -> np.ndarray:
    """Sylvester's construction, orthonormal."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / math.sqrt(n)


@pytest.mark.parametrize(("n", "block"), [(64, 64), (96, 32), (512, 64), (8, 1), (256, 256)])
def test_the_transform_is_blockwise_and_its_own_inverse(n: int, block: int) -> None:
    rng = np.random.default_rng(n)
    rows = rng.normal(size=(3, 5, n)).astype(np.float32)
    x = rows.copy()
    graph = Graph(core)
    graph.hadamard(external(x.ctypes.data, x, 0, (n, 5, 3)), block)
    plan = CompiledPlan(core, graph.nodes, Arena({}, 0), 64)
    plan.run(0, 2)
    expected = (rows.reshape(3, 5, n // block, block) @ hadamard_matrix(block)).reshape(rows.shape)
    assert np.abs(x - expected).max() < 1e-5
    plan.run(0, 1)
    assert np.abs(x - rows).max() < 1e-5


@pytest.fixture(scope="module")
def bases(model: Model, tokens: np.ndarray) -> dict[int, float]:
    """Perplexity with an F32 cache by MLA mode."""
    more: dict[int, dict] = {0: {"type_v": "f32"}, 1: {}, 3: {}}
    return {
        mla: perplexity(model, tokens[:512], 256, n_threads=2, mla=mla, type_k="f32", **types)
        for mla, types in more.items()
    }


@pytest.mark.parametrize("mla", [0, 1, 3])
@pytest.mark.parametrize("kind", TYPES)
def test_cache_types_cost_what_is_documented(
    model: Model, tokens: np.ndarray, bases: dict[int, float], mla: int, kind: str
) -> None:
    settings = {"n_threads": 2, "mla": mla}
    both = {"type_v": kind} if mla == 0 else {}
    base = bases[mla]
    plain = perplexity(model, tokens[:512], 256, **settings, type_k=kind, **both)
    assert abs(plain / base - 1) < LIMITS[kind], f"{kind} -mla {mla}: {100 * (plain / base - 1):+.3f} %"
    if kind == "bf16":
        return
    turned = perplexity(model, tokens[:512], 256, **settings, type_k=kind, **both, k_hadamard=True, v_hadamard=True)
    assert turned != plain, "the transform did nothing"
    assert abs(turned / base - 1) < LIMITS[kind], f"{kind} -mla {mla} -khad: {100 * (turned / base - 1):+.3f} %"


def test_the_transform_helps_rows_with_outliers(tmp_path: Path) -> None:
    """One channel of k ten times as large as the others is what the transform is for."""
    made, _ = gpt_oss()
    for name in ("blk.0.attn_k", "blk.1.attn_k"):
        made.weights[name][3] *= 12
        made.weights[name][20] *= 12
    path = made.write(tmp_path / "model.gguf")
    tokens = np.random.default_rng(2).integers(0, 150, 60)

    def run(**settings: object) -> np.ndarray:
        values = {"n_ctx": 256, "n_threads": 2, "type_v": "f32"} | settings
        return Context(Model.load(path), ContextParams(**values)).decode(Batch.single(tokens, logits="all"))  # type: ignore[arg-type]

    truth = run(type_k="f32")
    plain = np.abs(run(type_k="q4_0") - truth).mean()
    turned = np.abs(run(type_k="q4_0", k_hadamard=True) - truth).mean()
    assert turned < 0.8 * plain, f"mean error {turned:.4f} with the transform, {plain:.4f} without"


def test_transformed_keys_can_be_shifted(tmp_path: Path) -> None:
    path = gpt_oss()[0].write(tmp_path / "model.gguf")
    tokens = np.random.default_rng(2).integers(0, 150, 50)
    params = ContextParams(n_ctx=256, n_threads=2, type_k="q8_0", type_v="f32", k_hadamard=True)
    moved, computed = (Context(Model.load(path), params) for _ in range(2))
    moved.decode(Batch.single(tokens[:30], 0))
    moved.kv.seq_add(0, 0, -1, 23)
    computed.decode(Batch.single(tokens[:30], 23))
    ours = moved.decode(Batch.single(tokens[30:], 53, logits="all"))
    truth = computed.decode(Batch.single(tokens[30:], 53, logits="all"))
    assert np.abs(ours - truth).max() < 0.03 * np.abs(truth).max()


def test_the_transform_is_dropped_where_it_has_no_use(model: Model) -> None:
    lines: list[str] = []
    context = Context(model, ContextParams(n_ctx=256, n_threads=1, k_hadamard=True), log=lines.append)
    assert not context.graph_params.k_hadamard and any("-khad has no effect" in line for line in lines)


def test_expanded_latents_keep_the_precision_of_an_f32_cache() -> None:
    """The prompt path of -mla 3 on an F32 cache computes what -mla 0 does, to more digits than F16 has."""
    path = DATA / "zoo" / "deepseek2-v3-mla.gguf"
    found = []
    for mla in (0, 3):
        settings = ContextParams(n_ctx=512, n_threads=2, type_k="f32", type_v="f32", mla=mla)
        context = Context(Model.load(path), settings)
        tokens = np.random.default_rng(4).integers(0, context.model.hparams.n_vocab, 200)
        found.append(context.decode(Batch.single(tokens, logits="all")))
    difference = np.abs(found[1] - found[0]).max() / np.abs(found[0]).max()
    assert difference < 2e-4, f"logits differ by {difference:.1e} relative"


# expert reduction


@pytest.fixture(scope="module")
def eight_experts() -> Model:
    return Model.load(ikpy.default_model_path(), ModelParams(kv_overrides={"deepseek2.expert_used_count": 8}))


def test_perplexity_follows_the_number_of_experts_smoothly(eight_experts: Model, tokens: np.ndarray) -> None:
    """PPL at -ser 1,1 ... 8,1 tends to that of all experts, without jumps; 8,1 is all of them."""
    values = [
        perplexity(eight_experts, tokens, 768, n_threads=2, smart_expert_reduction=(k, 1.0)) for k in (1, 2, 4, 6, 8)
    ]
    off = perplexity(eight_experts, tokens, 768, n_threads=2)
    assert values[-1] == off
    steps = np.abs(np.diff(np.log(values)))
    assert steps.max() < 0.15, f"PPL {values}"
    assert all(after < 1.003 * before for before, after in pairwise(values)), f"PPL {values}"


def test_thresholds_lie_between_the_numbers_of_experts(model: Model, tokens: np.ndarray) -> None:
    """With two trained experts: the more are dropped, the higher the perplexity."""
    values = [perplexity(model, tokens, 768, n_threads=2, smart_expert_reduction=(1, t)) for t in (1e-6, 0.5, 0.8, 1.0)]
    assert values[0] == perplexity(model, tokens, 768, n_threads=2)
    assert values == sorted(values) and values[0] < values[-1] < 1.2 * values[0], f"PPL {values}"


@pytest.mark.parametrize("n_prompt", [1, 5, 127, 128, 300, 301, 512, 700])
def test_any_prompt_length(model: Model, tokens: np.ndarray, n_prompt: int) -> None:
    """A prompt in one piece gives what single steps give, however long it is."""
    settings = {"n_ctx": 768, "n_threads": 2, "smart_expert_reduction": (1, 0.6), "type_k": "f32", "mla": 1}
    whole = Context(model, ContextParams(**settings, n_ubatch=768)).decode(Batch.single(tokens[:n_prompt]))[-1]  # type: ignore[arg-type]
    pieces = Context(model, ContextParams(**settings, n_ubatch=64))  # type: ignore[arg-type]
    last = pieces.decode(Batch.single(tokens[:n_prompt]))[-1]
    assert np.abs(whole - last).max() < 0.05 * np.abs(last).max()


def test_losses_do_not_rise_with_the_position(model: Model, tokens: np.ndarray) -> None:
    """Far into a prompt the reduced model is as much worse than the whole one as at its beginning."""
    bos = model.gguf.get("tokenizer.ggml.bos_token_id")
    settings = {"n_ctx": 768, "n_threads": 2}
    reduced = Context(model, ContextParams(**settings, smart_expert_reduction=(1, 1.0)))  # type: ignore[arg-type]
    losses = token_losses(reduced, tokens, 768, bos) - token_losses(
        Context(model, ContextParams(**settings)),  # type: ignore[arg-type]
        tokens,
        768,
        bos,
    )
    early, late = losses[0, 10:300].mean(), losses[0, 400:].mean()
    assert abs(early) < 0.2 and abs(late) < 0.2, f"loss grows by {early:.3f} before, by {late:.3f} after 300 tokens"


@pytest.mark.parametrize("mla", [0, 1, 3])
def test_first_and_last_layers_with_another_type(model: Model, tokens: np.ndarray, mla: int) -> None:
    """Layers have the types that were asked for, and both edges together give all layers one type."""
    n_layer, name = model.hparams.n_layer, "kv" if mla else "k"

    def context(**types: object) -> Context:
        params = {"n_ctx": 512, "n_threads": 2, "mla": mla, **types}
        return Context(model, ContextParams(**params))

    def types_of(found: Context) -> list[str]:
        return [registry.by_id(found.kv.tensors[il, name].type_id).name for il in range(n_layer)]

    mixed = context(type_k="q8_0", type_k_first=("f16", 1), type_k_last=("q6_0", 1), type_v_last=("q8_0", 1))
    assert types_of(mixed) == ["f16", *["q8_0"] * (n_layer - 2), "q6_0"]
    if mla == 0:
        assert mixed.kv.tensors[n_layer - 1, "v"].type_id == registry.by_name("q8_0").id
        assert mixed.kv.tensors[0, "v"].type_id == registry.by_name("f16").id
    assert types_of(context(type_k_first=("q8_0", -1), type_k_last=("q8_0", 0))) == ["f16"] * n_layer
    assert types_of(context(type_k_first=("q8_0", 999))) == ["q8_0"] * n_layer
    batch = Batch.single(tokens[:64].tolist(), logits="all")
    plain = {kind: context(type_k=kind).decode(batch) for kind in ("f16", "q6_0")}
    edges = context(type_k_first=("q6_0", 1), type_k_last=("q6_0", n_layer - 1)).decode(batch)
    np.testing.assert_array_equal(edges, plain["q6_0"])
    some = context(type_k_first=("q6_0", 1)).decode(batch)
    assert 0 < np.abs(some - plain["f16"]).max() < 2 * np.abs(plain["q6_0"] - plain["f16"]).max()


def test_edge_layers_are_checked_like_all(model: Model) -> None:
    with pytest.raises(UsageError, match="unsupported cache type"):
        Context(model, ContextParams(n_ctx=256, n_threads=1, type_k_last=("q3_K", 1)))
    with pytest.raises(UsageError, match="requires flash_attn"):
        ContextParams(flash_attn=False, type_v_first=("q8_0", 1)).check()
    ContextParams(flash_attn=False, type_v_first=("q8_0", 0)).check()
