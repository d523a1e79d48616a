"""Memory, caches and checks of contexts on devices; emulated streams."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy import default_model_path
from ikpy.backends.cuda import devices as cuda_devices
from ikpy.backends.cuda.api import DeviceError
from ikpy.backends.cuda.emulated import EmulatedDevice
from ikpy.backends.cuda.memory import host_view
from ikpy.backends.cuda.plan import HybridPlan, Operation
from ikpy.cli import main
from ikpy.cli.params import CommonParams
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.fit import fit
from ikpy.engine.memory import memory_report
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.sequence_state import load_sequence, save_sequence
from ikpy.engine.session import load_session, save_session
from ikpy.errors import ResourceError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.graph import split
from ikpy.graph.activations import ActivationCollector
from ikpy.graph.assign import Step
from ikpy.graph.placement import CPU, DeviceParams, PlacementParams
from tests.cpu.models.test_prediction_head import glm4moe
from tests.cuda.cpu_kernels import CpuKernels
from tests.cuda.models import MIB, emulated, logits_of, zoo
from tests.cuda.test_placement_matrix import assert_same, tokens_for, worst

SETTINGS = ContextParams(n_ctx=256, n_ubatch=64, n_threads=1)


def context_on(name: str, placement: PlacementParams | None = None, **changes: Any) -> Context:
    model = Model.load(zoo(name), ModelParams(placement=placement or PlacementParams()))
    return Context(model, dataclasses.replace(SETTINGS, **changes))


def cpu_context(name: str, **changes: Any) -> Context:
    return context_on(name, PlacementParams(n_gpu_layers=0), **changes)


# memory


@pytest.mark.parametrize("rules", [(), (("exps", "CPU"),)])
def test_planned_memory_is_what_is_taken(rules: tuple[tuple[str, str], ...]) -> None:
    """The sums of a plan from the header alone, of a real context, and what the devices gave out."""
    placement = PlacementParams(rules=rules)
    with emulated(2):
        planned = Context(Model.load(zoo("qwen3moe"), ModelParams(header_only=True, placement=placement)), SETTINGS)
        context = context_on("qwen3moe", placement)
        assert planned.devices is not None and context.devices is not None
        for device in cuda_devices.available():
            need = context.devices.needs[device.name]
            assert need.total == planned.devices.needs[device.name].total > 0
            used = device.memory().total - device.memory().free
            assert used <= need.total + 8 * 256 and need.total <= used + 8 * 256
        context.decode(Batch.single(tokens_for(), 0, logits="all"))
        after = {d.name: d.memory().total - d.memory().free for d in cuda_devices.available()}
        assert all(after[name] <= need.total + 8 * 256 for name, need in context.devices.needs.items())


def test_a_second_context_shares_the_weights_and_memory_is_given_back() -> None:
    with emulated(1):
        (device,) = cuda_devices.available()
        first = context_on("qwen3")
        assert first.devices is not None
        after_first = device.memory().free
        second = Context(first.model, SETTINGS)
        assert second.devices is not None
        need = second.devices.needs["CUDA0"]
        assert abs(after_first - device.memory().free - (need.total - need.weight_bytes)) < 2048
        second.devices.release()
        assert device.memory().free == after_first


def test_too_little_memory_is_one_line() -> None:
    with emulated(1, mib=1), pytest.raises(DeviceError, match=r"^CUDA0: failed to allocate buffer: \d+ MiB are needed"):
        context_on("deepseek2-lite")


def used_bytes(placement: PlacementParams) -> int:
    planned = Context(Model.load(zoo("qwen3moe"), ModelParams(header_only=True, placement=placement)), SETTINGS)
    return planned.devices.needs["CUDA0"].total if planned.devices else 0


def test_fit_moves_experts_first_then_layers() -> None:
    params = ModelParams()
    with emulated(1, mib=64):
        sizes = [used_bytes(PlacementParams(n_gpu_layers=999, n_cpu_moe=n)) for n in (0, 1, 999)]
        one_layer = used_bytes(PlacementParams(n_gpu_layers=1, n_cpu_moe=999))
    assert sizes[0] > sizes[1] > sizes[2] > one_layer

    def fitted(nbytes: int, margin: int = 0) -> PlacementParams:
        with emulated(1, mib=1):
            device = cuda_devices.available()[0]
            assert isinstance(device, EmulatedDevice)
            device.total_bytes = nbytes
            return fit(zoo("qwen3moe"), params, SETTINGS, margin=margin)

    assert (fitted(sizes[0]).n_gpu_layers, fitted(sizes[0]).n_cpu_moe) == (999, 0)
    assert fitted(sizes[0] - 1).n_cpu_moe == 1
    assert fitted(sizes[0] + 3 * MIB, margin=3).n_cpu_moe == 0
    little = fitted(sizes[2] - 1)
    assert little.n_cpu_moe == 999 and 0 < little.n_gpu_layers < 999
    with pytest.raises(ResourceError, match="Unable to auto-fit model"):
        fitted(one_layer - 1)


# caches


def test_session_files_carry_caches_of_devices(tmp_path: Path) -> None:
    tokens = tokens_for()
    reference = cpu_context("qwen3")
    reference.decode(Batch.single(tokens[:-1], 0))
    truth = reference.decode(Batch.single(tokens[-1:], len(tokens) - 1))
    with emulated(2):
        writer = context_on("qwen3")
        writer.decode(Batch.single(tokens[:-1], 0))
        save_session(tmp_path / "session", writer, tokens[:-1].tolist())
        save_sequence(tmp_path / "sequence", writer, 0, tokens[:-1].tolist())
        for load in (load_session, lambda path, context: load_sequence(path, context, 0, 256)):
            reader = context_on("qwen3", PlacementParams(tensor_split=(1.0, 3.0)))
            load(tmp_path / ("session" if load is load_session else "sequence"), reader)
            assert_same(reader.decode(Batch.single(tokens[-1:], len(tokens) - 1)), truth)


def test_positions_can_be_shifted() -> None:
    def run(context: Context) -> np.ndarray:
        tokens = tokens_for(4, 24)
        context.decode(Batch.single(tokens[:16], 0))
        context.kv.seq_rm(0, 2, 6)
        context.kv.seq_add(0, 6, -1, -4)
        return context.decode(Batch.single(tokens[16:], 12, logits="all"))

    truth = run(cpu_context("qwen3"))
    with emulated(2):
        assert_same(run(context_on("qwen3")), truth)


def test_several_sequences_and_removed_cells() -> None:
    def run(context: Context) -> np.ndarray:
        tokens = tokens_for(5, 12)
        pos = np.tile(np.arange(6), 2)
        context.decode(Batch(tokens, pos, [(0,)] * 6 + [(1,)] * 6, np.zeros(12, bool)))
        context.kv.seq_rm(1, 3, -1)
        batch = Batch(tokens[:2], np.array([6, 3]), [(0,), (1,)], np.ones(2, bool))
        return context.decode(batch)

    truth = run(cpu_context("qwen3moe", n_seq_max=2))
    with emulated(2):
        assert_same(run(context_on("qwen3moe", PlacementParams(n_cpu_moe=1), n_seq_max=2)), truth)


def test_cells_that_were_emptied_behind_the_attended_ones() -> None:
    """They are not copied then; later runs look at them again."""

    def run(context: Context) -> np.ndarray:
        tokens = tokens_for(7, 600)
        context.decode(Batch.single(tokens, 0))
        context.kv.seq_rm(0, 10, -1)
        context.decode(Batch.one(int(tokens[0]), 10))
        context.decode(Batch.single(tokens[:500], 0, 1))
        return context.decode(Batch.one(int(tokens[1]), 590))

    truth = run(cpu_context("qwen3", n_ctx=1024, n_seq_max=2))
    with emulated(1):
        assert_same(run(context_on("qwen3", n_ctx=1024, n_seq_max=2)), truth)


def test_prompt_parts_without_outputs_may_overlap() -> None:
    """Nothing waits for a part that gives no logits; inputs of the next part must not overtake it."""

    def run(context: Context) -> np.ndarray:
        tokens = tokens_for(6, 40)
        return context.decode(Batch.single(tokens, 0))

    truth = run(cpu_context("qwen3moe", n_ubatch=8))
    with emulated(2):
        assert_same(run(context_on("qwen3moe", PlacementParams(rules=(("exps", "CPU"),)), n_ubatch=8)), truth)


def test_embeddings() -> None:
    def run(context: Context) -> np.ndarray:
        context.decode(Batch.single(tokens_for(), 0, logits="all"))
        assert context.embeddings is not None
        return context.embeddings

    truth = run(cpu_context("qwen3", embeddings=True))
    with emulated(2):
        assert_same(run(context_on("qwen3", embeddings=True)), truth)


def test_token_states() -> None:
    """Of prompt parts without logits too; they come back before the next part runs."""

    def run(context: Context) -> np.ndarray:
        logits = context.decode(Batch.single(tokens_for(6, 40), 0))
        assert context.token_states is not None
        return np.concatenate([logits, np.resize(context.token_states, (len(context.token_states), logits.shape[1]))])

    truth = run(cpu_context("qwen3moe", token_states=True, n_ubatch=8))
    with emulated(2):
        rules = PlacementParams(rules=(("exps", "CPU"),))
        assert_same(run(context_on("qwen3moe", rules, token_states=True, n_ubatch=8)), truth)


@pytest.mark.parametrize("limit", [split.OBSERVED_BYTES, 1 << 15])
def test_statistics_of_activations_are_collected_on_the_cpu(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "OBSERVED_BYTES", limit)

    def run(placement: PlacementParams) -> dict[str, np.ndarray]:
        collector = ActivationCollector({}, similarity=True)
        context = context_on("qwen3moe", placement, collector=collector)
        context.decode(Batch.single(tokens_for(0, 32), 0, logits="all"))
        means = {f"{kind} {layer}": np.array([s.mean]) for (kind, layer), s in collector.similarities.items()}
        return {name: entry.sums.copy() for name, entry in collector.entries.items()} | means

    truth = run(PlacementParams(n_gpu_layers=0))
    with emulated(2):
        ours = run(PlacementParams(n_cpu_moe=1))
    assert set(ours) == set(truth) and any("_exps" in name for name in truth)
    for name, sums in truth.items():
        np.testing.assert_allclose(ours[name], sums, rtol=1e-5, atol=1e-6, err_msg=name)


def test_inputs_that_statistics_are_made_of_are_not_held_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some at a time cross to the CPU: what a plan takes does not grow with the layers."""
    inputs = []
    for limit in (1 << 40, 1 << 15, 0):
        monkeypatch.setattr(split, "OBSERVED_BYTES", limit)
        with emulated(1):
            context = context_on("qwen3moe", collector=ActivationCollector({}), n_ubatch=64)
            report = memory_report(context)
            inputs.append((report.devices["CUDA0"]["compute"], report.devices["CPU"]["compute"]))
    (held, received), (some, part), (least, _) = inputs
    assert held - some > 3 * (1 << 15) and received - part > 3 * (1 << 15)
    assert least <= some


