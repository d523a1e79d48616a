"""Encoders of sound as the papers and transformers define them, in float64, written without ikpy's code."""

from __future__ import annotations

import math

import numpy as np

from tests.cpu.media.sound_filters import RATE, filters
from tests.cpu.media.sound_towers import SoundTower
from tests.cpu.media.vision_towers import Weights

WINDOW, HOP, FRAMES = 400, 160, 3000
_ERF = np.vectorize(math.erf)


def powers(samples: np.ndarray, places: range, n_mel: int) -> np.ndarray:
    """Powers [len(places), n_mel] of windows around samples 160 * place, by the definition of the transform."""
    t, f = np.arange(WINDOW), np.arange(WINDOW // 2 + 1)
    transform = np.exp(-2j * np.pi * np.outer(t, f) / WINDOW)
    hann = np.sin(np.pi * t / WINDOW) ** 2
    at = np.abs(np.array(places)[:, None] * HOP + t - WINDOW // 2)  # what lies before the beginning is reflected
    inside = at < len(samples)
    windows = np.where(inside, samples.astype(np.float64)[np.where(inside, at, 0)], 0)
    return np.abs(windows * hann @ transform) ** 2 @ filters(n_mel, WINDOW).T


def spectrogram(samples: np.ndarray, n_mel: int, n_frames: int) -> np.ndarray:
    """[n_frames, n_mel]."""
    levels = np.log10(np.maximum(powers(samples, range(n_frames), n_mel), 1e-10))
    return np.maximum(levels, levels.max() - 8) / 4 + 1


def silu(x: np.ndarray) -> np.ndarray:
    """x times its sigmoid."""
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    """x P(X <= x) of the normal distribution."""
    return x * 0.5 * (1 + _ERF(x / math.sqrt(2)))


def norm(x: np.ndarray, w: Weights, name: str, eps: float) -> np.ndarray:
    """LayerNorm of rows."""
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """RMSNorm of rows."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def linear(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    """x W^T + b."""
    return x @ w[f"{name}.weight"].astype(np.float64).T + w.get(f"{name}.bias", 0)


def convolved(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, step: int) -> np.ndarray:
    """Every `step`-th result of a convolution over 3 rows of x [n, in] with weight [out, in, 3], zeros around."""
    around = np.concatenate([np.zeros_like(x[:1]), x, np.zeros_like(x[:1])])
    found = sum(around[k : k + len(x)] @ weight[:, :, k].astype(np.float64).T for k in range(3))
    return (found + bias.reshape(-1))[::step]


def rotated(x: np.ndarray) -> np.ndarray:
    """Neighbouring elements of the first half of heads [H, n, d] turned by the number of the row."""
    found, n_rot = x.copy(), x.shape[2] // 2
    for i in range(0, n_rot, 2):
        angle = np.arange(x.shape[1]) / 10000 ** (i / n_rot)
        found[:, :, i] = x[:, :, i] * np.cos(angle) - x[:, :, i + 1] * np.sin(angle)
        found[:, :, i + 1] = x[:, :, i + 1] * np.cos(angle) + x[:, :, i] * np.sin(angle)
    return found


def attention(x: np.ndarray, w: Weights, p: str, heads: int, *, rotates: bool = False) -> np.ndarray:
    """All rows see each other."""
    q, k, v = (linear(x, w, f"{p}.attn_{part}").reshape(len(x), heads, -1).transpose(1, 0, 2) for part in "qkv")
    q, k = (rotated(q), rotated(k)) if rotates else (q, k)
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    out = scores / scores.sum(-1, keepdims=True) @ v
    return linear(out.transpose(1, 0, 2).reshape(len(x), -1), w, f"{p}.attn_out")


def whisper(t: SoundTower, w: Weights, mel: np.ndarray) -> np.ndarray:
    """States [n / 2, d] behind the layers of frames [n, mel]."""
    x = gelu(convolved(mel, w["a.conv1d.1.weight"], w["a.conv1d.1.bias"], 1))
    x = gelu(convolved(x, w["a.conv1d.2.weight"], w["a.conv1d.2.bias"], 2))
    return layers(t, w, x if t.kind == "glma" else x + w["a.position_embd.weight"][: len(x)])


def layers(t: SoundTower, w: Weights, x: np.ndarray) -> np.ndarray:
    """States [n, d] behind the layers."""
    for il in range(t.layers):
        p = f"a.blk.{il}"
        x = x + attention(norm(x, w, f"{p}.ln1", t.eps), w, p, t.heads, rotates=t.kind == "glma")
        x = x + linear(gelu(linear(norm(x, w, f"{p}.ln2", t.eps), w, f"{p}.ffn_up")), w, f"{p}.ffn_down")
    return x


def projected(t: SoundTower, w: Weights, x: np.ndarray) -> np.ndarray:
    """Rows of the text model."""
    if t.kind in ("qwen2a", "qwen2.5o", "musicflamingo"):
        x = norm(x.reshape(-1, 2, t.d).mean(1), w, "a.post_ln", t.eps)
        if t.kind != "musicflamingo":
            return linear(x, w, "mm.a.fc")
        return linear(gelu(linear(x, w, "mm.a.mlp.1")), w, "mm.a.mlp.2")
    if t.kind == "glma":
        x = norm(x, w, "mm.a.norm_pre", 1e-5).reshape(-1, t.d * t.stack)
        rows = linear(gelu(linear(x, w, "mm.a.mlp.1")), w, "mm.a.mlp.2")
        return np.concatenate([w["v.boi"][None], rows, w["v.eoi"][None]])
    x = norm(x, w, "a.post_ln", t.eps)
    if t.kind == "meralion":
        x = norm(x, w, "mm.a.norm_pre", t.eps).reshape(-1, t.d * t.stack)
        x = silu(linear(x, w, "mm.a.mlp.0"))
        return linear(silu(linear(x, w, "mm.a.mlp.1")) * linear(x, w, "mm.a.mlp.2"), w, "mm.a.mlp.3")
    x = x[: len(x) // t.stack * t.stack].reshape(-1, t.d * t.stack)
    if t.kind == "voxtral":
        return linear(gelu(linear(x, w, "mm.a.mlp.1")), w, "mm.a.mlp.2")
    half = linear(rms(x, w["mm.a.norm_pre.weight"]), w, "mm.a.mlp.1")
    first, gate = np.split(half, 2, axis=1)
    return linear(rms(first * gate / (1 + np.exp(-gate)), w["mm.a.norm_mid.weight"]), w, "mm.a.mlp.2")


def maps(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Every second row and column of a convolution of pictures x [in, rows, columns] with weight [out, in, 3, 3]."""
    around = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    found = np.zeros((len(weight), *x.shape[1:]))
    for i in range(3):
        for j in range(3):
            part = around[:, i : i + x.shape[1], j : j + x.shape[2]]
            found += np.einsum("oc,cyx->oyx", weight[:, :, i, j].astype(np.float64), part)
    return (found + bias.reshape(-1, 1, 1))[:, ::2, ::2]


def qwen3(t: SoundTower, w: Weights, samples: np.ndarray) -> list[np.ndarray]:
    """Rows of every eight seconds of Qwen3-Omni."""
    n = max(len(samples) // HOP, 1)
    ends = np.concatenate([samples, samples[-2 : -WINDOW // 2 - 2 : -1]])  # mirrored
    mel = spectrogram(ends, t.mel, n).T
    found = []
    for start in range(0, n, 800):
        states = []
        for at in range(start, min(start + 800, n), 100):
            second = np.zeros((1, t.mel, 100))
            part = mel[:, at : min(at + 100, n)]
            second[0, :, : part.shape[1]] = part
            for i in (1, 2, 3):
                second = gelu(maps(second, w[f"a.conv2d.{i}.weight"], w[f"a.conv2d.{i}.bias"]))
            rows = linear(second.transpose(2, 0, 1).reshape(13, -1), w, "a.conv_out") + w["a.position_embd.weight"]
            states.append(rows[: -(-part.shape[1] // 8)])
        x = norm(layers(t, w, np.concatenate(states)), w, "a.post_ln", t.eps)
        found.append(linear(gelu(linear(x, w, "mm.a.mlp.1")), w, "mm.a.mlp.2"))
    return found


def omni(t: SoundTower, w: Weights, samples: np.ndarray) -> list[np.ndarray]:
    """Rows of every 30 seconds of Qwen2.5-Omni, of which two seconds are seen by themselves."""
    n = max(len(samples) // HOP, 3)
    mel = spectrogram(samples, t.mel, n)
    found = []
    for start in range(0, n, FRAMES):
        piece = mel[start : start + FRAMES]
        x = np.concatenate([whisper(t, w, piece[at : at + 200]) for at in range(0, len(piece), 200)])
        found.append(projected(t, w, x[: len(x) // 2 * 2]))
    return [rows for rows in found if len(rows)]


def htk_levels(samples: np.ndarray, n_mel: int) -> np.ndarray:
    """Logarithms of the strength of pitches in whole windows of 20 ms, of which the first begins in silence."""
    corners = 700 * (10 ** (np.linspace(0, 2595 * math.log10(1 + 8000 / 700), n_mel + 2) / 2595) - 1)
    bank = np.zeros((n_mel, 257))
    for i, (low, middle, high) in enumerate(zip(corners, corners[1:], corners[2:], strict=False)):
        for j in range(257):
            f = j * RATE / 512
            if low < f < high:
                bank[i, j] = (f - low) / (middle - low) if f <= middle else (high - f) / (high - middle)
    n = max(-(-(len(samples) - 160) // 160), 1)
    line = np.concatenate([np.zeros(160), samples.astype(np.float64), np.zeros(320)])
    t, f = np.arange(320), np.arange(257)
    transform = np.exp(-2j * np.pi * np.outer(t, f) / 512)
    windows = np.stack([line[i * 160 : i * 160 + 320] for i in range(n)]) * np.sin(np.pi * t / 320) ** 2
    return np.log(np.abs(windows @ transform) @ bank.T + 1e-3)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x)."""
    return 1 / (1 + np.exp(-x))


def gemma(t: SoundTower, w: Weights, samples: np.ndarray) -> np.ndarray:
    """Rows of Gemma 4, a state at a time."""
    x = htk_levels(samples, t.mel)[None]
    for i in (0, 1):
        x = maps(x, w[f"a.conv1d.{i}.weight"], np.zeros(len(w[f"a.conv1d.{i}.weight"])))
        x = np.maximum(norm(x.transpose(1, 2, 0), w, f"a.conv1d.{i}.norm", 1e-6), 0).transpose(2, 0, 1)
    x = linear(x.transpose(1, 2, 0).reshape(x.shape[1], -1), w, "a.input_projection")
    for il in range(t.layers):
        x = conformer(t, w, f"a.blk.{il}", x)
    x = linear(x, w, "a.pre_encode.out")
    return linear(rms(x, np.float64(1)), w, "mm.a.input_projection")


def bounded(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    """A matrix within its bounds."""
    low, high = (w.get(f"{name}.input_{end}", sign * np.inf) for end, sign in (("min", -1), ("max", 1)))
    x = linear(np.clip(x, low, high), w, name)
    return np.clip(x, *(w.get(f"{name}.output_{end}", sign * np.inf) for end, sign in (("min", -1), ("max", 1))))


def conformer(t: SoundTower, w: Weights, p: str, x: np.ndarray) -> np.ndarray:
    """A layer of Gemma 4 on x [n, d]."""

    def scaled(x: np.ndarray, name: str) -> np.ndarray:
        return rms(x, w[f"{p}.{name}.weight"])

    def half(x: np.ndarray, end: str) -> np.ndarray:
        up = linear(scaled(x, f"ffn_norm{end}"), w, f"{p}.ffn_up{end}")
        return x + scaled(linear(up * sigmoid(up), w, f"{p}.ffn_down{end}"), f"ffn_post_norm{end}") / 2

    x = half(x, "")
    head, n = t.d // t.heads, len(x)
    q, k, v = (bounded(scaled(x, "attn_pre_norm"), w, f"{p}.attn_{part}").reshape(n, t.heads, head) for part in "qkv")
    q = q * head**-0.5 / math.log(2) * w[f"{p}.per_dim_scale.weight"]
    k = k * math.log(1 + math.e) / math.log(2)
    rates = 10000 ** -(np.arange(t.d // 2) / (t.d // 2 - 1))
    found = np.zeros_like(v)
    for i in range(n):
        keys = np.arange(max(0, i - 11), i + 1)
        angles = (i - keys)[:, None] * rates
        far = linear(np.concatenate([np.sin(angles), np.cos(angles)], 1), w, f"{p}.attn_k_rel")
        scores = np.einsum("hd,jhd->hj", q[i], k[keys] + far.reshape(len(keys), t.heads, head))
        scores = np.exp(50 * np.tanh(scores / 50))
        found[i] = np.einsum("hj,jhd->hd", scores / scores.sum(1, keepdims=True), v[keys])
    x = x + scaled(linear(found.reshape(n, -1), w, f"{p}.attn_out"), "attn_post_norm")
    y, gate = np.split(linear(scaled(x, "conv_norm"), w, f"{p}.conv_pw1"), 2, axis=1)
    y = np.concatenate([np.zeros((4, t.d)), y * sigmoid(gate)])
    y = scaled(sum(y[j : j + n] * w[f"{p}.conv_dw.weight"][:, j] for j in range(5)), "norm_conv")
    x = x + linear(y * sigmoid(y), w, f"{p}.conv_pw2")
    return scaled(half(x, "_1"), "ln2")


def pieces(t: SoundTower, w: Weights, samples: np.ndarray) -> list[np.ndarray]:
    """Rows of every 30 seconds, the last of which has silence behind the sound."""
    if t.kind == "qwen3a":
        return qwen3(t, w, samples)
    if t.kind == "gemma4ua":
        x = np.pad(samples.astype(np.float64), (0, -len(samples) % t.d)).reshape(-1, t.d)
        return [linear(rms(x, np.float64(1)), w, "mm.a.input_projection")]
    if t.kind == "gemma4a":
        parts = [samples[start : start + 30 * RATE] for start in range(0, len(samples), 30 * RATE)]
        return [gemma(t, w, part) for part in parts]
    if t.kind == "qwen2.5o":
        return omni(t, w, samples)
    n = FRAMES * ((len(samples) // HOP + 1) // FRAMES + 1)
    mel = spectrogram(samples, t.mel, n)
    return [projected(t, w, whisper(t, w, mel[start : start + FRAMES])) for start in range(0, n, FRAMES)]
