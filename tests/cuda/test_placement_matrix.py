"""Logits of every placement equal those of the CPU: splits, copies, waits, caches and uploads are right.

The kernels of the emulated devices are the CPU's own, so nothing but the way of the data can differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.graph.ir import Node
from ikpy.graph.placement import DeviceParams, PlacementParams
from tests.cpu.models.test_arch_kimi_k3 import kimi_k3
from tests.cuda.models import emulated, logits_of, zoo
from tests.shared import SHARED

MODELS = ("llama-ropefreqs", "qwen3", "llama-moe", "qwen3moe", "deepseek2-lite", "deepseek2-v3-mla")
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all": {},
    "one layer": {"n_gpu_layers": 1},
    "two layers and no output": {"n_gpu_layers": 2},
    "experts on the CPU": {"rules": (("exps", "CPU"),)},
    "attention on the CPU": {"rules": (("attn", "CPU"),)},
    "up and gate apart": {"rules": (("ffn_up", "CPU"), ("ffn_gate", "CUDA1"))},
    "some experts per device": {
        "rules": ((r"blk\.(0|1)\.ffn_.*", "CUDA0"), (r"blk\.2\.ffn_.*", "CUDA1"), ("exps", "CPU"))
    },
    "first device little": {"tensor_split": (1.0, 5.0)},
    "second device alone": {"split_mode": "none", "main_gpu": 1},
    "cpu-moe": {"n_cpu_moe": 999},
    "one layer's experts": {"n_cpu_moe": 1},
    "cache in host memory": {"kv_offload": False},
    "all tensors of the layers in host memory": {"rules": (("blk", "CPU"),), "kv_offload": False},
}
N_TOKENS, N_PROMPT = 20, 16


def tokens_for(seed: int = 0, n: int = N_TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 150, n).astype(np.int32)


def worst(ours: np.ndarray, truth: np.ndarray) -> str:
    """Where the largest difference is, for a failure's message."""
    row, column = np.unravel_index(np.abs(ours - truth).argmax(), ours.shape)
    return f"token {row}, logit {column}: {ours[row, column]} instead of {truth[row, column]}"


def assert_same(ours: np.ndarray, truth: np.ndarray, tolerance: float = 2e-5) -> None:
    """The sum of experts and shared expert may be rounded in another order, nothing else."""
    assert np.isfinite(ours).all()
    assert np.abs(ours - truth).max() <= tolerance * np.abs(truth).max(), worst(ours, truth)


@pytest.fixture(scope="module")
def truths() -> dict[str, np.ndarray]:
    return {name: logits_of(zoo(name), tokens_for(), N_PROMPT) for name in MODELS}


@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_cpu(name: str, where: str, truths: dict[str, np.ndarray]) -> None:
    with emulated(2) as kernels:
        ours = logits_of(zoo(name), tokens_for(), N_PROMPT, placement=PlacementParams(**PLACEMENTS[where]))
    assert kernels.launched
    assert_same(ours, truths[name])


ZOO = sorted((SHARED / "golden" / "zoo").glob("*.gguf"))


@pytest.mark.skipif(not ZOO, reason="golden/zoo is not present beside the checkout")
@pytest.mark.parametrize("path", ZOO, ids=lambda path: path.stem)
def test_every_architecture(path: Path) -> None:
    tokens, truth = tokens_for(9), logits_of(path, tokens_for(9), N_PROMPT)
    for rules in ((), (("exps", "CPU"),), (("ffn", "CPU"),)):
        with emulated(2):
            assert_same(logits_of(path, tokens, N_PROMPT, placement=PlacementParams(rules=rules)), truth)


@pytest.mark.skipif(not ZOO, reason="golden/zoo is not present beside the checkout")
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "llama4"])
def test_caches_of_windows(name: str) -> None:
    """Layers with a window have fewer cells, whose positions are inputs of their own."""
    path, tokens = SHARED / "golden" / "zoo" / f"{name}.gguf", tokens_for(11, 70)
    context: dict[str, Any] = {"n_ctx": 512, "n_ubatch": 16}
    truth = logits_of(path, tokens, 66, **context)
    for rules in ((), (("ffn", "CPU"),)):
        with emulated(2):
            assert_same(logits_of(path, tokens, 66, placement=PlacementParams(rules=rules), **context), truth)


CONTEXTS: list[dict[str, Any]] = [
    *({"mla": mla, "flash_attn": flash} for mla in (0, 1, 2, 3) for flash in (True, False)),
    {"type_k": "q8_0", "mla": 3},
    {"type_k": "q8_0", "type_v": "q8_0", "mla": 0},
    {"attn_max_batch": 128, "n_ubatch": 7},
]


@pytest.mark.parametrize("context", CONTEXTS, ids=str)
@pytest.mark.parametrize("rules", [(), (("exps", "CPU"),)], ids=["all", "exps=CPU"])
def test_settings_of_the_context(context: dict[str, Any], rules: tuple[tuple[str, str], ...]) -> None:
    name = "deepseek2-lite"
    truth = logits_of(zoo(name), tokens_for(), N_PROMPT, **context)
    with emulated(2):
        ours = logits_of(zoo(name), tokens_for(), N_PROMPT, placement=PlacementParams(rules=rules), **context)
    assert_same(ours, truth)