def test_growing_plans_keep_working() -> None:
    """Shapes that were not planned at first, and more of them than are kept."""
    lengths = [*range(1, 20), 3, 19]
    tokens = tokens_for(7, 20)

    def run(context: Context) -> list[np.ndarray]:
        results = []
        for n in lengths:
            context.kv.clear()
            results.append(context.decode(Batch.single(tokens[:n], 0, logits="all")))
        return results

    truth = run(cpu_context("qwen3"))
    with emulated(1):
        for ours, expected in zip(run(context_on("qwen3")), truth, strict=True):
            assert_same(ours, expected)


# checks


class Spoiling(CpuKernels):
    """Makes the product with one weight NaN."""

    def launch(self, launch: Any) -> None:
        super().launch(launch)
        node = launch.node
        if node.kind == "mul_mat" and node.src[0].buffer.name == "blk.1.attn_output.weight":
            tensors = launch.plan.tensors
            np.ctypeslib.as_array(
                (np.ctypeslib.ctypes.c_float * 1).from_address(int(tensors["data"][launch.plan.ops["dst"][0]]))
            )[:] = np.nan


def test_a_kernel_that_makes_nan_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(1) as kernels:
        monkeypatch.setattr(kernels, "launch", None)
        spoiling = Spoiling()
        device = cuda_devices.available()[0]
        assert isinstance(device, EmulatedDevice)
        device._launcher = spoiling.launch
        with pytest.raises(DeviceError, match=r"CUDA0: mul_mat with blk.1.attn_output.weight \(\w+\) gives NaN"):
            context_on("qwen3")
        model = Model.load(zoo("qwen3"), ModelParams(devices=DeviceParams(check=False)))
        Context(model, SETTINGS)


