"""`ikpy imatrix`: collected statistics against recorded ones, both file forms, merging, interruption, reports."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from ikpy._native import core
from ikpy.cli.imatrix import run
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import FileFormatError, UnsupportedError, UsageError
from ikpy.graph.activations import ActivationCollector
from ikpy.tools import imatrix_report
from ikpy.tools.imatrix_data import ImatrixData
from ikpy.tools.imatrix_file import read_file
from tests.cpu.quantize.imatrices import MODEL, legacy, partial, write_short_text
from tests.shared import DATA, SHARED

RECORDED = DATA / "imatrix"
TOLERANCE = 1e-3
# The recorded program leaves attn_kv_b out when it expands cached latents; ikpy collects it.
ADDED = {f"blk.{i}.attn_kv_b.weight" for i in range(4)}


@pytest.fixture(scope="module")
def wiki() -> str:
    path = SHARED / "public" / "wiki.test.raw"
    if not path.exists():
        pytest.skip(f"{path} is absent (set IKPY_SHARED)")
    return str(path)


@pytest.fixture(scope="module")
def short_text(tmp_path_factory) -> str:
    return write_short_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def basic(wiki, tmp_path_factory) -> Path:
    """The file of four chunks of the recorded text."""
    path = tmp_path_factory.mktemp("basic") / "IMATRIX.dat"
    assert run(["-m", MODEL, "-f", wiki, "-o", str(path), "-c", "512", "--chunks", "4", "-t", "2"]) == 0
    return path


def compare(path: Path, recorded: str) -> None:
    """Every figure of a recorded digest: names, calls, sizes, sum, extremes, first values, trailer."""
    golden = json.loads((RECORDED / f"{recorded}.json").read_text())
    file = read_file(path)
    records = {record.name: record for record in file.records}
    assert set(records) == {entry["name"] for entry in golden["entries"]} | ADDED
    assert file.chunks == golden["last_chunk"]
    assert bool(file.datasets) == bool(golden["dataset"])
    worst = (0.0, "", "")
    for entry in golden["entries"]:
        record = records[entry["name"]]
        values = record.sums.reshape(-1).astype(np.float64)
        assert (record.calls, len(values)) == (entry["ncall"], entry["n"]), entry["name"]
        pairs = [("sum", values.sum(), entry["sum"]), ("min", values.min(), entry["min"])]
        pairs += [("max", values.max(), entry["max"])]
        pairs += [(f"value {i}", values[i], x) for i, x in enumerate(entry["first"])]
        worst = max([worst, *((abs(a / b - 1), entry["name"], what) for what, a, b in pairs)])
    assert worst[0] < TOLERANCE, f"largest relative difference {worst}"


# against the recorded program


def test_four_chunks(basic):
    compare(basic, "basic")


def test_files_on_the_way_count_loaded_calls(wiki, tmp_path, capfd):
    """Copies come at multiples of the frequency, as without a file to go on from."""
    output, first = tmp_path / "on.dat", tmp_path / "first.dat"
    arguments = ["-m", MODEL, "-f", wiki, "-c", "256", "-t", "2", "-ofreq", "0"]
    assert run([*arguments, "-o", str(first), "--chunks", "5"]) == 0
    capfd.readouterr()
    resumed = ["--in-file", str(first), "--from-chunk", "5", "--chunks", "3", "--save-frequency", "4"]
    assert run([*arguments, "-o", str(output), *resumed]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first.dat", "on.dat", "on.dat.at_8"]
    assert re.findall(r"after (\d+) chunks", capfd.readouterr().err) == ["8", "8"]


def test_printed_text(wiki, tmp_path, capfd):
    output = tmp_path / "IM2.dat"
    arguments = ["-m", MODEL, "-f", wiki, "-o", str(output), "-c", "256", "--chunks", "4", "-t", "2"]
    assert run([*arguments, "-ofreq", "1", "--save-frequency", "2"]) == 0
    compare(output, "frequency")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["IM2.dat", "IM2.dat.at_2", "IM2.dat.at_4"]
    assert read_file(tmp_path / "IM2.dat.at_2").chunks == 2
    out, err = capfd.readouterr()
    values, final = out.splitlines()
    ppl = [float(v) for v in re.findall(r"\[\d\]([\d.]+),", values)]
    bound = 4e-4 if core.has_tiles() else 1e-4  # F16 weights meet 16 bits of the activations on tiles
    np.testing.assert_allclose(ppl, [93.5601, 111.6651, 87.9065, 89.0802], rtol=bound)
    assert re.fullmatch(r"Final estimate: PPL = 89\.0\d\d\d \+/- 10\.359\d\d", final)
    lines = err[err.index("compute_imatrix:") :].splitlines()
    assert lines[0] == "compute_imatrix: tokenizing the input .."
    assert lines[1].startswith("compute_imatrix: tokenization took ") and lines[1].endswith(" ms")
    assert lines[2] == "compute_imatrix: computing over 4 chunks with batch_size 256"
    assert lines[3:5] == ["", f"save_imatrix: stored collected data after 1 chunks in {output}"]
    assert re.fullmatch(r"compute_imatrix: \d+\.\d\d seconds per pass - ETA \d+\.\d\d minutes", lines[5])
    saves = [line.split("after ")[1].replace(str(output), "F") for line in lines if line.startswith("save_imatrix")]
    assert saves == [
        "1 chunks in F", "2 chunks in F", "2 chunks in F.at_2", "3 chunks in F", "4 chunks in F", "4 chunks in F.at_4",
        "4 chunks in F",
    ]  # fmt: skip


def test_going_on_from_a_legacy_file(basic, wiki, tmp_path, capfd):
    output = tmp_path / "IM6.dat"
    arguments = ["-m", MODEL, "-f", wiki, "--in-file", str(basic), "--chunk", "4", "--chunks", "1", "-t", "2"]
    assert run([*arguments, "-o", str(output)]) == 0
    compare(output, "continue")
    out, err = capfd.readouterr()
    assert out.startswith(f"main : loading imatrix from '{basic}'\n[1]122.5")
    assert "compute_imatrix: removing initial 4 chunks (2048 tokens)\n" in err
    assert ".dat files do not say how many tokens" in err


def test_merging_without_text(basic, wiki, tmp_path, capfd):
    second, output = tmp_path / "IM2.dat", tmp_path / "IM3.dat"
    run(["-m", MODEL, "-f", wiki, "-o", str(second), "-c", "256", "--chunks", "4", "-t", "2"])
    capfd.readouterr()
    arguments = ["--in-file", str(basic), "--in-file", str(second), "-o", str(output)]
    assert run(["-m", MODEL, *arguments, "-t", "2"]) == 1
    compare(output, "merge-only")
    out, err = capfd.readouterr()
    assert out == (
        f"main : loading imatrix from '{basic}'\nmain : loading imatrix from '{second}'\n"
        f"main : saving combined imatrix to '{output}'\n"
    )
    assert f"\nsave_imatrix: stored collected data after 0 chunks in {output}\n" in err
    assert "compute_imatrix: you need at least 1024 tokens for a context of 512 tokens\n" in err
    assert "compute_imatrix: the data file you provided tokenizes to only 1 tokens\n" in err
    assert run(arguments) == 0, "no model is needed, and none is loaded"
    assert capfd.readouterr().err == f"\nsave_imatrix: stored collected data after 8 chunks in {output}\n"
    merged = read_file(output)
    assert merged.chunks == 8 and merged.datasets == [wiki]


def test_output_matrix_without_perplexity(wiki, tmp_path, capfd):
    output = tmp_path / "IM4.dat"
    arguments = ["-m", MODEL, "-f", wiki, "-o", str(output), "-c", "512", "--chunks", "2", "-t", "2"]
    assert run([*arguments, "--process-output", "--no-ppl"]) == 0
    compare(output, "process-output-no-ppl")
    assert capfd.readouterr().out == "\n"


def test_layer_similarity(wiki, tmp_path, capfd):
    arguments = ["-m", MODEL, "-f", wiki, "-o", str(tmp_path / "x.dat"), "--chunks", "2", "-lsim", "-t", "2"]
    assert run(arguments) == 0
    out, recorded = capfd.readouterr().out.splitlines()[2:], (RECORDED / "layer-similarity.out").read_text()
    expected = recorded.splitlines()[2:]
    number = re.compile(r"= (\S+)$")
    assert [number.sub("", line) for line in out] == [number.sub("", line) for line in expected]
    for line, other in zip(out, expected, strict=True):
        if match := number.search(line):
            assert float(match[1]) == pytest.approx(float(number.search(other)[1]), rel=1e-4), other


def test_quantization_is_better_with_it(basic, wiki, tmp_path, capfd):
    """IQ2_K of the bundled model over four chunks: 113.5 with it, 116.2 without, 112.4 for F16."""
    from ikpy.cli.perplexity import run as perplexity
    from ikpy.cli.quantize import run as quantize

    values = {}
    for name, options in {"with": ["--imatrix", str(basic)], "without": []}.items():
        target = str(tmp_path / f"{name}.gguf")
        assert quantize([*options, MODEL, target, "IQ2_K", "2"]) == 0
        capfd.readouterr()
        assert perplexity(["-m", target, "-f", wiki, "--chunks", "4", "-t", "2"]) == 0
        values[name] = float(capfd.readouterr().out.split(" = ")[1].split()[0])
    print(values)
    assert values["with"] < 0.985 * values["without"], values


# collection


def collect(n_tokens: int, *, n_ubatch: int = 512, n_threads: int = 2, **options) -> ActivationCollector:
    """Statistics of the bundled model over arbitrary tokens."""
    model = Model.load(MODEL)
    stored = {n: t.shape[2] if len(t.shape) > 2 else 1 for n, t in model.gguf.tensors.items()}
    collector = ActivationCollector(stored, output_name="output.weight")
    context = Context(
        model, ContextParams(n_ctx=512, n_ubatch=n_ubatch, n_threads=n_threads, collector=collector, **options)
    )
    tokens = np.random.default_rng(5).integers(0, 4000, n_tokens)
    context.decode(Batch.single(tokens, logits="all"))
    return collector


def test_rows_and_calls():
    collector = collect(300, n_ubatch=100)
    down, gate, head = (
        collector.entries[n] for n in ("blk.2.ffn_down_exps.weight", "blk.2.ffn_gate_inp.weight", "output.weight")
    )
    assert down.calls == gate.calls == head.calls == 3
    assert gate.rows.tolist() == [300] and head.rows.tolist() == [300]
    assert down.sums.shape == (8, 256) and down.rows.sum() == 600
    up = collector.entries["blk.2.ffn_up_exps.weight"]
    assert np.array_equal(up.rows, down.rows)
    # Every token goes to two experts: both the router and the experts read the same rows.
    np.testing.assert_allclose(up.sums.sum(axis=0), 2 * gate.sums[0], rtol=1e-12)
    assert "blk.2.ffn_gate_exps.weight" not in collector.entries


def test_few_rows_count_for_experts_only():
    collector = collect(10)
    used = {name for name, sums in collector.entries.items() if sums.calls}
    assert used == {f"blk.{i}.ffn_{kind}_exps.weight" for i in (1, 2, 3) for kind in ("up", "down")}


def test_thread_count_does_not_matter():
    # So many tokens that attention is not split over the threads, which would add its sums in another order.
    one, three = collect(300, n_threads=1), collect(300, n_threads=3)
    assert any(sums.calls for sums in one.entries.values())
    for name, sums in one.entries.items():
        np.testing.assert_allclose(three.entries[name].memory, sums.memory, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("mla", [0, 1, 2, 3])
def test_latent_attention_is_covered(mla):
    """attn_kv_b in every mode, always with the same values; attn_k_b and attn_v_b per head in the absorbed form."""
    collector = collect(200, mla=mla)
    used = {name: sums for name, sums in collector.entries.items() if sums.calls}
    kv_b = used["blk.1.attn_kv_b.weight"]
    assert kv_b.rows.tolist() == [200] and kv_b.sums.shape == (1, 512)
    norm = kv_b.sums.sum() / (200 * 512)
    assert 0.3 < norm < 3, "the latents are normed"
    assert ("blk.1.attn_k_b.weight" in used) == (mla == 1)
    if mla == 1:
        assert used["blk.1.attn_k_b.weight"].sums.shape == (4, 128)
        assert used["blk.1.attn_v_b.weight"].sums.shape == (4, 512)
        assert used["blk.1.attn_v_b.weight"].rows.tolist() == [200] * 4


def test_heads_of_a_file_are_covered_in_every_mode():
    """A file with attn_k_b and attn_v_b, and no attn_kv_b: the same sums whatever a mode multiplies with, but for
    attn_v_b, which the absorbed form of mode 1 gives means of latents."""
    model = Model.load(str(DATA / "zoo" / "deepseek2-v3-mla.gguf"))
    stored = {tensor.name: tensor.shape[2] if len(tensor.shape) > 2 else 1 for tensor in model.gguf.tensors.values()}
    names = [f"blk.1.attn_{kind}_b.weight" for kind in "kv"]
    assert set(names) < stored.keys() and "blk.1.attn_kv_b.weight" not in stored
    found = {}
    for mode in (0, 1, 2, 3):
        collector = ActivationCollector(stored)
        context = Context(model, ContextParams(n_ctx=256, n_threads=2, collector=collector, mla=mode))
        context.decode(Batch.single([7 * i % 250 for i in range(200)]))
        found[mode] = [collector.entries[name] for name in names]
    for mode, entries in found.items():
        for name, entry, first in zip(names, entries, found[0], strict=True):
            assert entry.rows.tolist() == [200] * 4, (mode, name)
            if mode != 1 or name == names[0]:
                np.testing.assert_allclose(entry.sums, first.sums, rtol=2e-3, err_msg=f"{mode} {name}")


def test_statistics_do_not_change_results_and_are_sums_of_squares():
    """The input of the first layer's matrices is known: the normed embedding."""
    model = Model.load(MODEL)
    collector = ActivationCollector({})
    batch = Batch.single(list(range(100, 140)), logits="all")
    with_statistics = Context(model, ContextParams(n_ctx=256, n_threads=2, collector=collector)).decode(batch)
    plain = Context(model, ContextParams(n_ctx=256, n_threads=2)).decode(batch)
    assert np.array_equal(with_statistics, plain)
    gguf = model.gguf
    table = gguf.data(gguf.tensors["token_embd.weight"]).view(np.float16).reshape(-1, 256)
    weight = gguf.data(gguf.tensors["blk.0.attn_norm.weight"]).view(np.float32)
    x = table[100:140].astype(np.float64)
    normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) * weight
    entry = collector.entries["blk.0.attn_q_a.weight"]
    np.testing.assert_allclose(entry.sums[0], (normed**2).sum(axis=0), rtol=1e-4)


