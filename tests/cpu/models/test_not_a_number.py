"""Models that compute NaN: the tools end at once, and the first op that made a value that is no number is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ikpy
from ikpy import LLM
from ikpy.cli import main
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.nan_search import first_not_a_number
from ikpy.engine.params import ContextParams
from ikpy.engine.sampling import NotANumberError
from ikpy.gguf.reader import GGUFFile
from ikpy.quants.registry import CACHE_TYPES
from tests.shared import DATA

ZOO = DATA / "zoo"
TEXT = "".join(f"{i} sheep and {i * i} goats. " for i in range(400))
# Logits that are no numbers, for a reason that shows in the first token that reads it.
NO_NUMBER = "; the first value that is no number comes from "
DAMAGES = [
    ("qwen3", "blk.1.ffn_down.weight", np.float16(np.nan), "mul_mat with blk.1.ffn_down.weight (f16)"),
    ("qwen3moe", "blk.1.ffn_down_exps.weight", np.float16(np.nan), "mul_mat_id with blk.1.ffn_down_exps.weight (f16)"),
    ("qwen3", "blk.1.attn_norm.weight", np.float32(3e38), "rms_norm with blk.1.attn_norm.weight (f32)"),
]


def damaged(tmp_path, model, tensor, value):
    """Copy of a model of whose tensor every element is `value`."""
    source, path = ZOO / f"{model}.gguf", tmp_path / "damaged.gguf"
    data = bytearray(source.read_bytes())
    with GGUFFile.open(source) as file:
        info = file.tensors[tensor]
    n = info.nbytes // value.nbytes
    data[info.offset : info.offset + info.nbytes] = value.tobytes() * n
    path.write_bytes(data)
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.mark.parametrize(("model", "tensor", "value", "where"), DAMAGES)
def test_the_first_op_is_named(model, tensor, value, where, tmp_path, text, capfd):
    path = str(damaged(tmp_path, model, tensor, value))
    assert main(["perplexity", "-m", path, "-f", text, "-c", "64", "-ub", "32", "-t", "2"]) == 1
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == "[1]nan,"
    error = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and error[0].endswith(NO_NUMBER + where)


@pytest.mark.parametrize(
    "mode", [["--ppl-stride", "32"], ["-b", "32"], ["--kl-divergence-base", "BASE"], ["--kl-divergence"]]
)
def test_all_modes_end_at_the_first_chunk(mode, tmp_path, text, capfd):
    base = str(tmp_path / "base.kld")
    common = ["-f", text, "-c", "64", "--chunks", "3", "-t", "2"]
    if mode == ["--kl-divergence"]:
        assert main(["perplexity", "-m", str(ZOO / "qwen3.gguf"), *common, "--kl-divergence-base", base]) == 0
        mode = [*mode, "--kl-divergence-base", base]
    model, tensor, value, where = DAMAGES[0]
    path = str(damaged(tmp_path, model, tensor, value))
    capfd.readouterr()
    assert main(["perplexity", "-m", path, *common, *(base if word == "BASE" else word for word in mode)]) == 1
    out, err = capfd.readouterr()
    assert "[2]" not in out and err.rstrip().endswith(where)


def with_nan_for(tmp_path, source, token):
    """Copy of a model with a NaN in the embedding of one token."""
    data, path = bytearray(Path(source).read_bytes()), tmp_path / "damaged.gguf"
    with GGUFFile.open(source) as file:
        info = file.tensors["token_embd.weight"]
    at = info.offset + token * info.nbytes // info.shape[1]
    data[at : at + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(data)
    return path


def test_tests_of_alternatives_end_with_its_name(tmp_path, capfd):
    """The NaN is in the row of a token that stands in the second task alone."""
    from ikpy.vocab import Vocab

    source, tasks = ZOO / "qwen3moe.gguf", tmp_path / "tasks.txt"
    with GGUFFile.open(source) as file:
        vocab = Vocab.from_metadata(file.metadata)
    first, second = "The dog\n0\nran\nsat\nate\nlay\n", "The dog\n0\nran\nsat\nate\nx7\n"
    token = next(t for t in vocab.tokenize(second) if t not in vocab.tokenize(first))
    tasks.write_text(first + second)
    arguments = [
        "-m",
        str(with_nan_for(tmp_path, source, token)),
        "-f",
        str(tasks),
        "--hellaswag",
        "-c",
        "256",
        "-t",
        "2",
    ]
    assert main(["perplexity", *arguments]) == 1
    assert capfd.readouterr().err.rstrip().endswith(NO_NUMBER + "get_rows with token_embd.weight (f16)")


def test_generated_text_ends_with_its_name(tmp_path, capfd):
    model, tensor, value, where = DAMAGES[0]
    path = str(damaged(tmp_path, model, tensor, value))
    assert main(["cli", "-m", path, "-p", "Three sheep", "-n", "4", "-c", "256", "-t", "2"]) == 1
    assert capfd.readouterr().err.rstrip().endswith(NO_NUMBER + where)


def with_nan_in_row(tmp_path, model, tensor, row):
    """Copy of a model with a NaN in one row of a matrix: one element of every key, or value, or latent."""
    source, path = ZOO / f"{model}.gguf", tmp_path / "damaged.gguf"
    data = bytearray(source.read_bytes())
    with GGUFFile.open(source) as file:
        info = file.tensors[tensor]
    at = info.offset + row * info.nbytes // info.shape[1]
    data[at : at + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(data)
    return path


CACHED = [("qwen3", "attn_k"), ("qwen3", "attn_v"), ("deepseek2-v3-mla", "attn_kv_a_mqa")]


@pytest.mark.parametrize("kind", CACHE_TYPES)
@pytest.mark.parametrize(("model", "tensor"), CACHED)
def test_no_cache_hides_it(model, tensor, kind, tmp_path):
    """Scales of blocks are made of the largest magnitude, which NaN is not."""
    name = f"blk.0.{tensor}.weight"
    loaded = Model.load(with_nan_in_row(tmp_path, model, name, 9))
    value = {} if tensor == "attn_k" else {"type_v": kind}
    for flash in (True, False) if tensor == "attn_k" else (True,):
        params = ContextParams(n_ctx=256, n_threads=1, type_k=kind, flash_attn=flash, **value)
        context = Context(loaded, params, log=lambda _: None)
        assert np.isnan(context.decode(Batch.single(np.arange(20), logits="all"))).all(), (kind, flash)
        assert np.isnan(context.decode(Batch.single([7], 20))).all(), "a single token"
        assert context.first_not_a_number(list(range(20))) == f"mul_mat with {name} (f16)"


@pytest.mark.parametrize("kind", ["f16", "q8_0", "iq4_nl", "q8_KV"])
def test_generated_text_ends_with_its_name_whatever_the_cache_is(kind, tmp_path, capfd):
    path = str(with_nan_in_row(tmp_path, "qwen3", "blk.0.attn_k.weight", 9))
    arguments = ["-p", "Three sheep", "-n", "4", "-c", "256", "-t", "1", "-ctk", kind, "-ctv", kind]
    assert main(["cli", "-m", path, *arguments]) == 1
    assert capfd.readouterr().err.rstrip().endswith(NO_NUMBER + "mul_mat with blk.0.attn_k.weight (f16)")


@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        (
            "blk.0.ffn_down.weight",
            np.float16(np.nan),
            "detected NaNs in blk.1.attn_q.weight; the model file may be damaged",
        ),
        ("output_norm.weight", np.float32(np.nan), "no number comes from rms_norm with output_norm.weight (f32)"),
    ],
)
def test_imatrix_ends_with_the_first_chunk(tensor, value, message, tmp_path, text, capfd):
    path, output = str(damaged(tmp_path, "qwen3", tensor, value)), tmp_path / "im.dat"
    assert main(["imatrix", "-m", path, "-f", text, "-o", str(output), "-c", "256", "-t", "2"]) == 1
    out, err = capfd.readouterr()
    assert not out and err.splitlines()[-1].endswith(message)
    assert not output.exists()


def test_sound_models_have_no_such_op():
    """Masks hold -infinity, which is none."""
    for name in ("qwen3", "qwen3moe", "deepseek2-v3-mla", "llama-moe"):
        context = Context(Model.load(ZOO / f"{name}.gguf"), ContextParams(n_ctx=256, n_batch=64, n_ubatch=32))
        assert context.first_not_a_number(list(range(1, 100))) == ""
        assert context.kv.used_cells == 0


def test_experts_that_are_left_out_are_not_looked_at(monkeypatch):
    """No product writes their results: what is there may be anything."""

    def search(built, memory, n_kv, run_op):
        def run(i):
            node = built.cpu_nodes[i]
            if node.kind.startswith("mul_mat_id"):
                memory[built.arena.offsets[node.dst.buffer] :][: node.dst.buffer.nbytes] = 0xFF
            run_op(i)

        return first_not_a_number(built, memory, n_kv, run)

    monkeypatch.setattr(ikpy.engine.context, "first_not_a_number", search)
    params = ContextParams(n_ctx=256, n_batch=64, n_ubatch=32, smart_expert_reduction=(1, 1.0))
    context = Context(Model.load(ZOO / "qwen3moe.gguf"), params)
    assert context.first_not_a_number(list(range(1, 100))) == ""


def test_texts_with_the_same_beginning_are_not_spoiled(tmp_path):
    """In a batch, the tokens before the one that brings a NaN get it, too."""
    llm = LLM(with_nan_for(tmp_path, ikpy.default_model_path(), 7), n_ctx=512, n_threads=1)
    with pytest.raises(NotANumberError):
        llm.generate([1, 2, 3, 7, 4], 4, temperature=0)
    found = llm.generate([1, 2, 3, 4], 4, temperature=0)
    assert found == LLM(n_ctx=512, n_threads=1).generate([1, 2, 3, 4], 4, temperature=0)
