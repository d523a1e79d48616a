"""glm-dsa and deepseek32 where indexers choose cells: the definition, saved states, placements."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks import reference_attention as ref
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.sequence_state import load_sequence, save_sequence
from ikpy.errors import FileFormatError, UsageError
from ikpy.graph.activations import ActivationCollector
from ikpy.graph.placement import PlacementParams
from ikpy.models import latent_attention
from ikpy.tools import run_logs
from tests.cpu.models.reference_models import N_VOCAB, RandomModel
from tests.cpu.models.sparse_latent_models import PUBLISHED, Rounding, Sizes, SparseLatent, random_model
from tests.cpu.models.test_arch_glm_dsa import check, params
from tests.cuda.models import emulated

FEW = Sizes(top_k=8, index_heads=8)
"""Scores of 0, which leave a choice between equal cells, are rare with so many heads."""
TOKENS = np.random.default_rng(5).integers(0, N_VOCAB, 60)
LONG = np.random.default_rng(6).integers(0, N_VOCAB, 300)


def exact(**changes: object) -> ContextParams:
    """A context whose caches round nothing."""
    return params(**{"type_indexer": "f32", **changes})


def loaded(model: RandomModel, folder: Path) -> Model:
    return Model.load(model.write(folder / "model.gguf"))


def in_parts(context: Context, tokens: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Logits [T, n_vocab] of a text in batches of these sizes."""
    parts = pairwise(np.cumsum([0, *sizes]).tolist())
    return np.concatenate([context.decode(Batch.single(tokens[a:b], a, logits="all")) for a, b in parts])


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("mla", [0, 1, 2, 3])
@pytest.mark.parametrize("arch", ["glm-dsa", "deepseek32"])
def test_definition(arch: str, mla: int, flash: bool, tmp_path: Path) -> None:
    """One batch, parts of several sizes with single steps, and a second sequence in the same batch."""
    model = random_model(FEW, arch)
    wanted = SparseLatent(model, FEW, top_k=8).logits(TOKENS)
    file = loaded(model, tmp_path)
    settings = exact(mla=mla, flash_attn=flash, n_seq_max=2)
    check(Context(file, settings).decode(Batch.single(TOKENS, logits="all")), wanted)
    check(in_parts(Context(file, settings), TOKENS, [30, *[1] * 10, 9, 3, 8]), wanted)
    n = 40
    two = Batch(np.repeat(TOKENS[:n], 2), np.repeat(np.arange(n), 2), [0, 1] * n, np.ones(2 * n, np.bool_))
    check(Context(file, settings).decode(two), np.repeat(wanted[:n], 2, axis=0))


