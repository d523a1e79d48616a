"""What --dry-run prints: DeepSeek-V3 from its header alone, and plans equal to what real runs allocate."""

from __future__ import annotations

import re
import socket
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import ikpy
from ikpy.cli import bench, perplexity, server, sweep_bench
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.memory import memory_report
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.errors import UsageError
from ikpy.gguf import huge_pages
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.graph.ir import Buffer
from ikpy.graph.planner import place_buffers
from ikpy.quants import registry
from scripts import make_deepseek_header as deepseek
from tests.cpu.models.test_zoo_holdouts import gemma2_27b, gpt_oss, phi3_short_context
from tests.shared import DATA

TINY = ikpy.default_model_path()
MIB = 1 << 20


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The IQ2_K_R4 mix that users published: its tensor table without data."""
    path = tmp_path_factory.mktemp("deepseek") / "DeepSeek-V3-IQ2_K_R4.gguf"
    writer = GGUFWriter(path)
    deepseek.metadata(writer, deepseek.N_LAYER, 338)
    for name, shape, type_name in deepseek.tensors(deepseek.N_LAYER, "q8_0", "iq2_k_r4", "q8_0"):
        kind = "iq3_k_r4" if "ffn_down_exps" in name else type_name
        writer.add_tensor(name, shape, registry.by_name(kind).id)
    (shard,) = writer.plan()
    path.write_bytes(shard.header)  # not even the zeros of a sparse file
    return str(path)


def dry_run(capfd: pytest.CaptureFixture[str], tool: object, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        tool.run([*arguments, "--dry-run", "-t", "8"])  # type: ignore[attr-defined]
    assert stop.value.code == 0
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("cache", "n_ctx", "expected"),
    [("q8_0", 32768, "1166.62"), ("f16", 32768, "2196.00"), ("q8_0", 163840, "5833.12"), ("q8_0", 131072, "4666.50")],
)
def test_published_sizes_of_deepseek(
    header: str, capfd: pytest.CaptureFixture[str], cache: str, n_ctx: int, expected: str
) -> None:
    text = dry_run(capfd, sweep_bench, "-m", header, "-c", str(n_ctx), "-ctk", cache, "-fa", "-mla", "2")
    line = f"KV self size  = {expected} MiB, c^KV ({cache}): {expected} MiB, kv^T: not used"
    assert line in text, [found for found in text.splitlines() if "KV" in found]
    assert f"llama_kv_cache_init:        CPU KV buffer size =  {expected} MiB" in text
    for known in (
        "llm_load_print_meta: model params     = 672.050 B",
        "llm_load_print_meta: model size       = 226.003 GiB (2.889 BPW) ",
        "llm_load_print_meta: repeating layers = 224.169 GiB (2.873 BPW, 670.196 B parameters)",
    ):
        assert known in text
    (plan,) = [found.split() for found in text.splitlines() if found.startswith("memory plan") and "CPU" in found]
    assert plan[plan.index("CPU") + 1] == f"{226.003 * 1024:.2f}"[:4] + plan[plan.index("CPU") + 1][4:]
    assert plan[plan.index("CPU") + 4] == expected


def test_other_tools_plan_too(header: str, capfd: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capfd, perplexity, "-m", header, "-c", "512", "-b", "2048", "-ctk", "q8_0")
    assert "KV self size  =   72.91 MiB" in text, "four sequences of 512 tokens"
    assert bench.run(["-m", header, "-p", "512", "-n", "0", "-ctk", "q8_0", "--dry-run", "-t", "8"]) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[0].endswith("pp512:") and out[2].split()[7] == "18.23"


def test_the_server_plans_its_slots_and_opens_no_port(header: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        text = dry_run(capfd, server, "-m", header, "-c", "1024", "-np", "2", "-ctk", "q8_0", "--port", port)
    assert "KV self size  =   36.46 MiB" in text
    assert text.splitlines()[-1].startswith("Memory required for model tensors + cache: ")
    with pytest.raises(UsageError, match="--dry-run plans one model"):
        server.run(["--models-dir", str(Path(header).parent), "--dry-run"])


def test_buffer_sizes_do_not_count_repacked_tensors_twice(header: str, capfd: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capfd, sweep_bench, "-m", header, "-c", "512", "-rtr")
    (plan,) = [found.split() for found in text.splitlines() if found.startswith("memory plan") and "CPU" in found]
    buffers = dict(re.findall(r"llm_load_tensors: +(\S+) buffer size = +([\d.]+) MiB", text))
    mapped, copied = plan[plan.index("CPU") + 1 :][:2]
    assert buffers == {"CPU": mapped, "CPU_REPACK": copied} and float(copied) > 0
    whole = float(re.search(r"model size +=\s+([\d.]+) GiB", text)[1])  # type: ignore[index]
    assert float(mapped) + float(copied) == pytest.approx(whole * 1024, rel=1e-4)


def test_derived_and_repacked_tensors_are_planned(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "one-half.gguf")
    deepseek.metadata(writer, 4, 0)
    for name, shape, kind in deepseek.tensors(4, "q4_K", "q4_K", "q4_K"):
        if "attn_k_b" in name:
            continue  # its rows of 128 do not fit super-blocks
        if "attn_v_b" not in name:
            writer.add_tensor(name, shape, registry.by_name(kind).id)
    (shard,) = writer.plan()
    (tmp_path / "one-half.gguf").write_bytes(shard.header)
    lines: list[str] = []
    model = Model.load(tmp_path / "one-half.gguf", ModelParams(header_only=True, repack=True), log=lines.append)
    context = Context(model, ContextParams(n_ctx=512, n_ubatch=64, n_threads=4), log=lines.append)
    matrices = [info for info in model.gguf.tensors.values() if info.type_id == registry.by_name("q4_K").id]
    kinds = memory_report(context).devices["CPU"]
    # Everything but the token embedding is rearranged; attn_k_b [128, 512, 128] of every layer becomes Q8_0.
    assert kinds["copied"] == sum(info.nbytes for info in matrices if not info.name.startswith("token_embd"))
    assert kinds["derived"] == 4 * (128 * 512 * 128) * 34 // 32
    assert f"============ Repacked {len(matrices) - 1} tensors" in lines
    with pytest.raises(UsageError, match="measured, not run"):
        context.decode(Batch.single([1]))


SETTINGS = [
    {},
    {"mla": 0, "type_k": "q8_0", "type_v": "q8_0"},
    {"mla": 1, "flash_attn": False},
    {"mla": 2, "type_k": "q8_kv"},
    {"n_ubatch": 33, "n_batch": 64},
    {"n_ctx": 1024, "n_ubatch": 256, "attn_max_batch": 128, "n_threads": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("model", ["tiny-mla-moe", "gpt_oss", "phi3", "gemma2"])
def test_plans_equal_what_runs_allocate(
    model: str, settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Memory for huge pages is mapped, which tracemalloc does not see.
    monkeypatch.setattr(huge_pages, "transparent_page_size", lambda: 0)
    makers = {"gpt_oss": gpt_oss, "phi3": phi3_short_context, "gemma2": gemma2_27b}
    path = makers[model]()[0].write(tmp_path / "model.gguf") if model in makers else TINY
    if "q8_" in settings.get("type_k", "") and model in ("gemma2", "phi3"):
        settings = {**settings, "type_k": "f16", "type_v": "f16"}  # heads of 16 elements
    params = ContextParams(**({"n_ctx": 512, "n_ubatch": 128, "n_threads": 1} | settings))
    planned = Context(Model.load(path, ModelParams(header_only=True)), params)
    assert planned.allocated_bytes == {"cache": 0, "compute": 0}
    report = memory_report(planned).devices["CPU"]

    real_model = Model.load(path)
    grown: list[str] = []
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    real = Context(real_model, params, log=lambda line: grown.append(line) if "grows" in line else None)
    traced = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert real.allocated_bytes == {"cache": report["KV cache"], "compute": report["compute"]}
    assert memory_report(real).devices == memory_report(planned).devices
    # numpy reports its memory to tracemalloc: what was allocated in all is the plan and the records of graphs.
    wanted = report["KV cache"] + report["compute"] + report["derived"]
    assert wanted <= traced < wanted + 2 * MIB, f"planned {wanted}, allocated {traced}"

    rng = np.random.default_rng(2)
    for n in (real.n_ubatch, real.n_ubatch - 1, 127, 128, 100, 31, 17, 8, 2, 1):
        if n > min(real.n_ubatch, real.n_batch):
            continue
        for outputs in ("all", "last", "none"):
            real.kv.clear()
            tokens = rng.integers(0, real.model.hparams.n_vocab, n)
            real.decode(Batch.single(tokens, logits=outputs))
    assert not grown, grown
    assert real.allocated_bytes == {"cache": report["KV cache"], "compute": report["compute"]}


def test_no_tensor_data_is_needed(tmp_path: Path) -> None:
    whole = (DATA / "zoo" / "llama-moe.gguf").read_bytes()
    full = Model.load(DATA / "zoo" / "llama-moe.gguf")
    cut = tmp_path / "header.gguf"
    first = min(info.offset for info in full.gguf.tensors.values())
    cut.write_bytes(whole[:first])
    planned = Context(Model.load(cut, ModelParams(header_only=True)), ContextParams(n_ctx=256, n_threads=1))
    real = Context(full, ContextParams(n_ctx=256, n_threads=1))
    assert memory_report(planned).devices == memory_report(real).devices
    assert memory_report(real).devices["CPU"]["mapped"] > 0
    assert planned.model.gguf.value_type("general.architecture") == GGUFValueType.STRING


def test_planned_cells_take_no_memory() -> None:
    """A context of 2^31 cells would take 32 GiB for their tables alone."""
    model = Model.load(TINY, ModelParams(header_only=True))
    tracemalloc.start()
    try:
        context = Context(model, ContextParams(n_ctx=(1 << 31) - 1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(f"{peak / MIB:.1f} MiB")
    assert peak < 16 * MIB
    assert context.kv.pos.shape == context.kv.seq.shape == context.kv.delta.shape == (context.n_ctx,)
    assert context.kv.nbytes() == 9437184 * MIB
    assert context.kv.used_cells == 0
    with pytest.raises(UsageError, match="only the header"):
        context.decode(Batch.single([1]))


def test_buffers_that_live_together_do_not_overlap() -> None:
    rng = np.random.default_rng(7)
    for _ in range(30):
        first: dict[Buffer, int] = {}
        last: dict[Buffer, int] = {}
        for _ in range(int(rng.integers(1, 120))):
            buffer = Buffer(int(rng.choice([1, 64, 1000, int(rng.integers(1, 9999))])))
            first[buffer] = int(rng.integers(80))
            last[buffer] = first[buffer] + int(rng.choice([rng.integers(30), rng.integers(200)]))
        arena = place_buffers(first, last)
        places = [(b, arena.offsets[b], arena.offsets[b] + b.nbytes) for b in first]
        for a, a_start, a_end in places:
            assert a_start % 64 == 0 and a_end <= arena.nbytes
            for b, b_start, b_end in places:
                together = a is not b and first[a] <= last[b] and first[b] <= last[a]
                assert a_end <= b_start or b_end <= a_start or not together
        alive = [sum(-(-b.nbytes // 64) * 64 for b in first if first[b] <= i <= last[b]) for i in range(280)]
        assert arena.nbytes >= max(alive)


def test_buffers_that_live_to_the_end_are_placed_soon() -> None:
    """As where the inputs of all products are fetched from a GPU; ranges kept per step took minutes."""
    first = {Buffer(64 * (1 + i % 7)): i for i in range(1800)}
    begun = time.process_time()
    arena = place_buffers(first, dict.fromkeys(first, 1800))
    seconds = time.process_time() - begun
    assert seconds < 5, seconds
    assert arena.nbytes == sum(buffer.nbytes for buffer in first)


def test_a_gap_is_filled_by_what_fits_best() -> None:
    large, gone, small = Buffer(640), Buffer(1280), Buffer(640)
    arena = place_buffers({gone: 0, large: 0, small: 2}, {gone: 1, large: 3, small: 3})
    assert arena.offsets == {gone: 0, large: 1280, small: 0} and arena.nbytes == 1920
