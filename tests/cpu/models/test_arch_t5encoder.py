"""t5encoder: states of random models against their definition, embeddings, types when quantized, refused files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.cli.quantize import run as quantize
from ikpy.engine.model import Model
from ikpy.errors import IkpyError
from ikpy.gguf.reader import GGUFFile
from ikpy.models.relative_biases import FARTHEST, buckets
from ikpy.quants import registry
from tests.cpu.models.encoder_checks import check_embeddings, check_states
from tests.cpu.models.reference_models import N_VOCAB
from tests.cpu.models.t5_models import T5Evaluation, bucket, new_t5

TOKENS = np.random.default_rng(31).integers(4, N_VOCAB, 170)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("kind", [{}, {"gated": False}, {"own_biases": True}], ids=["gated", "plain", "umt5"])
@pytest.mark.parametrize("n_buckets", [32, 14])
def test_states_are_those_of_the_definition(kind: dict[str, Any], n_buckets: int, flash: bool, tmp_path: Path) -> None:
    """Texts longer and shorter than the farthest difference."""
    model = new_t5("t5encoder", 41, **kind, **{"attention.relative_buckets_count": n_buckets})
    for n in (3, 33, 128):
        check_states(model, TOKENS[:n], T5Evaluation(model).states(TOKENS[:n]), tmp_path, flash=flash)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize(("n_k", "n_v"), [(31, 31), (13, 27), (64, 9)])
def test_odd_heads(n_k: int, n_v: int, flash: bool, tmp_path: Path) -> None:
    """Nothing of a head is rotated, so that its elements need not be even."""
    model = new_t5("t5encoder", 47, **{"attention.key_length": n_k, "attention.value_length": n_v})
    check_states(model, TOKENS[:33], T5Evaluation(model).states(TOKENS[:33]), tmp_path, flash=flash)


def test_buckets_are_those_of_the_definition() -> None:
    for n in (4, 14, 32, 33, 64, 255):
        for both_ways in (True, False):
            found = buckets(n, both_ways=both_ways)
            wanted = [bucket(d, n, both_ways=both_ways) for d in range(-FARTHEST, FARTHEST + 1)]
            assert found.tolist() == wanted, (n, both_ways)


def test_embeddings(tmp_path: Path) -> None:
    check_embeddings(new_t5("t5encoder", 42, pooling_type=1), tmp_path)


def test_quantized_types(tmp_path: Path) -> None:
    """As llama-quantize chooses: the biases stay, what attention gives is no `attn_output`, V and down get more."""
    model = new_t5("t5encoder", 43)
    for name, w in model.weights.items():
        if w.ndim > 1 and not name.endswith("attn_rel_b"):
            model.matrix(name, w.shape[0], 256)
    path = model.write(tmp_path / "model.gguf")
    wanted = {
        "Q3_K_M": {"attn_q": "q3_K", "attn_v": "q5_K", "attn_o": "q3_K", "ffn_down": "q4_K"},
        "Q4_K_S": {"attn_q": "q4_K", "attn_v": "q5_K", "attn_o": "q4_K", "ffn_down": "q4_K"},
        "IQ4_KS": {"attn_q": "iq4_ks", "attn_o": "iq4_ks", "ffn_down": "iq4_ks"},
    }
    for ftype, types in wanted.items():
        assert quantize([str(path), str(tmp_path / "small.gguf"), ftype]) == 0
        with GGUFFile.open(tmp_path / "small.gguf") as file:
            found = {name: registry.by_id(info.type_id).name for name, info in file.tensors.items()}
        assert found["enc.blk.0.attn_rel_b.weight"] == found["enc.blk.0.attn_norm.weight"] == "f32"
        assert {name: found[f"enc.blk.0.{name}.weight"] for name in types} == types, ftype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention.relative_buckets_count": 3}, "attention.relative_buckets_count is 3; 4 to 255 are possible"),
        ({"attention.relative_buckets_count": 30}, r"tensor 'enc.blk.0.attn_rel_b.weight' has wrong shape"),
        ({"attention.relative_buckets_count": None}, "relative_buckets_count"),
        ({"attention.key_length": 0}, "impossible dimensions: head 0/32$"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
    ],
)
def test_keys_that_cannot_be(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = new_t5("t5encoder", 44)
    model.keys = {key: value for key, value in (model.keys | change).items() if value is not None}
    with pytest.raises(IkpyError, match=message) as error:
        Model.load(model.write(tmp_path / "model.gguf"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["enc.blk.0.attn_rel_b", "enc.blk.1.attn_o", "enc.output_norm", "enc.blk.2.ffn_up"])
def test_tensors_that_are_missing(name: str, tmp_path: Path) -> None:
    model = new_t5("t5encoder", 45)
    del model.weights[name]
    with pytest.raises(IkpyError, match=f"tensor '{name}.weight' not found"):
        Model.load(model.write(tmp_path / "model.gguf"))


def test_decoders_are_no_part_of_it(tmp_path: Path) -> None:
    with pytest.raises(IkpyError, match=r"dec\.") as error:
        Model.load(new_t5("t5encoder", 46, n_decoder=1).write(tmp_path / "model.gguf"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "status", "shown"), [("-p 8 -n 4", 0, ["8"]), ("-p 0 -n 4", 1, []), ("-p 8 -n 0 -pg 4,4", 0, ["8"])]
)
def test_bench_generates_nothing(
    options: str, status: int, shown: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of single tokens, each a text of its own, are nobody's speed."""
    path = new_t5("t5encoder", 48).write(tmp_path / "model.gguf")
    line = ["bench", "-m", str(path), "-r", "1", "-t", "1", "-o", "csv", *options.split()]
    assert main(line) == status
    out, err = capsys.readouterr()
    assert [row["n_prompt"] for row in csv.DictReader(out.splitlines())] == shown
    assert err.count("embeds texts and writes none: its prompts (-p) alone are measured") == 1
