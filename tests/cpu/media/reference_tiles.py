"""Float64 definitions of the encoders of tests/cpu/media/tile_towers.py: rows of pictures in their final size."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tests.cpu.media.tile_weights import TileTower, Weights

erf = np.vectorize(math.erf)


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + erf(x / math.sqrt(2))) / 2


def tanh_gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def quick_gelu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-1.702 * x))


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


class Reference:
    """One evaluation: the tower's weights in float64."""

    def __init__(self, tower: TileTower, weights: Weights) -> None:
        self.t = tower
        self.w = {name: w.astype(np.float64) for name, w in weights.items()}

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        low, high = self.w.get(f"{name}.input_min", -np.inf), self.w.get(f"{name}.input_max", np.inf)
        x = np.clip(x, low, high) @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)
        return np.clip(x, self.w.get(f"{name}.output_min", -np.inf), self.w.get(f"{name}.output_max", np.inf))

    def norm(self, name: str, x: np.ndarray, eps: float | None = None) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        return rms(x, eps or self.t.eps) * self.w[f"{name}.weight"] + self.w.get(f"{name}.bias", 0)

    def patches(self, image: np.ndarray) -> np.ndarray:
        """Products of every patch with the filters, patch by patch."""
        t = self.t
        x = (image / 255 - np.array(t.mean)) / np.array(t.std)
        if t.kind == "gemma4v":
            x = 2 * x - 1
        filters = self.w["v.patch_embd.weight"].reshape(t.d, 3, t.patch, t.patch)
        rows, columns = image.shape[0] // t.patch, image.shape[1] // t.patch
        found = np.empty((rows * columns, t.d))
        for i in range(rows * columns):
            y, x0 = i // columns * t.patch, i % columns * t.patch
            found[i] = np.einsum("ocyx,yxc->o", filters, x[y : y + t.patch, x0 : x0 + t.patch])
        return found + self.w.get("v.patch_embd.bias", 0)

    def attention(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
        """Of heads [T, H, d]."""
        scores = np.einsum("thd,shd->hts", q, k) * scale
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return np.einsum("hts,shd->thd", shares, v).reshape(len(q), -1)

    def heads(self, il: int, part: str, h: np.ndarray) -> np.ndarray:
        t, p = self.t, f"v.blk.{il}"
        if f"{p}.attn_qkv.weight" in self.w:
            i = "qkv".index(part)
            rows = slice(i * t.d, (i + 1) * t.d)
            x = h @ self.w[f"{p}.attn_qkv.weight"][rows].T + self.w[f"{p}.attn_qkv.bias"][rows]
        else:
            x = self.linear(f"{p}.attn_{part}", h)
        return x.reshape(len(h), t.heads, -1)

    def layers(
        self,
        x: np.ndarray,
        act: Callable[[np.ndarray], np.ndarray],
        turn: Callable[[np.ndarray], np.ndarray] | None = None,
        layers: range | None = None,
    ) -> list[np.ndarray]:
        """The states before every one of the layers and behind the last one."""
        found = [x]
        for il in layers or range(self.t.layers):
            p = f"v.blk.{il}"
            h = self.norm(f"{p}.ln1", x)
            q, k, v = (self.heads(il, part, h) for part in "qkv")
            if turn is not None:
                q, k = turn(q), turn(k)
            out = self.linear(f"{p}.attn_out", self.attention(q, k, v, (self.t.d // self.t.heads) ** -0.5))
            x = x + out * self.w.get(f"{p}.ls1.weight", 1)
            out = self.linear(f"{p}.ffn_down", act(self.linear(f"{p}.ffn_up", self.norm(f"{p}.ln2", x))))
            x = x + out * self.w.get(f"{p}.ls2.weight", 1)
            found.append(x)
        return found

    def squares(self, x: np.ndarray, columns: int, factor: int) -> np.ndarray:
        """Patches of every square [n, factor, factor, D], square by square."""
        grid = x.reshape(-1, factor, columns // factor, factor, x.shape[-1])
        return grid.transpose(0, 2, 1, 3, 4).reshape(-1, factor, factor, x.shape[-1])

    def merged(self, x: np.ndarray, columns: int) -> np.ndarray:
        squares = self.squares(x, columns, 2)
        return squares.reshape(len(squares), -1)


def siglip(r: Reference, image: np.ndarray) -> np.ndarray:
    return r.norm("v.post_ln", r.layers(r.patches(image) + r.w["v.position_embd.weight"], tanh_gelu)[-1])


def gemma3(r: Reference, image: np.ndarray) -> np.ndarray:
    x = r.squares(siglip(r, image), r.t.grid, 4).mean((1, 2))
    return rms(x, r.t.eps) * r.w["mm.soft_emb_norm.weight"] @ r.w["mm.input_projection.weight"]


def clip_states(r: Reference, image: np.ndarray) -> np.ndarray:
    x = np.concatenate([r.w["v.class_embd"][None], r.patches(image)]) + r.w["v.position_embd.weight"]
    return r.layers(r.norm("v.pre_ln", x), quick_gelu)[-2][1:]


def llava(r: Reference, image: np.ndarray) -> np.ndarray:
    return r.linear("mm.2", gelu(r.linear("mm.0", clip_states(r, image))))


def plain_llava(r: Reference, image: np.ndarray) -> np.ndarray:
    states = r.layers(r.patches(image) + r.w["v.position_embd.weight"], tanh_gelu)
    chosen = r.t.further.get("feature_layer", [r.t.layers - 1])
    return r.linear("mm.2", gelu(r.linear("mm.0", np.concatenate([states[il] for il in chosen], -1))))


def yi(r: Reference, image: np.ndarray) -> np.ndarray:
    x = r.layers(r.patches(image) + r.w["v.position_embd.weight"], tanh_gelu)[-2]
    return r.norm("mm.4", r.linear("mm.3", gelu(r.norm("mm.1", r.linear("mm.0", x)))))


def glm_edge(r: Reference, image: np.ndarray) -> np.ndarray:
    x = r.layers(r.patches(image) + r.w["v.position_embd.weight"], tanh_gelu)[-1]
    if "v.post_ln.weight" in r.w:
        x = r.norm("v.post_ln", x)
    x = np.einsum("tyxd,odyx->to", r.squares(x, r.t.grid, 2), r.w["adapter.conv.weight"].astype(np.float64))
    p = "adapter.linear"
    x = gelu(r.norm(f"{p}.norm1", r.linear(f"{p}.linear", x + r.w["adapter.conv.bias"])))
    gate = r.linear(f"{p}.gate", x)
    x = r.linear(f"{p}.dense_4h_to_h", gate / (1 + np.exp(-gate)) * r.linear(f"{p}.dense_h_to_4h", x))
    return np.concatenate([r.w["adapter.boi"][None], x, r.w["adapter.eoi"][None]])


def filtered(r: Reference, name: str, x: np.ndarray) -> np.ndarray:
    """Every element [rows, columns, D] by itself over its 3 x 3 neighbours, zeros around them."""
    framed, filters = np.pad(x, ((1, 1), (1, 1), (0, 0))), r.w[f"{name}.weight"][:, 0].astype(np.float64)
    rows, columns = x.shape[:2]
    return sum(framed[i : i + rows, j : j + columns] * filters[:, i, j] for i in range(3) for j in range(3))


def ldpv2(r: Reference, image: np.ndarray) -> np.ndarray:
    x = r.layers(r.patches(image) + r.w["v.position_embd.weight"], tanh_gelu)[-2]
    x = r.linear("mm.model.mlp.2", gelu(r.linear("mm.model.mlp.0", x)))
    x = r.squares(x, r.t.grid, 2).mean((1, 2)).reshape(r.t.grid // 2, r.t.grid // 2, -1)
    found = filtered(r, "mm.model.peg.0", x) + r.w["mm.model.peg.0.bias"] + x
    return found.reshape(-1, r.t.text)


def ldp(r: Reference, image: np.ndarray) -> np.ndarray:
    x = r.layers(r.patches(image) + r.w["v.position_embd.weight"], tanh_gelu)[-2]
    x = r.linear("mm.model.mlp.3", gelu(r.linear("mm.model.mlp.1", x))).reshape(r.t.grid, r.t.grid, -1)
    for i in (1, 2):
        p = f"mm.model.mb_block.{i}.block"
        h = r.norm(f"{p}.0.1", filtered(r, f"{p}.0.0", x)[::i, ::i])
        h = h * np.clip(h / 6 + 0.5, 0, 1)
        inner = np.maximum(r.linear(f"{p}.1.fc1", h.mean((0, 1))), 0)
        h = h * np.clip(r.linear(f"{p}.1.fc2", inner) / 6 + 0.5, 0, 1)
        h = r.norm(f"{p}.2.1", h @ r.w[f"{p}.2.0.weight"].astype(np.float64).T)
        x = h + x if i == 1 else h
    return x.reshape(-1, r.t.text)


def internvl(r: Reference, image: np.ndarray) -> np.ndarray:
    x = np.concatenate([r.w["v.class_embd"][None], r.patches(image)]) + r.w["v.position_embd.weight"]
    x = r.norm("mm.model.mlp.0", r.merged(r.layers(x, gelu)[-1][1:], r.t.grid), 1e-5)
    return r.linear("mm.model.mlp.3", gelu(r.linear("mm.model.mlp.1", x)))


def idefics3(r: Reference, image: np.ndarray) -> np.ndarray:
    return r.linear("mm.model.fc", r.merged(siglip(r, image), r.t.grid))


def turned(x: np.ndarray, angles: np.ndarray, *, apart: bool) -> np.ndarray:
    """Heads [T, H, n] with pairs turned by angles [T, n / 2]: half a head apart, or neighbours."""
    n = x.shape[-1]
    pairs = (np.arange(n // 2), np.arange(n // 2) + n // 2) if apart else (np.arange(0, n, 2), np.arange(1, n, 2))
    out = np.empty_like(x)
    a, b, cos, sin = x[..., pairs[0]], x[..., pairs[1]], np.cos(angles)[:, None], np.sin(angles)[:, None]
    out[..., pairs[0]], out[..., pairs[1]] = a * cos - b * sin, a * sin + b * cos
    return out


def by_place(x: np.ndarray, across: np.ndarray, down: np.ndarray, base: float, *, apart: bool) -> np.ndarray:
    """Heads whose first halves turn by the column, the second ones by the row."""
    half = x.shape[-1] // 2
    rates = base ** -(np.arange(0, half, 2) / half)
    parts = [
        turned(x[..., i * half : (i + 1) * half], p[:, None] * rates, apart=apart) for i, p in enumerate((across, down))
    ]
    return np.concatenate(parts, -1)


def gemma4(r: Reference, image: np.ndarray) -> np.ndarray:
    t = r.t
    rows, columns = image.shape[0] // t.patch, image.shape[1] // t.patch
    down, across = np.divmod(np.arange(rows * columns), columns)
    table = r.w["v.position_embd.weight"]
    x = r.patches(image) + table[0][across] + table[1][down]
    for il in range(t.layers):
        p = f"v.blk.{il}"
        h = rms(x, t.eps) * r.w[f"{p}.ln1.weight"]
        q, k, v = (r.heads(il, part, h) for part in "qkv")
        q, k = (rms(y, t.eps) * r.w[f"{p}.attn_{n}_norm.weight"] for y, n in ((q, "q"), (k, "k")))
        q, k = (by_place(y, across, down, 100.0, apart=True) for y in (q, k))
        out = r.linear(f"{p}.attn_out", r.attention(q, k, rms(v, t.eps), 1.0))
        x = x + rms(out, t.eps) * r.w[f"{p}.attn_post_norm.weight"]
        h = rms(x, t.eps) * r.w[f"{p}.ln2.weight"]
        out = r.linear(f"{p}.ffn_down", tanh_gelu(r.linear(f"{p}.ffn_gate", h)) * r.linear(f"{p}.ffn_up", h))
        x = x + rms(out, t.eps) * r.w[f"{p}.ffn_post_norm.weight"]
    x = r.squares(x, columns, 3).mean((1, 2)) * math.sqrt(t.d)
    return r.linear("mm.input_projection", rms((x - r.w["v.std_bias"]) * r.w["v.std_scale"], t.eps))


def llama4(r: Reference, image: np.ndarray) -> np.ndarray:
    down, across = np.divmod(np.arange(r.t.grid**2), r.t.grid)
    places = [np.append(p + 1, 0) for p in (across, down)]
    x = np.concatenate([r.patches(image), r.w["v.class_embd"][None]]) + r.w["v.position_embd.weight"]
    states = r.layers(r.norm("v.pre_ln", x), gelu, lambda y: by_place(y, *places, 10000.0, apart=False))
    x = r.merged(r.norm("v.post_ln", states[-1])[:-1], r.t.grid)
    x = gelu(r.linear("mm.model.mlp.2", gelu(r.linear("mm.model.mlp.1", x))))
    return r.linear("mm.model.fc", x)


def stretched(table: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A table [side, side, D] by triangular filters, [rows * columns, D]."""
    side = len(table)
    if (rows, columns) == (side, side):
        return table.reshape(side * side, -1)

    def shares(n: int) -> np.ndarray:
        scale = side / n
        found = np.zeros((n, side))
        for i in range(n):
            for j in range(side):
                found[i, j] = max(0.0, 1 - abs((j + 0.5) - (i + 0.5) * scale) / max(scale, 1.0))
            found[i] /= found[i].sum()
        return found

    return np.einsum("ry,cx,yxd->rcd", shares(rows), shares(columns), table).reshape(rows * columns, -1)


def lfm2(r: Reference, image: np.ndarray) -> np.ndarray:
    rows, columns = image.shape[0] // r.t.patch, image.shape[1] // r.t.patch
    table = r.w["v.position_embd.weight"].reshape(r.t.grid, r.t.grid, -1)
    x = r.layers(r.patches(image) + stretched(table, rows, columns), tanh_gelu)[-1]
    x = r.norm("mm.input_norm", r.merged(r.norm("v.post_ln", x), columns), 1e-5)
    return r.linear("mm.2", gelu(r.linear("mm.1", x)))


def minicpmv(r: Reference, image: np.ndarray) -> np.ndarray:
    rows, columns = image.shape[0] // r.t.patch, image.shape[1] // r.t.patch
    down, across = np.divmod(np.arange(rows * columns), columns)
    places = [int(70 * y / rows) * 70 + int(70 * x / columns) for y, x in zip(down, across, strict=True)]
    x = r.patches(image) + r.w["v.position_embd.weight"][places]
    x = r.norm("v.post_ln", r.layers(x, tanh_gelu)[-1])
    values = r.norm("resampler.ln_kv", r.linear("resampler.kv", x))
    n = r.t.text // 4
    rates = 1 / 10000 ** (np.arange(n) / n)
    waves = [f(p[:, None] * rates) for p in (across, down) for f in (np.sin, np.cos)]
    parts = r.norm("resampler.ln_q", r.w["resampler.query"]), values + np.concatenate(waves, 1), values
    q, k, v = (
        r.linear(f"resampler.attn.{name}", x).reshape(len(x), -1, 128) for name, x in zip("qkv", parts, strict=True)
    )
    x = r.norm("resampler.ln_post", r.linear("resampler.attn.out", r.attention(q, k, v, 128**-0.5)))
    return r.linear("resampler.proj", x)


def gemma4_unified(r: Reference, image: np.ndarray) -> np.ndarray:
    p = 3 * r.t.patch
    rows, columns = image.shape[0] // p, image.shape[1] // p
    x = np.stack(
        [
            (image[y * p : (y + 1) * p, x * p : (x + 1) * p] / 255).transpose(2, 0, 1).reshape(-1)
            for y in range(rows)
            for x in range(columns)
        ]
    )
    x = r.norm("v.patch_norm.2", r.linear("v.patch_embd", r.norm("v.patch_norm.1", x, 1e-5)), 1e-5)
    down, across = np.divmod(np.arange(rows * columns), columns)
    table = r.w["v.position_embd.weight"]
    x = r.norm("v.patch_norm.3", x + table[0][across] + table[1][down], 1e-5)
    return r.linear("mm.input_projection", rms(x, r.t.eps))


def cohere2(r: Reference, image: np.ndarray) -> np.ndarray:
    x, gate = np.split(r.linear("mm.1", r.merged(siglip(r, image), r.t.grid)), 2, -1)
    return r.linear("mm.2", x * gate / (1 + np.exp(-gate)))


def phi4(r: Reference, image: np.ndarray) -> np.ndarray:
    rows, columns = image.shape[0] // r.t.patch, image.shape[1] // r.t.patch
    table = r.w["v.position_embd.weight"].reshape(r.t.grid, r.t.grid, -1)
    x = r.layers(r.patches(image) + stretched(table, rows, columns), tanh_gelu)[-1]
    return r.linear("mm.2", gelu(r.linear("mm.0", r.norm("v.post_ln", x))))


def janus(r: Reference, image: np.ndarray) -> np.ndarray:
    x = r.norm("v.post_ln", r.layers(r.patches(image) + r.w["v.position_embd.weight"], gelu)[-1])
    return r.linear("mm.1", gelu(r.linear("mm.0", x)))


def nemotron(r: Reference, image: np.ndarray) -> np.ndarray:
    registers = r.w["v.class_embd"]
    x = np.concatenate([registers, r.patches(image) + r.w["v.position_embd.weight"]])
    x = r.merged(r.layers(x, gelu)[-1][len(registers) :], r.t.grid)
    hidden = r.linear("mm.model.mlp.1", rms(x, 1e-6) * r.w["mm.model.mlp.0.weight"])
    return r.linear("mm.model.mlp.3", np.maximum(hidden, 0) ** 2)


def minicpmv46(r: Reference, image: np.ndarray) -> np.ndarray:
    t = r.t
    rows, columns = image.shape[0] // t.patch, image.shape[1] // t.patch
    down, across = np.divmod(np.arange(rows * columns), columns)
    places = [int(70 * y / rows) * 70 + int(70 * x / columns) for y, x in zip(down, across, strict=True)]
    x = r.patches(image) + r.w["v.position_embd.weight"][places]
    if t.further["projector.scale_factor"] == 4:
        before, after = t.further["wa_layer_indexes"][0] + 1, t.layers
        x = r.layers(x, tanh_gelu)[before]
        squares = r.squares(x, columns, 2).reshape(-1, 4, t.d)
        merged = np.empty((len(squares), t.d))
        for i, square in enumerate(squares):
            h = r.norm("v.vit_merger.ln1", square)
            q, k, v = (r.linear(f"v.vit_merger.attn_{part}", h).reshape(4, t.heads, -1) for part in "qkv")
            out = r.attention(q, k, v, (t.d // t.heads) ** -0.5)
            seen = square + r.linear("v.vit_merger.attn_out", out)
            hidden = r.norm("v.vit_merger.ds_ln", seen.reshape(-1))
            hidden = tanh_gelu(r.linear("v.vit_merger.ds_ffn_up", hidden))
            merged[i] = r.linear("v.vit_merger.ds_ffn_down", hidden) + seen.mean(0)
        x, columns = r.layers(merged, tanh_gelu, layers=range(before, after))[-1], columns // 2
    else:
        x = r.layers(x, tanh_gelu)[-1]
    x = r.norm("mm.input_norm", r.merged(r.norm("v.post_ln", x), columns))
    return r.linear("mm.down", gelu(r.linear("mm.up", x)))


ROWS: dict[str, Callable[[Reference, np.ndarray], np.ndarray]] = {
    "gemma3": gemma3,
    "llava": llava,
    "llava_features": plain_llava,
    "llava_next": plain_llava,
    "glm_edge": glm_edge,
    "ldp": ldp,
    "ldpv2": ldpv2,
    "yi": yi,
    "internvl": internvl,
    "idefics3": idefics3,
    "gemma4": gemma4,
    "llama4": llama4,
    "lfm2": lfm2,
    "minicpmv": minicpmv,
    "minicpmv2": minicpmv,
    "gemma4_unified": gemma4_unified,
    "cohere2": cohere2,
    "phi4": phi4,
    "janus": janus,
    "nemotron": nemotron,
    "minicpmv46": minicpmv46,
    "minicpmv46_large": minicpmv46,
}
