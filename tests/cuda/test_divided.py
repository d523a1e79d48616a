"""-sm graph: networks and output matrices of which every device holds a part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.random_weights import random_tensor
from ikpy import default_model_path
from ikpy.backends.cuda.emulated import EmulatedDevice
from ikpy.backends.cuda.memory import host_bytes
from ikpy.cli import main
from ikpy.engine.context import Context
from ikpy.engine.memory import memory_report
from ikpy.engine.model import Model, open_model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.graph import division
from ikpy.graph.divide_networks import UP_GATE, NetworkDivider
from ikpy.graph.division import OUTPUTS, Part
from ikpy.graph.ir import Node, external
from ikpy.graph.placement import PlacementParams
from ikpy.graph.weight_parts import bias_part, columns_part, rows_part, whole_name
from ikpy.quants import by_name, dequantize
from tests.cpu.models.test_adapters import llama
from tests.cuda.models import MIB, emulated, logits_of, recorded_operations, zoo
from tests.cuda.test_adapters import adapted, logits, written
from tests.cuda.test_placement_matrix import KINDS, ZOO, assert_same, lacks, tokens_for, worst

# With a header per row, a header per group of interleaved rows, interleaved rows, blocks of 32 and of 256.
TYPES = (
    "f32",
    "f16",
    "q4_0",
    "q8_0",
    "q6_K",
    "iq4_ks",
    "iq2_kt",
    "q8_KV",
    "q4_k_r4",
    "iq4_ks_r4",
    "q8_0_r8",
    "bf16_r16",
)
EXACT: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}  # caches that do not round small differences up
GRAPH: dict[str, Any] = {"split_mode": "graph"}
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "uneven": {"tensor_split": (3.0, 1.0)},
    "one device has no share": {"tensor_split": (1.0, 0.0)},
    "some layers": {"n_gpu_layers": 3},
    "experts on the CPU": {"rules": (("exps", "CPU"),)},
    "some experts on the CPU": {"n_cpu_moe": 2},
    "down of some on another device": {"rules": ((r"blk\.0\.ffn_down", "CUDA1"),)},
    "cache in host memory": {"kv_offload": False},
}


def weight(name: str, shape: tuple[int, ...]) -> tuple[Any, np.ndarray]:
    """A random tensor of this ggml-order shape as a value, and its decoded rows [..., K]."""
    kind = by_name(name)
    rows = int(np.prod(shape[1:]))
    if kind.is_quantized:
        data = random_tensor(kind, (shape[0], rows), 3)
    else:
        numbers = np.random.default_rng(3).standard_normal(kind.row_nbytes(shape[0]) * rows // 2)
        data = numbers.astype(np.float16).view(np.uint8)
        if name == "f32":
            data = numbers[: len(numbers) // 2].astype(np.float32).view(np.uint8)
    data = np.ascontiguousarray(data)
    value = external(data.ctypes.data, data, kind.id, shape, "w", "weight")
    return value, decoded(data, name, shape)


def decoded(data: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
    flat = dequantize(np.ascontiguousarray(data), by_name(name).id, (shape[0], int(np.prod(shape[1:]))))
    return np.asarray(flat).reshape(*shape[:0:-1], shape[0])


@pytest.mark.parametrize("n_expert", (1, 3))
@pytest.mark.parametrize("name", TYPES)
def test_parts_hold_what_they_are_named_for(name: str, n_expert: int) -> None:
    shape = (512, 48, n_expert)
    value, whole = weight(name, shape)
    for start, end in ((0, 256), (256, 512)):
        part = columns_part(value, Part("CUDA0", start, end - start))
        data = host_bytes(part.buffer)
        assert data.nbytes == part.buffer.nbytes == by_name(name).tensor_nbytes(part.shape)
        found = decoded(data, name, (256, 48, n_expert))
        assert np.array_equal(found, whole[..., start:end], equal_nan=True), f"{name}, columns {start} to {end}"
    for start, end in ((0, 16), (16, 48)):
        part = rows_part(value, Part("CUDA0", start, end - start))
        found = decoded(host_bytes(part.buffer), name, (512, end - start, n_expert))
        assert np.array_equal(found, whole[:, start:end], equal_nan=True), f"{name}, rows {start} to {end}"


def test_parts_of_biases() -> None:
    data = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)
    value = external(data.ctypes.data, data, by_name("f32").id, (64, 3), "b", "weight")
    part = bias_part(value, Part("CUDA1", 32, 16))
    assert np.array_equal(host_bytes(part.buffer).view(np.float32).reshape(3, 16), data[:, 32:48])


@pytest.fixture(scope="module")
def truths() -> dict[str, np.ndarray]:
    return {str(path): logits_of(path, tokens_for(), 16, **EXACT) for path in (default_model_path(), zoo("qwen3"))}


@pytest.mark.parametrize("n_devices", (2, 3))
@pytest.mark.parametrize("where", CASES)
@pytest.mark.parametrize("path", (default_model_path(), zoo("qwen3")), ids=lambda path: path.stem)
def test_logits_are_those_of_the_cpu(path: Path, where: str, n_devices: int, truths: dict[str, np.ndarray]) -> None:
    """Dense networks, experts and shared ones; sums of parts are rounded in another order, nothing else."""
    with emulated(n_devices) as kernels:
        ours = logits_of(path, tokens_for(), 16, placement=PlacementParams(**GRAPH, **CASES[where]), **EXACT)
    launched = [n for n in kernels.launched if any(v is not None and v.buffer.gather for v in n.src)]
    parts = {n.kind for n in launched}
    outputs = {whole_name(n.src[0].buffer.name) for n in launched if n.src[0] is not None} & set(OUTPUTS)
    on_devices = where != "some layers" or path == zoo("qwen3")
    assert len(outputs) == (where != "one device has no share" and on_devices)
    if where == "one device has no share":
        assert not parts
    else:
        assert "mul_mat" in parts
    assert ("mul_mat_id" in parts) == (
        where not in ("one device has no share", "experts on the CPU") and path != zoo("qwen3")
    )
    assert_same(ours, truths[str(path)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", (default_model_path(), zoo("qwen3")), ids=lambda path: path.stem)
def test_what_lacks_a_kernel_stays_whole(path: Path, kind: str, truths: dict[str, np.ndarray]) -> None:
    """Activations of parts are prepared by the device that has the part: one that cannot gets no part."""
    with emulated(2, unsupported=lacks(kind)) as kernels:
        ours = logits_of(path, tokens_for(), 16, placement=PlacementParams(**GRAPH), **EXACT)
    assert kind not in {node.kind for node in kernels.launched}
    assert_same(ours, truths[str(path)])


@pytest.mark.skipif(not ZOO, reason="golden/zoo is not present beside the checkout")
@pytest.mark.parametrize("path", ZOO, ids=lambda path: path.stem)
def test_every_architecture(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of 8 columns, as these models are small."""
    monkeypatch.setattr(division, "GROUP", 8)
    truth = logits_of(path, tokens_for(9), 16, **EXACT)
    with emulated(2):
        ours = logits_of(path, tokens_for(9), 16, placement=PlacementParams(**GRAPH, tensor_split=(1.0, 1.0)), **EXACT)
    assert np.isfinite(ours).all()
    assert np.abs(ours - truth).max() <= 1e-4 * np.abs(truth).max(), worst(ours, truth)


