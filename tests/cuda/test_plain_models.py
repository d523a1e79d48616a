"""Models of plain blocks on devices: biases of fused matrices, norms with biases, branches side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.graph.placement import PlacementParams
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.models.test_arch_alibi import BAICHUAN, BLOOM, BLOOM_SEVEN, JAIS, MPT, MPT_EMBEDDED, MPT_NORMED, REFACT
from tests.cpu.models.test_arch_chameleon import LEAST, chameleon
from tests.cpu.models.test_arch_grok import grok, grok2
from tests.cpu.models.test_arch_grovemoe import grovemoe
from tests.cpu.models.test_arch_older_moe import arctic, dbrx, openelm, plm, smallthinker
from tests.cpu.models.test_arch_phimoe import phimoe
from tests.cpu.models.test_arch_plain import (
    CHATGLM,
    FALCON_40B,
    GPT2,
    JAIS2,
    MAINCODER,
    NEOX,
    OLMO_BOUNDED,
    PHI2_FUSED,
    STABLELM_12B,
    STARCODER2,
)
from tests.cpu.models.test_arch_plamo import plamo3
from tests.cpu.quants.plain_blocks import Form, made
from tests.cuda.models import emulated, logits_of
from tests.cuda.test_placement_matrix import assert_same

N_PROMPT = 36
FORMS = (PHI2_FUSED, STARCODER2, NEOX, FALCON_40B, STABLELM_12B, GPT2, CHATGLM, OLMO_BOUNDED, JAIS2, MAINCODER)
BIASED = (BLOOM, BLOOM_SEVEN, MPT, MPT_NORMED, MPT_EMBEDDED, JAIS, REFACT, BAICHUAN)
PLACES: dict[str, dict[str, Any]] = {
    "all": {},
    "last layers": {"n_gpu_layers": 2},
    "attention on the CPU": {"rules": (("attn", "CPU"),)},
    "cache in host memory": {"kv_offload": False},
    "heads and networks divided": {"split_mode": "graph"},
    "divided unevenly": {"split_mode": "graph", "tensor_split": (3.0, 1.0)},
}


def check(m: RandomModel, truth: np.ndarray, where: str, folder: Path) -> None:
    """Holds a placement of a model to its truth."""
    path, places = m.write(folder / "model.gguf"), PlacementParams(**PLACES[where])
    with emulated(2) as kernels:
        ours = logits_of(path, TOKENS, N_PROMPT, placement=places, type_k="f32", type_v="f32")
    assert kernels.launched
    assert_same(ours, truth, 1e-4)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("form", FORMS + BIASED, ids=lambda form: form.name)
def test_dense(form: Form, where: str, tmp_path: Path) -> None:
    check(*made(form), where, tmp_path)


FURTHER = (dbrx, arctic, smallthinker, openelm, plm, phimoe, grovemoe, grok, grok2, plamo3)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("make", FURTHER, ids=lambda f: f.__name__)
def test_further(make: Any, where: str, tmp_path: Path) -> None:
    check(*make(), where, tmp_path)


@pytest.mark.parametrize("where", PLACES)
def test_tokens_of_pictures(where: str, tmp_path: Path) -> None:
    """Chameleon gives texts none of them."""
    m, truth = chameleon()
    path, places = m.write(tmp_path / "model.gguf"), PlacementParams(**PLACES[where])
    with emulated(2):
        ours = logits_of(path, TOKENS, N_PROMPT, placement=places, type_k="f32", type_v="f32")
    of_words = truth > LEAST
    assert (ours[~of_words] < LEAST).all()
    assert_same(ours[of_words].reshape(len(ours), -1), truth[of_words].reshape(len(ours), -1), 1e-4)