class Failing(CpuKernels):
    """Stores to the cache of one layer end in an error, which shows when somebody waits."""

    def launch(self, launch: Any) -> None:
        super().launch(launch)
        if launch.node.kind == "kv_store" and launch.node.dst.buffer.name == "cache_v_l1":
            raise DeviceError("CUDA0: an illegal memory access was encountered")


def test_a_kernel_that_fails_is_named_at_load(capsys: pytest.CaptureFixture[str]) -> None:
    with emulated(1):
        device = cuda_devices.available()[0]
        assert isinstance(device, EmulatedDevice)
        device._launcher = Failing().launch
        with pytest.raises(DeviceError, match=r"^kv_store to cache_v_l1 fails on CUDA0: CUDA0: an illegal memory"):
            context_on("qwen3")
        assert main(["cuda", "check", "-m", str(zoo("qwen3")), "-t", "1", "-c", "256", "--log-disable"]) == 1
    assert "kv_store to cache_v_l1 fails on CUDA0" in capsys.readouterr().err


def test_ops_that_differ_from_the_cpu_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["cuda", "check", "-m", str(zoo("qwen3")), "-t", "1", "-c", "256", "--log-disable"]
    with emulated(1):
        assert main(line) == 0
        table = capsys.readouterr().out
        assert re.search(r"CUDA0 +mul_mat +f16 +\d+ +0.0e\+00", table) and "WRONG" not in table
        device = cuda_devices.available()[0]
        assert isinstance(device, EmulatedDevice)
        device._launcher = Spoiling().launch
        assert main(line) == 1
        wrong = [row for row in capsys.readouterr().out.splitlines() if "WRONG" in row]
        assert any("mul_mat with blk.1.attn_output.weight" in row for row in wrong)
        assert main([*line, "-ngl", "0"]) == 1
        assert "no node runs on a device" in capsys.readouterr().err


