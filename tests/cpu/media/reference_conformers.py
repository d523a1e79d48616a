"""Conformers with LayerNorm as their papers and transformers define them, in float64, written without ikpy's code."""

from __future__ import annotations

import math

import numpy as np

from tests.cpu.media import reference_sound
from tests.cpu.media.projector_files import Weights
from tests.cpu.media.reference_sound import gelu, linear, norm, silu
from tests.cpu.media.sound_filters import RATE, filters
from tests.cpu.media.sound_towers import SoundTower

N_FFT, WINDOW, HOP = 512, 400, 160


def htk_bank(n_mel: int, n_fft: int, low: float = 0, high: float = 8000) -> np.ndarray:
    """Triangles of height 1 [n_mel, n_fft / 2 + 1], made point by point."""
    ends = [2595 * math.log10(1 + f / 700) for f in (low, high)]
    corners = 700 * (10 ** (np.linspace(*ends, n_mel + 2) / 2595) - 1)
    bank = np.zeros((n_mel, n_fft // 2 + 1))
    for i, (first, middle, last) in enumerate(zip(corners, corners[1:], corners[2:], strict=False)):
        for j in range(bank.shape[1]):
            f = j * RATE / n_fft
            if first < f < last:
                bank[i, j] = (f - first) / (middle - first) if f <= middle else (last - f) / (last - middle)
    return bank


def spectra(line: np.ndarray, n: int, window: np.ndarray) -> np.ndarray:
    """Powers [n, N_FFT / 2 + 1] of what begins at every HOP-th sample of a line, by the definition of the transform."""
    wide = np.zeros(N_FFT)
    start = (N_FFT - len(window)) // 2
    wide[start : start + len(window)] = window
    line = np.concatenate([line, np.zeros(N_FFT)])
    transform = np.exp(-2j * np.pi * np.outer(np.arange(N_FFT), np.arange(N_FFT // 2 + 1)) / N_FFT)
    parts = np.stack([line[i * HOP : i * HOP + N_FFT] for i in range(n)])
    return np.abs(parts * wide @ transform) ** 2


def half(x: np.ndarray, w: Weights, p: str, end: str) -> np.ndarray:
    """x and half of what a network makes of it."""
    up = silu(linear(norm(x, w, f"{p}.ffn_norm{end}", 1e-5), w, f"{p}.ffn_up{end}"))
    return x + linear(up, w, f"{p}.ffn_down{end}") / 2


def channels(x: np.ndarray, w: Weights, p: str, silent: int = 0) -> np.ndarray:
    """x and the convolution of every channel, to which the last silent states are zeros."""
    y, gate = np.split(linear(norm(x, w, f"{p}.norm_conv", 1e-5), w, f"{p}.conv_pw1"), 2, axis=1)
    y = y / (1 + np.exp(-gate)) * (np.arange(len(x)) < len(x) - silent)[:, None]
    taps = w[f"{p}.conv_dw.weight"].astype(np.float64)
    around = np.pad(y, ((taps.shape[1] // 2, taps.shape[1]), (0, 0)))
    y = sum(around[i : i + len(x)] * taps[:, i] for i in range(taps.shape[1]))
    y = y + w.get(f"{p}.conv_dw.bias", 0)
    if f"{p}.conv_norm_var" in w:
        y = (y - w[f"{p}.conv_norm_mean"]) / np.sqrt(w[f"{p}.conv_norm_var"].astype(np.float64) + 1e-5)
    y = silu(y * w[f"{p}.conv_norm.weight"] + w[f"{p}.conv_norm.bias"])
    return x + linear(y, w, f"{p}.conv_pw2")


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last dimension."""
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def heads_of(x: np.ndarray, w: Weights, name: str, n: int) -> np.ndarray:
    """[n, len(x), d] of a matrix."""
    return linear(x, w, name).reshape(len(x), n, -1).transpose(1, 0, 2)


def granite_levels(t: SoundTower, samples: np.ndarray) -> np.ndarray:
    """Pairs of frames [n, mel]."""
    n = max((len(samples) // HOP + 1) // 2, 1)
    at = np.abs(np.arange(-N_FFT // 2, len(samples) + N_FFT // 2))  # mirrored at both ends
    last = len(samples) - 1
    line = samples.astype(np.float64)[np.where(at > last, 2 * last - at, at)]
    hann = np.sin(np.pi * np.arange(WINDOW) / WINDOW) ** 2
    powers = spectra(line, max(2 * n, len(samples) // HOP + 1), hann) @ htk_bank(t.mel // 2, N_FFT).T
    levels = np.log10(np.maximum(powers, 1e-10))
    return (np.maximum(levels, levels.max() - 8) / 4 + 1)[: 2 * n].reshape(n, t.mel)


def shaw(t: SoundTower, w: Weights, p: str, x: np.ndarray) -> np.ndarray:
    """States see their block; a vector for every distance is added to keys."""
    q, k, v = (heads_of(x, w, f"{p}.attn_{part}", t.heads) for part in "qkv")
    size, reach = t.further["chunk_size"], t.further["max_pos_emb"]
    table, found = w[f"{p}.attn_rel_pos_emb"].astype(np.float64), np.zeros_like(q)
    for i in range(len(x)):
        seen = np.arange(i // size * size, min((i // size + 1) * size, len(x)))
        keys = k[:, seen] + table[reach + i - seen]
        weights = softmax(np.einsum("hd,hjd->hj", q[:, i], keys) / math.sqrt(q.shape[-1]))
        found[:, i] = np.einsum("hj,hjd->hd", weights, v[:, seen])
    return linear(found.transpose(1, 0, 2).reshape(len(x), -1), w, f"{p}.attn_out")


def granite(t: SoundTower, w: Weights, samples: np.ndarray) -> list[np.ndarray]:
    """Rows of Granite Speech."""
    x = linear(granite_levels(t, samples), w, "a.input_projection")
    states = [x]
    for il in range(t.layers):
        p = f"a.blk.{il}"
        x = half(x, w, p, "")
        x = x + shaw(t, w, p, norm(x, w, f"{p}.ln1", 1e-5))
        x = norm(half(channels(x, w, p), w, p, "_1"), w, f"{p}.ln2", 1e-5)
        states.append(x)
        if il + 1 == t.layers // 2:
            x = x + linear(softmax(linear(x, w, "a.enc_ctc_out")), w, "a.enc_ctc_out_mid")
    x = np.concatenate([*(states[i] for i in t.further.get("feature_layer", ())), x], axis=1)
    size = t.further["projector.window_size"]
    x = np.pad(x, ((0, -len(x) % size), (0, 0)))
    rows = [q_former(t, w, x[i : i + size]) for i in range(0, len(x), size)]
    return [linear(np.concatenate(rows), w, "a.proj_linear")]


def q_former(t: SoundTower, w: Weights, window: np.ndarray) -> np.ndarray:
    """Rows of the states of a window."""
    rows, count = norm(w["a.proj_query"][0].astype(np.float64), w, "a.proj_norm", 1e-12), 0
    while f"a.proj_blk.{count}.ffn_up.weight" in w:
        p = f"a.proj_blk.{count}"
        for name, seen in (("self_attn", None), ("cross_attn", window)):
            heads = t.further["projector.head_count"]
            q = heads_of(rows, w, f"{p}.{name}_q", heads)
            k, v = (heads_of(rows if seen is None else seen, w, f"{p}.{name}_{part}", heads) for part in "kv")
            found = softmax(q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])) @ v
            found = linear(found.transpose(1, 0, 2).reshape(len(rows), -1), w, f"{p}.{name}_out")
            rows = norm(rows + found, w, f"{p}.{name}_norm", 1e-12)
        inner = linear(gelu(linear(rows, w, f"{p}.ffn_up")), w, f"{p}.ffn_down")
        rows, count = norm(rows + inner, w, f"{p}.ffn_norm", 1e-12), count + 1
    return rows


def fast_levels(t: SoundTower, samples: np.ndarray) -> np.ndarray:
    """Frames [n, mel] of FastConformers, the last of zeros."""
    n, line = len(samples) // HOP, samples.astype(np.float64)
    line = line - 0.97 * np.concatenate([[0], line[:-1]])
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / (WINDOW - 1))
    levels = np.zeros((n + 1, t.mel))
    if n:
        powers = spectra(np.concatenate([np.zeros(N_FFT // 2), line]), n, hann)
        known = np.log(powers @ filters(t.mel, N_FFT).T + 2**-24)
        known = known - known.mean(0)
        levels[:n] = known / (np.sqrt((known**2).sum(0) / max(n - 1, 1)) + 1e-5)
    return levels


def halved(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Every second row and column of filters [out, in, 3, 3] over pictures [in, rows, columns]; in 1: of each."""
    count, around, weight = len(weight), np.pad(x, ((0, 0), (1, 1), (1, 1))), weight.astype(np.float64)
    found = np.zeros((count, *x.shape[1:]))
    for i in range(3):
        for j in range(3):
            part = around[:, i : i + x.shape[1], j : j + x.shape[2]]
            found += weight[:, 0, i, j, None, None] * part  # one input, or as many as outputs
    return (found + bias)[:, ::2, ::2]


def fast_front(t: SoundTower, w: Weights, x: np.ndarray) -> np.ndarray:
    """States [n / 8, d] of frames."""
    x = np.maximum(halved(x[None], w["a.conv1d.0.weight"], w["a.conv1d.0.bias"]), 0)
    for i in (2, 5):
        x = halved(x, w[f"a.conv1d.{i}.weight"], w[f"a.conv1d.{i}.bias"])
        mixing = w[f"a.conv1d.{i + 1}.weight"][:, :, 0, 0].astype(np.float64)
        x = np.maximum(np.einsum("oc,cyx->oyx", mixing, x) + w[f"a.conv1d.{i + 1}.bias"], 0)
    return linear(x.transpose(1, 0, 2).reshape(x.shape[1], -1), w, "a.pre_encode.out")


def far(t: SoundTower, w: Weights, p: str, x: np.ndarray, silent: int) -> np.ndarray:
    """All states see each other by content and by sines and cosines of their distance, but for the last ones that are
    silent: these see all the same, and are seen by no others."""
    q, k, v = (heads_of(x, w, f"{p}.attn_{part}", t.heads) for part in "qkv")
    u, place = (w[f"{p}.pos_bias_{part}"].astype(np.float64)[:, None] for part in "uv")
    waves = np.zeros((2 * len(x) - 1, t.d))
    angles = np.arange(1 - len(x), len(x))[:, None] / 10000 ** (np.arange(0, t.d, 2) / t.d)
    waves[:, ::2], waves[:, 1::2] = np.sin(angles), np.cos(angles)
    waves = heads_of(waves, w, f"{p}.linear_pos", t.heads)
    far_scores = (q + place) @ waves.transpose(0, 2, 1)  # by i - j + n - 1
    at = np.arange(len(x))[:, None] - np.arange(len(x)) + len(x) - 1
    by_distance = np.take_along_axis(far_scores, np.broadcast_to(at, (t.heads, *at.shape)), axis=2)
    scores = ((q + u) @ k.transpose(0, 2, 1) + by_distance) / math.sqrt(q.shape[-1])
    if silent:
        scores[:, :-silent, -silent:], scores[:, -silent:] = -np.inf, 0
    return linear((softmax(scores) @ v).transpose(1, 0, 2).reshape(len(x), -1), w, f"{p}.attn_out")


def fast_layers(t: SoundTower, w: Weights, x: np.ndarray, silent: int = 0) -> np.ndarray:
    """States behind the layers of a FastConformer."""
    for il in range(t.layers):
        p = f"a.blk.{il}"
        x = half(x, w, p, "")
        x = x + far(t, w, p, norm(x, w, f"{p}.ln1", 1e-5), silent)
        x = norm(half(channels(x, w, p, silent), w, p, "_1"), w, f"{p}.ln2", 1e-5)
    return x


def lfm2(t: SoundTower, w: Weights, samples: np.ndarray) -> list[np.ndarray]:
    """Rows of LFM2-Audio."""
    x = fast_layers(t, w, fast_front(t, w, fast_levels(t, samples)))
    x = linear(norm(x, w, "mm.a.mlp.0", 1e-5), w, "mm.a.mlp.1")
    return [linear(gelu(x), w, "mm.a.mlp.3")]


def parakeet(t: SoundTower, w: Weights, samples: np.ndarray) -> list[np.ndarray]:
    """Rows of Nemotron 3 Nano Omni."""
    n = max(len(samples) // HOP, 1)
    x, silent = fast_front(t, w, fast_levels(t, samples)[:n]), int(n % 8 == 0)
    x = fast_layers(t, w, np.concatenate([x, w["a.pre_encode.out.bias"][None].repeat(silent, 0)]), silent)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w["mm.a.norm_pre.weight"]
    return [linear(np.maximum(linear(x, w, "mm.a.mlp.1"), 0) ** 2, w, "mm.a.mlp.2")]


def gemma3n_levels(t: SoundTower, samples: np.ndarray) -> np.ndarray:
    """Frames [n, mel] of whole windows, silence behind the sound up to a multiple of 128 samples."""
    count = max(-(-len(samples) // 128) * 128, 640)
    line = np.zeros(count)
    line[: len(samples)] = samples
    n = (count - 513) // HOP + 1
    parts = np.stack([line[i * HOP : i * HOP + 512] for i in range(n)])
    sharp = parts - 0.97 * np.concatenate([parts[:, :1], parts[:, :-1]], axis=1)
    sharp *= np.sin(np.pi * np.arange(512) / 512) ** 2
    strength = np.abs(sharp @ np.exp(-2j * np.pi * np.outer(np.arange(512), np.arange(513)) / 1024))
    return np.log(np.maximum(strength @ htk_bank(t.mel, 1024, 125, 7600).T, 1e-5))


def gemma3n_front(t: SoundTower, w: Weights, x: np.ndarray) -> np.ndarray:
    """What states are made of."""
    x = x[None]
    for i in (0, 1):
        taps = w[f"a.conv1d.{i}.weight"].astype(np.float64)
        around = np.pad(x, ((0, 0), (0, 2), (1, 1)))
        found = np.zeros((len(taps), *x.shape[1:]))
        for dy in range(3):
            for dx in range(3):
                part = around[:, dy : dy + x.shape[1], dx : dx + x.shape[2]]
                found += np.einsum("oc,cyx->oyx", taps[:, :, dy, dx], part)
        found = found[:, ::2, ::2]
        x = np.zeros_like(found)
        squares = 0.0
        for row in range(found.shape[1]):
            around_mean = found[:, row] - found[:, : row + 1].mean()
            squares += (around_mean**2).sum()
            scale = np.sqrt(squares / found[:, : row + 1].size + 1e-3)
            x[:, row] = np.maximum(around_mean / scale * w[f"a.conv1d.{i}.norm.weight"][:, None], 0)
    return linear(x.transpose(1, 2, 0).reshape(x.shape[1], -1), w, "a.pre_encode.out")


def near(t: SoundTower, w: Weights, p: str, x: np.ndarray) -> np.ndarray:
    """A state sees itself and twelve before it; sines, then cosines of distances are added to keys."""
    q, k, v = (heads_of(x, w, f"{p}.attn_{part}", t.heads) for part in "qkv")
    q = q * np.log1p(np.exp(w[f"{p}.per_dim_scale"].astype(np.float64))) / math.log(2) / math.sqrt(q.shape[-1])
    angles = np.arange(13)[:, None] / 10000 ** (np.arange(t.d // 2) / (t.d // 2 - 1))
    waves = heads_of(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), w, f"{p}.linear_pos", t.heads)
    found = np.zeros_like(q)
    for i in range(len(x)):
        seen = np.arange(max(0, i - 12), i + 1)
        scores = np.einsum("hd,hjd->hj", q[:, i], k[:, seen] + waves[:, i - seen])
        found[:, i] = np.einsum("hj,hjd->hd", softmax(50 * np.tanh(scores / 50)), v[:, seen])
    return linear(found.transpose(1, 0, 2).reshape(len(x), -1), w, f"{p}.attn_out")


def gemma3n_layer(t: SoundTower, w: Weights, p: str, x: np.ndarray) -> np.ndarray:
    """States behind a layer."""

    def scaled(x: np.ndarray, name: str) -> np.ndarray:
        return reference_sound.rms(x, w[f"{p}.{name}.weight"])

    def network(x: np.ndarray, end: str) -> np.ndarray:
        inner = linear(silu(linear(scaled(x, f"ffn_norm{end}"), w, f"{p}.ffn_up{end}")), w, f"{p}.ffn_down{end}")
        return x + scaled(inner, f"ffn_post_norm{end}") / 2

    x = network(x, "")
    x = x + scaled(near(t, w, p, scaled(x, "ln1")), "ln2")
    y, gate = np.split(linear(scaled(x, "conv_norm"), w, f"{p}.conv_pw1"), 2, axis=1)
    taps = w[f"{p}.conv_dw.weight"][:, 0].astype(np.float64)
    around = np.pad(y / (1 + np.exp(-gate)), ((taps.shape[1] - 1, 0), (0, 0)))
    y = sum(around[i : i + len(x)] * taps[:, i] for i in range(taps.shape[1]))
    x = x + linear(silu(scaled(y, "norm_conv")), w, f"{p}.conv_pw2")
    return scaled(network(x, "_1"), "layer_pre_norm")


def gemma3n(t: SoundTower, w: Weights, samples: np.ndarray) -> list[np.ndarray]:
    """Rows of every 30 seconds of Gemma 3n."""
    found = []
    for start in range(0, len(samples), 30 * RATE):
        part = samples[start : start + 30 * RATE]
        x = gemma3n_front(t, w, gemma3n_levels(t, part))[: -(-len(part) // 640)]
        for il in range(t.layers):
            x = gemma3n_layer(t, w, f"a.blk.{il}", x)
        x = reference_sound.rms(x[::4], w["mm.a.soft_emb_norm.weight"])
        last = reference_sound.rms(w["mm.a.embedding.weight"][-1:].astype(float), w["mm.a.hard_emb_norm.weight"])
        rows = linear(np.concatenate([x, last.repeat(188 - len(x), 0)]), w, "mm.a.input_projection")
        found.append(reference_sound.rms(rows, np.float64(1)))
    return found


def dots3note(t: SoundTower, w: Weights, samples: np.ndarray) -> list[np.ndarray]:
    """Rows of every minute of dots3 note."""
    found = []
    for start in range(0, len(samples), 60 * RATE):
        part = samples[start : start + 60 * RATE]
        n = max(len(part) // HOP, 1)
        levels = reference_sound.spectrogram(np.pad(part, (0, RATE)), t.mel, n + 3)[:n]
        found.append(dots3note_rows(t, w, levels))
    return found


def dots3note_rows(t: SoundTower, w: Weights, levels: np.ndarray) -> np.ndarray:
    """Rows of the frames of a piece."""
    x = levels.T[None]
    for i in (1, 2, 3):
        x = gelu(reference_sound.maps(x, w[f"a.conv2d.{i}.weight"], w[f"a.conv2d.{i}.bias"]))
    x = linear(x.transpose(2, 0, 1).reshape(x.shape[2], -1), w, "a.conv_out")
    angles = np.arange(len(x))[:, None] / 10000 ** (np.arange(0, t.d // t.heads // 2, 2) / (t.d // t.heads // 2))
    for il in range(t.layers):
        p = f"a.blk.{il}"
        states = reference_sound.rms(x, w[f"{p}.ln1.weight"])
        q, k, v = (heads_of(states, w, f"{p}.attn_{part}", t.heads) for part in "qkv")
        for heads in (q, k):
            a, z = np.split(heads[..., : 2 * angles.shape[1]].copy(), 2, axis=-1)
            heads[..., : angles.shape[1]] = a * np.cos(angles) - z * np.sin(angles)
            heads[..., angles.shape[1] : 2 * angles.shape[1]] = z * np.cos(angles) + a * np.sin(angles)
        seen = softmax(q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])) @ v
        x = x + linear(seen.transpose(1, 0, 2).reshape(len(x), -1), w, f"{p}.attn_out")
        states = reference_sound.rms(x, w[f"{p}.ln2.weight"])
        inner = silu(linear(states, w, f"{p}.ffn_gate")) * linear(states, w, f"{p}.ffn_up")
        x = x + linear(inner, w, f"{p}.ffn_down")
    x = norm(reference_sound.rms(x, w["a.post_ln.weight"]), w, "mm.a.norm_pre", 1e-5)
    return linear(gelu(linear(x, w, "mm.a.mlp.1")), w, "mm.a.mlp.3")


CONFORMERS = {
    "granite_speech": granite,
    "lfm2a": lfm2,
    "parakeet": parakeet,
    "gemma3na": gemma3n,
    "dots3note_a": dots3note,
}


def pieces(t: SoundTower, w: Weights, samples: np.ndarray) -> list[np.ndarray]:
    """Rows of all pieces of a sound, of every kind of encoder."""
    return CONFORMERS.get(t.kind, reference_sound.pieces)(t, w, samples)
