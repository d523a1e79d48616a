"""Readable float64 evaluations of the vision towers of projector files.

Patches stay in a grid [rows, columns] in their order in the picture.
"""

from __future__ import annotations

import math

import numpy as np

from tests.cpu.media.vision_towers import Tower, Weights


def normalized(tower: Tower, picture: np.ndarray) -> np.ndarray:
    """Pixels of a picture uint8 [h, w, 3] as float64."""
    return (picture / 255.0 - np.array(tower.mean)) / np.array(tower.std)


def patches_of(pixels: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Products [rows, columns, d] of the patches with filters [d, 3, p, p], or [d, p p 3]."""
    if weight.ndim == 2:
        p = math.isqrt(weight.shape[1] // 3)
        weight = weight.reshape(-1, p, p, 3).transpose(0, 3, 1, 2)
    p = weight.shape[-1]
    rows, columns = pixels.shape[0] // p, pixels.shape[1] // p
    grid = pixels.reshape(rows, p, columns, p, 3).astype(np.float64)
    return np.einsum("rycxk,dkyx->rcd", grid, weight.astype(np.float64))


def norm(x: np.ndarray, w: Weights, name: str, eps: float, *, rms: bool = False) -> np.ndarray:
    x = x if rms else x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"].astype(np.float64)
    return x if rms else x + w[f"{name}.bias"]


def linear(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    y = x @ w[f"{name}.weight"].astype(np.float64).T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def erf_gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


ACTIVATIONS = {
    "quick": lambda x: x / (1 + np.exp(-1.702 * x)),
    "tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "erf": erf_gelu,
}


def angles(tower: Tower, rows: int, columns: int) -> np.ndarray:
    """Angles [rows, columns, pairs] of the pairs of a head, in the order of the file."""
    n = tower.head_size // 2  # pairs
    if tower.kind == "minimax_m3":
        return _third_angles(n, rows, columns)
    row, column = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    first, second = (column, row) if tower.kind.startswith(("kimi", "step")) else (row, column)
    steps = np.arange(n // 2)
    if tower.kind in ("pixtral", "lightonocr"):  # the rates of all pairs, dealt out in turn
        rates = 10000.0 ** (-2 * steps / n), 10000.0 ** (-(2 * steps + 1) / n)
    else:
        rates = (10000.0 ** (-2 * steps / n),) * 2
    return np.concatenate([first[..., None] * rates[0], second[..., None] * rates[1]], -1)


def _third_angles(n: int, rows: int, columns: int) -> np.ndarray:
    """A third of the pairs turns by time, which is 0, a third by rows, one by columns, and what is left not at all."""
    third = 2 * n // 3 // 2
    row, column = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    rates = 10000.0 ** (-np.arange(third) / third)
    found = np.zeros((rows, columns, n))
    found[..., third : 2 * third] = row[..., None] * rates
    found[..., 2 * third : 3 * third] = column[..., None] * rates
    return found


def rotated(tower: Tower, x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Heads [rows, columns, H, n] turned; pairs are neighbours in some files and n / 2 apart in others."""
    z = np.exp(1j * angle)[:, :, None]
    if tower.kind == "minimax_m3":  # each third has its own pairs, which are half of it apart
        third, turned = x.shape[-1] // 3 // 2, x.copy()
        for i in range(3):
            a, b = (x[..., third * j : third * (j + 1)] for j in (2 * i, 2 * i + 1))
            part = (a + 1j * b) * z[..., third * i : third * (i + 1)]
            turned[..., 2 * third * i : 2 * third * (i + 1)] = np.concatenate([part.real, part.imag], -1)
        return turned
    if tower.kind in ("pixtral", "lightonocr", "kimivl", "kimik25", "step3vl"):
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * z
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * z
    return np.concatenate([turned.real, turned.imag], -1)


def windows_of(tower: Tower, rows: int, columns: int) -> np.ndarray:
    """The window of every patch [rows * columns]."""
    size = tower.further.get("window_size", 112) // tower.merge // tower.patch * tower.merge
    row, column = np.meshgrid(np.arange(rows) // size, np.arange(columns) // size, indexing="ij")
    return (row * columns + column).reshape(-1)


def order_of(tower: Tower, rows: int, columns: int, *, by_columns: bool) -> np.ndarray:
    """Number of every patch [rows * columns] where squares follow each other line by line or column by column."""
    m = tower.merge
    row, column = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    outer = (column // m) * (rows // m) + row // m if by_columns else (row // m) * (columns // m) + column // m
    return (outer * m * m + (row % m) * m + column % m).reshape(-1)


def attention(tower: Tower, w: Weights, p: str, x: np.ndarray, *, windowed: bool, mode: int = -1) -> np.ndarray:
    """mode: of MiMo-VL, -1 the whole picture, else a stretch around each patch."""
    (rows, columns), n = x.shape[:2], tower.head_size
    if f"{p}.attn_qkv.weight" in w:
        q, k, v = np.split(
            linear(x, w, f"{p}.attn_qkv"), np.cumsum([n * tower.heads, n * (tower.kv or tower.heads)]), -1
        )
    else:
        q, k, v = (linear(x, w, f"{p}.attn_{part}") for part in "qkv")
    q, k, v = (part.reshape(rows, columns, -1, n) for part in (q, k, v))
    if f"{p}.attn_q_norm.weight" in w:
        q, k = (norm(part, w, f"{p}.attn_{name}_norm", tower.eps, rms=True) for part, name in ((q, "q"), (k, "k")))
    k, v = (np.repeat(part, tower.heads // part.shape[2], axis=2) for part in (k, v))
    turns = angles(tower, rows, columns)
    q, k = rotated(tower, q, turns), rotated(tower, k, turns)
    q, k, v = (part.reshape(rows * columns, tower.heads, n) for part in (q, k, v))
    scores = np.einsum("ahn,bhn->hab", q, k) / math.sqrt(n)
    if windowed:
        window = windows_of(tower, rows, columns)
        scores = np.where(window[:, None] == window, scores, -np.inf)
    sinks = np.full((tower.heads, 1, 1), -np.inf)
    if mode >= 0:
        place = order_of(tower, rows, columns, by_columns=mode == 1)
        scores = np.where(np.abs(place[:, None] - place) <= tower.further["window_size"], scores, -np.inf)
        sinks[:, 0, 0] = w[f"{p}.attn_sinks"]
    top = np.maximum(scores.max(-1, keepdims=True), sinks)
    share = np.exp(scores - top)
    share /= share.sum(-1, keepdims=True) + np.exp(sinks - top)
    return linear(np.einsum("hab,bhn->ahn", share, v).reshape(rows, columns, -1), w, f"{p}.attn_out")


def gated(tower: Tower, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    limit = tower.further.get("swiglu_clamp", np.inf)
    return ACTIVATIONS[tower.activation](np.minimum(gate, limit)) * np.clip(up, -limit, limit)


def routed(tower: Tower, w: Weights, p: str, x: np.ndarray) -> np.ndarray:
    """Experts that sigmoid scores and a bias choose, by their shares of the scores."""
    scores = 1 / (1 + np.exp(-linear(x, w, f"{p}.ffn_gate_inp")))
    order = np.argsort(-(scores + w[f"{p}.exp_probs_b.weight"]), axis=-1)
    taken = np.zeros_like(scores)
    np.put_along_axis(taken, order[..., : tower.further["expert_used_count"]], 1.0, -1)
    shares = scores * taken
    shares /= shares.sum(-1, keepdims=True)
    gate, up = (np.einsum("rcd,efd->rcef", x, w[f"{p}.ffn_{part}_exps.weight"]) for part in ("gate", "up"))
    out = np.einsum("rcef,edf->rced", gated(tower, gate, up), w[f"{p}.ffn_down_exps.weight"])
    return np.einsum("rced,rce->rcd", out, shares)


def network(tower: Tower, w: Weights, p: str, x: np.ndarray) -> np.ndarray:
    if f"{p}.ffn_gate_inp.weight" in w:
        return routed(tower, w, p, x)
    up, act = linear(x, w, f"{p}.ffn_up"), ACTIVATIONS[tower.activation]
    inner = gated(tower, linear(x, w, f"{p}.ffn_gate"), up) if tower.gated else act(up)
    return linear(inner, w, f"{p}.ffn_down")


def merged(tower: Tower, x: np.ndarray) -> np.ndarray:
    """Neighbours [rows, columns, d] joined, row by row: [rows * columns / m^2, m^2 * d]."""
    m = tower.merge
    parts = [x[i::m, j::m] for i in range(m) for j in range(m)]
    return np.concatenate(parts, -1).reshape(-1, m * m * x.shape[-1])


def corner_weights(n: int, side: int) -> np.ndarray:
    """Linear interpolation of a table of `side` places at n, the first and last ones being those of the table."""
    found = np.zeros((n, side))
    for i, at in enumerate(np.linspace(0, side - 1, n)):
        low = min(int(at), side - 2)
        found[i, low] += 1 - (at - low)
        found[i, low + 1] += at - low
    return found


def cubic_weights(n: int, side: int) -> np.ndarray:
    """Cubic interpolation (a = -0.75) at the middles of n cells; places outside are those at the edge."""

    def share(x: float) -> float:
        x, a = abs(x), -0.75
        if x <= 1:
            return ((a + 2) * x - (a + 3)) * x * x + 1
        return ((x - 5) * x + 8) * x * a - 4 * a if x < 2 else 0.0

    found = np.zeros((n, side))
    for i in range(n):
        at = (i + 0.5) * side / n - 0.5
        for place in range(math.floor(at) - 1, math.floor(at) + 3):
            found[i, min(max(place, 0), side - 1)] += share(at - place)
    return found


def linear_weights(n: int, side: int) -> np.ndarray:
    """Linear interpolation at the middles of n cells; places outside are those at the edge."""
    found = np.zeros((n, side))
    for i in range(n):
        at = (i + 0.5) * side / n - 0.5
        low = math.floor(at)
        for place, share in ((low, 1 - (at - low)), (low + 1, at - low)):
            found[i, min(max(place, 0), side - 1)] += share
    return found


INTERPOLATIONS = {
    "qwen3vl_merger": corner_weights,
    "ling3vl": corner_weights,
    "step3vl": linear_weights,
    "paddleocr": linear_weights,
}


def positions(tower: Tower, w: Weights, rows: int, columns: int) -> np.ndarray:
    table = w["v.position_embd.weight"].reshape(tower.side, tower.side, tower.d).astype(np.float64)
    weights = INTERPOLATIONS.get(tower.kind, cubic_weights)
    return np.einsum("ry,cx,yxd->rcd", weights(rows, tower.side), weights(columns, tower.side), table)


def encoded(tower: Tower, w: Weights, pixels: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """States [rows, columns, d] behind all layers, and those behind the layers of tower.deep."""
    x = patches_of(pixels, w["v.patch_embd.weight"])
    if "v.patch_embd.weight.1" in w:
        x = x + patches_of(pixels, w["v.patch_embd.weight.1"])
    if "v.patch_embd.bias" in w:
        x = x + w["v.patch_embd.bias"]
    if "v.norm_embd.weight" in w:
        x = norm(x, w, "v.norm_embd", tower.eps, rms=True)
    if "v.position_embd.weight" in w:
        x = x + positions(tower, w, *x.shape[:2])
    if "v.pre_ln.weight" in w:
        x = norm(x, w, "v.pre_ln", tower.eps, rms=tower.rms)
    deep = []
    for il in range(tower.layers):
        p = f"v.blk.{il}"
        windowed = tower.windows > 0 and (il + 1) % tower.windows != 0
        if tower.kind == "youtuvl":
            windowed = il not in tower.further["wa_layer_indexes"]
        mode = tower.further["wa_pattern_mode"][il] if tower.kind == "mimovl" else -1
        h = norm(x, w, f"{p}.ln1", tower.eps, rms=tower.rms)
        x = x + attention(tower, w, p, h, windowed=windowed, mode=mode) * w.get(f"{p}.ls1.weight", 1)
        x = x + network(tower, w, p, norm(x, w, f"{p}.ln2", tower.eps, rms=tower.rms)) * w.get(f"{p}.ls2.weight", 1)
        if il in tower.deep:
            deep.append(x)
    return x, deep


def rows(tower: Tower, w: Weights, picture: np.ndarray) -> np.ndarray:
    """What the file makes of a picture uint8 [h, w, 3] of a size that fits it, float64 [n, n_embd * (1 + n_deep)]."""
    x, deep = encoded(tower, w, normalized(tower, picture))
    if tower.kind in ("pixtral", "lightonocr"):
        return _pixtral_rows(tower, w, x)
    if tower.kind == "minimax_m3":
        return _minimax_rows(tower, w, x)
    if tower.kind == "step3vl":
        return linear(halved(halved(x, w, "mm.0"), w, "mm.1"), w, "mm.model.fc").reshape(-1, tower.text)
    last = "mm.post_norm" if tower.kind.startswith("dots") else "v.post_ln"
    if f"{last}.weight" in w:
        x = norm(x, w, last, tower.eps, rms=tower.rms and tower.kind != "mimovl")
    if tower.kind.startswith("glm"):
        return _glm_rows(tower, w, x)
    if tower.kind == "youtuvl":
        x = norm(x, w, "mm.input_norm", 1e-6, rms=True)
    elif "mm.input_norm.weight" in w:
        x = norm(
            x, w, "mm.input_norm", {"ling3vl": tower.eps, "dots_ocr": 1e-6, "dots3note_v": 1e-6}.get(tower.kind, 1e-5)
        )
    if tower.kind.startswith(("kimi", "paddle")):
        return linear(erf_gelu(linear(merged(tower, x), w, "mm.1")), w, "mm.2")
    found = [linear(erf_gelu(linear(merged(tower, x), w, "mm.0")), w, "mm.2")]
    for il, states in zip(tower.deep, deep, strict=True):
        p = f"v.deepstack.{il}"
        normed = norm(merged(tower, states), w, f"{p}.norm", tower.eps)
        found.append(linear(erf_gelu(linear(normed, w, f"{p}.fc1")), w, f"{p}.fc2"))
    return np.concatenate(found, -1)


def halved(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    """Every second row and column of a convolution of 3 x 3 over x [rows, columns, D] with zeros around it."""
    filters, (rows, columns, _) = w[f"{name}.weight"].astype(np.float64), x.shape
    framed = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    parts = [
        [framed[i : i + rows : 2, j : j + columns : 2] @ filters[:, :, i, j].T for j in range(3)] for i in range(3)
    ]
    return np.sum(parts, axis=(0, 1)) + w[f"{name}.bias"]


def _minimax_rows(tower: Tower, w: Weights, x: np.ndarray) -> np.ndarray:
    """Two matrices for patches, two for squares of them."""
    x = linear(erf_gelu(linear(x, w, "mm.1")), w, "mm.2")
    return linear(erf_gelu(linear(merged(tower, x), w, "mm.merger.fc1")), w, "mm.merger.fc2")


def _glm_rows(tower: Tower, w: Weights, x: np.ndarray) -> np.ndarray:
    """A convolution over squares, a matrix and a gated network."""
    m = tower.merge
    squares = x.reshape(x.shape[0] // m, m, x.shape[1] // m, m, tower.d)
    x = (
        np.einsum("ryckd,odyk->rco", squares, w["mm.patch_merger.weight"].astype(np.float64))
        + w["mm.patch_merger.bias"]
    )
    x = erf_gelu(norm(linear(x.reshape(-1, tower.text), w, "mm.model.fc"), w, "mm.post_norm", 1e-5))
    return linear(gated(tower, linear(x, w, "mm.gate"), linear(x, w, "mm.up")), w, "mm.down")


def _pixtral_rows(tower: Tower, w: Weights, x: np.ndarray) -> np.ndarray:
    """Rows of the picture with the row of [IMG_BREAK] between them."""
    m, columns = tower.merge, x.shape[1] // tower.merge
    if m > 1:
        x = norm(x, w, "mm.input_norm", tower.eps, rms=True)
        parts = [x[i::m, j::m] for i in range(m) for j in range(m)]
        x = linear(np.stack(parts, -1).reshape(-1, m * m * tower.d), w, "mm.patch_merger")
    x = linear(erf_gelu(linear(x.reshape(-1, tower.d), w, "mm.1")), w, "mm.2")
    if tower.kind == "lightonocr":
        return x
    lines = x.reshape(-1, columns, tower.text)
    end = np.broadcast_to(w["v.token_embd.img_break"].astype(np.float64), (len(lines), 1, tower.text))
    return np.concatenate([lines, end], 1).reshape(-1, tower.text)[:-1]
