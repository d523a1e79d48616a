"""Ways to load: run-time repacking, reading instead of mapping, locked memory; and that a file is opened once."""

from __future__ import annotations

import itertools
import mmap
import re
from pathlib import Path

import numpy as np
import pytest

import ikpy
from ikpy._native import core
from ikpy.cli import quantize
from ikpy.cli import session as cli_session
from ikpy.cli.logs import ProgressDots
from ikpy.cli.parser import parse
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.gguf import encode
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.graph.builder import Graph
from ikpy.graph.ir import F16, Value
from ikpy.quants import registry
from ikpy.tools.gguf_split import split
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.models.test_adapters import llama_experts
from tests.cpu.models.test_zoo_holdouts import RMS, frame, gpt_oss_mxfp4, shape
from tests.shared import DATA

TINY = ikpy.default_model_path()
PAGE = mmap.PAGESIZE
DTYPES = {"f16": "<f2", "f64": "<f8"}
TOKENS = np.random.default_rng(3).integers(0, 150, 140).astype(np.int32)


def quantized(tmp_path: Path, ftype: str) -> Path:
    """The bundled model in another type."""
    out = tmp_path / f"{ftype}.gguf"
    assert quantize.run([str(TINY), str(out), ftype, "2"]) == 0
    return out


def fused_model(tmp_path: Path, kind: str, heads: int = 4, head: int = 24, f: int = 72) -> Path:
    """A phi3 whose q, k, v and gate, up rows are fused; k and v have 24 rows, no multiple of 16."""
    n, d, kv = 2, 64, 1
    m = RandomModel("phi3", 8, **shape(n, d, heads, kv, head, f), **RMS, **{"attention.sliding_window": 400})
    frame(m, d, tied=False)
    for il in range(n):
        m.norm(f"blk.{il}.attn_norm", d)
        m.norm(f"blk.{il}.ffn_norm", d)
        m.matrix(f"blk.{il}.attn_qkv", (heads + 2 * kv) * head, d)
        m.matrix(f"blk.{il}.attn_output", d, heads * head)
        m.matrix(f"blk.{il}.ffn_up", 2 * f, d)
        m.matrix(f"blk.{il}.ffn_down", d, f)
    for name in [name for name in m.weights if "attn_qkv" in name or "ffn_up" in name]:
        kind_row = registry.by_name(kind)
        rows = m.weights[name]
        encoded = core.quantize(rows, kind_row.id, None, 1)
        m.encoded[name] = (kind_row.id, encoded)
        m.weights[name] = core.dequantize(encoded, kind_row.id, rows.shape[1], rows.shape[0])
    return m.write(tmp_path / "fused.gguf")


def logits(model: Model, **settings: object) -> np.ndarray:
    context = Context(model, ContextParams(**({"n_ctx": 256, "n_threads": 2} | settings)))  # type: ignore[arg-type]
    whole = context.decode(Batch.single(TOKENS, logits="all"))
    return np.concatenate([whole, *(context.decode(Batch.single([7], len(TOKENS) + i)) for i in range(2))])


def weights_in_use(model: Model) -> dict[str, Value]:
    """Matrices that the graph of a prompt reads, by name."""
    context = Context(model, ContextParams(n_ctx=256, n_threads=1))
    nodes = context._plans.build(128, 1).cpu_nodes
    return {
        v.name: v for node in nodes if node.kind.startswith("mul_mat") for v in node.src if v is not None and v.name
    }


