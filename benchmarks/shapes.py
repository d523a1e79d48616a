"""Shapes of real models for synthetic files, and a narrow one whose tokens take little but overhead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model; those of experts, latents, windows and states are 0 where they do not apply."""

    arch: str
    layers: int
    embd: int
    heads: int
    heads_kv: int
    ff: int
    vocab: int
    rope_base: float
    head_size: int = 0
    experts: int = 0
    experts_used: int = 0
    ff_exp: int = 0
    shared: int = 0
    dense_layers: int = 0
    kv_lora_rank: int = 0
    n_rope: int = 0
    n_nope: int = 0
    value_size: int = 0
    tied: bool = False
    window: int = 0  # that some layers attend to
    key_heads: int = 0  # of recurrent layers, which are all but every fourth; of Mamba-2: groups
    value_heads: int = 0  # of Mamba-2 heads of value_size elements
    state_size: int = 0
    q_lora_rank: int = 0
    moe_step: int = 1  # of so many layers the last one has experts
    experts_scale: float = 0.0  # of the large mixtures in `benchmarks.synthetic_large`


SHAPES = {
    "llama-1b": Shape("llama", 16, 2048, 32, 8, 8192, 128256, 500000.0, head_size=64),
    "llama-8b": Shape("llama", 32, 4096, 32, 8, 14336, 128256, 500000.0, head_size=128),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 16, 8, 3072, 151936, 1e6, head_size=128),
    "narrow": Shape("llama", 28, 256, 4, 2, 512, 1024, 10000.0, head_size=64),
    "narrow-window": Shape("gemma2", 28, 256, 4, 2, 512, 1024, 10000.0, head_size=64, tied=True, window=512),
    "gemma2-2b": Shape("gemma2", 26, 2304, 8, 4, 9216, 256000, 10000.0, head_size=256, tied=True, window=4096),
    "qwen3-30b-a3b": Shape(
        "qwen3moe", 48, 2048, 32, 4, 6144, 151936, 1e6, head_size=128, experts=128, experts_used=8, ff_exp=768
    ),
    "qwen35-4b": Shape(
        "qwen35",
        32,
        2560,
        16,
        4,
        9216,
        248320,
        1e7,
        head_size=256,
        n_rope=64,
        tied=True,
        key_heads=16,
        value_heads=32,
        state_size=128,
    ),
    "qwen3next-80b": Shape(
        "qwen3next",
        48,
        2048,
        16,
        2,
        5120,
        151936,
        1e7,
        head_size=256,
        n_rope=64,
        experts=512,
        experts_used=10,
        ff_exp=512,
        shared=1,
        key_heads=16,
        value_heads=32,
        state_size=128,
    ),
    "nemotron-nano2-9b": Shape(
        "nemotron_h",
        56,
        4480,
        40,
        8,
        15680,
        131072,
        10000.0,
        head_size=128,
        key_heads=8,
        value_heads=128,
        value_size=80,
        state_size=128,
    ),
    "granite4-h-tiny": Shape(
        "granitehybrid",
        40,
        1536,
        12,
        4,
        512,
        100352,
        10000.0,
        head_size=128,
        experts=64,
        experts_used=6,
        ff_exp=512,
        shared=2,
        tied=True,
        key_heads=1,
        value_heads=48,
        value_size=64,
        state_size=128,
    ),
    "deepseek-v4-flash": Shape(
        "deepseek4",
        43,
        4096,
        64,
        1,
        2048,
        129280,
        10000.0,
        head_size=512,
        n_rope=64,
        experts=256,
        experts_used=6,
        ff_exp=2048,
        shared=1,
    ),
    "deepseek-lite": Shape(
        "deepseek2",
        27,
        2048,
        16,
        16,
        10944,
        102400,
        10000.0,
        experts=64,
        experts_used=6,
        ff_exp=1408,
        shared=2,
        dense_layers=1,
        kv_lora_rank=512,
        n_rope=64,
        n_nope=128,
        value_size=128,
    ),
    "qwen3-235b-a22b": Shape(
        "qwen3moe", 94, 4096, 64, 4, 12288, 151936, 1e6, head_size=128, experts=128, experts_used=8, ff_exp=1536
    ),
    "glm-4.6": Shape(
        "glm4moe",
        92,
        5120,
        96,
        8,
        12288,
        151552,
        1e6,
        head_size=128,
        n_rope=64,
        experts=160,
        experts_used=8,
        ff_exp=1536,
        shared=1,
        dense_layers=3,
        experts_scale=2.5,
    ),
    "kimi-k2": Shape(
        "deepseek2",
        61,
        7168,
        64,
        64,
        18432,
        163840,
        50000.0,
        experts=384,
        experts_used=8,
        ff_exp=2048,
        shared=1,
        dense_layers=1,
        q_lora_rank=1536,
        kv_lora_rank=512,
        n_rope=64,
        n_nope=128,
        value_size=128,
        experts_scale=2.827,
    ),
    "llama4-maverick": Shape(
        "llama4",
        48,
        5120,
        40,
        8,
        16384,
        202048,
        500000.0,
        head_size=128,
        experts=128,
        experts_used=1,
        ff_exp=8192,
        shared=1,
        moe_step=2,
        experts_scale=1.0,
    ),
}
