"""No batch takes more memory than was planned from the largest ones; the lines of the log add up to what is taken."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda.devices import available
from ikpy.cli.logs import memory_log
from ikpy.cli.parser import parse
from ikpy.cli.session import load
from ikpy.engine.adapter import LoraAdapter
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.graph.placement import DeviceParams, PlacementParams
from tests.cpu.models import definition_checks as checks
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.models.test_adapters import write_directions
from tests.cuda.models import MIB, emulated, zoo
from tests.cuda.test_adapters import llama, written

pytestmark = pytest.mark.usefixtures("emulation")


def wide(heads: int, kv: int, head: int) -> RandomModel:
    """Of LLaMA's kind, with heads of real models."""
    d, ff = 128, 64
    m = RandomModel("llama", 71, **checks.shape(1, d, heads, kv, head, ff), **checks.RMS)
    m.keys["rope.dimension_count"] = head
    m.numbered_words = True
    checks.frame(m, d, tied=False)
    for name in ("attn_norm", "ffn_norm"):
        m.norm(f"blk.0.{name}", d)
    m.attention("blk.0", d, heads, kv, head)
    m.ffn("blk.0", d, ff)
    return m


@pytest.mark.parametrize(("heads", "kv", "head"), [(32, 8, 128), (16, 16, 64), (64, 8, 128), (8, 1, 256)], ids=str)
def test_scratch_memory_of_every_size(heads: int, kv: int, head: int, tmp_path: Path, cuda_devices: int) -> None:
    """Attention of fewer tokens divides the cells into more parts, each with results of its own."""
    assert cuda_devices
    path = wide(heads, kv, head).write(tmp_path / "model.gguf")
    settings = ContextParams(n_ctx=16384, n_ubatch=1024, n_threads=1)
    placement = PlacementParams(split_mode="none")
    context = Context(Model.load(path, ModelParams(placement=placement, header_only=True)), settings)
    assert context.devices is not None
    (needs,) = context.devices.needs.values()
    planned = replace(needs, weights=dict(needs.weights))
    for n in (1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 100, 128, 129, 200, 256, 257, 400, 512, 513, 640, 768, 1000, 1024):
        for n_outputs in {1, n}:
            built = context._plans.build(n, n_outputs)
            assert built.graph is not None
            context.devices.measure(built.graph)
            assert needs == planned, f"{n} tokens, {n_outputs} outputs: {needs} instead of {planned}"


@pytest.mark.parametrize("offload_batch", [2, 4, 8, 32])
@pytest.mark.parametrize("name", ["llama-moe", "deepseek2-v3-mla", "llama-ropefreqs"])
def test_host_memory_below_the_sizes_that_devices_take(name: str, offload_batch: int) -> None:
    """A batch that is too small for a device may need more of the host's compute memory than the largest one."""
    rules, settings = (("ffn|attn_output", "CPU"),), ContextParams(n_ctx=256, n_ubatch=64, n_threads=1)
    for placement in (PlacementParams(rules=rules), PlacementParams(n_gpu_layers=1)):
        lines: list[str] = []
        with emulated(1):
            params = ModelParams(placement=placement, devices=DeviceParams(offload_batch=offload_batch))
            context = Context(Model.load(zoo(name), params), settings, log=lines.append)
            used = [device.memory().free for device in available()]
            tokens = np.random.default_rng(1).integers(5, 150, 64)
            for n in range(1, 65):
                context.kv.clear()
                context.decode(Batch.single(tokens[:n], logits="all" if n % 2 else "last"))
            assert [device.memory().free for device in available()] == used
        assert not [line for line in lines if "grows" in line]


def told(lines: list[str], device: str) -> float:
    """Sum of the buffers of a device in a log, in MiB."""
    taken = [re.match(rf"\w+: +{device} .*buffer size *= +([\d.]+) MiB", line) for line in lines]
    left_out = [re.match(rf"note: .* \(([\d.]+) MiB\) not copied to {device}", line) for line in lines]
    return sum(float(m[1]) for m in taken if m) - sum(float(m[1]) for m in left_out if m)


@pytest.mark.parametrize(
    "placement", [PlacementParams(), PlacementParams(split_mode="none"), PlacementParams(n_gpu_layers=9)]
)
@pytest.mark.parametrize("name", ["deepseek2-lite", "deepseek2-v3-mla", "qwen3moe", "llama-moe"])
def test_the_log_adds_up(name: str, placement: PlacementParams) -> None:
    """With tensors that were derived for a mode of latent attention, and without those that it does not read."""
    for mla in (0, 1, 3):
        lines: list[str] = []
        with emulated(2):
            model = Model.load(zoo(name), ModelParams(placement=placement, mla=mla), log=lines.append)
            context = Context(model, ContextParams(n_ctx=256, n_threads=1, n_ubatch=64, mla=mla))
            lines += memory_log(context)
            for device in available():
                taken = (device.memory().total - device.memory().free) / MIB
                assert told(lines, device.name) == pytest.approx(taken, abs=0.03), f"{device.name}, -mla {mla}"


def test_adapters_and_control_vectors_are_told(tmp_path: Path) -> None:
    """And planned: what a dry run counts is what is taken."""
    path, adapters = written(llama, tmp_path)
    totals = []
    for header_only in (True, False):
        lines: list[str] = []
        with emulated(1):
            model = Model.load(path, ModelParams(header_only=header_only), log=lines.append)
            loaded = [LoraAdapter.load(adapter, model) for adapter in adapters]
            context = Context(model, ContextParams(n_ctx=256, n_threads=1, n_ubatch=64, adapters=loaded))
            context.steer(np.ones((model.hparams.n_layer, model.hparams.n_embd), np.float32))
            lines += memory_log(context)
            assert any("adapter buffer size" in line for line in lines)
            assert context.devices is not None
            totals.append(context.devices.needs["CUDA0"].total)
            (device,) = available()
            taken = device.memory().total - device.memory().free
            assert header_only or told(lines, "CUDA0") == pytest.approx(taken / MIB, abs=0.03)
    assert totals[0] == totals[1] and 0 <= taken - totals[1] < 2048


def test_fit_counts_adapters_and_control_vectors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What --fit says a device takes is what it then takes."""
    path, adapters = written(llama, tmp_path)
    vector = write_directions(tmp_path / "vector.gguf", {1: np.ones(64, np.float32)})
    line = f"-m {path} --lora {adapters[0]} --lora {adapters[1]} --control-vector {vector} -t 1 -c 256 -ub 32 --fit"
    with emulated(1, mib=1200):
        params = parse(line.split(), "server")
        context = load(params).new_context()
        (device,) = available()
        taken = (device.memory().total - device.memory().free) / MIB
        assert context.devices is not None
    found = re.search(r"fit: CUDA0: ([\d.]+) MiB", capsys.readouterr().err)
    assert found and float(found[1]) == pytest.approx(taken, abs=0.02)
