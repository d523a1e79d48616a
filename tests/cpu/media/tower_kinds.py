"""The random vision towers that tests have of every kind of projector."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.cpu.media.vision_towers import Tower

TEXT_AROUND = {
    "qwen2vl": ("<|vision_start|>", "<|vision_end|>"),
    "qwen25vl": ("<|vision_start|>", "<|vision_end|>"),
    "qwen3vl": ("<|vision_start|>", "<|vision_end|>"),
    "pixtral": ("", "[IMG_END]"),
    "mistral3": ("", "[IMG_END]"),
    "kimivl": ("<|media_start|>", "<|media_end|>"),
    "kimik25": ("<|media_begin|>", "<|media_end|>"),
    "glm4v": ("<|begin_of_image|>", "<|end_of_image|>"),
    "glm_ocr": ("<|begin_of_image|>", "<|end_of_image|>"),
    "glm5v": ("<|begin_of_image|>", "<|end_of_image|>"),
    "lightonocr": ("<|im_start|>", "<|im_end|>"),
    "dots_ocr": ("<|img|>", "<|endofimg|>"),
    "dots3note_v": ("<|img|>", "<|endofimg|>"),
    "minimax_m3": ("]<]start of image[>[", "]<]end of image[>["),
    "exaone4_5": ("<vision>", "</vision>"),
    "ling3vl": ("<|vision_start|>", "<|vision_end|>"),
    "paddleocr": ("<|IMAGE_START|>", "<|IMAGE_END|>"),
    "mimovl": ("<|vision_start|>", "<|vision_end|>"),
    "youtuvl": ("<|vision_start|>", "<|vision_end|>"),
}
INTERPOLATED = ("kimivl", "paddleocr")
UNKNOWN_TO_TRANSFORMERS = {"kimivl", "dots_ocr", "ling3vl", "mimovl", "youtuvl"}

TOWERS = {
    "qwen2vl": Tower("qwen2vl_merger", ff=120),
    "qwen25vl": Tower("qwen2.5vl_merger", patch=14, layers=4, windows=2, rms=True, gated=True, activation="silu"),
    "qwen3vl": Tower("qwen3vl_merger", activation="tanh", side=7, deep=(0, 2)),
    "pixtral": Tower("pixtral", merge=1, rms=True, gated=True, biases=False, activation="silu", eps=1e-5),
    "mistral3": Tower(
        "pixtral", rms=True, gated=True, biases=False, activation="silu", eps=1e-5, further={"spatial_merge_size": 2}
    ),
    "kimivl": Tower("kimivl", activation="tanh", side=7, eps=1e-5, further={"projector.scale_factor": 2}),
    "kimik25": Tower("kimik25", activation="tanh", side=7, eps=1e-5, further={"projector.scale_factor": 2}),
    "glm4v": Tower(
        "glm4v",
        rms=True,
        gated=True,
        biases=False,
        activation="silu",
        side=7,
        eps=1e-5,
        ff=64,
        further={"spatial_merge_size": 2},
    ),
    "lightonocr": Tower(
        "lightonocr",
        rms=True,
        gated=True,
        biases=False,
        activation="silu",
        eps=1e-5,
        further={"spatial_merge_size": 2, "image_size": 100},
    ),
    "dots_ocr": Tower(
        "dots_ocr",
        rms=True,
        gated=True,
        biases=False,
        activation="silu",
        eps=1e-5,
        further={"projector.scale_factor": 2, "image_min_pixels": 1152, "image_max_pixels": 144000},
    ),
    "dots3note_v": Tower(
        "dots3note_v",
        rms=True,
        gated=True,
        biases=False,
        activation="silu",
        eps=1e-5,
        further={
            "spatial_merge_size": 2,
            "expert_used_count": 2,
            "image_min_pixels": 1152,
            "image_max_pixels": 144000,
        },
    ),
    "minimax_m3": Tower("minimax_m3", activation="erf", eps=1e-5),
    "exaone4_5": Tower(
        "exaone4_5",
        patch=14,
        layers=4,
        windows=2,
        kv=1,
        rms=True,
        gated=True,
        activation="silu",
        further={"image_min_pixels": 6272, "image_max_pixels": 784000},
    ),
    "ling3vl": Tower("ling3vl", activation="tanh", side=7),
    "paddleocr": Tower(
        "paddleocr", activation="tanh", side=7, further={"image_min_pixels": 1152, "image_max_pixels": 144000}
    ),
    "glm_ocr": Tower("glm4v", rms=True, gated=True, activation="silu", eps=1e-5, ff=189),
    "glm5v": Tower(
        "glm5v",
        rms=True,
        gated=True,
        activation="silu",
        eps=1e-5,
        ff=64,
        further={"swiglu_clamp": 0.8, "image_min_pixels": 16 * 144, "image_max_pixels": 8000 * 144},
    ),
    "youtuvl": Tower(
        "youtuvl",
        layers=4,
        activation="tanh",
        further={"window_size": 48, "wa_layer_indexes": [0, 3], "spatial_merge_size": 2},
    ),
    "mimovl": Tower(
        "mimovl",
        layers=5,
        head=16,
        heads=4,
        kv=2,
        rms=True,
        gated=True,
        activation="silu",
        further={
            "wa_pattern_mode": [-1, 0, 1, 1, 0],
            "window_size": 7,
            "image_min_pixels": 1152,
            "image_max_pixels": 144000,
            "spatial_merge_size": 2,
        },
    ),
}


STEP3VL = Tower("step3vl", patch=42, side=16, eps=1e-5, further={"image_size": 672})
"""Sees the whole of a picture as 672 pixels, windows as 504."""
STEP_MARKS = "<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>"
STEP_SIZES = (
    (672, 672),  # as it is
    (504, 1008),  # two windows as they are
    (300, 400),  # enlarged
    (100, 201),  # narrow
    (20, 130),  # thin: a square, black below
    (130, 20),
    (400, 700),  # windows that are black below
    (1100, 1690),  # two rows of three windows
    (3100, 300),  # narrow and too long
)


def step_pictures() -> list[np.ndarray]:
    """Pictures with all kinds of windows: random, and smooth where they are large."""
    random, found = np.random.default_rng(8), []
    for height, width in STEP_SIZES:
        y, x = np.mgrid[:height, :width]
        waves = [128 + 60 * np.sin(x / a + y / b) for a, b in ((40, 90), (70, -50), (-100, 35))]
        noise = random.normal(0, 20, (height, width, 3)) if height * width < 10**6 else 0
        found.append(np.clip(np.stack(waves, -1) + noise, 0, 255).astype(np.uint8))
    return found


def peer_tower(name: str) -> Tower:
    """The tower that llama.cpp's rows are of. It interpolates the positions of Kimi-VL linearly and smooths those of
    PaddleOCR-VL, unlike the published code, so that their pictures are those that need no interpolation.
    """
    tower = TOWERS[name]
    return replace(tower, side=8) if tower.kind in INTERPOLATED else tower


def peer_pictures(tower: Tower) -> list[np.ndarray]:
    """Pictures that need all ways to resize: enlarged, as they are, with bars, narrow."""
    p = tower.patch
    sizes = [(8 * p, 8 * p)]
    if tower.kind not in INTERPOLATED:
        sizes += [(2 * p, 3 * p), (9 * p + 3, 17 * p - 4), (19 * p, 3 * p + 1)]
    random = np.random.default_rng(7)
    return [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