def test_a_weight_with_nan_is_found_on_the_cpu_too(tmp_path: Path) -> None:
    data = bytearray(zoo("qwen3").read_bytes())
    with GGUFFile.open(zoo("qwen3")) as file:
        info = file.tensors["blk.1.ffn_norm.weight"]
    data[info.offset : info.offset + 4] = np.float32(np.nan).tobytes()
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    for rules, device in (((), "CUDA0"), ((("ffn_norm", "CPU"),), "CPU")):
        with emulated(1), pytest.raises(DeviceError, match=rf"^{device}: rms_norm with blk.1.ffn_norm.weight"):
            Context(Model.load(path, ModelParams(placement=PlacementParams(rules=rules))), SETTINGS)


def test_a_nan_that_only_some_tokens_bring_is_named_later(tmp_path: Path) -> None:
    data = bytearray(zoo("qwen3moe").read_bytes())
    with GGUFFile.open(zoo("qwen3moe")) as file:
        info = file.tensors["token_embd.weight"]
    at = info.offset + 9 * 2 * info.shape[0]
    data[at : at + 2] = np.float16(np.nan).tobytes()
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with emulated(1):
        context = Context(Model.load(path, ModelParams(placement=PlacementParams())), SETTINGS)
        assert context.first_not_a_number([1, 2, 3]) == ""
        assert "get_rows with token_embd.weight (f16) gives NaN" in context.first_not_a_number([1, 9, 3])


