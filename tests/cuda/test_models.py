"""Models through the CUDA kernels, on GPUs or emulated: logits against the CPU's, for every placement and setting."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy import default_model_path
from ikpy.backends.cuda import compare, launch
from ikpy.cli import main
from ikpy.graph.ir import Node
from ikpy.graph.placement import DeviceParams, PlacementParams
from tests.cpu.models.definition_checks import TOKENS as CHECKED_TOKENS
from tests.cpu.models.test_arch_afmoe import afmoe
from tests.cpu.models.test_arch_cohere2moe import cohere2moe
from tests.cpu.models.test_arch_dense import apertus, arcee, nemotron
from tests.cpu.models.test_arch_granite_swa import granite_swa_moe
from tests.cpu.models.test_arch_hy_v3 import hy_v3
from tests.cpu.models.test_arch_laguna import laguna
from tests.cpu.models.test_arch_mellum import mellum
from tests.cpu.models.test_arch_mimo2 import mimo2
from tests.cpu.models.test_arch_step35 import step35
from tests.cuda.models import logits_of, zoo
from tests.cuda.test_placement_matrix import ZOO, tokens_for, worst
from tests.shared import ROOT

TEXT = ROOT / "ikpy" / "assets" / "demo-text.txt"
EXPERTS = {"rules": (("exps", "CPU"),)}
APART = {"rules": ((r"blk\.0\.ffn_.*", "CUDA0"), ("exps", "CPU")), "tensor_split": (1.0, 1.0)}
# Other formats of activations and other orders of sums than the CPU's; quantized caches round differently as well.
TOLERANCE, QUANTIZED_TOLERANCE = 3e-3, 3e-2
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama-ropefreqs", {}, {}),
    ("qwen3", {"n_gpu_layers": 2}, {"type_k": "q8_0", "type_v": "q8_0"}),
    ("qwen3", {}, {"type_k": "q5_1", "type_v": "q4_1"}),
    ("qwen2-yarn", {"kv_offload": False}, {}),
    ("llama-moe", EXPERTS, {}),
    ("qwen3moe", {"n_cpu_moe": 1}, {"flash_attn": False}),
    ("qwen3moe", APART, {}),
    ("deepseek2-lite", {}, {"mla": 0}),
    ("deepseek2-lite", EXPERTS, {"mla": 1}),
    ("deepseek2-lite", APART, {"mla": 3, "type_k": "q8_0"}),
    ("deepseek2-v3-mla", EXPERTS, {"mla": 2}),
    ("qwen3", {"split_mode": "graph", "tensor_split": (2.0, 1.0)}, {}),
    ("qwen3moe", {"split_mode": "graph", "tensor_split": (1.0, 1.0)}, {"type_k": "q8_0", "type_v": "q8_0"}),
    ("deepseek2-v3-mla", {"split_mode": "graph", "tensor_split": (1.0, 1.0)}, {"mla": 3}),
    ("deepseek2-lite", {"split_mode": "graph", "tensor_split": (1.0, 1.0)}, {"mla": 1, "type_k": "q8_0"}),
    ("deepseek2-lite", {"split_mode": "graph", "tensor_split": (1.0, 1.0)}, {"mla": 0}),
]


@pytest.mark.parametrize(
    ("name", "where", "context"), CASES, ids=lambda v: str(v) if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_logits_are_close_to_those_of_the_cpu(
    name: str, where: dict[str, Any], context: dict[str, Any], cuda_devices: int
) -> None:
    if cuda_devices < 2 and "tensor_split" in where:
        pytest.skip("needs two GPUs")
    tokens = tokens_for(2, 7)
    truth = logits_of(zoo(name), tokens, 5, **context)
    ours = logits_of(zoo(name), tokens, 5, placement=PlacementParams(**where), **context)
    quantized = context.get("type_k", "f16").startswith("q")
    assert np.isfinite(ours).all()
    bound = QUANTIZED_TOLERANCE if quantized else TOLERANCE
    assert np.abs(ours - truth).max() <= bound * np.abs(truth).max(), worst(ours, truth)


@pytest.mark.skipif(not ZOO, reason="golden/zoo is not present beside the checkout")
@pytest.mark.parametrize("path", ZOO, ids=lambda path: path.stem)
def test_every_architecture(path: Path, cuda_devices: int) -> None:
    """Layers on all devices, routed experts and some feed-forward networks on the CPU; a prompt and two tokens."""
    tokens = tokens_for(4, 6)
    truth = logits_of(path, tokens, 4)
    rules = (("exps", "CPU"), (r"blk\.1\.ffn_down\.", "CPU"))
    split = (1.0,) * cuda_devices
    ours = logits_of(path, tokens, 4, placement=PlacementParams(rules=rules, tensor_split=split))
    assert np.isfinite(ours).all()
    assert np.abs(ours - truth).max() <= TOLERANCE * np.abs(truth).max(), worst(ours, truth)


@pytest.mark.parametrize(
    "make",
    [afmoe, apertus, arcee, cohere2moe, granite_swa_moe, hy_v3, laguna, mellum, mimo2, nemotron, step35],
    ids=lambda f: f.__name__,
)
def test_gates_and_layers_of_two_kinds(make: Callable, tmp_path: Path, cuda_devices: int) -> None:
    """Gated heads, heads of two sizes, bounded SwiGLU; experts and a gate on the CPU."""
    path, tokens = make()[0].write(tmp_path / "model.gguf"), CHECKED_TOKENS[:16]
    truth = logits_of(path, tokens, 12)
    rules = (("exps", "CPU"), (r"blk\.1\.attn_gate", "CPU"))
    ours = logits_of(path, tokens, 12, placement=PlacementParams(rules=rules))
    assert np.isfinite(ours).all()
    assert np.abs(ours - truth).max() <= TOLERANCE * np.abs(truth).max(), worst(ours, truth)


def test_gated_heads_in_parts(tmp_path: Path, cuda_devices: int) -> None:
    """K/V heads, their gates and caches of windows on two devices."""
    if cuda_devices < 2:
        pytest.skip("needs two GPUs")
    path, tokens = afmoe(heads=4, kv=2)[0].write(tmp_path / "model.gguf"), CHECKED_TOKENS[:16]
    truth, log = logits_of(path, tokens, 12), list[str]()
    placement = PlacementParams(split_mode="graph", tensor_split=(1.0, 1.0))
    ours = logits_of(path, tokens, 12, placement=placement, log=log)
    assert "llm_load_tensors: 2 devices share attention of 4 of 4 layers" in log
    assert np.isfinite(ours).all()
    assert np.abs(ours - truth).max() <= TOLERANCE * np.abs(truth).max(), worst(ours, truth)


APART_RULES: dict[str, tuple[tuple[str, str], ...]] = {
    "whole": (),
    "as in the report": (("attn_kv_b", "CPU"), ("exps", "CPU")),
    "networks divided": (("attn_q_b", "CPU"),),
    "heads divided": (),
    "attention divided": (("attn_output", "CPU"), (r"blk\.[12]\.attn_q", "CUDA0"), (r"ffn_down\.", "CPU")),
}


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bundled model in a quantized form, which is made once."""
    folder = tmp_path_factory.mktemp("encoded")

    @cache
    def make(name: str) -> Path:
        path = folder / f"{name}.gguf"
        assert main(["quantize", str(default_model_path()), str(path), name]) == 0
        return path

    return make