@pytest.mark.parametrize("ftype", ["Q4_0", "Q8_0", "Q4_K_S", "IQ4_NL"])
def test_repacked_weights_are_used_and_give_the_same_logits(ftype: str, tmp_path: Path) -> None:
    path = quantized(tmp_path, ftype)
    lines: list[str] = []
    plain, repacked = Model.load(path), Model.load(path, ModelParams(repack=True), log=lines.append)
    names = {
        info.name
        for info in plain.gguf.tensors.values()
        if len(info.shape) > 1
        and not info.name.startswith("token_embd")
        and registry.repack_target(registry.by_id(info.type_id).name) not in ("", "bf16_r16")
    }
    assert f"============ Repacked {len(names)} tensors" in lines and len(names) > 20
    used = weights_in_use(repacked)
    for name in names & set(used):
        value, info = used[name], plain.gguf.tensors[name]
        kind = registry.by_id(value.type_id)
        assert kind.repack_of == registry.by_id(info.type_id).name, f"{name} is {kind.name}"
        assert isinstance(value.buffer.owner, np.ndarray), f"{name} is still in the file"
    assert len(names & set(used)) > 20
    ours, theirs = logits(repacked), logits(plain)
    error = np.abs(ours - theirs).max(axis=1)
    assert error.max() < 2e-2 * np.abs(theirs).max(), f"row {int(error.argmax())} off by {error.max():.4f}"
    assert repacked.own_bytes == sum(plain.gguf.tensors[name].nbytes for name in names)


def test_rows_of_fused_tensors_stay_apart(tmp_path: Path) -> None:
    """24 rows of k and v are a multiple of 8, so the fused tensor is repacked; the views must begin at whole groups."""
    path = fused_model(tmp_path, "q8_0")
    plain, repacked = Model.load(path), Model.load(path, ModelParams(repack=True))
    assert repacked.replaced == {f"blk.{il}.{name}.weight" for il in (0, 1) for name in ("attn_qkv", "ffn_up")}
    ours, theirs = logits(repacked, type_k="f32", type_v="f32"), logits(plain, type_k="f32", type_v="f32")
    assert np.abs(ours - theirs).max() < 1e-2 * np.abs(theirs).max()


def test_row_groups_of_a_file_must_not_cross_fused_tensors(tmp_path: Path) -> None:
    """24 rows of k and v are no multiple of 16."""
    path = fused_model(tmp_path, "bf16_r16")
    with pytest.raises(UnsupportedError, match=r"attn_qkv\.weight' of type bf16_r16 joins matrices"):
        Model.load(path)


@pytest.mark.parametrize("options", [["IQ4_NL_R4"], ["--custom-q", "attn_qkv=iq4_nl_r4", "IQ4_NL_R4"], ["--repack"]])
def test_joined_matrices_stay_plain_where_groups_would_cross(options: list[str], tmp_path: Path, capfd) -> None:
    """22 rows of k and v are no multiple of 4, though the 396 rows of all three are; 96 of gate and up are."""
    kind, out = "iq4_nl" if "--repack" in options else "bf16", tmp_path / "out.gguf"
    files = [str(fused_model(tmp_path, kind, heads=16, head=22, f=96)), str(out)]
    assert quantize.run([*options[:-1], *files, options[-1]] if "--repack" not in options else [*options, *files]) == 0
    with GGUFFile.open(out) as file:
        kinds = {name: registry.by_id(info.type_id).name for name, info in file.tensors.items() if ".0." in name}
    assert (kinds["blk.0.attn_qkv.weight"], kinds["blk.0.ffn_up.weight"]) == ("iq4_nl", "iq4_nl_r4")
    line = "tensor joins matrices of 352, 22, 22 rows, no multiples of 4, the row group of iq4_nl_r4 - using iq4_nl"
    assert capfd.readouterr().err.count(line) == 2
    assert np.isfinite(logits(Model.load(out))).all()


def test_rearranging_says_which_joined_matrices_it_leaves(tmp_path: Path) -> None:
    lines: list[str] = []
    path = fused_model(tmp_path, "iq4_nl", heads=16, head=22, f=96)
    model = Model.load(path, ModelParams(repack=True), log=lines.append)
    assert model.replaced == {"blk.0.ffn_up.weight", "blk.1.ffn_up.weight"}
    note = "tensor blk.0.attn_qkv.weight is not rearranged: row groups would cross the matrices that it joins"
    assert f"llm_load_tensors: note: {note}" in lines


