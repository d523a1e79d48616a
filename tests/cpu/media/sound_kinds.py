"""The random encoders of sound that tests have of every kind of projector, and their sounds."""

from __future__ import annotations

import numpy as np

from tests.cpu.media.conformer_kinds import CONFORMER_TEXT, CONFORMER_TOWERS, LIKE_TRANSFORMERS, PEERS
from tests.cpu.media.sound_towers import SoundTower
from tests.shared import DATA
from tests.sound_models import tone

GOLDENS = DATA / "sound"
GOLDEN_ROWS = (0, 7, 20, -1)
PEER_ROWS = (0, 3, -1)
PEER_COLUMNS = 32
TEXT_AROUND = {
    "ultravox": ("", ""),
    "qwen2a": ("<|audio_bos|>", "<|audio_eos|>"),
    "voxtral": ("[BEGIN_AUDIO]", ""),
    "musicflamingo": ("<sound>", ""),
    "glma": ("", ""),
    "meralion": ("", ""),
    "meralion_single": ("", ""),
    "qwen3a": ("<|audio_start|>", "<|audio_end|>"),
    "qwen2.5o": ("<|audio_bos|>", "<|audio_eos|>"),
    "gemma4a": ("<|audio>", "<audio|>"),
    "gemma4ua": ("<|audio>", "<audio|>"),
    **CONFORMER_TEXT,
}
TOWERS = {
    "ultravox": SoundTower("ultravox", d=80, heads=2, stack=8),
    "qwen2a": SoundTower("qwen2a", mel=128),
    "voxtral": SoundTower("voxtral", d=80, mel=128, stack=4),
    "musicflamingo": SoundTower("musicflamingo"),
    "glma": SoundTower("glma", d=80, stack=4),
    "meralion": SoundTower("meralion", d=80, stack=15),
    "meralion_single": SoundTower("meralion", mel=128),
    "qwen3a": SoundTower("qwen3a", mel=128),
    "qwen2.5o": SoundTower("qwen2.5o", mel=128),
    "gemma4a": SoundTower("gemma4a", mel=32, eps=1e-6),
    "gemma4ua": SoundTower("gemma4ua", d=640, layers=0, eps=1e-6),
    **CONFORMER_TOWERS,
}
IN_TRANSFORMERS = ("qwen2a", "voxtral", "musicflamingo", "qwen3a", "qwen2.5o", "gemma4a", "gemma4ua")
IN_TRANSFORMERS_TOO = LIKE_TRANSFORMERS
"""Recorded by scripts/make_conformer_golden.py."""
LIKE_LLAMA_CPP = ("ultravox", "qwen2a", "musicflamingo", "meralion_single", "gemma4a", "gemma4ua", "qwen3a", *PEERS)
"""Of Voxtral, Qwen2.5-Omni and GLM-ASR it makes other rows than the models do, of MERaLiON with more than
one state in a row."""


# Names of files -> those of transformers, of Gemma 4 and of its layers.
GEMMA = {
    "a.conv1d.0.norm": "subsample_conv_projection.layer0.norm",
    "a.conv1d.1.norm": "subsample_conv_projection.layer1.norm",
    "a.conv1d.0": "subsample_conv_projection.layer0.conv",
    "a.conv1d.1": "subsample_conv_projection.layer1.conv",
    "a.input_projection": "subsample_conv_projection.input_proj_linear",
    "a.pre_encode.out": "output_proj",
}
GEMMA_LAYER = {
    "ffn_norm": "feed_forward1.pre_layer_norm",
    "ffn_up": "feed_forward1.ffw_layer_1.linear",
    "ffn_down": "feed_forward1.ffw_layer_2.linear",
    "ffn_post_norm": "feed_forward1.post_layer_norm",
    "ffn_norm_1": "feed_forward2.pre_layer_norm",
    "ffn_up_1": "feed_forward2.ffw_layer_1.linear",
    "ffn_down_1": "feed_forward2.ffw_layer_2.linear",
    "ffn_post_norm_1": "feed_forward2.post_layer_norm",
    "attn_pre_norm": "norm_pre_attn",
    "attn_q": "self_attn.q_proj.linear",
    "attn_k": "self_attn.k_proj.linear",
    "attn_v": "self_attn.v_proj.linear",
    "attn_out": "self_attn.post.linear",
    "attn_k_rel": "self_attn.relative_k_proj",
    "attn_post_norm": "norm_post_attn",
    "conv_norm": "lconv1d.pre_layer_norm",
    "conv_pw1": "lconv1d.linear_start.linear",
    "conv_dw": "lconv1d.depthwise_conv1d",
    "norm_conv": "lconv1d.conv_norm",
    "conv_pw2": "lconv1d.linear_end.linear",
    "ln2": "norm_out",
}


def golden_sound(name: str) -> np.ndarray:
    """One that fills a piece, or one of several that ends within."""
    seconds = {"qwen3a": 10.33, "qwen2.5o": 5.37, "gemma4a": 3.21, "gemma4ua": 2.345, "parakeet_full": 3.2}
    return tone(seconds.get(name, 4.21 if name in CONFORMER_TOWERS else 29.9))


def peer_sounds(name: str) -> list[np.ndarray]:
    """Sounds of whole pieces for Qwen3-Omni, behind which llama.cpp has another piece."""
    return [tone(8, 1), tone(16, 2)] if name == "qwen3a" else sounds()


def sounds() -> list[np.ndarray]:
    """A short one, and one that goes on in a second piece."""
    return [tone(2.5, 1), tone(30.5, 2)]