@pytest.mark.parametrize("name", ("Q4_K_R4", "IQ4_KS_R4", "IQ4_KT", "Q8_KV"))
def test_quantized_models(name: str, tmp_path: Path) -> None:
    path = tmp_path / "quantized.gguf"
    assert main(["quantize", str(default_model_path()), str(path), name]) == 0
    truth = logits_of(path, tokens_for(), 16)
    with emulated(2) as kernels:
        ours = logits_of(path, tokens_for(), 16, placement=PlacementParams(**GRAPH))
    assert any(v is not None and v.buffer.gather for n in kernels.launched for v in n.src)
    # Sums in another order may round an activation to another code or choose another expert, which all tokens behind
    # inherit: the CPU's tiers differ from each other in that way from token 3 or 4 on with Q4_K_R4, by up to 0.027.
    difference = np.abs(ours - truth).max(axis=1) / np.abs(truth).max()
    assert difference.min() <= 2e-5 and difference.max() <= 0.04, worst(ours, truth)


def loaded(placement: PlacementParams, log: list[str] | None = None) -> Context:
    """A context of the bundled model."""
    lines = [] if log is None else log
    params = ModelParams(placement=placement)
    model = Model.load(open_model(default_model_path(), params), params, log=lines.append)
    return Context(model, ContextParams(n_ctx=64, n_ubatch=16), log=lines.append)