@pytest.mark.parametrize("where", APART_RULES)
@pytest.mark.parametrize(("name", "mla"), [("Q4_K_R4", 3), ("IQ4_KS_R4", 2), ("Q8_0_R8", 1)])
def test_interleaved_rows_with_attention_divided(
    name: str, mla: int, where: str, encoded: Callable[[str], Path], cuda_devices: int
) -> None:
    """Tensors of interleaved rows on devices, and attention that lies apart, give what the CPU gives."""
    path, tokens = encoded(name), tokens_for(2, 7)
    truth = logits_of(path, tokens, 5, mla=mla)
    mode = "graph" if where in ("networks divided", "heads divided") else "layer"
    ours = logits_of(path, tokens, 5, placement=PlacementParams(rules=APART_RULES[where], split_mode=mode), mla=mla)
    assert np.isfinite(ours).all()
    assert np.abs(ours - truth).max() <= QUANTIZED_TOLERANCE * np.abs(truth).max(), worst(ours, truth)


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2-v3-mla"])
def test_prompts_with_other_activation_formats_on_the_cpu(name: str, cuda_devices: int) -> None:
    """From 24 tokens on, CPUs with AMX prepare activations in bf16, devices do not; experts here are on the CPU."""
    tokens = tokens_for(12, 40)
    truth = logits_of(zoo(name), tokens, 40)
    ours = logits_of(zoo(name), tokens, 40, placement=PlacementParams(n_cpu_moe=1))
    assert np.abs(ours - truth).max() <= QUANTIZED_TOLERANCE * np.abs(truth).max(), worst(ours, truth)


