"""Random weights of conformers, as their projector files hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.cpu.media.sound_filters import filters

if TYPE_CHECKING:
    from tests.cpu.media.sound_towers import Maker

N_FFT, WINDOW = 512, 400
CHARACTERS = 11
"""That the middle layer of Granite Speech tells apart."""
WINDOW_LAYERS = 2
CHANNELS = 6
"""Of convolutions of FastConformers."""
OUTPUT_CODES = 2000
"""Rows of a table that FastConformers do not read, of which llama.cpp wants half as many as frames."""


def vector(m: Maker, name: str, *shape: int, spread: float = 0.3) -> None:
    """Numbers without the end of a name that says weight or bias."""
    m.weights[name] = m.random.normal(0, spread, shape).astype(np.float32)


def conformer_layers(m: Maker, n_inner: int, taps: int, *, bias: bool = True) -> None:
    """Layers with LayerNorm but for what they know of distances. bias: of matrices that may have none."""
    t = m.tower
    for il in range(t.layers):
        p = f"a.blk.{il}"
        for end in ("", "_1"):
            m.norm(f"{p}.ffn_norm{end}", t.d)
            m.linear(f"{p}.ffn_up{end}", t.ff, t.d, bias=bias)
            m.linear(f"{p}.ffn_down{end}", t.d, t.ff, bias=bias)
        for name in ("ln1", "norm_conv", "ln2"):
            m.norm(f"{p}.{name}", t.d)
        m.linear(f"{p}.conv_pw1", 2 * n_inner, t.d, bias=bias)
        vector(m, f"{p}.conv_dw.weight", n_inner, taps)
        m.norm(f"{p}.conv_norm", n_inner)
        m.linear(f"{p}.conv_pw2", t.d, n_inner, bias=bias)


def granite(m: Maker) -> None:
    """Granite Speech."""
    t = m.tower
    m.linear("a.input_projection", t.d, t.mel)
    conformer_layers(m, 2 * t.d, t.further["conv_kernel_size"])
    for il in range(t.layers):
        for part in "qkv":
            m.linear(f"a.blk.{il}.attn_{part}", t.d, t.d, bias=False)
        m.linear(f"a.blk.{il}.attn_out", t.d, t.d)
        vector(m, f"a.blk.{il}.attn_rel_pos_emb", 2 * t.further["max_pos_emb"] + 1, t.d // t.heads)
    m.linear("a.enc_ctc_out", CHARACTERS, t.d)
    m.linear("a.enc_ctc_out_mid", t.d, CHARACTERS)
    n_state = t.d * (1 + len(t.further.get("feature_layer", ())))
    n_queries = t.further["projector.window_size"] // t.further["projector.downsample_rate"]
    vector(m, "a.proj_query", 1, n_queries, t.d, spread=1)
    m.norm("a.proj_norm", t.d)
    for il in range(WINDOW_LAYERS):
        p = f"a.proj_blk.{il}"
        for attention, n in (("self", t.d), ("cross", n_state)):
            for part, n_in in (("q", t.d), ("k", n), ("v", n), ("out", t.d)):
                m.linear(f"{p}.{attention}_attn_{part}", t.d, n_in)
            m.norm(f"{p}.{attention}_attn_norm", t.d)
        m.linear(f"{p}.ffn_up", t.ff, t.d)
        m.linear(f"{p}.ffn_down", t.d, t.ff)
        m.norm(f"{p}.ffn_norm", t.d)
    m.linear("a.proj_linear", t.text, t.d)


def lfm2(m: Maker) -> None:
    """LFM2-Audio."""
    t = m.tower
    fast_front(m)
    conformer_layers(m, t.d, 9)
    for il in range(t.layers):
        for part in ("q", "k", "v", "out"):
            m.linear(f"a.blk.{il}.attn_{part}", t.d, t.d)
        distances(m, f"a.blk.{il}")
        m.weights[f"a.blk.{il}.conv_dw.bias"] = m.random.normal(0, 0.3, t.d).astype(np.float32)
    m.norm("mm.a.mlp.0", t.d)
    m.linear("mm.a.mlp.1", t.ff, t.d)
    m.linear("mm.a.mlp.3", t.text, t.ff)
    vector(m, "a.position_embd.weight", OUTPUT_CODES, t.text)  # of the sounds that the model speaks


def parakeet(m: Maker) -> None:
    """The encoder of sound of Nemotron 3 Nano Omni."""
    t = m.tower
    m.weights["a.mel_filters"] = filters(t.mel, N_FFT).astype(np.float32)
    m.weights["a.window"] = (np.sin(np.pi * np.arange(WINDOW) / (WINDOW - 1)) ** 2).astype(np.float32)
    fast_front(m)
    conformer_layers(m, t.d, t.further["conv_kernel_size"], bias=False)
    for il in range(t.layers):
        for part in ("q", "k", "v", "out"):
            m.linear(f"a.blk.{il}.attn_{part}", t.d, t.d, bias=False)
        distances(m, f"a.blk.{il}")
        vector(m, f"a.blk.{il}.conv_norm_mean", t.d)
        m.weights[f"a.blk.{il}.conv_norm_var"] = m.random.uniform(0.5, 2, t.d).astype(np.float32)
    m.norm("mm.a.norm_pre", t.d, bias=False)
    m.linear("mm.a.mlp.1", t.ff, t.d, bias=False)
    m.linear("mm.a.mlp.2", t.text, t.ff, bias=False)
    for i in (0, 1, 3):
        m.weights[f"mm.model.mlp.{i}.weight"] = np.zeros(1, np.float32)  # of pictures, which llama.cpp wants to see


def gemma3n(m: Maker) -> None:
    """Gemma 3n."""
    t, n_in, taps = m.tower, 1, 5
    for i, n_out in enumerate((CHANNELS, 4)):
        m.linear(f"a.conv1d.{i}", n_out, n_in, 3, 3, bias=False)
        m.norm(f"a.conv1d.{i}.norm", n_out, bias=False)
        n_in = n_out
    m.linear("a.pre_encode.out", t.d, n_in * ((t.mel + 3) // 4), bias=False)
    for il in range(t.layers):
        p = f"a.blk.{il}"
        for end in ("", "_1"):
            m.norm(f"{p}.ffn_norm{end}", t.d, bias=False)
            m.linear(f"{p}.ffn_up{end}", 4 * t.d, t.d, bias=False)
            m.linear(f"{p}.ffn_down{end}", t.d, 4 * t.d, bias=False)
            m.norm(f"{p}.ffn_post_norm{end}", t.d, bias=False)
        for name in ("ln1", "ln2", "conv_norm", "norm_conv", "layer_pre_norm"):
            m.norm(f"{p}.{name}", t.d, bias=False)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out", "linear_pos", "conv_pw2"):
            m.linear(f"{p}.{name}", t.d, t.d, bias=False)
        m.linear(f"{p}.conv_pw1", 2 * t.d, t.d, bias=False)
        vector(m, f"{p}.conv_dw.weight", t.d, 1, taps, spread=0.5)
        vector(m, f"{p}.per_dim_scale", t.d // t.heads, spread=1)
    vector(m, "mm.a.embedding.weight", 3, t.d, spread=1)
    for name in ("hard", "soft"):
        m.norm(f"mm.a.{name}_emb_norm", t.d, bias=False)
    m.linear("mm.a.input_projection", t.text, t.d, bias=False)


def dots3note(m: Maker) -> None:
    """dots3 note, which is no conformer."""
    t, n_in, pitches = m.tower, 1, m.tower.mel
    for i in (1, 2, 3):
        m.linear(f"a.conv2d.{i}", CHANNELS, n_in, 3, 3)
        n_in, pitches = CHANNELS, (pitches + 1) // 2
    m.linear("a.conv_out", t.d, CHANNELS * pitches, bias=False)
    for il in range(t.layers):
        p = f"a.blk.{il}"
        for name in ("ln1", "ln2"):
            m.norm(f"{p}.{name}", t.d, bias=False)
        for part in ("q", "k", "v", "out"):
            m.linear(f"{p}.attn_{part}", t.d, t.d, bias=part != "k")
        for part in ("gate", "up"):
            m.linear(f"{p}.ffn_{part}", t.ff, t.d)
        m.linear(f"{p}.ffn_down", t.d, t.ff)
    m.norm("a.post_ln", t.d, bias=False)
    m.norm("mm.a.norm_pre", t.d)
    m.linear("mm.a.mlp.1", t.text, t.d)
    m.linear("mm.a.mlp.3", t.text, t.text)


def fast_front(m: Maker) -> None:
    """Convolutions of FastConformers."""
    t = m.tower
    for i, (n_in, size) in {0: (1, 3), 2: (1, 3), 3: (CHANNELS, 1), 5: (1, 3), 6: (CHANNELS, 1)}.items():
        m.linear(f"a.conv1d.{i}", CHANNELS, n_in, size, size)
        m.weights[f"a.conv1d.{i}.bias"] = m.weights[f"a.conv1d.{i}.bias"][:, None, None]
    pitches = t.mel
    for _ in range(3):
        pitches = (pitches + 1) // 2
    m.linear("a.pre_encode.out", t.d, CHANNELS * pitches)


def distances(m: Maker, p: str) -> None:
    """What a layer of a FastConformer knows of distances."""
    t = m.tower
    for part in "uv":
        vector(m, f"{p}.pos_bias_{part}", t.heads, t.d // t.heads)
    m.linear(f"{p}.linear_pos", t.d, t.d, bias=False)


CONFORMERS: dict[str, Callable[[Maker], None]] = {
    "granite_speech": granite,
    "lfm2a": lfm2,
    "parakeet": parakeet,
    "gemma3na": gemma3n,
    "dots3note_a": dots3note,
}