def test_an_impossible_number_of_layers_is_not_placed(tmp_path: Path) -> None:
    """Rearranging asks for the place of every layer before the model is built."""
    model, _ = llama_experts()
    model.keys["block_count"] = 2**31
    path, placed = model.write(tmp_path / "model.gguf"), []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(FileFormatError, match="block_count is 2147483648; 1 to"):
        patch.setattr("ikpy.engine.model.place", lambda *sizes: placed.append(sizes))
        Model.load(path, ModelParams(repack=True))
    assert not placed


def test_a_second_output_matrix_is_left_alone(tmp_path: Path) -> None:
    """Files of --extra-output-tensor load, and say what they said without it."""
    out, lines = tmp_path / "out.gguf", list[str]()
    assert quantize.run(["--extra-output-tensor", "q4_0", str(TINY), str(out), "COPY"]) == 0
    found = Model.load(out, log=lines.append)
    assert "llm_load_tensors: note: tensor output_extra.weight is not used" in lines
    assert np.array_equal(logits(found), logits(Model.load(TINY)))


def copied(source: Path, path: Path, types: dict[str, str], alignment: int = 32, title: str = "") -> Path:
    """A copy of a GGUF file with another title and alignment; tensors with an ending of types in that type."""
    with GGUFFile.open(source) as file, GGUFWriter(path, alignment=alignment) as out:
        out.copy_metadata(file, replace={"general.name": encode.scalar(GGUFValueType.STRING, title)})
        tensors = {}
        for name, info in file.tensors.items():
            kind = next((kind for end, kind in types.items() if name.endswith(end)), None)
            values = file.data(info) if kind is None else file.data(info).view("<f4").astype(DTYPES[kind])
            tensors[name] = values
            out.add_tensor(name, info.shape, info.type_id if kind is None else registry.by_name(kind).id)
        for name, values in tensors.items():
            out.write(name, values)
    return path


@pytest.mark.parametrize("name", ["llama-ropefreqs", "qwen2-yarn", "qwen3moe", "deepseek2-v3-mla"])
def test_norms_and_biases_of_any_type(name: str, tmp_path: Path) -> None:
    """Kernels read them as f32, so others are decoded at load; as f64 they are the same numbers."""
    source = DATA / "zoo" / f"{name}.gguf"
    ends = ("norm.weight", ".bias", "rope_freqs.weight")
    wanted = logits(Model.load(source))
    doubles = Model.load(copied(source, tmp_path / "f64.gguf", dict.fromkeys(ends, "f64")))
    halves = Model.load(copied(source, tmp_path / "f16.gguf", dict.fromkeys(ends, "f16")))
    assert len(doubles.replaced) >= 5 and doubles.replaced == halves.replaced
    assert (logits(doubles) == wanted).all()
    assert np.abs(logits(halves) - wanted).max() < 5e-3 * np.abs(wanted).max()


def test_other_weights_must_be_of_a_type_that_kernels_read(tmp_path: Path) -> None:
    graph = Graph(core)
    x, weight = graph.new(32, 2), graph.new(32, type_id=F16, name="odd.weight")
    with pytest.raises(UnsupportedError, match=r"'odd\.weight' has type f16; it is read as f32 only"):
        graph.rms_norm(x, weight, 1e-5)


@pytest.mark.parametrize("repack", [False, True])
@pytest.mark.parametrize("alignment", [1, 2])
def test_tensors_at_any_byte(alignment: int, repack: bool, tmp_path: Path) -> None:
    source = DATA / "zoo" / "qwen3.gguf"
    for length in range(4):
        path = copied(source, tmp_path / "odd.gguf", {}, alignment, "n" * length)
        with GGUFFile.open(path) as file:
            if any(info.offset % 4 for info in file.tensors.values()):
                break
    params = ModelParams(repack=repack)
    model, planned = Model.load(path, params), Model.load(path, ModelParams(repack=repack, header_only=True))
    assert model.own_bytes == planned.own_bytes > 0
    assert all(value.buffer.address % 4 == 0 for value in model.weights.values())  # type: ignore[operator]
    assert (logits(model) == logits(Model.load(source, params))).all()


