"""The PTX that nvcc makes of the kernels, executed: a selection of the tests of kernels, and mistakes that it finds.

All of them: `pytest tests/cuda --device ptx --arch 75`, 80 or 90.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda import launch, modules
from ikpy.backends.cuda.api import DeviceError
from tests.cuda import programs
from tests.cuda import test_kernels_attention as attention
from tests.cuda import test_kernels_indexer as indexer
from tests.cuda import test_kernels_large as large
from tests.cuda import test_kernels_ops as ops
from tests.cuda import test_kernels_recurrent as recurrent
from tests.cuda import test_kernels_weights as weights
from tests.cuda import test_kernels_wgmma as wgmma
from tests.cuda.ptx.cut import CutLibrary
from tests.cuda.ptx.launcher import MachineFault


def has_nvcc() -> bool:
    try:
        return bool(modules.nvcc())
    except DeviceError:
        return False


pytestmark = [
    pytest.mark.usefixtures("emulation"),
    pytest.mark.skipif(not has_nvcc(), reason="needs nvcc"),
    pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"),
]


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., CutLibrary]:
    """use(arch, edits): launches run on the machine, once and in the order in which copies are late."""

    def chosen(arch: int, edits: dict[str, str] | None = None) -> CutLibrary:
        library = CutLibrary(arch, tmp_path, edits)
        monkeypatch.setattr(programs, "PTX", library)
        monkeypatch.setattr(programs, "DEVICE", None)
        monkeypatch.setattr(programs, "ORDERS", programs.ORDERS[:2])
        return library

    return chosen


CASES: dict[str, Callable[[], None]] = {
    "unary": lambda: ops.test_unary_and_gated(rng(), "gelu", 33),
    "arithmetic": lambda: ops.test_arithmetic_with_broadcast(rng(), 33),
    "norms": lambda: ops.test_norms(rng()),
    "norm with preparation": lambda: ops.test_norm_fused_with_preparation(rng(), 320),
    "rope": lambda: ops.test_rope(rng(), True, 1.0),
    "temperature": lambda: ops.test_attention_temperature(rng()),
    "cache": lambda: ops.test_cache_store_and_copy(rng(), "q8_0"),
    "cache shift": lambda: ops.test_cache_shift(rng(), "q5_1", 64),
    "hadamard": lambda: ops.test_hadamard(rng()),
    "mask": lambda: ops.test_mask(rng(), "sliding", True, False, False),
    "mask of pictures": lambda: ops.test_mask(rng(), "sliding", True, False, True),
    "routing": lambda: ops.test_routing(rng(), sorted(ops.ROUTES)[0], 40),
    "assignments": lambda: ops.test_assignments_sorted_by_expert(rng(), 70),
    "preparation": lambda: ops.test_prepared_activations_are_those_of_the_cpu(rng(), 320),
    "attention, one token": lambda: attention.test_head_sizes(64, 1),
    "attention, many tokens": lambda: attention.test_head_sizes(64, 25),
    "attention over a converted cache": lambda: attention.test_cache_types("q8_0", 12),
    "attention over nibbles and fifth bits": lambda: attention.test_cache_types("q5_1", 2),
    "attention over nibbles and pairs": lambda: attention.test_cache_types("q6_0", 2),
    "attention over levels": lambda: attention.test_cache_types("iq4_nl", 2),
    "attention over rows with one factor": lambda: attention.test_cache_types("q8_KV", 2),
    "attention over bf16": lambda: attention.test_cache_types("bf16", 12),
    "attention, other head size": lambda: attention.test_other_head_sizes_take_the_plain_kernel("q8_0"),
    "attention in parts": lambda: attention.test_cells_split_over_blocks(5),
    "latent attention": lambda: attention.test_latent_attention("f16", 16, 1),
    "convolution": lambda: recurrent.test_convolution(rng(), 4, 9),
    "delta rule": lambda: recurrent.test_delta_rule(rng(), 128, 40, 9, True),
    "selective scan": lambda: recurrent.scan(rng(), 9, 40, 128, keep=True),
    "states of RWKV": lambda: recurrent.test_wkv(rng(), 64, 40, 9, True, "removing"),
    "choice of cells": lambda: indexer.test_choice(3, 16),
    "cells of chosen stretches": lambda: indexer.test_cells_of_chosen_stretches(9, 300, 4, 7),
    "attention to chosen cells": lambda: indexer.test_attention_to_chosen_latents("q8_0", 1),
    "experts": lambda: weights.test_experts("q4_K", 3),
}


@pytest.mark.parametrize("arch", [75, 80])
@pytest.mark.parametrize("case", CASES)
def test_kernels(use: Callable[..., CutLibrary], case: str, arch: int) -> None:
    use(arch)
    CASES[case]()


@pytest.mark.parametrize("arch", [75, 80])
@pytest.mark.parametrize("family", launch.family_types())
def test_weights(use: Callable[..., CutLibrary], family: str, arch: int) -> None:
    """Rows, one token, a few and many of a type of every family; on sm_75 of those that differ in tensor products."""
    if arch == 75 and family not in ("float", "weights_legacy", "weights_kquants", "weights_trellis"):
        pytest.skip("its code for sm_75 differs as that of other families does")
    use(arch)
    lower = launch.family_types()[family]
    type_name = next((name for name in weights.QUANTIZED if name.lower() == lower), lower)
    if family == "float":
        for n_tokens in (1, 6, 21):
            weights.check_product(type_name, 136, 48, n_tokens, 2e-6)
        return
    weights.test_rows_equal_the_numpy_decoder(type_name)
    for n_tokens in (1, 5, 20):
        weights.test_product(type_name, n_tokens)


def test_large_products_in_bf16(use: Callable[..., CutLibrary], monkeypatch: pytest.MonkeyPatch) -> None:
    use(80)
    large.test_product("q4_1", 130, launch.ACT_BF16, monkeypatch)


def test_large_products_by_wgmma(use: Callable[..., CutLibrary], monkeypatch: pytest.MonkeyPatch) -> None:
    use(90)
    large.test_product("q4_1", 130, launch.ACT_TILES, monkeypatch)


@pytest.mark.parametrize("type_name", ["q6_K", "q4_1"])
def test_integer_products_by_wgmma(use: Callable[..., CutLibrary], type_name: str) -> None:
    """Scales per 16, and per 32 with offsets."""
    use(90)
    wgmma.test_product(type_name)


# What only a device's code has: (architecture, text in the kernels, what stands there instead, test).
MISTAKES: dict[str, tuple[int, str, str, Callable[[], None]]] = {
    "rows of a fragment in another order": (
        80,
        '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start.x)',
        '"r"(a[0]), "r"(a[2]), "r"(a[1]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start.x)',
        lambda: weights.check_product("q4_0", 256, 48, 20, 2e-6),
    ),
    "the halves of sm_75 exchanged": (
        75,
        '"r"(a[2 + h]), "r"(b[1])',
        '"r"(a[2 + h]), "r"(b[0])',
        lambda: weights.check_product("q4_0", 256, 48, 20, 2e-6),
    ),
    "matrices that are not transposed": (80, "x4.trans.shared", "x4.shared", lambda: attention.test_head_sizes(64, 25)),
    "copies that nobody waits for": (80, "cp.async.wait_group %0;", "", lambda: attention.test_head_sizes(64, 25)),
    "copies of too few bytes": (80, "(valid ? 16 : 0)", "(valid ? 8 : 0)", lambda: attention.test_head_sizes(64, 25)),
    "a descriptor with another stride": (
        90,
        "kEightRows = 1024 >> 4",
        "kEightRows = 512 >> 4",
        lambda: wgmma.test_product("q4_1"),
    ),
    "no fence of the async proxy": (90, "fence.proxy.async.shared::cta;", "", lambda: wgmma.test_product("q4_1")),
    "products that nobody waits for": (
        90,
        "wgmma.wait_group.sync.aligned %0;",
        "",
        lambda: wgmma.test_product("q4_1"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_device_code_are_found(use: Callable[..., CutLibrary], mistake: str) -> None:
    """By a fault or because results differ; the emulation for the host cannot see them."""
    arch, old, new, test = MISTAKES[mistake]
    library = use(arch, {old: new})
    with pytest.raises((MachineFault, AssertionError)):
        test()
    assert library.all_edited()
