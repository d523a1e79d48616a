"""Texts with pictures, and float64 evaluations of models that read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ikpy.engine.media import MediaStore
from ikpy.vision.rows import MediaRows
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models import test_arch_qwen3next as delta
from tests.cpu.models.definition_checks import RMS
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel

D, HEADS, KV, HEAD, F, N = 64, 4, 2, 32, 48, 3
BASE = 1e4
SECTIONS = [7, 5, 4, 0]
GLM_SECTIONS = [4, 1, 3, 0]
"""Of a model that rotates half of every head."""
IN_ORDER = ("qwen2vl", "glm4", "paddleocr")
COUNTED_SECTIONS = [5, 4, 4, 3]
"""Of position, column, row and number of the picture."""
WINDOW = 12
Text = Sequence["int | MediaRows"]


def words(seed: int, n: int) -> list[int]:
    """Random tokens of the vocabulary."""
    return [int(token) for token in np.random.default_rng(seed).integers(4, N_VOCAB, n)]


def picture(
    seed: int,
    n: int,
    grid: tuple[int, int] | None = None,
    *,
    n_deep: int = 0,
    both_ways: bool = False,
    counted: bool = False,
) -> MediaRows:
    """Random rows, of the size of scaled embeddings."""
    values = np.random.default_rng(seed).normal(0, 1, (n, D * (1 + n_deep))).astype(np.float32)
    return MediaRows(values, grid, both_ways, counted)


def ids_of(store: MediaStore, text: Text) -> list[int]:
    """Tokens and ids of the pictures' rows."""
    found: list[int] = []
    for item in text:
        if isinstance(item, MediaRows):
            found += store.add(item.values.tobytes(), lambda item=item: item)  # type: ignore[misc]
        else:
            found.append(item)
    return found


class Placed:
    """Of every token of a text: token, or 0; row of a picture, or 0; whether it is one; its four places; the last
    position that it sees.
    """

    def __init__(self, text: Text, width: int) -> None:
        self.tokens: list[int] = []
        rows, is_row, places, last = [], [], [], []
        place = number = 0
        for item in text:
            start = len(self.tokens)
            if not isinstance(item, MediaRows):
                self.tokens.append(item)
                rows.append(np.zeros(width))
                is_row.append(False)
                places.append((place,) * 4)
                last.append(start)
                place += 1
                continue
            for i, row in enumerate(item.values):
                self.tokens.append(0)
                rows.append(row.astype(np.float64))
                is_row.append(True)
                if item.grid:
                    y, x = divmod(i, item.grid[1])
                    inside = (place + i, x, y, number) if item.counted else (place, place + y, place + x, 0)
                    places.append(inside)
                else:
                    places.append((place + i,) * 4)
                last.append(start + len(item) - 1 if item.both_ways else start + i)
            place += max(item.grid) if item.grid and not item.counted else len(item)
            number += item.grid is not None
        self.rows, self.is_row = np.array(rows), np.array(is_row)
        self.places, self.last = np.array(places), np.array(last)

    def visible(self, window: int = 0) -> np.ndarray:
        """Bool [T, T]: which tokens (columns) each token sees."""
        i, j = np.arange(len(self.tokens))[:, None], np.arange(len(self.tokens))[None, :]
        return (j <= self.last[:, None]) & ((i - j < window) | (window == 0))


