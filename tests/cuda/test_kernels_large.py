"""Emulated kernels of large products in bf16: on mma.sync (sm_80) and on wgmma (sm_90), against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda import emulator, launch
from ikpy.backends.cuda.launch import products_bf16
from ikpy.graph.ir import Node
from tests.cuda import programs
from tests.cuda.programs import Program
from tests.cuda.test_kernels_weights import packed, values

ACT_BF16, ACT_TILES = launch.ACT_BF16, launch.ACT_TILES
GEMM = {ACT_BF16: "gemm_bf16", ACT_TILES: "gemm_wgmma"}
FORMATS = pytest.mark.parametrize("fmt", list(GEMM), ids=list(GEMM.values()))


def target(fmt: int) -> launch.Target:
    if fmt == ACT_TILES and programs.capability() != (9, 0):
        pytest.skip("this device has no wgmma")
    if programs.capability() < (8, 0):
        pytest.skip("this device has no products of bf16")
    return launch.Target(large={"": launch.Large(1, fmt)})


def rounded(x: np.ndarray) -> np.ndarray:
    """To bf16, nearest even, as float64."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def kernels_of(p: Program) -> list[str]:
    return [step.kernel for step in launch.lower(p.graph.nodes[-1], lambda _: 0, p.target)]


@FORMATS
@pytest.mark.parametrize("n_tokens", [5, 130])
@pytest.mark.parametrize("type_name", ["q4_0", "q4_1", "mxfp4", "q8_0_r8", "bf16"])
def test_product(type_name: str, n_tokens: int, fmt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the rows, the last one smaller; row lengths and numbers of rows and tokens that fill no tile."""
    n_in, n_out = 192 if fmt == ACT_TILES else 96, 168
    monkeypatch.setattr(products_bf16, "PART_BYTES", 2 * n_in * 128)
    rng = np.random.default_rng(n_tokens)
    data = packed(type_name, (n_in, n_out), 5)
    x, bias = rng.standard_normal((n_tokens, n_in), np.float32), rng.standard_normal(n_out).astype(np.float32)
    p = Program(target(fmt))
    out = p.graph.mul_mat(p.weight(data, type_name, (n_in, n_out)), p.array(x), p.array(bias))
    if type_name != "bf16":
        assert kernels_of(p) == [f"rows_{type_name}", GEMM[fmt]] * 2
    else:
        assert kernels_of(p) == (["gemm_bf16"] if fmt == ACT_BF16 else ["rows_float", "gemm_wgmma"] * 2)
    (actual,) = p.run([out], on_cuda=True)
    expected = rounded(x) @ rounded(values(data, type_name, (n_in, n_out))).T + bias
    assert np.abs(actual.reshape(n_tokens, n_out) - expected).max() < 1e-5 * np.abs(expected).max()


@FORMATS
@pytest.mark.parametrize("type_name", ["q6_K", "iq4_ks_r4"])
def test_up_and_gate(type_name: str, fmt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_bf16, "PART_BYTES", 2 * 2 * 256 * 128)
    rng = np.random.default_rng(1)
    shape, n_tokens = (256, 200), 20
    data = [packed(type_name, shape, seed) for seed in (1, 2)]
    x = rng.standard_normal((n_tokens, 256), np.float32)
    biases = [rng.standard_normal(200).astype(np.float32) for _ in range(2)]
    p = Program(target(fmt))
    up, gate = (p.weight(d, type_name, shape) for d in data)
    out = p.graph.mul_mat_up_gate(up, gate, p.array(x), "silu", *map(p.array, biases))
    assert kernels_of(p) == [f"rows_{type_name.lower()}", f"rows_{type_name.lower()}", GEMM[fmt]] * 2
    (actual,) = p.run([out], on_cuda=True)
    u, g = (rounded(x) @ rounded(values(d, type_name, shape)).T + b for d, b in zip(data, biases, strict=True))
    with np.errstate(over="ignore"):
        expected = g / (1 + np.exp(-g)) * u
    assert np.abs(actual.reshape(n_tokens, 200) - expected).max() < 1e-4 * np.abs(expected).max()


def test_both_ways_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps than the pipeline has stages, as often as its barriers have parities."""
    shape, n_tokens = (512, 128), 128
    rng = np.random.default_rng(7)
    data, x = packed("q8_0", shape, 2), rng.standard_normal((n_tokens, 512), np.float32)
    found = []
    for fmt in GEMM:
        p = Program(target(fmt))
        out = p.graph.mul_mat(p.weight(data, "q8_0", shape), p.array(x))
        found.append(p.run([out], on_cuda=True)[0])
    assert np.abs(found[0] - found[1]).max() < 1e-5 * np.abs(found[0]).max()


def many_and_few(p: Program) -> list[Node]:
    w = p.weight(packed("q4_0", (64, 32), 1), "q4_0", (64, 32))
    nodes = []
    for n in (300, 255):
        p.graph.mul_mat(w, p.array(np.ones((n, 64), np.float32)))
        nodes.append(p.graph.nodes[-1])
    return nodes


def test_few_tokens_and_old_devices_stay_with_integers() -> None:
    many, few = many_and_few(Program())
    large = {"": launch.Large(256, ACT_TILES)}
    new, old = launch.Target.of([(9, 0)], large), launch.Target.of([(9, 0), (7, 5)], large)
    assert [launch.large_format(node, new) for node in (many, few)] == [ACT_TILES, None]
    assert launch.large_format(many, old) is None
    assert launch.large_format(many, launch.Target.of([(9, 0)], {"": launch.Large(0)})) is None


def test_every_family_may_have_its_own_way() -> None:
    many, few = many_and_few(Program())
    own = launch.Target.of([(9, 0)], {"": launch.Large(0), "weights_legacy": launch.Large(200, ACT_TILES)})
    other = launch.Target.of([(9, 0)], {"": launch.Large(200), "weights_kquants": launch.Large(1, ACT_TILES)})
    for node in (many, few):
        assert launch.large_format(node, own) == ACT_TILES
        assert launch.large_format(node, other) == ACT_BF16


def test_rows_that_fill_no_block_of_columns_take_mma() -> None:
    p = Program()
    for n_in in (96, 128):
        w = p.weight(packed("q4_0", (n_in, 32), 1), "q4_0", (n_in, 32))
        p.graph.mul_mat(w, p.array(np.ones((4, n_in), np.float32)))
        expected = ACT_BF16 if n_in == 96 else ACT_TILES
        assert launch.large_format(p.graph.nodes[-1], target(ACT_TILES)) == expected


MISTAKES = {  # in gemm_wgmma.cu: (line, what stands there instead, error)
    "no wait for the multiplying warps": (
        "if (round > 0) barrier_wait(&pipeline.empty[s], (round - 1) & 1);",
        "",
        "operands are overwritten|more arrivals|two copies|barrier that does not end",
    ),
    "no wait for the copies": (
        "barrier_wait(&pipeline.full[s], round & 1);",
        "",
        "without waiting for the copy|that nobody wrote|does not end",
    ),
    "a stage is given back too early": (
        "turn(k - 1).stage",
        "turn(k).stage",
        "operands are overwritten|more arrivals|barrier that does not end",
    ),
    "products are not waited for": ("wgmma_wait<1>();", "wgmma_wait<3>();", "operands are overwritten"),
    "sums are read too early": ("    wgmma_finish(sums);", "", "while products"),
    "sums replace what others read": (
        "        __syncthreads();  // nobody",
        "        __syncwarp();  // nobody",
        "operands are overwritten|threads wait at a block barrier|race",
    ),
    "no proxy fence": ("        fence_async();", "", "without a proxy fence"),
    "one arrival too few": ("pipeline.empty[s], kMultiplyingWarps", "pipeline.empty[s], 9", "that does not end"),
    "no announcement of one operand": (
        "full[s], sizeof(Stage));",
        "full[s], kTiledBytes);",
        "without waiting for the copy|that nobody wrote|does not end",
    ),
}


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_pipeline_are_found(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six steps, twice the number of stages."""
    right, wrong, error = MISTAKES[mistake]
    text = (emulator.KERNELS / "gemm_wgmma.cu").read_text()
    assert text.count(right) == 1
    source = tmp_path / "gemm_wgmma.cu"
    source.write_text(text.replace(right, wrong))
    others = [emulator.KERNELS / name for name in ("float.cu", "act_prepare.cu")]
    machine = emulator.build([source, *others], checked=True)
    monkeypatch.setattr(emulator, "library", lambda *, checked: machine)
    monkeypatch.setattr(programs, "DEVICE", None)
    p = Program(target(ACT_TILES))
    shape = (6 * 64, 128)
    x = np.random.default_rng(7).standard_normal((20, shape[0]), np.float32)
    out = p.graph.mul_mat(p.weight(packed("bf16", shape, 2), "bf16", shape), p.array(x))
    with pytest.raises(emulator.EmulationError, match=error):
        p.run([out], on_cuda=True)