def test_experts_are_repacked(tmp_path: Path) -> None:
    path = gpt_oss_mxfp4()[0].write(tmp_path / "model.gguf")
    plain, repacked = Model.load(path), Model.load(path, ModelParams(repack=True))
    assert any("exps" in name for name in repacked.replaced)
    ours, theirs = logits(repacked), logits(plain)
    # Routing may flip where two experts are equally good.
    error = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max()
    assert np.median(error) < 5e-3, f"median {np.median(error):.1e}"


@pytest.mark.parametrize("ff", [40, 64])
def test_single_experts_are_repacked(ff: int, tmp_path: Path) -> None:
    """Tensors per expert that lie one behind the other without padding are joined without a copy."""
    model, dims = llama_experts(ff)
    for name in [name for name in model.weights if name.endswith("_exps")]:
        whole = model.weights.pop(name)
        for e in range(dims.experts):
            model.weights[f"{name.removesuffix('_exps')}.{e}"] = whole[e]
    kind = registry.by_name("q8_0")
    for name in [name for name in model.weights if "ffn_gate." in name]:
        rows = model.weights[name]
        encoded = core.quantize(rows, kind.id, None, 1)
        model.encoded[name] = (kind.id, encoded)
        model.weights[name] = core.dequantize(encoded, kind.id, rows.shape[1], rows.shape[0])
    path = model.write(tmp_path / "model.gguf")
    plain, repacked = Model.load(path), Model.load(path, ModelParams(repack=True))
    joined = repacked.weights["blk.0.ffn_gate_exps.weight"]
    assert registry.by_id(joined.type_id).name == "q8_0_r8"
    first = repacked.weights["blk.0.ffn_gate.0.weight"]
    assert (joined.buffer.address == first.buffer.address) == (first.buffer.nbytes % 64 == 0) == (ff == 64)
    ours, theirs = logits(repacked), logits(plain)
    assert np.median(np.abs(ours - theirs).max(axis=1)) < 1e-2 * np.abs(theirs).max()


def test_repacked_weights_are_one_block(tmp_path: Path) -> None:
    """One behind the other, each at a multiple of 64: small tensors of their own would lie in small pages."""
    model = Model.load(quantized(tmp_path, "Q4_0"), ModelParams(repack=True))
    parts = sorted((v.buffer.address, v.buffer.nbytes) for n, v in model.weights.items() if n in model.replaced)
    assert len(parts) > 20
    for (begin, nbytes), (following, _) in itertools.pairwise(parts):
        assert begin % 64 == 0 and following == begin + -(-nbytes // 64) * 64


def test_f16_is_not_repacked() -> None:
    lines: list[str] = []
    model = Model.load(TINY, ModelParams(repack=True), log=lines.append)
    assert not model.replaced and "============ Repacked 0 tensors" in lines


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_reading_instead_of_mapping(tmp_path: Path) -> None:
    copy = tmp_path / "copy-to-be-read.gguf"
    copy.write_bytes(TINY.read_bytes())
    read = Model.load(copy, ModelParams(use_mmap=False))
    assert copy.name not in mapped_files()
    copy.unlink()
    ours = logits(read)
    assert (ours == logits(Model.load(TINY))).all()
    mapped = tmp_path / "copy-to-be-mapped.gguf"
    mapped.write_bytes(TINY.read_bytes())
    model = Model.load(mapped)
    assert mapped.name in mapped_files() and model.gguf.path.endswith(mapped.name)


def resident_bytes(area: np.ndarray) -> int:
    """Bytes in memory of the mappings that an array lies in."""
    first, end = area.ctypes.data, area.ctypes.data + area.nbytes
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) < end and int(span[2], 16) > first
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_what_was_read_and_repacked_is_in_memory_once(tmp_path: Path) -> None:
    path = quantized(tmp_path, "Q4_0")
    model = Model.load(path, ModelParams(repack=True, use_mmap=False))
    kept = sum(info.nbytes for name, info in model.gguf.tensors.items() if name not in model.replaced)
    left = resident_bytes(model.gguf.shards[0].data) - kept
    assert left < model.size_bytes / 2, f"{left} of {model.size_bytes} bytes are left"
    whole = GGUFFile.open(path)
    for name, info in model.gguf.tensors.items():
        assert (model.gguf.data(info) == whole.data(info)).all(), name
    assert model.fingerprint == Model.load(path).fingerprint
    assert (logits(model) == logits(Model.load(path, ModelParams(repack=True)))).all()


