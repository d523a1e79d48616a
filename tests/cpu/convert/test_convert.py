"""`ikpy convert`: metadata and types, output files, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ikpy.cli import main
from ikpy.cli.convert import app
from ikpy.convert import Conversion, ConvertOptions
from ikpy.convert.families import FAMILIES
from ikpy.convert.rope import llama3_factors
from ikpy.convert.weights import Weights
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.models import ARCHITECTURES
from ikpy.quants import registry
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.checkpoints import convert
from tests.shared import ROOT


def types(file: GGUFFile) -> dict[str, str]:
    """Type name of every tensor."""
    return {info.name: registry.by_id(info.type_id).name for info in file.tensors.values()}


def test_metadata_of_llama(tmp_path):
    file = convert(made.CHECKPOINTS / "llama", tmp_path, model_name="Tiny Llama")
    expected = {
        "general.architecture": "llama",
        "general.name": "Tiny Llama",
        "general.file_type": 32,
        "llama.block_count": 2,
        "llama.context_length": 4096,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 500000.0,
        "llama.vocab_size": 384,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.bos_token_id": 379,
        "tokenizer.ggml.eos_token_id": 380,
        "tokenizer.ggml.eot_token_id": 381,
        "tokenizer.ggml.add_bos_token": True,
    }
    assert {key: file.metadata[key] for key in expected} == expected
    assert file.metadata["tokenizer.chat_template"].startswith("{% for m in messages %}")
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 384


def test_every_model_type_leads_to_an_architecture_that_runs():
    for model_type, target in FAMILIES.items():
        module, name = target.split(":")
        family = getattr(__import__(f"ikpy.convert.families.{module}", fromlist=[name]), name)
        assert family.arch in ARCHITECTURES, model_type


def test_older_spelling_of_rope_parameters(tmp_path):
    new = convert(made.CHECKPOINTS / "llama", tmp_path)
    keys, factors = dict(new.metadata), np.array(new.data(new.tensors["rope_freqs.weight"]))
    folder = made.copy("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_parameters"]
    made.amend(folder, drop=("rope_parameters",), rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    old = convert(folder, tmp_path)
    assert all(np.array_equal(old.metadata[key], value) for key, value in keys.items())
    assert np.array_equal(old.data(old.tensors["rope_freqs.weight"]), factors)


def test_llama3_factors_are_one_then_a_ramp_then_the_factor():
    rope = {
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_factors(rope, 128)
    assert factors.shape == (64,) and (factors[:28] == 1).all() and np.allclose(factors[36:], 8)
    assert (np.diff(factors) >= -1e-6).all()
    step = llama3_factors({**rope, "high_freq_factor": 1.0, "factor": 16.0}, 128)
    assert set(np.unique(step)) == {1.0, 16.0}


@pytest.mark.parametrize(("name", "value"), [("factor", 0), ("factor", -2), ("low_freq_factor", float("nan"))])
def test_llama3_factors_that_are_none(name: str, value: float, tmp_path: Path) -> None:
    """Refused before a file is written whose logits would be no numbers."""
    folder = made.copy("llama", tmp_path)
    usual = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    made.amend(folder, rope_scaling={"rope_type": "llama3", **usual, name: value}, drop=("rope_parameters",))
    with pytest.raises(FileFormatError, match="RoPE scaling 'llama3'"):
        Conversion(folder)


def test_types_of_tensors(tmp_path):
    found = types(convert(made.CHECKPOINTS / "gpt-oss", tmp_path, outtype="q8_0"))
    assert found["token_embd.weight"] == "q8_0"
    assert found["blk.0.ffn_gate_exps.weight"] == "mxfp4"
    for name in ("attn_norm.weight", "attn_q.bias", "attn_sinks.weight", "ffn_gate_inp.weight", "ffn_up_exps.bias"):
        assert found[f"blk.0.{name}"] == "f32", name
    # 24 columns are no whole block of 32.
    assert types(convert(made.CHECKPOINTS / "deepseek-v3", tmp_path, outtype="q8_0"))["blk.0.attn_q_b.weight"] == "bf16"


def test_auto_keeps_f16(tmp_path):
    folder = made.copy("llama", tmp_path)

    def to_f16(tensors: made.Tensors) -> None:
        for name, (_, shape, data) in tensors.items():
            values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
            tensors[name] = ("F16", shape, values.astype("<f2").tobytes())

    made.change_tensors(folder, to_f16)
    file = convert(folder, tmp_path)
    assert file.metadata["general.file_type"] == 1
    assert types(file)["output.weight"] == "f16"


# output files


def test_split_output(tmp_path):
    whole = convert(made.CHECKPOINTS / "qwen3moe", tmp_path)
    prefix = tmp_path / "parts.gguf"
    arguments = [str(made.CHECKPOINTS / "qwen3moe"), "--outfile", str(prefix), "--split-max-tensors", "10"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    n_files = -(-len(whole.tensors) // 10)
    parts = sorted(path.name for path in tmp_path.glob("parts-*.gguf"))
    assert parts == [f"parts-{i + 1:05d}-of-{n_files:05d}.gguf" for i in range(n_files)]
    joined = GGUFFile.open(str(tmp_path / parts[0]))
    assert list(joined.tensors) == list(whole.tensors)
    for name, info in whole.tensors.items():
        assert np.array_equal(whole.data(info), joined.data(joined.tensors[name])), name


def test_split_by_size(tmp_path):
    options = ConvertOptions(outfile=str(tmp_path / "m.gguf"), split_max_bytes=100_000)
    plan = Conversion(made.CHECKPOINTS / "llama", options).write()
    assert len(plan) > 1
    assert all(sum(t.nbytes for t in shard.tensors) <= 100_000 or len(shard.tensors) == 1 for shard in plan)
    assert len(GGUFFile.open(plan[0].path).tensors) == sum(len(shard.tensors) for shard in plan)


def test_dry_run_shows_the_plan_and_writes_nothing(tmp_path):
    folder = made.copy("llama", tmp_path)
    before = sorted(folder.iterdir())
    result = CliRunner().invoke(app, [str(folder), "--dry-run", "--outtype", "q8_0", "--split-max-size", "100K"])
    assert result.exit_code == 0, result.output
    assert "blk.1.ffn_down.weight" in result.output and "llama-Q8_0-00001-of-" in result.output
    assert sorted(folder.iterdir()) == before


def test_default_name_of_the_file(tmp_path):
    folder = made.copy("llama", tmp_path)
    assert main(["convert", str(folder), "--model-name", "Tiny", "--outtype", "f16", "--verbose"]) == 0
    assert (folder / "Tiny-F16.gguf").is_file()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_conversion_leaves_the_old_file(error, tmp_path):
    old = tmp_path / "m.gguf"
    old.write_bytes(b"old")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(error):
        Conversion(made.CHECKPOINTS / "llama", ConvertOptions(outfile=str(old))).write(stop)
    assert old.read_bytes() == b"old" and list(tmp_path.iterdir()) == [old]


def test_lack_of_memory_names_the_tensor(tmp_path, monkeypatch, capfd):
    load = Weights.load

    def fail(weights, name, kind):
        if name.endswith("layers.1.mlp.up_proj.weight"):
            raise MemoryError
        return load(weights, name, kind)

    monkeypatch.setattr(Weights, "load", fail)
    old = tmp_path / "m.gguf"
    old.write_bytes(b"old")
    assert main(["convert", str(made.CHECKPOINTS / "llama"), "--outfile", str(old), "--outtype", "f16"]) == 1
    err = capfd.readouterr().err
    assert "error: not enough memory to convert tensor 'model.layers.1.mlp.up_proj.weight' to f16" in err
    assert old.read_bytes() == b"old" and list(tmp_path.iterdir()) == [old]


PEAK = """
import sys
from ikpy.convert import Conversion, ConvertOptions
from tests.cpu.convert.checkpoints import CHECKPOINTS

def resident(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith(key))

Conversion(CHECKPOINTS / "mixtral", ConvertOptions(outtype="q8_0", outfile=sys.argv[2])).write()
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")  # the peak starts anew
before = resident("VmRSS")
Conversion(sys.argv[1], ConvertOptions(outtype="q8_0", outfile=sys.argv[2])).write()
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_model(tmp_path):
    # 384 MiB in 48 matrices of 8 MiB. Measured: 51 MiB at a time, mostly pieces of 16 MiB of floats.
    weights = made.write_sparse_mixtral(tmp_path / "big", n_embd=2048, n_ff=2048, n_expert=16)
    assert weights > 380 << 20
    command = [sys.executable, "-c", PEAK, str(tmp_path / "big"), str(tmp_path / "big.gguf")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 120, f"peak memory grew by {done.stdout.strip()} MiB"
