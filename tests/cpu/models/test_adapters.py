"""LoRA adapters and control vectors: logits of merged weights, and of the definition in float64."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.adapter import LoraAdapter
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.control_vector import in_range, load_control_vector
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import FileFormatError, IkpyError, UsageError
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.graph.ir import F32
from ikpy.quants import registry
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel
from tests.cpu.models.shaped_models import Dims, deepseek2
from tests.cpu.models.test_zoo_holdouts import RMS, frame, gemma, gpt_oss, llama4_two_experts, phi3_short_context, shape

TOKENS = np.random.default_rng(8).integers(0, N_VOCAB, 24)
RANDOM = np.random.default_rng(4)
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


def llama(seed: int = 11) -> RandomModel:
    n, d, heads, kv, head, f = 3, 64, 4, 2, 16, 56
    m = RandomModel("llama", seed, **shape(n, d, heads, kv, head, f), **RMS)
    frame(m, d, tied=False)
    for il in range(n):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", d)
        m.norm(f"{p}.ffn_norm", d)
        m.attention(p, d, heads, kv, head)
        m.ffn(p, d, f)
    return m


def make_pairs(model: RandomModel, rank: int, *, skip: tuple[str, ...] = ("token_embd",)) -> Pairs:
    """Random pairs for every matrix."""
    pairs = {}
    for name, w in model.weights.items():
        if w.ndim >= 2 and not name.startswith(skip) and "norm" not in name and not name.endswith(".bias"):
            a = RANDOM.normal(0, 1 / math.sqrt(w.shape[-1]), (*w.shape[:-2], rank, w.shape[-1]))
            b = RANDOM.normal(0, 0.4 / math.sqrt(rank), (*w.shape[:-2], w.shape[-2], rank))
            pairs[name] = a.astype(np.float32), b.astype(np.float32)
    return pairs


def write_adapter(path: Path, arch: str, pairs: Pairs, alpha: float, type_name: str = "f32") -> Path:
    kind = registry.by_name(type_name).id
    dtype = {"f32": np.float32, "f16": np.float16}[type_name]
    with GGUFWriter(path) as out:
        out.add("general.type", GGUFValueType.STRING, "adapter")
        out.add("general.architecture", GGUFValueType.STRING, arch)
        out.add("adapter.type", GGUFValueType.STRING, "lora")
        out.add("adapter.lora.alpha", GGUFValueType.FLOAT32, alpha)
        tensors = {f"{n}.weight.lora_{ab}": v for n, pair in pairs.items() for ab, v in zip("ab", pair, strict=True)}
        for name, values in tensors.items():
            out.add_tensor(name, values.shape[::-1], kind)
        for name, values in tensors.items():
            out.write(name, values.astype(dtype))
    return path


def merged(model: RandomModel, pairs: Pairs, scale: float) -> RandomModel:
    """The model with scale * B A added to its weights."""
    result = RandomModel(model.arch, 0)
    result.keys, result.weights = model.keys, dict(model.weights)
    for name, (a, b) in pairs.items():
        delta = b.astype(np.float64) @ a.astype(np.float64)
        result.weights[name] = (model.weights[name] + scale * delta).astype(np.float32)
    return result


def params(**changes: object) -> ContextParams:
    return ContextParams(**{"n_ctx": 256, "n_threads": 2, "type_k": "f32", "type_v": "f32", **changes})  # type: ignore[arg-type]


def assert_equal(ours: np.ndarray, wanted: np.ndarray, what: str, bound: float = 2e-5) -> None:
    error = np.abs(ours - wanted).max(axis=1) / np.abs(wanted).max()
    assert error.max() < bound, f"{what}: row {error.argmax()} off by {error.max():.1e} relative"


@pytest.mark.parametrize("make", [llama, phi3_short_context, gpt_oss, llama4_two_experts], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("rank", "alpha"), [(3, 5.0), (8, 0.0)])
def test_logits_are_those_of_merged_weights(make, rank: int, alpha: float, tmp_path: Path) -> None:
    """Dense, fused and expert tensors; prompts, single tokens, few outputs; alpha 0 means no division by the rank."""
    made = make()
    model = made[0] if isinstance(made, tuple) else made
    pairs = make_pairs(model, rank)
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    adapter = LoraAdapter.load(write_adapter(tmp_path / "lora.gguf", model.arch, pairs, alpha), loaded)
    ctx = Context(loaded, params(adapters=(adapter,)))
    plain = Context(loaded, params()).decode(Batch.single(TOKENS, logits="all"))
    for scale in (1.0, 0.0, -0.6):
        factor = scale * alpha / rank if alpha else scale
        wanted_model = Model.load(merged(model, pairs, factor).write(tmp_path / f"merged{scale}.gguf"))
        wanted = Context(wanted_model, params()).decode(Batch.single(TOKENS, logits="all"))
        assert scale == 0 or np.abs(wanted - plain).max() > 0.05, "the adapter changes something"
        ctx.adapter_scales[:] = scale
        ctx.kv.clear()
        assert_equal(ctx.decode(Batch.single(TOKENS, logits="all")), wanted, f"scale {scale}, prompt")
        ctx.kv.clear()
        last = ctx.decode(Batch.single(TOKENS[:-1]))
        assert_equal(last, wanted[-2:-1], f"scale {scale}, last row of a prompt")
        assert_equal(ctx.decode(Batch.single(TOKENS[-1:], len(TOKENS) - 1)), wanted[-1:], f"scale {scale}, one token")


def test_several_adapters_and_scales_per_sequence(tmp_path: Path) -> None:
    """Two adapters in one batch of two sequences, each with scales of its own; f16 files."""
    model = llama()
    pairs = [
        {
            n: (a.astype(np.float16).astype(np.float32), b.astype(np.float16).astype(np.float32))
            for n, (a, b) in p.items()
        }
        for p in (make_pairs(model, 4), make_pairs(model, 6, skip=("token_embd", "output", "blk.1")))
    ]
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    files = [write_adapter(tmp_path / f"{i}.gguf", "llama", p, 8.0, "f16") for i, p in enumerate(pairs)]
    ctx = Context(loaded, params(adapters=[LoraAdapter.load(f, loaded) for f in files], n_seq_max=2))
    scales = np.array([[1.0, 0.5], [0.0, -1.0]], np.float32)
    ctx.adapter_scales[:2] = scales
    n = len(TOKENS)
    both = Batch(np.tile(TOKENS, 2), np.tile(np.arange(n), 2), [(0,)] * n + [(1,)] * n, np.ones(2 * n, bool))
    found = ctx.decode(both)
    for seq in range(2):
        wanted_model = merged(merged(model, pairs[0], scales[seq, 0] * 2), pairs[1], scales[seq, 1] * 8 / 6)
        reference = Context(Model.load(wanted_model.write(tmp_path / f"m{seq}.gguf")), params())
        wanted = reference.decode(Batch.single(TOKENS, logits="all"))
        assert_equal(found[seq * n : (seq + 1) * n], wanted, f"sequence {seq}")


def test_adapter_of_a_quantized_model(tmp_path: Path) -> None:
    """The addition is made in float whatever the type of the weights: the difference is the adapter's own."""
    model = gpt_oss(f=32, expert_type="q8_0")[0]
    pairs = {n: p for n, p in make_pairs(model, 4).items() if "_exps" in n}
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    adapter = LoraAdapter.load(write_adapter(tmp_path / "lora.gguf", model.arch, pairs, 0.0), loaded)
    model.encoded.clear()
    wanted = Context(Model.load(merged(model, pairs, 1.0).write(tmp_path / "m.gguf")), params())
    a = Context(loaded, params(adapters=(adapter,))).decode(Batch.single(TOKENS, logits="all"))
    b = wanted.decode(Batch.single(TOKENS, logits="all"))
    assert np.median(np.abs(a - b)) < 0.01 * np.abs(b).max()