def test_devices_hold_parts_alone() -> None:
    """The weights on all devices together are those of the model on one; all hold their share of the networks."""

    def held(n: int, **where: Any) -> list[int]:
        with emulated(n):
            devices = loaded(PlacementParams(**where)).devices
            assert devices is not None
            return [need.weight_bytes for need in devices.needs.values()]

    one, three = held(1), held(3, **GRAPH)
    assert sum(three) == sum(one)
    with emulated(3):
        log: list[str] = []
        context = loaded(PlacementParams(**GRAPH), log)
        placement = context.model.placement
        sizes = {info.name: info.nbytes for info in context.model.gguf.tensors.values()}
        assert sum(placement.bytes_per_device(sizes).values()) == sum(sizes.values())
        shared = [placement.divisions["blk.0.ffn_up.weight"].nbytes(3000)[f"CUDA{i}"] for i in range(3)]
    assert sum(shared) == 3000 and min(shared) > 900
    assert "llm_load_tensors: 3 devices share 7 of 7 feed-forward networks" in log
    assert "llm_load_tensors: 3 devices share the output matrix" in log
    with emulated(2):
        loaded(PlacementParams(**GRAPH, rules=(("exps", "CPU"), (r"blk\.1\.ffn_up_shexp", "CUDA1"))), log)
    assert "llm_load_tensors: 2 devices share 3 of 4 feed-forward networks; 1 stay whole" in log


@pytest.mark.parametrize("mode", ("layer", "graph"))
@pytest.mark.parametrize("path", (zoo("qwen3"), default_model_path()), ids=lambda path: path.stem)
def test_plans_count_what_is_uploaded(path: Path, mode: str) -> None:
    """Embeddings that are the output matrix as well, derived tensors, and parts where they lie."""

    def context(*, header_only: bool) -> Context:
        placement = PlacementParams(split_mode=mode, tensor_split=(1.0, 1.0))
        model = Model.load(path, ModelParams(placement=placement, header_only=header_only))
        return Context(model, ContextParams(n_ctx=64, n_ubatch=16))

    with emulated(2):
        planned = memory_report(context(header_only=True)).devices
        ran = context(header_only=False)
        assert ran.devices is not None
        for device in ran.devices.setup.devices:
            assert isinstance(device, EmulatedDevice)
            blocks = [at for one, at in ran.devices.setup.weights._blocks if one is device]
            uploaded = sum(len(device._memory[at]) for at in blocks)
            assert planned[device.name]["mapped"] == uploaded


def test_all_devices_work_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a network reads leaves for the other devices before its own part is started."""
    issued = recorded_operations(monkeypatch)
    with emulated(2):
        logits_of(zoo("qwen3"), tokens_for(n=1), 1, placement=PlacementParams(**GRAPH, tensor_split=(1.0, 1.0)))
    networks = [i for i, (_, kind) in enumerate(issued) if kind in UP_GATE]
    assert len(networks) >= 4
    for first, second in zip(networks[::2], networks[1::2], strict=True):
        own, other = issued[first][0], issued[second][0]
        assert own != other
        assert (own, "send") in issued[:first]
        assert (own, "send") not in issued[first:second], f"CUDA operations: {issued[first - 6 : second + 1]}"


def test_parts_of_logits_are_made_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the output matrix reads leaves before the first part is started."""

    def kind(one: Any) -> str:
        weight = one.node.src[0]
        name = whole_name(weight.buffer.name) if weight is not None else ""
        return "output" if name in OUTPUTS else str(one.kernel)

    issued = recorded_operations(monkeypatch, kind)
    with emulated(2):
        logits_of(zoo("qwen3"), tokens_for(n=1), 1, placement=PlacementParams(**GRAPH, tensor_split=(1.0, 1.0)))
    products = [i for i, (_, kind) in enumerate(issued) if kind == "output"]
    assert len({issued[i][0] for i in products[-2:]}) == 2
    own, other = products[-2:]
    assert (issued[own][0], "send") in issued[own - 2 : own], f"CUDA operations: {issued[own - 6 : other + 2]}"


