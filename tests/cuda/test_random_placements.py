"""Placements drawn by chance: logits are those of the CPU. A failure's name is the seed that makes it again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.graph.placement import DeviceParams, PlacementParams
from tests.cpu.models.test_arch_bailingmoe3 import bailingmoe3
from tests.cpu.models.test_arch_granite_hybrid import granite_hybrid_moe
from tests.cpu.models.test_arch_kimi_k3 import kimi_k3
from tests.cpu.models.test_arch_qwen3next import qwen3next
from tests.cuda.models import emulated, logits_of, zoo
from tests.cuda.test_placement_matrix import assert_same

FILES = ("llama-ropefreqs", "qwen3", "llama-moe", "qwen3moe", "deepseek2-lite", "deepseek2-v3-mla")
MADE = (kimi_k3, bailingmoe3, qwen3next, granite_hybrid_moe)
NAMES = (
    "exps",
    "ffn",
    "attn_",
    r"blk\.0\.",
    r"blk\.[12]\.ffn",
    "ffn_up",
    "ffn_down",
    "attn_k",
    "norm",
    "output",
    "kv_b",
)
OPERATIONS = ("MUL_MAT", "MUL_MAT_ID", "MOE_FUSED_UP_GATE", "FUSED_UP_GATE")
N_TOKENS, N_PROMPT = 24, 20


def drawn(rng: random.Random, n_devices: int) -> tuple[PlacementParams, DeviceParams, dict[str, Any]]:
    """Where tensors lie, what goes to devices for large batches, and how a context runs."""
    places = ["CPU", *(f"CUDA{i}" for i in range(n_devices))]
    mode = rng.choice(["layer", "graph", "none"])
    shares = tuple(rng.choice([0.0, 1.0, 3.0]) for _ in range(n_devices))
    placement = PlacementParams(
        n_gpu_layers=rng.choice([-1, -1, 0, 1, 2, 99]),
        split_mode=mode,
        main_gpu=rng.randrange(n_devices) if mode == "none" else 0,
        tensor_split=shares if any(shares) and rng.random() < 0.5 else (),
        rules=tuple((rng.choice(NAMES), rng.choice(places)) for _ in range(rng.randrange(4))),
        n_cpu_moe=rng.choice([0, 0, 1, 99]),
        kv_offload=rng.random() < 0.8,
    )
    devices = DeviceParams(
        policy={name: rng.random() < 0.5 for name in rng.sample(OPERATIONS, rng.randrange(3))},
        offload_batch=rng.choice([32, 4, 1, 0]),
        only_active_experts=rng.random() < 0.6,
        graphs=rng.random() < 0.7,
    )
    context = {"flash_attn": rng.random() < 0.7, "mla": rng.randrange(4), "n_ubatch": rng.choice([64, 16, 7])}
    return placement, devices, {**context, "type_k": "f32", "type_v": "f32"}


@pytest.mark.parametrize("seed", [*range(40), 155, 257])  # the last two: a slice of one row, taken for the whole
def test_logits_are_those_of_the_cpu(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    n_devices, source = rng.choice([1, 2, 2, 3]), rng.choice([*FILES, *MADE])
    path = zoo(source) if isinstance(source, str) else source()[0].write(tmp_path / "model.gguf")
    placement, devices, context = drawn(rng, n_devices)
    tokens = np.random.default_rng(seed).integers(5, 30, N_TOKENS).astype(np.int32)
    truth = logits_of(path, tokens, N_PROMPT, **context)
    with emulated(n_devices, order=seed) as kernels:
        ours = logits_of(path, tokens, N_PROMPT, placement=placement, devices=devices, **context)
    assert_same(ours, truth, 3e-4)
    if not kernels.launched:
        pytest.skip("all is on the CPU")