def assert_merged(model: RandomModel, pairs: Pairs, merge: Pairs, tmp_path: Path, **settings: int) -> None:
    """Logits with the pairs are those of the model with `merge` added to its weights: prompts and single tokens."""
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    adapter = LoraAdapter.load(write_adapter(tmp_path / "lora.gguf", model.arch, pairs, 0.0), loaded)
    wanted_model = Model.load(merged(model, merge, -0.7).write(tmp_path / "merged.gguf"))
    tokens = np.random.default_rng(2).integers(0, N_VOCAB, 140)
    # Modes 2 and 3 round expanded keys to F16 in prompts, unless there are adapters.
    exact = params(**{**settings, "mla": min(1, settings.get("mla", 0))})
    wanted = Context(wanted_model, exact).decode(Batch.single(tokens, logits="all"))
    plain = Context(loaded, exact).decode(Batch.single(tokens, logits="all"))
    assert np.abs(wanted - plain).max() > 0.05 * np.abs(plain).max(), "the adapter changes something"
    ctx = Context(loaded, params(adapters=(adapter,), **settings))
    ctx.adapter_scales[:] = -0.7
    assert_equal(ctx.decode(Batch.single(tokens[:-2], logits="all")), wanted[:-2], "prompt", 5e-5)
    for i in (138, 139):
        assert_equal(ctx.decode(Batch.single(tokens[i : i + 1], i)), wanted[i : i + 1], "one token", 5e-5)