def test_host_memory_has_room_for_the_logits_once() -> None:
    """Their parts come to lie in the rows of all logits."""
    with emulated(2):
        whole = loaded(PlacementParams(tensor_split=(1.0, 1.0))).compute_bytes
    with emulated(2):
        assert loaded(PlacementParams(**GRAPH, tensor_split=(1.0, 1.0))).compute_bytes == whole


def test_shared_experts_cross_with_routed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device adds its parts of both: one result crosses per layer and device, as from a dense network."""
    nodes: list[tuple[list[Node], dict[Node, str]]] = []
    run = NetworkDivider.run

    def kept(divider: NetworkDivider, given: list[Node]) -> tuple[list[Node], dict[Node, str]]:
        nodes.append(run(divider, given))
        return nodes[-1]

    monkeypatch.setattr(NetworkDivider, "run", kept)
    with emulated(2):
        n_layer = loaded(PlacementParams(**GRAPH, tensor_split=(1.0, 1.0))).model.hparams.n_layer
    for graph, devices in nodes:
        sums = [n for n in graph if n.kind == "add" and n in devices]
        assert len(sums) == n_layer
        assert sum(n.kind == "moe_combine" and n.src[3] is not None for n in graph) == 2 * (n_layer - 1)


def test_networks_with_adapters_stay_whole(tmp_path: Path) -> None:
    """Their up, gate and down are further products each."""
    model, adapters = written(llama, tmp_path)
    wanted = logits(adapted(model, adapters, PlacementParams(n_gpu_layers=0)))
    with emulated(2) as kernels:
        ours = logits(adapted(model, adapters, PlacementParams(**GRAPH)))
    assert not any(v is not None and v.buffer.gather for n in kernels.launched for v in n.src)
    assert np.abs(ours - wanted).max() < 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("n_gpu_layers", (99, 2))
@pytest.mark.parametrize("mode", ("none", "layer", "graph"))
@pytest.mark.parametrize("name", ("llama-ropefreqs", "qwen3", "qwen3moe"))
def test_the_log_has_what_is_uploaded(name: str, mode: str, n_gpu_layers: int) -> None:
    """The bytes per buffer are those of all that the graphs read there, of tied output matrices (0.25 MiB here) too."""
    log: list[str] = []
    params = ModelParams(placement=PlacementParams(split_mode=mode, n_gpu_layers=n_gpu_layers))
    with emulated(2):
        model = Model.load(zoo(name), params, log=log.append)
        context = Context(model, ContextParams(n_ctx=64, n_ubatch=16), log=log.append)
        assert context.devices is not None
        uploaded = {d: sum(b.nbytes for b in need.weights.values()) for d, need in context.devices.needs.items()}
        planned = memory_report(context).devices
    assert model.placement.tied == (name != "qwen3moe" and n_gpu_layers == 99)
    found = re.findall(r"^llm_load_tensors: +(CUDA\d) buffer size = +([\d.]+) MiB$", "\n".join(log), re.MULTILINE)
    logged = {device: float(size) for device, size in found}
    for device, nbytes in uploaded.items():
        # Norms of the heads lie on all devices that share them.
        assert logged.get(device, 0) == pytest.approx(nbytes / MIB, abs=0.01)
        assert 0 <= planned[device]["mapped"] - nbytes < 256 * len(context.devices.needs[device].weights)