def test_a_tool_opens_the_file_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    opened = []
    real = GGUFFile.open.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(GGUFFile, "open", classmethod(lambda cls, *a, **k: (opened.append(a), real(cls, *a, **k))[1]))
    session = cli_session.load(parse(["-m", str(TINY), "-rtr"], "cli", {}))
    assert len(opened) == 1 and session.model.gguf.tensors
    assert "============ Repacked 0 tensors" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "rows"), [([], 1), (["--no-mmap"], 2), (["-rtr"], 1), (["--dry-run"], 0), (["--log-disable"], 0)]
)
def test_progress_dots(options: list[str], rows: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A dot per percent of the tensors, and before of the file where it is read."""
    cli_session.load(parse(["-m", str(TINY), *options], "cli", {}))
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if "...." in line and "=" not in line] == ["." * 100] * rows


def test_a_file_is_shown_and_judged_before_it_is_read(capfd: pytest.CaptureFixture[str]) -> None:
    """With --no-mmap reading takes minutes: the log says first of what, and a vocabulary that is none stops it."""
    line = ["-m", str(TINY), "--no-mmap", "-okv", "tokenizer.ggml.pre=str:nonsense"]
    with pytest.raises(UnsupportedError, match="nonsense"):
        cli_session.load(parse(line, "cli", {}))
    assert "." * 100 not in capfd.readouterr().err
    cli_session.load(parse(line[:3], "cli", {}))
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("llama_model_loader: loaded meta data") and lines.index("." * 100) > 50


def test_progress_is_that_of_all_parts(tmp_path: Path) -> None:
    source = tmp_path / "whole.gguf"
    source.write_bytes(TINY.read_bytes())
    split(str(source), str(tmp_path / "part"), max_tensors=20)
    first = min(tmp_path.glob("part-00001-of-*.gguf"))
    parts = len(list(tmp_path.glob("part-*.gguf")))
    read: list[float] = []
    assert len(GGUFFile.open(first, use_mmap=False, progress=read.append).shards) == parts > 2
    taken: list[float] = []
    Model.load(first, progress=taken.append)
    for shares in (read, taken):
        assert len(shares) >= parts and shares == sorted(shares) and shares[-1] == 1 and 0 < shares[0] < 1


def test_dots_end_before_other_lines(capfd: pytest.CaptureFixture[str]) -> None:
    """Log lines and errors begin on a line of their own."""
    with pytest.raises(ValueError, match="damaged"), ProgressDots(parse([], "cli", {})) as dots:
        dots(0.03)
        dots(0.02)
        dots.log("a note")
        dots(0.051)
        raise ValueError("damaged")
    assert capfd.readouterr().err == "...\na note\n..\n"


@pytest.mark.parametrize(("name", "expected"), [("deepseek2-v3-mla", True), ("deepseek2-lite", False)])
def test_files_with_one_latent_head_are_announced(name: str, expected: bool) -> None:
    lines: list[str] = []
    model = Model.load(DATA / "zoo" / f"{name}.gguf", log=lines.append)
    assert ("Detected incompatible DeepSeek model." in lines) == expected
    if expected:
        Context(model, ContextParams(n_ctx=256, n_threads=1), log=lines.append)
        n = model.hparams.n_layer
        assert f"============ llm_prepare_mla: need to compute {n} wkv_b tensors" in lines
        assert sum(line.startswith("Computed blk.") and "stored in buffer CPU" in line for line in lines) == n


def test_overrides_of_keys_that_the_file_lacks_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["-okv", "deepseek2.expert_use_count=int:1", "-okv", "general.name=str:x"]
    cli_session.load(parse(["-m", str(TINY), "--log-disable", *overrides], "perplexity"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "warning: --override-kv deepseek2.expert_use_count: the file has no such key "
        "(did you mean deepseek2.expert_used_count?)"
    )
