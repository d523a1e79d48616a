"""`ikpy gguf dump --by-kind`: roles of tensors, their blocks and sizes."""

from __future__ import annotations

import json

from ikpy import default_model_path
from tests.cpu.gguf import gguf_files as made
from tests.cpu.gguf.test_gguf_tool import run


def test_dump_by_kind():
    """Roles of the bundled model's tensors; its experts are those of blocks 1 to 3."""
    path = default_model_path()
    lines = run("dump", "--by-kind", path)[0].splitlines()
    assert lines[0].split() == ["blocks", "kind", "type", "shape", "MiB", "each", "MiB", "all"]
    rows = [line.split() for line in lines]
    assert ["-", "token_embd.weight", "f16", "256", "x", "4096", "2.00", "2.00"] in rows
    assert ["0", "ffn_up.weight", "f16", "256", "x", "1024", "0.50", "0.50"] in rows
    assert ["1-3", "ffn_up_exps.weight", "f16", "256", "x", "256", "x", "8", "1.00", "3.00"] in rows
    assert lines[-3:] == [
        "experts: 9.00 MiB in 3 blocks (1-3)",
        "experts of a block: 3.00 MiB on average, 8 of 0.38 MiB",
        "everything else: 14.79 MiB",
    ]
    (down,) = (row for row in json.loads(run("dump", "--by-kind", "--json", path)[0]) if "down_exps" in row["kind"])
    assert down["blocks"] == [1, 2, 3] and down["total"] == 3 * down["nbytes"] == 3 * 2**20


def test_kinds_of_other_files(tmp_path):
    """Types nobody knows, blocks of different types, names that are no blocks, no experts."""
    tensors = [("blk.0.a", 12345), ("blk.1.a", 0), ("blk.2.a", 0), ("blk.4.a", 0), ("blk.x.a", 0)]
    endless = f"blk.{'9' * 1000}.a"
    tensors.append((endless, 0))
    path = tmp_path / "odd.gguf"
    path.write_bytes(
        made.build([], [made.tensor(name, (32,), kind, i * 128) for i, (name, kind) in enumerate(tensors)])
    )
    lines = [line.split() for line in run("dump", "--by-kind", path)[0].splitlines()]
    assert lines[1:] == [
        ["0", "a", "unknown(12345)", "32", "?", "0.00"],
        ["1-2,4", "a", "f32", "32", "0.00", "0.00"],
        ["-", "blk.x.a", "f32", "32", "0.00", "0.00"],
        ["-", endless, "f32", "32", "0.00", "0.00"],
    ]