def section_angles(n: int, base: float, places: np.ndarray, arch: str) -> np.ndarray:
    """Rotation angles [T, n/2], the place of a pair being that of its section."""
    pairs = np.arange(n // 2)
    if arch in IN_ORDER:
        part = np.repeat([0, 1, 2], GLM_SECTIONS[:3] if arch == "glm4" else SECTIONS[:3])
    elif arch.startswith(("qwen3vl", "qwen35")):
        lengths = delta_sections(n) if arch.startswith("qwen35") else SECTIONS
        part = np.where((pairs % 3 == 1) & (pairs < 3 * lengths[1]), 1, 0)
        part[(pairs % 3 == 2) & (pairs < 3 * lengths[2])] = 2
    elif arch == "hunyuan_vl":
        part = np.repeat(range(4), COUNTED_SECTIONS)
    else:
        part = np.zeros(n // 2, int)
    return places[:, part] * base ** (-2 * pairs / n)


def delta_sections(n: int) -> list[int]:
    """Those of the models of test_arch_qwen3next."""
    assert n == delta.ROTATED
    return [2, 1, 1, 0]


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, seen: np.ndarray) -> np.ndarray:
    """Attention of q [T, H, d] to k and v as the mask [T, T] allows, [T, H * dv]."""
    group = q.shape[1] // k.shape[1]
    out = [
        ref.softmax(np.where(seen, scale * q[:, h] @ k[:, h // group].T, -np.inf)) @ v[:, h // group]
        for h in range(q.shape[1])
    ]
    return np.stack(out, axis=1).reshape(len(q), -1)


def transformer(arch: str, seed: int = 71, n_layer: int = N, **keys: object) -> RandomModel:
    """qwen2vl, qwen3vl, qwen3vlmoe, paddleocr, glm4, hunyuan_vl, granite, gemma3 or llama."""
    is_gemma, has_sections = arch == "gemma3", "vl" in arch or arch == "paddleocr"
    sections = {"rope.dimension_sections": SECTIONS} if has_sections else {}
    shape = checks.shape(n_layer, D, HEADS, KV, HEAD, F)
    m = RandomModel(arch, seed, **{**shape, **RMS, **sections, "rope.freq_base": BASE, **keys})
    checks.frame(m, D, tied=is_gemma)
    behind = arch in ("gemma3", "glm4")
    names = ["attn_norm", "ffn_norm", *(["post_attention_norm", "post_ffw_norm"] if behind else [])]
    for il in range(n_layer):
        p = f"blk.{il}"
        for name in names:
            m.norm(f"{p}.{name}", D)
        if is_gemma or "qwen3" in arch or arch == "hunyuan_vl":
            m.norm(f"{p}.attn_q_norm", HEAD)
            m.norm(f"{p}.attn_k_norm", HEAD)
        m.attention(p, D, HEADS, KV, HEAD)
        if arch in IN_ORDER:
            for name, n in (("q", HEADS), ("k", KV), ("v", KV)):
                m.vector(f"{p}.attn_{name}.bias", n * HEAD)
        if "expert_count" in keys:
            checks.experts(m, p, D, F, int(str(keys["expert_count"])))
        else:
            m.ffn(p, D, F)
        if arch == "glm4":
            m.weights[f"{p}.ffn_up"] = np.concatenate([m.weights.pop(f"{p}.ffn_gate"), m.weights[f"{p}.ffn_up"]])
    return m


def evaluate(m: RandomModel, text: Text) -> np.ndarray:
    """Logits [T, V] in float64."""
    e, arch = Evaluation(m), m.arch
    deep = deep_parts(m)
    placed = Placed(text, D * (1 + len(deep)))
    is_row, is_gemma = placed.is_row[:, None], arch == "gemma3"
    x = e.w["token_embd"][placed.tokens] * (math.sqrt(D) if is_gemma else m.keys.get("embedding_scale", 1))
    x = np.where(is_row, placed.rows[:, :D], x)
    for il in range(delta.N_LAYER if arch == "qwen35" else e.n_layer):
        x = _delta_layer(e, il, x, placed) if arch == "qwen35" else _layer(e, il, x, placed, arch)
        if il in deep:
            x = x + placed.rows[:, D * deep[il] : D * (deep[il] + 1)]
    output = e.w["token_embd"] if is_gemma else e.w["output"]
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ output.T / m.keys.get("logit_scale", 1)


def deep_parts(m: RandomModel) -> dict[int, int]:
    """Parts of rows by the layers behind which they are added."""
    mapping = m.keys.get("deepstack_mapping")
    if mapping is not None:
        return {layer - 1: part for layer, part in enumerate(mapping) if part > 0}
    return {il: il + 1 for il in range(int(m.keys.get("n_deepstack_layers", 0)))}


def _layer(e: Evaluation, il: int, x: np.ndarray, placed: Placed, arch: str) -> np.ndarray:
    w, is_gemma = checks.layer_weights(e, il), arch == "gemma3"
    windowed = is_gemma and (il + 1) % 6 != 0
    h = ref.rms_norm(x, w["attn_norm"], e.eps)
    q, k, v = e.qkv(il, h)
    norms_last, scale = arch == "hunyuan_vl", float(e.keys.get("residual_scale", 1))
    score_scale = float(e.keys.get("attention.scale", 1 / math.sqrt(HEAD)))
    if "attn_q_norm" in w and not norms_last:
        q, k = ref.rms_norm(q, w["attn_q_norm"], e.eps), ref.rms_norm(k, w["attn_k_norm"], e.eps)
    n = int(e.keys.get("rope.dimension_count", HEAD))
    angles = section_angles(n, float(e.keys["rope.freq_base"]), placed.places, arch)
    q, k = (
        np.concatenate([ref.rotate(t[..., :n], angles, neox=arch not in ("llama", "granite")), t[..., n:]], -1)
        for t in (q, k)
    )
    if norms_last:
        q, k = ref.rms_norm(q, w["attn_q_norm"], e.eps), ref.rms_norm(k, w["attn_k_norm"], e.eps)
    a = e.output(il, attend(q, k, v, score_scale, placed.visible(WINDOW if windowed else 0)))
    behind = "post_ffw_norm" in w
    x = x + (ref.rms_norm(a, w["post_attention_norm"], e.eps) if behind else scale * a)
    h = ref.rms_norm(x, w["ffn_norm"], e.eps)
    if "ffn_gate_inp" in w:
        used = int(e.keys["expert_used_count"])
        weights = checks.chosen(ref.softmax(h @ w["ffn_gate_inp"].T), used)
        return x + checks.routed(w, h, weights / weights.sum(-1, keepdims=True), used)
    if arch == "glm4":
        gate, up = np.split(h @ w["ffn_up"].T, 2, -1)
        y = (ref.silu(gate) * up) @ w["ffn_down"].T
    else:
        y = e.ffn(il, h, ref.gelu if is_gemma else ref.silu)
    return x + (ref.rms_norm(y, w["post_ffw_norm"], e.eps) if behind else scale * y)


def _delta_layer(e: Evaluation, il: int, x: np.ndarray, placed: Placed) -> np.ndarray:
    w = checks.layer_weights(e, il)
    h = ref.rms_norm(x, w["attn_norm"], e.eps)
    if (il + 1) % 4:
        x = x + delta.delta_layer(e, w, h, delta.separate, interleaved=False)
    else:
        x = x + _gated_attention(e, w, h, placed)
    return x + delta.feed_forward(e, il, w, ref.rms_norm(x, w["post_attention_norm"], e.eps))


def _gated_attention(e: Evaluation, w: ref.Weights, h: np.ndarray, placed: Placed) -> np.ndarray:
    n = delta.ROTATED
    q, gate = np.split((h @ w["attn_q"].T).reshape(-1, HEADS, 2 * HEAD), 2, axis=2)
    k, v = ((h @ w[f"attn_{name}"].T).reshape(-1, KV, HEAD) for name in "kv")
    q, k = ref.rms_norm(q, w["attn_q_norm"], e.eps), ref.rms_norm(k, w["attn_k_norm"], e.eps)
    angles = section_angles(n, BASE, placed.places, "qwen35")
    q, k = (np.concatenate([ref.rotate(t[..., :n], angles, neox=True), t[..., n:]], -1) for t in (q, k))
    attended = attend(q, k, v, 1 / math.sqrt(HEAD), placed.visible())
    return (attended * ref.sigmoid(gate.reshape(len(h), -1))) @ w["attn_output"].T


def qwen2vl() -> RandomModel:
    """Sections one behind the other."""
    return transformer("qwen2vl")


def qwen3vl() -> RandomModel:
    """Interleaved sections, features behind two layers."""
    return transformer("qwen3vl", n_deepstack_layers=2)


def qwen3vlmoe() -> RandomModel:
    """With experts."""
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": F}
    return transformer("qwen3vlmoe", n_deepstack_layers=1, **experts)


def qwen35() -> RandomModel:
    """Recurrent layers, a rotated part of every head."""
    m = delta.new_model("qwen35", 63, experts=False)
    for p in delta.recurrent_prefixes():
        m.matrix(f"{p}.attn_qkv", 2 * delta.N_KEYS + delta.N_VALUES, D)
        m.matrix(f"{p}.attn_gate", delta.N_VALUES, D)
        for name in ("ssm_beta", "ssm_alpha"):
            m.matrix(f"{p}.{name}", delta.VALUE_HEADS, D)
    return m


def paddleocr() -> RandomModel:
    """Sections one behind the other."""
    return transformer("paddleocr", 74)


def glm4() -> RandomModel:
    """Pairs half of the rotated part apart, unlike those of files without sections."""
    keys = {"rope.dimension_sections": GLM_SECTIONS, "rope.dimension_count": HEAD // 2}
    return transformer("glm4", 73, **keys)


def hunyuan_vl() -> RandomModel:
    """Four sections, pictures that are counted; a base by which all pairs turn."""
    keys = {"rope.dimension_sections": COUNTED_SECTIONS, "rope.freq_base": 20.0}
    return transformer("hunyuan_vl", 75, **keys)


def granite() -> RandomModel:
    """Parts of rows are added before layers that the file names, in any order; an embedding scale that rows lack."""
    scales = {"logit_scale": 2.0, "residual_scale": 0.5, "embedding_scale": 3.0, "attention.scale": 0.3}
    return transformer("granite", 76, 5, **scales, deepstack_mapping=np.array([-1, 2, -1, 1, 3], np.int32))


def gemma3() -> RandomModel:
    """Windows, rows that see each other, an embedding scale that rows do not have."""
    return transformer("gemma3", 72, 7, **{"attention.sliding_window": WINDOW})


def llama() -> RandomModel:
    """No sections: rows count on like text."""
    return transformer("llama")


MODELS: dict[str, Callable[[], RandomModel]] = {
    f.__name__: f for f in (qwen2vl, qwen3vl, qwen3vlmoe, qwen35, paddleocr, glm4, hunyuan_vl, granite, gemma3, llama)
}


def text_for(m: RandomModel) -> list[int | MediaRows]:
    """Words with two pictures, one of which two words follow, of the kind that the model reads."""
    n_deep = len(deep_parts(m))
    grids = [(3, 5), (4, 2)] if "qwen" in m.arch or m.arch in (*IN_ORDER, "hunyuan_vl") else [None, None]
    first, second = (
        picture(i, n, grid, n_deep=n_deep, both_ways=m.arch.startswith("gemma"), counted=m.arch == "hunyuan_vl")
        for i, (n, grid) in enumerate(zip((15, 8), grids, strict=True))
    )
    return [*words(1, 6), first, *words(2, 2), second, *words(3, 17)]