@pytest.mark.parametrize("mla", [0, 1, 2, 3])
def test_long_prompts_of_latent_attention(mla: int) -> None:
    """From 128 tokens on, modes 2 and 3 expand the cached latents."""
    context: dict[str, Any] = {"mla": mla, "n_ubatch": 256}
    tokens, name = tokens_for(10, 140), "deepseek2-v3-mla"
    truth = logits_of(zoo(name), tokens, 136, **context)
    for rules in ((), (("exps", "CPU"), ("attn_kv_b", "CPU"))):
        with emulated(2):
            assert_same(logits_of(zoo(name), tokens, 136, placement=PlacementParams(rules=rules), **context), truth)


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2-v3-mla", "llama-ropefreqs"])
@pytest.mark.parametrize("active", [True, False])
def test_large_batches_with_weights_in_host_memory_run_on_the_device(name: str, active: bool) -> None:
    """With a threshold of one token everything goes there; the weights are uploaded for every use."""
    tokens, truth = tokens_for(1), logits_of(zoo(name), tokens_for(1), N_PROMPT)
    rules = (("ffn_.*", "CPU"),)
    devices = DeviceParams(offload_batch=1, only_active_experts=active)
    with emulated(1) as kernels:
        ours = logits_of(zoo(name), tokens, N_PROMPT, placement=PlacementParams(rules=rules), devices=devices)
    on_device = {n.src[0].buffer.name for n in kernels.launched if n.kind.startswith("mul_mat") and n.src[0]}
    assert any(".ffn_down" in n for n in on_device)
    assert_same(ours, truth)


def test_large_batches_go_to_a_device_that_holds_nothing() -> None:
    """A device whose layers lie in host memory as a whole, their cache too, is not left out."""
    tokens, truth = tokens_for(1), logits_of(zoo("llama-ropefreqs"), tokens_for(1), N_PROMPT)
    placement = PlacementParams(rules=(("blk", "CPU"),), kv_offload=False)
    with emulated(2) as kernels:
        devices = DeviceParams(offload_batch=1)
        ours = logits_of(zoo("llama-ropefreqs"), tokens, N_PROMPT, placement=placement, devices=devices)
    on_device = {n.src[0].buffer.name for n in kernels.launched if n.kind.startswith("mul_mat") and n.src[0]}
    assert {name.split(".")[1] for name in on_device if name.startswith("blk.")} == {"0", "1", "2"}
    assert_same(ours, truth)


@pytest.mark.parametrize("n_layers", [1, -1])
def test_rows_of_one_token_that_devices_make_parts_of(n_layers: int, tmp_path: Path) -> None:
    """Scores of earlier streams have a row for each, those of the present one for each token: at a threshold of four
    rows the first go to the device after single tokens and the second stay.
    """
    model, _ = kimi_k3()
    path, tokens = model.write(tmp_path / "model.gguf"), tokens_for(2, 24) % 25
    settings: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}
    truth = logits_of(path, tokens, 20, **settings)
    placement = PlacementParams(n_gpu_layers=n_layers, rules=(("res_score", "CPU"),))
    with emulated(1):
        ours = logits_of(path, tokens, 20, placement=placement, devices=DeviceParams(offload_batch=4), **settings)
    assert_same(ours, truth, 1e-4)


def test_policy_keeps_large_batches_on_the_cpu() -> None:
    devices = DeviceParams(offload_batch=1, policy={"MUL_MAT_ID": False, "MOE_FUSED_UP_GATE": False})
    with emulated(1) as kernels:
        logits_of(zoo("qwen3moe"), tokens_for(), N_PROMPT, placement=PlacementParams(n_cpu_moe=99), devices=devices)
    assert not any("mul_mat_id" in n.kind for n in kernels.launched)


def lacks(kind: str) -> Any:
    """A device without a kernel for this kind of node."""
    return lambda node: f"no kernel for {kind}" if node.kind == kind else None


KINDS = (
    "mul_mat",
    "mul_mat_id",
    "attention",
    "kv_store",
    "rope",
    "rope_table",
    "kq_mask",
    "act_prepare",
    "rms_norm",
    "moe_route",
    "moe_group",
    "moe_combine",
)


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_without_a_kernel_run_on_the_cpu_and_are_noted(kind: str, truths: dict[str, np.ndarray]) -> None:
    name, lines = "deepseek2-lite", []
    with emulated(2, unsupported=lacks(kind)) as kernels:
        ours = logits_of(zoo(name), tokens_for(), N_PROMPT, placement=PlacementParams(), log=lines)
    assert kind not in {node.kind for node in kernels.launched}
    assert any(f"no kernel for {kind}" in line for line in lines)
    assert_same(ours, truths[name])


def test_a_type_without_a_kernel_keeps_its_tensors_in_host_memory(truths: dict[str, np.ndarray]) -> None:
    def unsupported(node: Node) -> str | None:
        down = node.kind.startswith("mul_mat") and node.src[0] is not None and ".ffn_down" in node.src[0].buffer.name
        return "no kernel for this type" if down else None

    with emulated(1, unsupported=unsupported):
        ours = logits_of(zoo("qwen3moe"), tokens_for(), N_PROMPT, placement=PlacementParams())
    assert_same(ours, truths["qwen3moe"])


def test_without_graphs_the_result_is_the_same(truths: dict[str, np.ndarray]) -> None:
    with emulated(2):
        ours = logits_of(
            zoo("qwen3"), tokens_for(), N_PROMPT, placement=PlacementParams(), devices=DeviceParams(graphs=False)
        )
    assert_same(ours, truths["qwen3"])