@pytest.mark.parametrize("looked_up", [False, True])
@pytest.mark.parametrize("make", [llama, gemma], ids=lambda f: f.__name__)
def test_embeddings(make, looked_up: bool, tmp_path: Path) -> None:
    """Rows of an adapted embedding, which is the output matrix too in gemma; both ways in which files hold A and B."""
    made = make()
    model = made[0] if isinstance(made, tuple) else made
    pairs = make_pairs(model, 4, skip=("blk.0", "output"))
    a, b = pairs["token_embd"]
    stored = {**pairs, "token_embd": (b, np.ascontiguousarray(a.T))} if looked_up else pairs
    assert_merged(model, stored, pairs, tmp_path)


LATENT = Dims(heads=3, head=24, rank=64, rot=16, dense=2, experts=2, used=1)


def latent(form: str, n: Dims = LATENT) -> RandomModel:
    """A deepseek2 whose files hold attn_kv_b, or attn_k_b and attn_v_b, or all of them."""
    model = deepseek2(n)[0]
    for il in range(n.layers):
        both = model.weights[f"blk.{il}.attn_kv_b"].reshape(n.heads, 2 * n.head, n.rank)
        if form != "kv_b":
            model.weights[f"blk.{il}.attn_k_b"] = np.ascontiguousarray(both[:, : n.head].transpose(0, 2, 1))
            model.weights[f"blk.{il}.attn_v_b"] = np.ascontiguousarray(both[:, n.head :])
        if form == "k_b, v_b":
            del model.weights[f"blk.{il}.attn_kv_b"]
    return model


@pytest.mark.parametrize("form", ["kv_b", "all"])
@pytest.mark.parametrize("mla", [0, 1, 2, 3])
def test_latent_attention(form: str, mla: int, tmp_path: Path) -> None:
    """Adapters of attn_kv_b act on the tensors derived from it, and on those that the file holds beside it."""
    model = latent(form)
    pairs = {n: p for n, p in make_pairs(latent("kv_b"), 4).items() if ".attn_" in n}
    merge = dict(pairs)
    for il in range(LATENT.layers if form == "all" else 0):
        a, b = pairs[f"blk.{il}.attn_kv_b"]
        heads = b.reshape(LATENT.heads, 2 * LATENT.head, -1)
        shared = np.tile(a, (LATENT.heads, 1, 1))
        merge[f"blk.{il}.attn_k_b"] = heads[:, : LATENT.head].transpose(0, 2, 1), shared.transpose(0, 2, 1)
        merge[f"blk.{il}.attn_v_b"] = shared, heads[:, LATENT.head :]
    assert_merged(model, pairs, merge, tmp_path, mla=mla, flash_attn=mla != 2)