@pytest.mark.parametrize("rules", [(), (("ffn_gate_inp", "CPU"),), (("exps", "CPU"),)])
def test_experts_that_are_left_out_are_not_looked_at(
    rules: tuple[tuple[str, str], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No product writes their results: what is there may be anything, and is no error of a kernel."""
    singly = HybridPlan.singly

    def spoiled(plan: HybridPlan) -> Iterator[tuple[Step | None, Operation]]:
        for step, operation in singly(plan):
            if step is not None and step.node.kind.startswith("mul_mat_id"):
                buffer = step.node.dst.buffer
                if step.device == CPU:
                    host_view(plan.host_address(buffer), buffer.nbytes)[:] = 0xFF
                else:
                    state = plan.states[step.device]
                    state.stream.fill(state.base(buffer, plan.graph.arenas[step.device]), 0xFF, buffer.nbytes)
            yield step, operation

    monkeypatch.setattr(HybridPlan, "singly", spoiled)
    with emulated(1):
        context = context_on("qwen3moe", PlacementParams(rules=rules), smart_expert_reduction=(1, 1.0))
        for error in context.compare_devices():
            assert error.error < 1e-2, error


# options


def test_devices_are_selected_by_name() -> None:
    tokens = tokens_for(0, 4)
    with emulated(2) as kernels:
        lines: list[str] = []
        logits_of(
            zoo("qwen3"), tokens, 3, placement=PlacementParams(), devices=DeviceParams(names=("CUDA1",)), log=lines
        )
        assert any(re.search(r"CUDA1 buffer size", line) for line in lines)
        assert not any("CUDA0" in line for line in lines)
        kernels.launched.clear()
        logits_of(zoo("qwen3"), tokens, 3, placement=PlacementParams(), devices=DeviceParams(names=()))
        assert not kernels.launched
        with pytest.raises(UsageError, match=r"--device CUDA7: no such device \(available: CUDA0, CUDA1\)"):
            Model.load(zoo("qwen3"), ModelParams(devices=DeviceParams(names=("CUDA7",))))
        with pytest.raises(UsageError, match="--device CUDA0: the device is named twice"):
            Model.load(zoo("qwen3"), ModelParams(devices=DeviceParams(names=("CUDA0", "CUDA1", "CUDA0"))))


def test_ngl_0_uses_no_device() -> None:
    with emulated(1) as kernels:
        logits_of(zoo("qwen3"), tokens_for(0, 4), 3, placement=PlacementParams(n_gpu_layers=0))
    assert not kernels.launched


def test_defaults_of_the_command_line_are_those_of_the_engine() -> None:
    params = CommonParams()
    assert params.placement_params() == PlacementParams()
    assert params.device_params() == DeviceParams()


# emulated devices


def test_emulated_streams_run_late_and_in_order() -> None:
    device = EmulatedDevice(0, MIB)
    address = device.alloc(64)
    stream, other, event = device.new_stream(), device.new_stream(), device.new_event()
    source, found = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
    stream.download(found, address)
    stream.synchronize()
    assert np.isnan(found).all()
    stream.upload(address, source)
    stream.record(event)
    source[:] = 7
    other.wait(event)
    other.download(found, address)
    other.synchronize()
    assert (found == 7).all()


def test_emulated_streams_refuse_what_a_driver_refuses() -> None:
    one, two = (EmulatedDevice(i, MIB, lambda _: None) for i in range(2))
    stream = one.new_stream()
    with pytest.raises(DeviceError, match="CUDA0: an event of CUDA1 cannot be recorded"):
        stream.record(two.new_event())
    stream.wait(two.new_event())
    with pytest.raises(DeviceError, match="a stream that is captured cannot be waited for"):
        stream.capture(stream.synchronize)
    with pytest.raises(DeviceError, match="only launches can be captured"):
        stream.capture(lambda: stream.fill(one.alloc(64), 0, 64))
    stream.synchronize()


def test_emulated_memory_is_checked() -> None:
    device = EmulatedDevice(0, MIB)
    with pytest.raises(DeviceError, match="are not memory of this device"):
        device.new_stream().upload(4096, np.zeros(4))
    address = device.alloc(64)
    for source, target in ((address, 4096), (4096, address)):
        with pytest.raises(DeviceError, match="are not memory of this device"):
            device.new_stream().copy(target, source, 64)
    with pytest.raises(DeviceError, match="failed to allocate"):
        device.alloc(2 * MIB)


# repacking


def test_only_tensors_in_host_memory_are_rearranged(tmp_path: Path) -> None:
    path = tmp_path / "tiny-q4_0.gguf"
    assert main(["quantize", str(default_model_path()), str(path), "Q4_0"]) == 0
    rules = (("exps", "CPU"),)
    tokens = tokens_for(8)
    truth = logits_of(path, tokens, len(tokens))
    with emulated(1):
        model = Model.load(path, ModelParams(repack=True, placement=PlacementParams(rules=rules)))
        ours = Context(model, SETTINGS).decode(Batch.single(tokens, 0, logits="all"))
    assert model.replaced and all("_exps" in name for name in model.replaced), model.replaced
    # Interleaved rows are multiplied with activations rounded in another way.
    assert np.abs(ours - truth).max() <= 2e-2 * np.abs(truth).max(), worst(ours, truth)


def test_only_tensors_in_host_memory_are_read_into_memory(tmp_path: Path) -> None:
    """The last of the layers that run is on the device, the prediction layer behind it is not."""
    path = glm4moe(own_matrices=True).write(tmp_path / "m.gguf")
    with emulated(1):
        gguf = Model.load(path, ModelParams(use_mmap=False, placement=PlacementParams(n_gpu_layers=1))).gguf
    is_mapped = [gguf.maps(gguf.address(gguf.tensors[f"blk.{il}.attn_q.weight"])) for il in range(3)]
    assert is_mapped == [False, True, False]


def test_memory_goes_back_with_the_context() -> None:
    with emulated(1):
        (device,) = cuda_devices.available()
        context = context_on("qwen3")
        context.decode(Batch.single(tokens_for(), 0))
        assert device.memory().free < device.memory().total
        del context
        gc.collect()
        assert device.memory().free == device.memory().total
