"""`ikpy convert` of Gemma 3n: stacked matrices, padded rows, values that files cannot say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import FileFormatError, IkpyError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.gemma3n_checkpoints import GEMMA3N, INPUT, KINDS, N_OWN, N_STREAMS
from tests.cpu.convert.seeded_checkpoints import D, V


def test_keys_and_tensors(tmp_path: Path) -> None:
    file = convert(tiny.write(GEMMA3N, tmp_path / "checkpoint"), tmp_path, outtype="bf16")
    keys = {key.removeprefix("gemma3n."): value for key, value in file.metadata.items()}
    assert list(keys["attention.sliding_window_pattern"]) == [kind == "sliding" for kind in KINDS]
    assert keys["rope.freq_base_swa"] == 10000 and keys["attention.shared_kv_layers"] == 2
    cutoffs = keys["activation_sparsity_scale"]
    assert cutoffs[0] == pytest.approx(1.6448536) and cutoffs[2] == -math.inf
    table = file.tensors["per_layer_token_embd.weight"]
    assert table.shape == (len(KINDS) * INPUT, V)
    rows = np.array(file.data(table)).reshape(V, -1)
    assert (rows[N_OWN:] == rows[0]).all() and not (rows[N_OWN - 1] == rows[0]).all()
    stacked = file.tensors["altup_unembd_proj.weight"]
    assert stacked.shape == (D, D, N_STREAMS - 1)
    weights = tiny.weights(GEMMA3N)
    values = np.array(file.data(stacked)).view(np.uint16).reshape(N_STREAMS - 1, D, D).astype(np.uint32) << 16
    for i, matrix in enumerate(values.view(np.float32)):
        np.testing.assert_array_equal(matrix, weights[f"model.altup_unembed_projections.{i}.weight"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"altup_correct_scale": False}, "altup_correct_scale false"),
        ({"altup_num_inputs": 4}, "altup_(unembd_)?proj.weight needs 3 parts, found 2 .part 2 is missing"),
        ({"altup_active_idx": 3}, "layers work on stream 3 are not possible"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": 1.0}, "activation_sparsity_pattern"),
        ({"hidden_activation": "silu"}, "activation 'silu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic'"),
        ({"intermediate_size": [96]}, "intermediate_size of 1 layers"),
        ({"laurel_rank": "x", "num_kv_shared_layers": 7}, "7 of 7 layers share"),
    ],
)
def test_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny.write(GEMMA3N, tmp_path / "checkpoint", **values)
    with pytest.raises(IkpyError, match=message):
        Conversion(folder)


def test_a_lacking_tensor(tmp_path: Path) -> None:
    folder = tiny.write(GEMMA3N, tmp_path / "checkpoint")
    stored = {name: tiny.entry(name, values) for name, values in tiny.weights(GEMMA3N).items()}
    del stored["model.layers.1.laurel.linear_left.weight"]
    made.write_tensors(folder / "model.safetensors", stored)
    with pytest.raises(FileFormatError, match=r"layer 1 lacks blk\.1\.laurel_l\.weight .from 'laurel\.linear_left'"):
        Conversion(folder)