# reports and errors


def test_statistics(tmp_path, capfd):
    path = tmp_path / "a.dat"
    path.write_bytes(legacy(("blk.0.ffn_up.weight", 1, [1, 1, 1, 5]), ("blk.1.ffn_up.weight", 2, [0, 0, 4, 4])))
    assert run(["--in-file", str(path), "--show-statistics"]) == 0
    out = capfd.readouterr().out
    assert f"Statistics of {path} (2 tensors)" in out
    assert run(["-m", "missing.gguf", "--in-file", str(path), "--show-statistics"]) == 0, "no model is needed"
    assert capfd.readouterr().out == out
    data = ImatrixData()
    data.load(str(path))
    first, second = imatrix_report.tensor_statistics(data)
    assert (first.layer, first.kind, first.total, first.mean, first.high) == (0, "ffn_up", 8, 2, 5)
    assert first.z_share == 0.25 and first.similarity is None
    assert first.entropy == pytest.approx(-(3 / 8 * np.log2(1 / 8) + 5 / 8 * np.log2(5 / 8)))
    assert second.active == 0.5 and second.entropy == 1 and second.relative_entropy == 0.5
    assert second.similarity == pytest.approx(12 / np.sqrt(28 * 8))


def test_coverage():
    lines = imatrix_report.coverage_lines(partial(8, 2), each=False)
    assert lines[0].startswith("expert coverage: 6 of 8 experts in 1 layers have data; rows per expert: mean 2.2, ")
    assert lines[1].endswith("6 of 8 experts have data, rows 0 to 3, median 3; none for 0, 1")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--in-file", "none.dat", "-f", "TEXT"], UsageError, r"failed to open file .none\.dat.: No such file"),
        (["--in-file", "BAD", "-o", "x.dat"], FileFormatError, "the file is damaged or no importance matrix"),
        (["--in-file", "GOOD"], UsageError, "nothing to do with one --in-file alone"),
        (
            ["-f", "TEXT", "-ub", "8", "-o", "x.dat"],
            UsageError,
            "batches of 8 tokens: those below 16 count for experts only",
        ),
        (["-f", "TEXT", "-b", "15", "-o", "x.dat"], UsageError, "batches of 15 tokens"),
        ([], UsageError, "no text: give one with -f FILE"),
        (["-m", "NONE.gguf", "-f", "EMPTY"], UsageError, "the text is empty"),
        (["-f", "TEXT", "-o", "."], UsageError, "this is a folder"),
        (["-f", "TEXT", "-o", "./TEXT"], UsageError, "this is the file given with -f"),
        (["-m", "GOOD", "-f", "TEXT", "-o", "GOOD"], UsageError, "this is the file given with -m"),
        (["-f", "TEXT", "-o", "/dev/null"], UsageError, "this is no regular file"),
        (["-f", "TEXT", "--chunks", "0"], UsageError, "--chunks 0 leaves nothing to process"),
        (["-f", "TEXT", "--output-draft", "x"], UnsupportedError, "--output-draft"),
        (["-f", "TEXT", "-c", "256", "-b", "8", "-ub", "8", "--chunks", "0"], UsageError, "--chunks 0"),
        (["--in-file", "GOOD", "--in-file", "OTHER", "-o", "x.dat"], UsageError, "inconsistent size for blk.0.a"),
    ],
)
def test_errors(arguments, error, message, short_text, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    good = legacy(("blk.0.a.weight", 1, [1.0, 2.0]))
    (tmp_path / "GOOD").write_bytes(good)
    (tmp_path / "BAD").write_bytes(good[:-3])
    (tmp_path / "OTHER").write_bytes(legacy(("blk.0.a.weight", 1, [1.0])))
    (tmp_path / "EMPTY").touch()
    shutil.copy(short_text, tmp_path / "TEXT")
    with pytest.raises(error, match=message):
        run(arguments)
    assert not (tmp_path / "x.dat").exists()


def test_a_matrix_of_another_model_is_refused_before_the_work(short_text, tmp_path, capfd):
    other = tmp_path / "other.dat"
    other.write_bytes(legacy(("blk.0.attn_q_a.weight", 1, [1.0] * 128)))
    with pytest.raises(UsageError, match=r"inconsistent size for blk\.0\.attn_q_a\.weight \(128 vs 256\)"):
        run(["-m", MODEL, "-f", short_text, "--in-file", str(other), "-o", str(tmp_path / "x.dat"), "-t", "2"])
    assert "[1]" not in capfd.readouterr().out


def test_too_little_text(short_text, tmp_path, capfd):
    tiny = tmp_path / "tiny.txt"
    tiny.write_text("Once upon a time")
    assert run(["-f", str(tiny), "-o", str(tmp_path / "x.dat"), "-t", "2"]) == 1
    err = capfd.readouterr().err
    assert "no model given with -m: using the bundled tiny-mla-moe" in err
    assert "compute_imatrix: you need at least 1024 tokens for a context of 512 tokens\n" in err
    assert run(["-f", short_text, "-o", str(tmp_path / "x.dat"), "-c", "256", "--from-chunk", "90"]) == 1
    assert "there will be not enough tokens left after removing 90 chunks\n" in capfd.readouterr().err
    assert not (tmp_path / "x.dat").exists()
