"""Architectures with linear biases of attention (ALiBi) against their definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.model import Model
from ikpy.errors import FileFormatError, IkpyError
from ikpy.models.size_class import size_class
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import LONG, TOKENS
from tests.cpu.quants.plain_blocks import HEAD, Blocks, Form, gelu_erf, made, model

EVERYWHERE = ("qkv", "out", "ffn")
BLOOM = Form("bloom", 201, kv=4, biases=EVERYWHERE, fused=True, tied=True, embedding_norm=True, max_bias=8.0)
# Slopes of heads that are no power of two.
BLOOM_SEVEN = replace(BLOOM, seed=202, heads=7, kv=7, head=24)
MPT = Form(
    "mpt",
    203,
    norms="layer",
    kv=4,
    act=gelu_erf,
    fused=True,
    tied=True,
    max_bias=6.0,
    clamp=0.9,
    keys={"attention.clamp_kqv": 0.9, "attention.max_alibi_bias": 6.0},
)
MPT_NORMED = Form(
    "mpt",
    204,
    kv=6,
    heads=6,
    head=16,
    act=gelu_erf,
    fused=True,
    biases=EVERYWHERE,
    head_norms="all",
    max_bias=8.0,
    keys={"attention.max_alibi_bias": 8.0},
)
MPT_EMBEDDED = Form("mpt", 205, norms="layer", kv=4, act=gelu_erf, fused=True, tied=True, positions=True)
JAIS = Form(
    "jais",
    206,
    kv=5,
    heads=5,
    biases=EVERYWHERE,
    act=ref.silu,
    gated=True,
    fused=True,
    max_bias=8.0,
    scale=HEAD**-0.5,
    keys={"attention.max_alibi_bias": 8.0},
)
REFACT = Form("refact", 207, norms="rms", heads=6, kv=1, act=ref.silu, gated=True, max_bias=8.0)
BAICHUAN = Form(
    "baichuan", 208, norms="rms", heads=5, kv=5, head=16, act=ref.silu, gated=True, max_bias=8.0, n_layer=40
)
FORMS = (BLOOM, BLOOM_SEVEN, MPT, MPT_NORMED, MPT_EMBEDDED, JAIS, REFACT, BAICHUAN)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_definition(form: Form, tmp_path: Path) -> None:
    m, truth = made(form)
    path = checks.check_definition(m, truth, tmp_path)
    if not form.positions:
        checks.check_shift(path)
    if form.head % 32 == 0:
        checks.check_quantized_cache(path, truth, 0.08)


@pytest.mark.parametrize("form", [BLOOM_SEVEN, JAIS, REFACT], ids=lambda form: form.name)
def test_prompts_in_micro_batches_and_sequences(form: Form, tmp_path: Path) -> None:
    m = model(form)
    truth = Blocks(form, m).logits(LONG)
    path = m.write(tmp_path / "model.gguf")
    for flash in (False, True):
        context = checks.context_of(path, n_ubatch=50, flash_attn=flash, type_k="f32", type_v="f32")
        logits = context.decode(Batch.single(LONG, logits="all"))
        checks.hold(f"micro-batches, flash={flash}", logits, truth, checks.FLOAT_BOUND)
        context = checks.context_of(path, n_seq_max=3, flash_attn=flash, type_k="f32", type_v="f32")
        checks.check_sequences(context, lambda tokens: Blocks(form, m).logits(tokens), checks.FLOAT_BOUND)


def test_distances_after_a_part_was_taken_out(tmp_path: Path) -> None:
    """As a context shift does: the tokens behind a hole move up, and distances across it shrink."""
    path = model(BLOOM_SEVEN).write(tmp_path / "model.gguf")
    contexts = [checks.context_of(path, type_k="f32", type_v="f32") for _ in range(2)]
    for context in contexts:
        context.decode(Batch.single(TOKENS[:-1]))
    n = len(TOKENS) - 1
    contexts[0].kv.seq_rm(0, 5, 15)
    left = contexts[0].decode(Batch.single(TOKENS[-1:], n))
    contexts[1].kv.seq_rm(0, 5, 15)
    contexts[1].kv.seq_add(0, 15, -1, -10)
    moved = contexts[1].decode(Batch.single(TOKENS[-1:], n - 10))
    difference = abs(left - moved).max() / abs(left).max()
    assert 1e-3 < difference < 1.0


def test_files_that_say_no_bias_or_an_impossible_one(tmp_path: Path) -> None:
    m = model(JAIS)
    del m.keys["attention.max_alibi_bias"]
    with pytest.raises(FileFormatError, match="max_alibi_bias"):
        Model.load(m.write(tmp_path / "model.gguf"))
    for value in (-1.0, 1e9):
        checks.refuses(model(MPT), "attention.max_alibi_bias", value, "max_alibi_bias is", tmp_path)


def test_embedded_positions_cannot_be_shifted(tmp_path: Path) -> None:
    context = checks.context_of(model(MPT_EMBEDDED).write(tmp_path / "model.gguf"))
    context.decode(Batch.single(TOKENS))
    with pytest.raises(IkpyError):
        context.kv.seq_add(0, 0, -1, 4)


def test_size_classes() -> None:
    for arch, layers, width, expected in (
        ("bloom", 24, 1536, "1B"),
        ("bloom", 30, 2560, "3B"),
        ("bloom", 30, 4096, "7B"),
        ("mpt", 48, 7168, "30B"),
        ("jais", 40, 5120, "13B"),
        ("refact", 32, 2048, "1B"),
        ("baichuan", 40, 5120, "13B"),
    ):
        shape = {f"{arch}.block_count": layers, f"{arch}.embedding_length": width}
        assert size_class({"general.architecture": arch, **shape}) == expected