@pytest.mark.parametrize("listed_from", [1, 2])
@pytest.mark.parametrize("options", [{}, {"n_threads": 1}, {"attn_max_batch": 1, "n_threads": 3}], ids=str)
@pytest.mark.parametrize("mla", [0, 1, 2, 3])
def test_both_forms_of_prompts(
    mla: int, options: dict, listed_from: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to once or twice as many cells as are chosen prompts expand all, further on they read those chosen."""
    for name in ("LISTED_FROM", "LISTED_FROM_TILES"):
        monkeypatch.setattr(latent_attention, name, listed_from)
    n = Sizes(top_k=150, index_heads=8)
    model = random_model(n, "deepseek32")
    wanted = SparseLatent(model, n, top_k=150).logits(LONG)
    file = loaded(model, tmp_path)
    context = Context(file, exact(n_ctx=512, mla=mla, **options))
    check(in_parts(context, LONG, [140, 140, 20]), wanted)
    everything = SparseLatent(model, n).logits(LONG)
    error = np.abs(wanted - everything).max(1) / np.abs(wanted).max()
    assert error[:150].max() < 1e-9 and error[150:].min() > 1e-4, "the choice makes no difference"


@pytest.mark.parametrize("mla", [0, 3])
def test_nothing_changes_within_reach(mla: int, tmp_path: Path) -> None:
    """The same bits as without a choice while no token sees more cells than it may choose."""
    file = loaded(random_model(replace(FEW, top_k=260), "glm-dsa"), tmp_path)
    found = [
        in_parts(Context(file, exact(n_ctx=512, mla=mla, sparse_top_k=top_k)), LONG, [130, *[1] * 6, 114])
        for top_k in (-1, 0)
    ]
    assert found[0].tobytes() == found[1].tobytes()


def test_top_k_of_the_user(tmp_path: Path) -> None:
    model = random_model(FEW, "glm-dsa")
    file = loaded(model, tmp_path)
    for given, top_k in ((20, 20), (0, None), (100000, None), (-1, 8)):
        found = Context(file, exact(sparse_top_k=given)).decode(Batch.single(TOKENS, logits="all"))
        check(found, SparseLatent(model, FEW, top_k=top_k).logits(TOKENS))
    assert (0, "ki") not in Context(file, exact(sparse_top_k=0)).kv.tensors
    lines: list[str] = []
    plain = random_model(replace(FEW, top_k=8), "glm-dsa")
    plain.weights = {name: w for name, w in plain.weights.items() if "indexer" not in name}
    Context(loaded(plain, tmp_path), exact(sparse_top_k=20), log=lines.append)
    assert [line for line in lines if "-ictk" in line or "-dsatk" in line] == [
        "warning: -dsatk has no effect: the model has no indexers",
        "warning: -ictk has no effect: the model has no indexers",
    ]


def rounded(name: str) -> Rounding:
    """What a cache type makes of index keys [T, n]."""
    type_id = next(t for t, known in ref.TYPE_NAMES.items() if known == name)
    return lambda keys: ref.make_cache(keys[:, None].astype(np.float32), type_id)[1][:, 0]


@pytest.mark.parametrize("type_indexer", ["f16", "q8_0", "q4_0", "q8_KV"])
def test_types_of_index_keys(type_indexer: str, tmp_path: Path) -> None:
    """With scores of rounded keys; a choice between cells whose scores are nearly equal may be another one."""
    model = random_model(replace(FEW, index_size=64), "glm-dsa")
    n = replace(FEW, index_size=64)
    wanted = SparseLatent(model, n, top_k=8, cached=rounded(type_indexer)).logits(TOKENS)
    file = loaded(model, tmp_path)
    found = Context(file, exact(type_indexer=type_indexer)).decode(Batch.single(TOKENS, logits="all"))
    error = np.sort(np.abs(found - wanted).max(axis=1)) / np.abs(wanted).max()
    assert error[len(error) * 9 // 10] < 5e-4, f"of nine tokens in ten the worst is off by {error[-6:]}"


def test_prediction_layer_and_shared_choices(tmp_path: Path) -> None:
    """Layers without an indexer take the choice of the last one that has one, whether the file says which or not."""
    n = replace(FEW, layers=6, predict=1)
    for full in ([0, 1, 3], None):
        model = random_model(n, "glm-dsa", full=full)
        file = loaded(model, tmp_path)
        definition = SparseLatent(model, n, top_k=8)
        wanted = definition.logits(TOKENS)
        check(Context(file, exact()).decode(Batch.single(TOKENS, logits="all")), wanted)
        check(in_parts(Context(file, exact(mla=1)), TOKENS, [50, *[1] * 10]), wanted)
        states = np.random.default_rng(1).normal(size=(len(TOKENS), n.d)).astype(np.float32)
        head = Context(file.prediction_head(), exact())
        found = head.decode(Batch.single(TOKENS, logits="all"), states)
        check(found, definition.prediction(TOKENS, states.astype(np.float64)))
        if full:
            del model.keys["attention.indexer.types"]
            check(Context(loaded(model, tmp_path), exact()).decode(Batch.single(TOKENS, logits="all")), wanted)


def test_layers_that_the_file_calls_shared_ignore_indexers(tmp_path: Path) -> None:
    model = random_model(FEW, "glm-dsa", full=[0])
    wanted = SparseLatent(model, FEW, top_k=8).logits(TOKENS)
    extra = random_model(FEW, "glm-dsa")
    model.weights |= {name: w for name, w in extra.weights.items() if "blk.1.indexer" in name}
    check(Context(loaded(model, tmp_path), exact()).decode(Batch.single(TOKENS, logits="all")), wanted)


@pytest.mark.parametrize("mla", [0, 3])
def test_saved_states(mla: int, tmp_path: Path) -> None:
    """A sequence goes on in another context, in other cells, with its index keys."""
    model = random_model(FEW, "deepseek32")
    wanted = SparseLatent(model, FEW, top_k=8).logits(TOKENS)
    file = loaded(model, tmp_path)
    first, second = (Context(file, exact(mla=mla, n_seq_max=3)) for _ in range(2))
    first.decode(Batch.single(TOKENS[:50], 0, 1))
    save_sequence(tmp_path / "state", first, 1, TOKENS[:50].tolist())
    second.decode(Batch.single(TOKENS[:7], 0, 2))
    load_sequence(tmp_path / "state", second, 0, 256)
    check(np.concatenate([second.decode(Batch.single(TOKENS[i : i + 1], i, 0)) for i in range(50, 60)]), wanted[50:])
    other = Context(file, exact(mla=mla, sparse_top_k=0))
    with pytest.raises(FileFormatError):
        load_sequence(tmp_path / "state", other, 0, 256)


@pytest.mark.parametrize("mla", [0, 1, 3])
def test_placements(mla: int, tmp_path: Path) -> None:
    """Layers divided among two devices, with their index keys."""
    n = replace(FEW, layers=4, predict=1)
    model = random_model(n, "glm-dsa")
    path = model.write(tmp_path / "model.gguf")
    tokens = LONG[:150]
    wanted = SparseLatent(model, n, top_k=8).logits(tokens)
    for n_gpu_layers in (2, 9):
        with emulated(2):
            file = Model.load(path, ModelParams(placement=PlacementParams(n_gpu_layers=n_gpu_layers)))
            context = Context(file, exact(mla=mla))
            check(in_parts(context, tokens, [140, *[1] * 4, 6]), wanted)
            assert context.devices is not None
            on_devices = sum(nbytes for name, nbytes in context.devices.cache_bytes().items() if name != "CPU")
            expected = context.kv.nbytes()
            assert 0 < on_devices <= expected and (n_gpu_layers < 9 or on_devices == expected)


def test_errors(tmp_path: Path) -> None:
    file = loaded(random_model(replace(FEW, index_size=24), "glm-dsa"), tmp_path)
    with pytest.raises(UsageError, match=r"-ictk q8_0: index keys of 24 elements are no multiple of its block size 32"):
        Context(file, exact(type_indexer="q8_0"))
    with pytest.raises(UsageError, match="-ictk q4_K: unsupported cache type"):
        Context(file, exact(type_indexer="q4_K"))
    with pytest.raises(UsageError, match=r"-dsatk -2: -1 \(what the file says\), 0 \(all cells\) or more are possible"):
        Context(file, exact(sparse_top_k=-2))
    for key, value, message in (
        ("head_count", 0, "an indexer of 0 heads"),
        ("key_length", 8, "of 8 elements, 16 of them rotated"),
        ("key_length", 48, "has wrong shape"),
        ("top_k", 0, "that chooses 0 cells"),
        ("top_k", None, "glm-dsa.attention.indexer.top_k"),
    ):
        model = random_model(FEW, "glm-dsa")
        model.keys[f"attention.indexer.{key}"] = value
        model.keys = {name: v for name, v in model.keys.items() if v is not None}
        with pytest.raises(FileFormatError, match=message):
            loaded(model, tmp_path)
    model = random_model(FEW, "glm-dsa")
    del model.weights["blk.1.indexer.proj"]
    with pytest.raises(FileFormatError, match=r"tensor 'blk.1.indexer.proj.weight' not found"):
        loaded(model, tmp_path)


def test_long_rows_of_published_size(tmp_path: Path) -> None:
    """Head sizes of GLM-5, for which products of tiles are made; a single token and small batches."""
    n = replace(PUBLISHED, top_k=40, experts=2, used=2)
    model = random_model(n, "glm-dsa")
    wanted = SparseLatent(model, n, top_k=40).logits(LONG[:140])
    file = loaded(model, tmp_path)
    for mla in (1, 3):
        check(in_parts(Context(file, exact(mla=mla)), LONG[:140], [130, *[1] * 4, 6]), wanted)
    wanted = SparseLatent(model, n, top_k=40, cached=rounded("f16")).logits(LONG[:140])
    found = in_parts(Context(file, exact(type_indexer="f16")), LONG[:140], [130, *[1] * 4, 6])
    error = np.sort(np.abs(found - wanted).max(axis=1)) / np.abs(wanted).max()
    assert error[len(error) * 9 // 10] < 5e-4, f"of nine tokens in ten the worst is off by {error[-14:]}"


@pytest.mark.parametrize("top_k", [8, 1000])
@pytest.mark.parametrize("mla", [0, 1, 3])
def test_statistics_of_inputs(mla: int, top_k: int, tmp_path: Path) -> None:
    """Every token counts once for all weights, those of indexers too, whether cells are left out or not."""
    file = loaded(random_model(replace(FEW, top_k=top_k), "glm-dsa"), tmp_path)
    collector = ActivationCollector({name: (*info.shape, 1, 1)[2] for name, info in file.gguf.tensors.items()})
    context = Context(file, exact(n_ctx=512, n_ubatch=140, mla=mla, collector=collector))
    context.decode(Batch.single(LONG, logits="all"))
    names = ["attn_output", "indexer.attn_k", "indexer.attn_q_b", "indexer.proj", *(["attn_k_b"] if mla else [])]
    for name in names:
        rows = collector.entries[f"blk.1.{name}.weight"].rows
        assert (rows == len(LONG)).all(), f"{name} has seen {rows} tokens"


def test_the_log_has_the_size_of_index_keys(tmp_path: Path) -> None:
    file = loaded(random_model(FEW, "glm-dsa"), tmp_path)
    lines = run_logs.index_cache_lines(Context(file, params(n_ctx=4096, type_indexer="q8_0")))
    assert lines == ["llama_kv_cache_init: index keys (q8_0) of sparse attention =     0.40 MiB"]
    assert run_logs.index_cache_lines(Context(file, params(sparse_top_k=0))) == []
