"""Architectures of plain blocks (Phi-2, StarCoder 2, Pythia, Falcon, StableLM and others) against their definition."""

from __future__ import annotations

from pathlib import Path

import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import FileFormatError, IkpyError
from ikpy.models.size_class import size_class
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.quants.plain_blocks import F, Form, gelu_erf, made, model, relu_squared

PHI2 = Form("phi2", 161, parallel="one", rotated=10, biases=("qkv", "out", "ffn", "output"))
PHI2_FUSED = Form("phi2", 162, parallel="one", kv=4, rotated=10, biases=("qkv", "out", "ffn", "output"), fused=True)
STARCODER2 = Form("starcoder2", 163, biases=("qkv", "out", "ffn"), tied=True)
STARCODER2_PLAIN = Form("starcoder2", 164)
NEOX = Form(
    "gptneox",
    165,
    parallel="two",
    kv=4,
    rotated=6,
    act=gelu_erf,
    biases=("qkv", "out", "ffn"),
    fused=True,
    keys={"use_parallel_residual": True},
)
NEOX_IN_TURN = Form(
    "gptneox",
    166,
    kv=4,
    rotated=6,
    act=gelu_erf,
    biases=("qkv", "out", "ffn"),
    fused=True,
    keys={"use_parallel_residual": False},
)
FALCON = Form("falcon", 167, parallel="one", kv=1, act=gelu_erf, fused=True, tied=True)
FALCON_40B = Form("falcon", 168, parallel="one", act=gelu_erf, fused=True, attention_norm="attn_norm_2")
STABLELM = Form("stablelm", 169, rotated=6, act=ref.silu, gated=True, biases=("qkv",))
STABLELM_12B = Form("stablelm", 170, parallel="one", rotated=6, act=ref.silu, gated=True, head_norms="apart")

EVERYWHERE = ("qkv", "out", "ffn")
GPT2 = Form("gpt2", 171, kv=4, biases=EVERYWHERE, fused=True, tied=True, positions=True)
STARCODER = Form("starcoder", 172, kv=1, biases=EVERYWHERE, fused=True, positions=True)
CODESHELL = Form("codeshell", 173, biases=EVERYWHERE, fused=True)
ORION = Form("orion", 174, act=ref.silu, gated=True)
XVERSE = Form("xverse", 175, norms="rms", kv=4, neox=False, act=ref.silu, gated=True)
BAICHUAN = Form("baichuan", 176, norms="rms", kv=4, neox=False, act=ref.silu, gated=True)
QWEN = Form(
    "qwen",
    177,
    norms="rms",
    kv=4,
    act=ref.silu,
    gated=True,
    biases=("qkv",),
    fused=True,
    keys={"feed_forward_length": 2 * F},
)
CHATGLM = Form(
    "chatglm",
    178,
    norms="rms",
    rotated=14,
    neox=False,
    act=ref.silu,
    gated=True,
    biases=("qkv",),
    fused=True,
    fused_ffn=True,
)
GLM_EDGE = Form("chatglm", 179, norms="rms", rotated=14, neox=False, act=ref.silu, gated=True, fused_ffn=True)
PLAMO = Form("plamo", 180, norms="rms", parallel="one", act=ref.silu, gated=True)
OLMO = Form("olmo", 181, norms="bare", kv=4, neox=False, act=ref.silu, gated=True, tied=True)
OLMO_BOUNDED = Form(
    "olmo",
    182,
    norms="bare",
    neox=False,
    act=ref.silu,
    gated=True,
    clamp=0.8,
    keys={"attention.clamp_kqv": 0.8},
)

JAIS2 = Form("jais2", 183, act=relu_squared, biases=EVERYWHERE)
PANGU = Form("pangu-embedded", 184, norms="rms", act=ref.silu, gated=True, biases=("qkv", "out"))
PANGU_PLAIN = Form("pangu-embedded", 185, norms="rms", act=ref.silu, gated=True, tied=True)
MAINCODER = Form("maincoder", 186, norms="rms", neox=False, act=ref.silu, gated=True, head_norms="behind", tied=True)

FORMS = (
    PHI2,
    PHI2_FUSED,
    STARCODER2,
    STARCODER2_PLAIN,
    NEOX,
    NEOX_IN_TURN,
    FALCON,
    FALCON_40B,
    STABLELM,
    STABLELM_12B,
    GPT2,
    STARCODER,
    CODESHELL,
    ORION,
    XVERSE,
    BAICHUAN,
    QWEN,
    CHATGLM,
    GLM_EDGE,
    PLAMO,
    OLMO,
    OLMO_BOUNDED,
    JAIS2,
    PANGU,
    PANGU_PLAIN,
    MAINCODER,
)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_definition(form: Form, tmp_path: Path) -> None:
    m, truth = made(form)
    path = checks.check_definition(m, truth, tmp_path)
    if not form.positions and form.head_norms != "behind":
        checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.08)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (PHI2, "output.bias"),
        (PHI2, "blk.1.attn_norm.bias"),
        (PHI2_FUSED, "blk.2.attn_qkv.bias"),
        (STARCODER2, "output_norm.bias"),
        (NEOX, "blk.0.ffn_norm.bias"),
        (STABLELM, "blk.1.ffn_norm.bias"),
    ],
)
def test_a_bias_that_lacks(form: Form, name: str, tmp_path: Path) -> None:
    m = model(form)
    del m.weights[name]
    with pytest.raises(FileFormatError, match=f"tensor '{name}' not found"):
        Model.load(m.write(tmp_path / "model.gguf"))


def test_a_norm_of_some_layers(tmp_path: Path) -> None:
    """Branches are side by side in all layers or in none."""
    for form, message in (
        (STABLELM, r"blk\.2\.ffn_norm\.weight' not found"),
        (STABLELM_12B, r"not used: blk\.2\.ffn_norm\.weight"),
    ):
        m = model(form)
        if form is STABLELM:
            del m.weights["blk.2.ffn_norm"], m.weights["blk.2.ffn_norm.bias"]
        else:
            m.norm("blk.2.ffn_norm", len(m.weights["output_norm"]))
        with pytest.raises(FileFormatError, match=message):
            Model.load(m.write(tmp_path / "model.gguf"))


def test_positions_that_have_no_embedding(tmp_path: Path) -> None:
    path = model(GPT2).write(tmp_path / "model.gguf")
    context = Context(Model.load(path), ContextParams(n_ctx=1024, n_threads=1))
    with pytest.raises(IkpyError, match="512"):
        context.decode(Batch.single([5], 512))
    with pytest.raises(IkpyError):
        context.kv.seq_add(0, 0, -1, 4)


def test_size_classes() -> None:
    for arch, layers, expected in (
        ("phi2", 32, "3B"),
        ("starcoder2", 30, "3B"),
        ("falcon", 32, "7B"),
        ("stablelm", 40, "12B"),
        ("jais2", 68, "70B"),
        ("maincoder", 32, "1B"),
        ("pangu-embedded", 34, "7B"),
    ):
        assert size_class({"general.architecture": arch, f"{arch}.block_count": layers}) == expected
    shape = {"gptneox.block_count": 32, "gptneox.embedding_length": 2560}
    assert size_class({"general.architecture": "gptneox", **shape}) == "2.8B"
