"""Files of importance matrices: both forms, experts without data, wrong values, failed writes."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy.cli.imatrix import run
from ikpy.errors import FileFormatError, UsageError
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.graph.activations import ActivationSums
from ikpy.tools.imatrix_data import Entry, ImatrixData, save
from ikpy.tools.imatrix_file import read_file, read_imatrix
from tests.cpu.quantize.imatrices import legacy, partial, trailer, write_gguf


def quiet(_: str) -> None:
    """Drops log lines."""


def test_legacy_files_survive_reading_and_writing_bit_for_bit(tmp_path):
    rng = np.random.default_rng(1)
    values = (rng.random(4096) ** 8 * 1e5).astype(np.float32).tolist()
    content = legacy(
        ("blk.0.ffn_up.weight", 7, values), ("blk.1.ffn_up.weight", 213, values[:32]),
        trailer=trailer(213, "gr\u00fcn.txt".encode()),
    )  # fmt: skip
    source, target = tmp_path / "a.dat", tmp_path / "b.dat"
    source.write_bytes(content)
    assert run(["--in-file", str(source), "-o", str(target)]) == 0
    assert target.read_bytes() == content
    old = tmp_path / "old.dat"
    old.write_bytes(legacy(("blk.0.ffn_up.weight", 0, [1.5, 2.5])))
    assert read_imatrix(old).values["blk.0.ffn_up.weight"].tolist() == [1.5, 2.5]


def test_gguf_files_hold_the_same_means(tmp_path):
    """Converting there and back keeps every mean; the GGUF form is readable by the `gguf` package."""
    from gguf import GGUFReader

    source, middle, target = tmp_path / "a.dat", tmp_path / "b.gguf", tmp_path / "c.dat"
    source.write_bytes(legacy(("blk.0.ffn_up.weight", 4, [4.0, 8.0, 1.0]), trailer=trailer(4, b"text")))
    assert run(["--in-file", str(source), "-o", str(middle)]) == 0
    reader = GGUFReader(middle)
    assert {t.name: t.data.reshape(-1).tolist() for t in reader.tensors} == {
        "blk.0.ffn_up.weight.in_sum2": [4, 8, 1], "blk.0.ffn_up.weight.counts": [4],
    }  # fmt: skip
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["text"]
    assert reader.fields["imatrix.chunk_count"].contents() == 4
    assert run(["--in-file", str(middle), "-o", str(target)]) == 0
    assert target.read_bytes() == source.read_bytes()
    assert run(["--in-file", str(source), "-o", str(tmp_path / "named.dat"), "--output-format", "gguf"]) == 0
    assert (tmp_path / "named.dat").read_bytes()[:4] == b"GGUF"


def test_experts_without_data(tmp_path):
    """Below 5% they are stored as ones; above, the entry is dropped; the recorded wording."""
    path = tmp_path / "x.dat"
    log: list[str] = []
    save(partial(256, 1), str(path), "dat", chunks=1, log=log.append)
    assert log == [
        "save_imatrix: entry '                blk.0.ffn_up_exps.weight' has partial data (99.61%) "
        "1 out of 256 experts are missing data Storing **but be aware**"
    ]
    assert read_imatrix(path).values["blk.0.ffn_up_exps.weight"].tolist() == [1, 1] + [2, 2] * 255
    log.clear()
    save(partial(8, 1), str(path), "dat", chunks=1, log=log.append)
    assert log[0].endswith("has partial data (87.50%) 1 out of 8 experts are missing data - skipping")
    assert log[1] == "save_imatrix: warning: storing only 1 out of 2 entries"
    assert list(read_imatrix(path).values) == ["blk.0.ffn_up.weight"]
    log.clear()
    save(partial(50, 2), str(path), "dat", chunks=1, log=log.append)
    assert log[0].endswith("2 out of 50 experts are missing data Storing **but be aware**"), "halves round up"
    log.clear()
    save(partial(8, 8), str(path), "dat", chunks=1, log=log.append)
    assert log[0] == "save_imatrix: entry '                blk.0.ffn_up_exps.weight' has no data - skipping"
    save(partial(8, 3), str(tmp_path / "x.gguf"), "gguf", chunks=1, log=quiet)
    kept = read_file(tmp_path / "x.gguf").records[-1]
    assert kept.rows.tolist() == [0] * 3 + [3] * 5 and kept.mean().tolist() == [1, 1] * 3 + [2, 2] * 5


@pytest.mark.parametrize(("changes", "message"), [
    ({"imatrix.chunk_count": (GGUFValueType.STRING, "x")}, "imatrix.chunk_count is not a whole number"),
    ({"imatrix.chunk_size": (GGUFValueType.FLOAT32, 1.5)}, "imatrix.chunk_size is not a whole number"),
    ({"imatrix.chunk_count": (GGUFValueType.UINT32, 2**31)}, "x.gguf: imatrix.chunk_count cannot be 2147483648"),
    ({"imatrix.chunk_size": (GGUFValueType.INT32, -1)}, "x.gguf: imatrix.chunk_size cannot be -1"),
    ({"rows": 2e12}, "x.gguf: the number of calls of a.in_sum2 cannot be 3906249984"),
    ({"rows": np.nan}, "values of entry a.in_sum2 in .* are not finite"),
    ({"rows": np.inf}, "values of entry a.in_sum2 in .* are not finite"),
    ({"rows": 1e-40}, "values of entry a in .* are not finite"),
    ({"rows": -1.0}, "counts of a.in_sum2 are negative"),
    ({"sums": -1.0}, "entry a in .* has negative sums"),
])  # fmt: skip
def test_gguf_forms_with_wrong_values(tmp_path, changes, message):
    rows, sums = changes.pop("rows", 1.0), changes.pop("sums", 1.0)
    keys = {
        "general.type": (GGUFValueType.STRING, "imatrix"),
        "imatrix.datasets": (GGUFValueType.UINT32, 3),
        "imatrix.chunk_count": (GGUFValueType.UINT32, 0),
        "imatrix.chunk_size": (GGUFValueType.UINT32, 512),
        **changes,
    }
    path = tmp_path / "x.gguf"
    with GGUFWriter(path) as writer:
        for key, (kind, value) in keys.items():
            writer.add(key, kind, value)
        writer.add_tensor("a.in_sum2", (2, 1), 0)
        writer.add_tensor("a.counts", (1, 1), 0)
        writer.write("a.in_sum2", np.full(2, sums, "<f4"))
        writer.write("a.counts", np.array([rows], "<f4"))
    with pytest.raises(FileFormatError, match=message):
        read_imatrix(path)


def test_entries_without_rows_are_no_data(tmp_path):
    """Entries that saw no tokens are left out, experts without tokens are counted."""
    path = tmp_path / "x.gguf"
    entries = {
        "blk.0.ffn_down_exps.weight": (np.zeros((4, 2)), [0, 0, 0, 0]),
        "blk.0.ffn_up_exps.weight": (np.full((4, 2), 6.0), [3, 0, 0, 3]),
        "blk.1.ffn_up_exps.weight": (np.full((4, 2), 6.0), [3, 0, 3, 3]),
        "blk.1.ffn_up.weight": (np.full((1, 2), 6.0), [3]),
    }
    write_gguf(path, entries)
    matrix = read_imatrix(path)
    assert list(matrix.values) == list(entries)[1:]
    assert matrix.gaps() == [
        "blk.0.ffn_down_exps.weight of the importance matrix saw no tokens and counts as without data",
        "2 of 4 experts of blk.0.ffn_up_exps.weight have no data in the importance matrix (the largest share of 2 such "
        "entries); their columns all count the same",
    ]
    assert matrix.filtered(["blk.1"], []).gaps() == [
        "1 of 4 experts of blk.1.ffn_up_exps.weight have no data in the importance matrix; "
        "their columns all count the same"
    ]
    assert matrix.filtered([], ["exps"]).gaps() == []
    write_gguf(path, {"a": entries["blk.0.ffn_down_exps.weight"]})
    with pytest.raises(FileFormatError, match=r"load_imatrix: no data in file .*: none of its entries saw a token"):
        read_imatrix(path)
    assert len(read_file(path).records) == 1, "combining files keeps them"


def test_names_of_entries_steer_no_terminal(tmp_path, capfd):
    path = tmp_path / "x.gguf"
    write_gguf(path, {"blk.0.\x1b[31m": (np.ones((1, 2)), [1]), "blk.0.\x1b[32m": (np.zeros((1, 2)), [0])})
    assert run(["--in-file", str(path), "--show-statistics"]) == 0
    assert run(["--in-file", str(path), "-o", str(tmp_path / "x.dat")]) == 0
    out, err = capfd.readouterr()
    assert r" \x1b[31m " in out
    assert r"blk.0.\x1b[32m' has no data - skipping" in err
    assert "\x1b" not in out + err


def test_counts_of_legacy_files_that_cannot_be(tmp_path):
    path = tmp_path / "x.dat"
    path.write_bytes(legacy(("a", 1, [1.0]), trailer=trailer(-3, b"x")))
    with pytest.raises(FileFormatError, match=r"x\.dat: the chunk count cannot be -3"):
        read_imatrix(path)


@pytest.mark.parametrize("form", ["dat", "gguf"])
@pytest.mark.parametrize(("calls", "value", "chunks", "message"), [
    (2**31 - 1, 1.0, 5, "4294967294 chunks or calls are more than a file holds"),
    (5, 1.0, 2**31 - 1, "4294967294 chunks or calls are more than a file holds"),
    (5, 3e38, 5, "the sums of a are larger than a file holds"),
])  # fmt: skip
def test_sums_of_files_that_no_file_holds(tmp_path, form, calls, value, chunks, message):
    path, output = tmp_path / "x.dat", tmp_path / f"out.{form}"
    path.write_bytes(legacy(("a", calls, [value]), trailer=trailer(chunks, b"x")))
    with pytest.raises(UsageError, match=message):
        run(["--in-file", str(path), "--in-file", str(path), "-o", str(output)])
    assert not output.exists()


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.dat"
    path.write_bytes(b"old")
    live = ActivationSums("MUL_MAT", 2, 1)
    live.memory[:] = [np.nan, 1, 1, 1]
    with pytest.raises(FileFormatError, match=r"detected NaNs in blk\.0\.a\.weight"):
        save(ImatrixData(live={"blk.0.a.weight": live}), str(path), "dat", chunks=1, log=quiet)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_files_of_both_forms_weigh_by_their_calls(tmp_path, monkeypatch):
    """A call of a legacy file would else count like one of the many tokens of a GGUF file."""
    monkeypatch.chdir(tmp_path)
    name, experts = "blk.0.ffn_up.weight", "blk.0.ffn_up_exps.weight"
    (tmp_path / "old.dat").write_bytes(legacy((name, 3, [3.0, 6.0]), (experts, 3, [3.0, 6.0, 9.0, 12.0])))
    tokens = ImatrixData(chunk_size=512)
    tokens.loaded[name] = Entry(np.array([[5120.0, 512.0]]), np.array([512.0]), 1)
    tokens.loaded[experts] = Entry(np.array([[1000.0, 2000.0], [0.0, 0.0]]), np.array([500.0, 0.0]), 1)
    save(tokens, "new.gguf", "gguf", chunks=1, log=quiet)
    for output in ("both.gguf", "both.dat"):
        assert run(["--in-file", "old.dat", "--in-file", "new.gguf", "-o", output]) == 0
        found = read_imatrix(output).values
        assert np.allclose(found[name], [(3 * 1 + 10) / 4, (3 * 2 + 1) / 4])
        # The second expert saw no tokens of the newer text.
        assert np.allclose(found[experts], [(3 * 1 + 2) / 4, (3 * 2 + 4) / 4, 3, 4])