@pytest.mark.parametrize("mla", [1, 2, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_parts_of_latent_attention(mla: int, shared: bool, tmp_path: Path) -> None:
    """Adapters of attn_k_b and attn_v_b, with an own pair for every head or with one half shared by all."""
    model = latent("k_b, v_b")
    merge = {n: p for n, p in make_pairs(model, 4).items() if n.endswith(("k_b", "v_b"))}
    pairs = dict(merge)
    for name, (own_a, own_b) in merge.items() if shared else ():
        a, b = (own_a, own_b[:1]) if name.endswith("k_b") else (own_a[:1], own_b)
        pairs[name] = a, b
        merge[name] = np.repeat(a, LATENT.heads // len(a), axis=0), np.repeat(b, LATENT.heads // len(b), axis=0)
    assert_merged(model, pairs, merge, tmp_path, mla=mla)


def test_parts_of_latent_attention_need_the_absorbed_form(tmp_path: Path) -> None:
    model = latent("k_b, v_b")
    pairs = {n: p for n, p in make_pairs(model, 4).items() if n.endswith(("k_b", "v_b"))}
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    adapter = LoraAdapter.load(write_adapter(tmp_path / "lora.gguf", model.arch, pairs, 0.0), loaded)
    with pytest.raises(UsageError, match=r"'blk\.0\.attn_k_b\.weight' has no matrix product to act on with -mla 0"):
        Context(loaded, params(adapters=(adapter,), mla=0))


@pytest.mark.parametrize("legacy_model", [False, True])
@pytest.mark.parametrize("legacy_adapter", [False, True])
def test_single_experts(legacy_model: bool, legacy_adapter: bool, tmp_path: Path) -> None:
    """Tensors per expert in the model, the adapter or both; experts differ in rank, and one has no adapter."""
    model, dims = llama_experts()
    pairs = {n: p for n, p in make_pairs(model, 5).items() if n.endswith("_exps")}
    for a, b in pairs.values():
        a[1], b[1] = 0, 0
        a[2, 3:], b[2, :, 3:] = 0, 0
    stored, merge = dict(pairs), dict(pairs)
    for name, (a, b) in pairs.items():
        for e in range(dims.experts):
            one = f"{name.removesuffix('_exps')}.{e}"
            rank = 3 if e == 2 else 5
            if legacy_adapter and e != 1:
                stored[one] = a[e, :rank], b[e, :, :rank]
            if legacy_model:
                model.weights[one], merge[one] = model.weights[name][e], (a[e], b[e])
        if legacy_adapter:
            del stored[name]
        if legacy_model:
            del model.weights[name], merge[name]
    assert_merged(model, stored, merge, tmp_path)


def llama_experts(ff: int = 40) -> tuple[RandomModel, Dims]:
    dims = Dims(experts=4, used=2, ff=ff)
    model = RandomModel("llama", 12, **dims.keys, **dims.expert_keys, **RMS)
    frame(model, dims.d, tied=False)
    for il in range(dims.layers):
        p = f"blk.{il}"
        model.norm(f"{p}.attn_norm", dims.d)
        model.norm(f"{p}.ffn_norm", dims.d)
        model.attention(p, dims.d, dims.heads, dims.kv, dims.head)
        model.matrix(f"{p}.ffn_gate_inp", dims.experts, dims.d)
        for name, rows, columns in (("gate", dims.ff, dims.d), ("up", dims.ff, dims.d), ("down", dims.d, dims.ff)):
            model.matrix(f"{p}.ffn_{name}_exps", dims.experts, rows, columns)
    return model, dims


def damaged(name: str, pairs: Pairs) -> tuple[str, Pairs]:
    """Architecture and pairs of a file that does not fit."""
    a, b = pairs["blk.0.attn_q"]
    return {
        "arch": ("qwen3", pairs),
        "name": ("llama", {"blk.9.attn_q": (a, b)}),
        "values": ("llama", {"blk.0.attn_q": (a, np.where(b == b.max(), np.nan, b))}),
        "overflow": ("llama", {"blk.0.attn_q": (np.where(a == a.max(), np.inf, a), b)}),
        "shape": ("llama", {"blk.0.attn_q": (a[:, :-1], b)}),
        "rank": ("llama", {"blk.0.attn_q": (a[:-1], b)}),
        "embedding": ("llama", {"token_embd": (RANDOM.normal(size=(2, 64)), RANDOM.normal(size=(N_VOCAB - 1, 2)))}),
    }[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arch", "the adapter is for 'qwen3', the model is 'llama'"),
        ("name", "the model has no tensor 'blk.9.attn_q.weight'"),
        ("values", "'blk.0.attn_q.weight.lora_b' has elements that are not finite numbers"),
        ("overflow", "'blk.0.attn_q.weight.lora_a' has elements that are not finite numbers"),
        ("shape", "'blk.0.attn_q.weight': shapes (63, 3) and (3, 64) do not fit"),
        ("rank", "'blk.0.attn_q.weight': shapes (64, 2) and (3, 64) do not fit"),
        ("embedding", "'token_embd.weight': shapes (64, 2) and (2, 159) do not fit (64, 160, 1)"),
    ],
)
def test_adapters_that_do_not_fit(name: str, message: str, tmp_path: Path) -> None:
    model = llama()
    arch, pairs = damaged(name, make_pairs(model, 3))
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    with pytest.raises(IkpyError, match=re.escape(message)):
        LoraAdapter.load(write_adapter(tmp_path / "lora.gguf", arch, pairs, 1.0), loaded)


def test_files_that_are_no_adapters(tmp_path: Path) -> None:
    model = llama()
    path = model.write(tmp_path / "model.gguf")
    with pytest.raises(FileFormatError, match=r"not a LoRA adapter: it has no key general\.type"):
        LoraAdapter.load(path, Model.load(path))
    with pytest.raises(FileFormatError, match="holds no control vector"):
        load_control_vector(path, 3, 64)


@pytest.mark.parametrize(
    ("keys", "shape", "message"),
    [
        ({"general.type": [1, 2]}, (1, 64), "general.type is array([1, 2]"),
        ({"general.architecture": [1, 2]}, (1, 64), "key general.architecture has wrong type"),
        ({"adapter.lora.alpha": "8"}, (1, 64), "key adapter.lora.alpha has wrong type"),
        ({"adapter.lora.alpha": [1, 2]}, (1, 64), "key adapter.lora.alpha has wrong type"),
        ({"adapter.lora.alpha": math.nan}, (1, 64), "adapter.lora.alpha is nan, not a finite number"),
        ({}, (2, 1, 1, 64), "'blk.0.attn_q.weight.lora_a' has 4 dimensions; at most 3 are possible"),
    ],
)
def test_adapters_of_another_form(keys: dict, shape: tuple[int, ...], message: str, tmp_path: Path) -> None:
    model = llama()
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    path = tmp_path / "lora.gguf"
    standard = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora"}
    tensors = {"blk.0.attn_q.weight.lora_a": np.zeros(shape), "blk.0.attn_q.weight.lora_b": np.zeros((64, 1))}
    with GGUFWriter(path) as out:
        for key, value in {**standard, **keys}.items():
            if isinstance(value, list):
                out.add_array(key, GGUFValueType.UINT32, value)
            else:
                out.add(key, ref.VALUE_TYPES[type(value)], value)
        for name, values in tensors.items():
            out.add_tensor(name, values.shape[::-1], F32)
        for name, values in tensors.items():
            out.write(name, values.astype(np.float32))
    with pytest.raises(FileFormatError, match=re.escape(message)):
        LoraAdapter.load(path, loaded)


# control vectors


def write_directions(path: Path, rows: dict[int, np.ndarray]) -> Path:
    with GGUFWriter(path) as out:
        out.add("general.architecture", GGUFValueType.STRING, "controlvector")
        for layer, values in rows.items():
            out.add_tensor(f"direction.{layer}", values.shape, F32)
        for layer, values in rows.items():
            out.write(f"direction.{layer}", values)
    return path


def steered(model: RandomModel, directions: np.ndarray) -> np.ndarray:
    """Logits of the llama model in float64, directions [n_layer, D] added behind the layers."""
    e = Evaluation(model)
    x = e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(16, 10000.0, np.arange(len(TOKENS), dtype=np.float64))
    for il in range(e.n_layer):
        q, k, v = e.qkv(il, ref.rms_norm(x, e.w[f"blk.{il}.attn_norm"], e.eps))
        q, k = (ref.rotate(t, angles, neox=False) for t in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(16)))
        x = x + e.ffn(il, ref.rms_norm(x, e.w[f"blk.{il}.ffn_norm"], e.eps))
        x = x + directions[il]
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def test_control_vectors_are_added_behind_their_layers(tmp_path: Path) -> None:
    model = llama()
    rows = {n: RANDOM.normal(0, 0.5, 64).astype(np.float32) for n in (1, 2, 3)}
    path = write_directions(tmp_path / "vector.gguf", rows)
    loaded = load_control_vector(path, 3, 64)
    assert (loaded[0] == 0).all() and (loaded[1] == rows[1]).all() and (loaded[2] == rows[2]).all()
    ctx = Context(Model.load(model.write(tmp_path / "model.gguf")), params())
    for directions in (loaded, 0.5 * loaded, in_range(loaded, 2, 2), in_range(loaded, 0, 0), None):
        ctx.steer(directions)
        ctx.kv.clear()
        wanted = steered(model, np.zeros((3, 64)) if directions is None else directions)
        assert_equal(ctx.decode(Batch.single(TOKENS, logits="all")), wanted, "prompt", 5e-5)
        ctx.kv.clear()
        ctx.decode(Batch.single(TOKENS[:-1]))
        assert_equal(ctx.decode(Batch.single(TOKENS[-1:], len(TOKENS) - 1)), wanted[-1:], "one token", 5e-5)
    assert (in_range(loaded, 0, 0) == loaded).all() and (in_range(loaded, 1, 1)[2] == 0).all()


def test_control_vectors_that_do_not_fit(tmp_path: Path) -> None:
    path = write_directions(tmp_path / "vector.gguf", {1: np.ones(48, np.float32)})
    with pytest.raises(FileFormatError, match=re.escape("'direction.1' has 48 elements, the model 64")):
        load_control_vector(path, 3, 64)
    path = write_directions(tmp_path / "vector0.gguf", {0: np.ones(64, np.float32)})
    with pytest.raises(FileFormatError, match="directions are numbered from 1"):
        load_control_vector(path, 3, 64)
    path = write_directions(tmp_path / "vector1.gguf", {1: np.full(64, np.inf, np.float32)})
    with pytest.raises(FileFormatError, match=re.escape("'direction.1' has elements that are not finite numbers")):
        load_control_vector(path, 3, 64)
    ctx = Context(Model.load(llama().write(tmp_path / "model.gguf")), params())
    with pytest.raises(UsageError, match="control vectors of shape"):
        ctx.steer(np.zeros((2, 64), np.float32))