def test_prompts_on_bf16_tensor_cores(tmp_path: Path, cuda_devices: int) -> None:
    """Activations are rounded to bf16 there, which costs less than rounding them to int8."""
    model, decoded = tmp_path / "q8_0.gguf", tmp_path / "f32.gguf"
    assert main(["quantize", str(zoo("qwen3")), str(model), "Q8_0"]) == 0
    assert main(["quantize", "--allow-requantize", str(model), str(decoded), "F32"]) == 0
    tokens = tokens_for(12, 20)
    exact = logits_of(decoded, tokens, 20)
    always, never = (
        logits_of(model, tokens, 20, placement=PlacementParams(), devices=DeviceParams(bf16_batch=batch)) - exact
        for batch in (16, 0)
    )
    assert np.linalg.norm(always) < 0.7 * np.linalg.norm(never)
    assert np.linalg.norm(always) < 0.02 * np.linalg.norm(exact)


def test_experts_uploaded_for_a_large_batch(cuda_devices: int) -> None:
    tokens = tokens_for(3, 9)
    truth = logits_of(zoo("qwen3moe"), tokens, 8)
    ours = logits_of(
        zoo("qwen3moe"), tokens, 8, placement=PlacementParams(n_cpu_moe=99), devices=DeviceParams(offload_batch=1)
    )
    assert np.abs(ours - truth).max() <= TOLERANCE * np.abs(truth).max(), worst(ours, truth)


@pytest.mark.parametrize(
    ("context", "place"),
    [
        ("", "-ot exps=CPU"),
        ("-mla 2", "-nkvo"),
        ("-mla 3 -fa -fmoe -amb 512 -ctk q8_0", "--override-tensor exps=CPU,attn_kv_b=CPU"),
        ("-mla 1 -fa -ctk bf16", "-ngl 2"),
        ("-mla 0 -no-fa", "-ncmoe 1 -op 27,0,29,0 -cuda graphs=0"),
        ("-mla 3 -no-fmoe", "-cmoe -cuda offload-batch-size=1"),
    ],
)
def test_perplexity_of_the_bundled_model(
    context: str, place: str, cuda_devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tool itself with experts or the cache on the CPU and the rest on devices."""

    def estimate(*where: str) -> float:
        line = ["perplexity", "-f", str(TEXT), "-c", "16", "--chunks", "1", "-b", "16", "-ub", "16", "-t", "1", *where]
        assert main(line) == 0
        found = re.search(r"PPL over 1 chunks for n_ctx=16 = ([0-9.]+)", capsys.readouterr().out)
        assert found
        return float(found[1])

    settings = context.split()
    truth = estimate("-ngl", "0", *settings)
    assert estimate("-ngl", "99", *settings, *place.split()) == pytest.approx(truth, rel=1e-3)


def test_norms_of_a_quantized_model_prepare_its_activations(
    encoded: Callable[[str], Path], cuda_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = encoded("Q8_0")
    lowered: set[str] = set()

    def lower(op: Node, *rest: Any) -> list[launch.Launch]:
        lowered.add(op.kind)
        return original(op, *rest)

    original = launch.lower
    monkeypatch.setattr(launch, "lower", lower)
    tokens = tokens_for(2, 7)
    ours = logits_of(path, tokens, 5, placement=PlacementParams())
    assert "rms_norm_q8" in lowered
    truth = logits_of(path, tokens, 5)
    assert np.abs(ours - truth).max() <= QUANTIZED_TOLERANCE * np.abs(truth).max(), worst(ours, truth)
    monkeypatch.setattr(launch, "joined", lambda *_: None)
    assert np.array_equal(ours, logits_of(path, tokens, 5, placement=PlacementParams()))


def test_check_goes_through_quantized_models(
    encoded: Callable[[str], Path],
    cuda_devices: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their norms are joined with the preparation of activations, which the CPU does apart; both are compared."""
    path = encoded("Q8_0")
    capsys.readouterr()
    assert main(["cuda", "check", "-m", str(path)]) == 0
    rows = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("CUDA0")}
    assert {"rms_norm_q8", "act_prepare", "mul_mat"} <= set(rows)
    assert 1e-4 < float(re.findall(r"\d\.\de[-+]\d\d", rows["act_prepare"])[0]) < 0.005
    # Scales that a kernel would have stored in the wrong place.
    monkeypatch.setattr(compare, "act_row_bytes", lambda fmt, n: launch.act_row_bytes(fmt, n) - 64)
    assert main(["cuda", "check", "-m", str(path)]) == 1
    assert re.search(r"act_prepare.*WRONG", capsys.readouterr().out)


def test_check_compares_heads_of_divided_latent_attention(
    encoded: Callable[[str], Path], cuda_devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if cuda_devices < 2:
        pytest.skip("needs two GPUs")
    path = encoded("Q8_0")
    capsys.readouterr()
    assert main(["cuda", "check", "-m", str(path), "-sm", "graph", "-ts", "1,1"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("CUDA")]
    assert {("CUDA0", "attention"), ("CUDA1", "attention")} <= {(device, op) for device, op in rows}
