"""Names whose block numbers have more digits than Python reads (4300): of no block, and no traceback."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.convert.families.base import place_apart
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.graph.activations import block_of
from ikpy.graph.division import attention_tensor
from ikpy.graph.placement import BLOCK_NAME, EXPERT_NAME
from ikpy.tools.imatrix_report import split_name

DIGITS = "9" * 5000


@pytest.fixture
def model(tmp_path):
    """A model with experts and a tensor of an impossible block for each kind that goes by its number."""
    path = tmp_path / "model.gguf"
    values = {"block_count": 1, "expert_count": 8, "expert_used_count": 2, "attention.head_count": 2}
    with GGUFWriter(path) as writer:
        writer.add("general.architecture", GGUFValueType.STRING, "llama")
        for key, value in values.items():
            writer.add(f"llama.{key}", GGUFValueType.UINT32, value)
        names = [f"blk.{number}.{kind}.weight" for number in ("0", DIGITS[:900]) for kind in ("ffn_down", "attn_v")]
        for name in names:
            writer.add_tensor(name, (256, 8), 0)
        for name in names:
            writer.write(name, np.ones((8, 256), np.float32))
    return path


@pytest.mark.parametrize(
    "options", [["Q4_K_M"], ["--prune-layers", "0", "Q8_0"], ["--dry-run", "--target-size", "9KiB", "AUTO"]]
)
def test_quantize(model, tmp_path, capsys, options):
    *before, ftype = options
    main(["quantize", *before, str(model), str(tmp_path / "out.gguf"), ftype])
    shown = "".join(capsys.readouterr())
    assert "Traceback" not in shown and "internal error" not in shown and "digits" not in shown, shown[-300:]


@pytest.mark.parametrize("name", ["²", DIGITS, f"Q4_{DIGITS}"])
def test_types_of_files(model, tmp_path, capsys, name):
    assert main(["quantize", str(model), str(tmp_path / "out.gguf"), name]) == 1
    assert "internal error" not in capsys.readouterr().err


def test_sizes(model, tmp_path, capsys):
    assert main(["quantize", "--target-size", f"{DIGITS}GiB", str(model), str(tmp_path / "out.gguf"), "AUTO"]) == 1
    assert "is no size such as" in capsys.readouterr().err


def test_other_readers_of_names():
    assert BLOCK_NAME.match(f"blk.{DIGITS}.attn_q.weight") is None
    assert EXPERT_NAME.match(f"blk.{DIGITS}.ffn_up_exps.weight") is None
    assert attention_tensor(f"blk.{DIGITS}.attn_q.weight") == (-1, "")
    assert split_name(f"blk.{DIGITS}.attn_q.weight")[0] is None
    assert block_of(f"blk.{DIGITS}.attn_q.weight") is block_of("blk.².attn_q.weight") is None
    assert place_apart(f"mtp.layers.{DIGITS}.mlp.up_proj.weight") == (None, f"layers.{DIGITS}.mlp.up_proj.weight")
