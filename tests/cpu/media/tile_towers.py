"""Random projector files of families whose encoders read squares or tiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.cpu.media.tile_weights import Maker, TileTower

GOLDENS = Path(__file__).parents[2] / "data" / "vision"
GOLDEN_ROWS = (0, 1, 2, -1)
PEER_COLUMNS = 5


def gemma3(m: Maker) -> None:
    m.encoder(m.tower.grid**2)
    m.norm("mm.soft_emb_norm", m.tower.d, bias=False)
    m.matrix("mm.input_projection.weight", m.tower.d, m.tower.text)


def llava(m: Maker) -> None:
    t = m.tower
    n = len(t.further.get("feature_layer", (0,)))
    m.encoder(t.grid**2 + 1, token=True, patch_bias=False, pre=True, post=False)
    m.linear("mm.0", 40, t.d * n)
    m.linear("mm.2", t.text, 40)


def plain_llava(m: Maker) -> None:
    """Without a class token."""
    t = m.tower
    m.encoder(t.grid**2, post=False)
    m.linear("mm.0", 40, t.d * len(t.further.get("feature_layer", (0,))))
    m.linear("mm.2", t.text, 40)


def glm_edge(m: Maker) -> None:
    t, p = m.tower, "adapter.linear"
    m.encoder(t.grid**2, post=False)
    m.linear("adapter.conv", 40, t.d, 2, 2)
    m.linear(f"{p}.linear", t.text, 40, bias=False)
    m.norm(f"{p}.norm1", t.text)
    for name in ("gate", "dense_h_to_4h"):
        m.linear(f"{p}.{name}", 56, t.text, bias=False)
    m.linear(f"{p}.dense_4h_to_h", t.text, 56, bias=False)
    for name in ("adapter.boi", "adapter.eoi"):
        m.vector(name, t.text)


def ldpv2(m: Maker) -> None:
    t = m.tower
    m.encoder(t.grid**2, post=False)
    m.linear("mm.model.mlp.0", t.text, t.d)
    m.linear("mm.model.mlp.2", t.text, t.text)
    m.filters("mm.model.peg.0.weight", t.text)
    m.vector("mm.model.peg.0.bias", t.text)


def ldp(m: Maker) -> None:
    t = m.tower
    m.encoder(t.grid**2, post=False)
    m.linear("mm.model.mlp.1", t.text, t.d)
    m.linear("mm.model.mlp.3", t.text, t.text)
    for p in ("mm.model.mb_block.1.block", "mm.model.mb_block.2.block"):
        m.filters(f"{p}.0.0.weight", t.text)
        m.norm(f"{p}.0.1", t.text)
        m.linear(f"{p}.1.fc1", 12, t.text)
        m.linear(f"{p}.1.fc2", t.text, 12)
        m.matrix(f"{p}.2.0.weight", t.text, t.text)
        m.norm(f"{p}.2.1", t.text)


def yi(m: Maker) -> None:
    t = m.tower
    m.encoder(t.grid**2, post=False)
    m.linear("mm.0", 40, t.d)
    m.norm("mm.1", 40)
    m.linear("mm.3", t.text, 40)
    m.norm("mm.4", t.text)


def internvl(m: Maker) -> None:
    t = m.tower
    m.encoder(t.grid**2 + 1, token=True, post=False, fused=True, scales=True)
    m.norm("mm.model.mlp.0", 4 * t.d)
    m.linear("mm.model.mlp.1", 40, 4 * t.d)
    m.linear("mm.model.mlp.3", t.text, 40)


def idefics3(m: Maker) -> None:
    m.encoder(m.tower.grid**2)
    m.matrix("mm.model.fc.weight", m.tower.text, 4 * m.tower.d)


def gemma4(m: Maker) -> None:
    t = m.tower
    m.encoder(0, patch_bias=False, post=False, biases=False, norm_biases=False, gated=True)
    m.vector("v.position_embd.weight", 2, 160, t.d)
    for il in range(t.layers):
        for name, n in (("attn_q_norm", t.d // t.heads), ("attn_k_norm", t.d // t.heads)):
            m.norm(f"v.blk.{il}.{name}", n, bias=False)
        for name in ("attn_post_norm", "ffn_post_norm"):
            m.norm(f"v.blk.{il}.{name}", t.d, bias=False)
    for name, bound in (("v.blk.0.attn_q", 0.9), ("v.blk.1.ffn_down", 0.6), ("v.blk.2.attn_out", 1.2)):
        for end, value in (
            ("input_min", -bound),
            ("input_max", bound + 0.2),
            ("output_min", -0.8),
            ("output_max", 0.8),
        ):
            m.weights[f"{name}.{end}"] = np.array([value], np.float32)
    m.vector("v.std_bias", t.d)
    m.norm("v.std_scale", t.d, bias=False)
    m.weights["v.std_scale"] = m.weights.pop("v.std_scale.weight")
    m.matrix("mm.input_projection.weight", t.text, t.d)


def llama4(m: Maker) -> None:
    t = m.tower
    m.encoder(t.grid**2 + 1, token=True, patch_bias=False, pre=True)
    m.weights["v.patch_embd.weight"] = m.weights["v.patch_embd.weight"].reshape(t.d, -1)
    m.matrix("mm.model.mlp.1.weight", 40, 4 * t.d)
    m.matrix("mm.model.mlp.2.weight", 44, 40)
    m.matrix("mm.model.fc.weight", t.text, 44)


def lfm2(m: Maker) -> None:
    t = m.tower
    m.encoder(t.grid**2)
    m.norm("mm.input_norm", 4 * t.d)
    m.linear("mm.1", 40, 4 * t.d)
    m.linear("mm.2", t.text, 40)


def minicpmv(m: Maker) -> None:
    t = m.tower
    m.encoder(70 * 70)
    m.vector("resampler.query", 9, t.text)
    m.vector("resampler.pos_embed_k", 9, t.text)
    m.matrix("resampler.kv.weight", t.text, t.d)
    for part in ("q", "k", "v", "out"):
        m.linear(f"resampler.attn.{part}", t.text, t.text)
    for part in ("q", "kv", "post"):
        m.norm(f"resampler.ln_{part}", t.text)
    m.matrix("resampler.proj.weight", t.text, t.text)


def gemma4_unified(m: Maker) -> None:
    t = m.tower
    n = 3 * (3 * t.patch) ** 2
    m.linear("v.patch_embd", t.d, n)
    m.vector("v.position_embd.weight", 2, 90, t.d)
    for i, size in enumerate((n, t.d, t.d)):
        m.norm(f"v.patch_norm.{i + 1}", size)
    m.matrix("mm.input_projection.weight", t.text, t.d)


def cohere2(m: Maker) -> None:
    t = m.tower
    m.encoder(t.grid**2)
    m.linear("mm.1", 40, 4 * t.d)
    m.linear("mm.2", t.text, 20)


def phi4(m: Maker) -> None:
    m.encoder(m.tower.grid**2)
    m.linear("mm.0", 40, m.tower.d)
    m.linear("mm.2", m.tower.text, 40)


def janus(m: Maker) -> None:
    m.encoder(m.tower.grid**2)
    m.linear("mm.0", m.tower.text, m.tower.d)
    m.linear("mm.1", m.tower.text, m.tower.text)


def nemotron(m: Maker) -> None:
    t = m.tower
    m.encoder(t.grid**2, post=False)
    m.vector("v.class_embd", 3, t.d)
    m.norm("mm.model.mlp.0", 4 * t.d, bias=False)
    m.matrix("mm.model.mlp.1.weight", 40, 4 * t.d)
    m.matrix("mm.model.mlp.3.weight", t.text, 40)


def minicpmv46(m: Maker) -> None:
    t = m.tower
    m.encoder(70 * 70)
    if t.further["projector.scale_factor"] == 4:
        m.norm("v.vit_merger.ln1", t.d)
        for part in ("q", "k", "v", "out"):
            m.linear(f"v.vit_merger.attn_{part}", t.d, t.d)
        m.norm("v.vit_merger.ds_ln", 4 * t.d)
        m.linear("v.vit_merger.ds_ffn_up", 4 * t.ff, 4 * t.d)
        m.linear("v.vit_merger.ds_ffn_down", t.d, 4 * t.ff)
    m.norm("mm.input_norm", 4 * t.d)
    m.linear("mm.up", 4 * t.d, 4 * t.d)
    m.linear("mm.down", t.text, 4 * t.d)


MERGED = {"projector.scale_factor": 2}
AROUND = "<fake_token_around_image>"
ROWS = [f"<row_{y}_col_{x}>" for y in range(1, 5) for x in range(1, 5)]
LFM_ROWS = [f"<|img_row_{y}_col_{x}|>" for y in range(1, 4) for x in range(1, 4)]
SLICES = ("<image>", "</image>", "<slice>", "</slice>")
TOWERS = {
    "gemma3": TileTower("gemma3", gemma3, ("<start_of_image>", "<end_of_image>"), side=56),
    "llava": TileTower("mlp", llava, activation="quick", token="behind"),
    "llava_features": TileTower("mlp", plain_llava, further={"feature_layer": [1, 3]}),
    "llava_next": TileTower(
        "mlp", plain_llava, further={"image_grid_pinpoints": [28, 56, 56, 28, 56, 56, 84, 28, 28, 84]}
    ),
    "yi": TileTower("mlp", yi),
    "glm_edge": TileTower("adapter", glm_edge),
    "ldp": TileTower("ldp", ldp, patch=2, side=48),
    "ldpv2": TileTower("ldpv2", ldpv2, patch=2, side=48),
    "internvl": TileTower("internvl", internvl, ("<img>", "</img>"), further=MERGED, token="behind"),
    "idefics3": TileTower(
        "idefics3", idefics3, (AROUND, "<global-img>", "\n\n", *ROWS), further={**MERGED, "preproc_image_size": 84}
    ),
    "gemma4": TileTower(
        "gemma4v",
        gemma4,
        ("<|image>", "<image|>"),
        patch=4,
        side=48,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        further={"projector.scale_factor": 3},
    ),
    "llama4": TileTower("llama4", llama4, ("<|image_start|>", "<|image_end|>"), further=MERGED),
    "lfm2": TileTower(
        "lfm2",
        lfm2,
        ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *LFM_ROWS),
        patch=32,
        side=192,
        further=MERGED,
    ),
    "minicpmv": TileTower(
        "resampler",
        minicpmv,
        SLICES,
        side=56,
        text=128,
        outer={"clip.minicpmv_version": 6, "clip.minicpmv_query_num": 9},
    ),
    "minicpmv2": TileTower(
        "resampler",
        minicpmv,
        SLICES,
        side=56,
        text=128,
        outer={"clip.minicpmv_version": 2, "clip.minicpmv_query_num": 9},
    ),
    "gemma4_unified": TileTower(
        "gemma4uv",
        gemma4_unified,
        ("<|image>", "<image|>"),
        layers=0,
        patch=2,
        side=48,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        further={"projector.scale_factor": 3},
    ),
    "cohere2": TileTower(
        "cohere2v",
        cohere2,
        ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"),
        further={**MERGED, "preproc_max_tiles": 5},
    ),
    "phi4": TileTower("phi4", phi4, further={"image_min_pixels": 28 * 28, "image_max_pixels": 98 * 98}),
    "janus": TileTower("janus_pro", janus),
    "nemotron": TileTower("nemotron_v2_vl", nemotron, further=MERGED),
    "minicpmv46": TileTower(
        "minicpmv4_6",
        minicpmv46,
        SLICES,
        side=56,
        further={"projector.scale_factor": 4, "wa_layer_indexes": [1]},
    ),
    "minicpmv46_large": TileTower("minicpmv4_6", minicpmv46, SLICES, side=56, further=MERGED),
}


def picture(height: int, width: int, seed: int = 3) -> np.ndarray:
    """Random colours uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def golden_picture(tower: TileTower) -> np.ndarray:
    """What transformers' rows are of: a picture in its final size, where that is free 12 x 18 or 20 patches."""
    if tower.kind in ("gemma4v", "gemma4uv", "lfm2", "minicpmv4_6"):
        return picture(12 * tower.patch, (20 if tower.kind == "minicpmv4_6" else 18) * tower.patch)
    return picture(tower.side, tower.side)


def peer_pictures(tower: TileTower) -> list[np.ndarray]:
    """What llama.cpp's pieces are of: sizes that need all of a family's ways to resize and to cut."""
    if tower.kind == "lfm2":
        sizes = [(90, 61), (700, 900), (1450, 1500)]
    elif tower.kind.startswith("gemma4"):
        sizes = [(40, 91), (210, 173), (501, 300)]
    else:
        s = tower.side
        sizes = [(s, s), (s // 2, s - 3), (2 * s + 3, s + 5), (s - 7, 3 * s + 2)]
    return [picture(*size, seed=i) for i, size in enumerate(sizes)]
