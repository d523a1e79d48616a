"""Emulated int8 products of sm_90 (wgmma): bit for bit those of the kernels for all devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda import emulator, launch
from ikpy.graph.ir import F16, F32
from tests.cuda import programs
from tests.cuda.programs import Program
from tests.cuda.test_kernels_large import kernels_of
from tests.cuda.test_kernels_weights import QUANTIZED, packed

# One of each kind: scales per 32 or per 16, without and with offsets; row scales, interleaved rows, tables.
KINDS = ["q8_0", "q4_1", "q6_K", "q2_K", "iq4_ks", "iq5_ks_r4", "q8_k_r16", "iq3_kt"]


def target(first: int = 1) -> launch.Target:
    if programs.capability() != (9, 0):
        pytest.skip("this device has no wgmma")
    return launch.Target(large={"": launch.Large(wgmma=first)})


def assert_same(build, n_kv: int = 0) -> None:
    """build(program): values. The kernels differ and their results do not."""
    found, kernels = [], []
    for where in (launch.Target(), target()):
        p = Program(where)
        values = build(p)
        kernels.append([step.kernel for node in p.graph.nodes for step in launch.lower(node, lambda _: 0, where)])
        found.append(p.run(values, on_cuda=True, n_kv=n_kv))
    assert kernels[1] == [name.replace("matmul_", "wgmma_") for name in kernels[0]] != kernels[0]
    for plain, newer in zip(*found, strict=True):
        if programs.DEVICE is None and programs.PTX is None:
            assert plain.tobytes() == newer.tobytes(), f"{(plain != newer).sum()} of {plain.size} differ"
        else:  # nvcc may join multiplications and additions in one kernel that it leaves apart in the other
            programs.assert_close(newer[: n_kv or None], plain[: n_kv or None], 1e-5, "result")
        assert n_kv or np.isfinite(plain.astype(np.float64)).all()


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_product(type_name: str) -> None:
    """Steps that are not full (512 columns of a tile of 128 are), rows and tokens that fill no tile."""
    rng = np.random.default_rng(3)
    shape, n_tokens = (512, 80), 20
    data, x = packed(type_name, shape, 5), rng.standard_normal((n_tokens, shape[0]), np.float32)
    assert_same(lambda p: [p.graph.mul_mat(p.weight(data, type_name, shape), p.array(x))])


@pytest.mark.parametrize(("n_in", "n_tokens"), [(32, 9), (96, 64), (160, 130), (320, 257)])
@pytest.mark.parametrize("type_name", ["q8_0", "q5_1"])
def test_columns_and_tokens_that_fill_no_tile(type_name: str, n_in: int, n_tokens: int) -> None:
    rng = np.random.default_rng(n_tokens)
    data, x = packed(type_name, (n_in, 72), 5), rng.standard_normal((n_tokens, n_in), np.float32)
    bias = rng.standard_normal(72).astype(np.float32)
    assert_same(lambda p: [p.graph.mul_mat(p.weight(data, type_name, (n_in, 72)), p.array(x), p.array(bias))])


@pytest.mark.parametrize("type_name", KINDS)
def test_up_and_gate(type_name: str) -> None:
    rng = np.random.default_rng(1)
    shape, n_tokens = (256, 80), 40
    data = [packed(type_name, shape, seed) for seed in (1, 2)]
    x = rng.standard_normal((n_tokens, 256), np.float32)
    biases = [rng.standard_normal(80).astype(np.float32) for _ in range(2)]

    def build(p: Program) -> list:
        up, gate = (p.weight(d, type_name, shape) for d in data)
        return [p.graph.mul_mat_up_gate(up, gate, p.array(x), "silu", *map(p.array, biases))]

    assert_same(build)


@pytest.mark.parametrize("type_name", KINDS)
def test_experts(type_name: str) -> None:
    """Experts without tokens, and one with more than a tile takes."""
    rng = np.random.default_rng(4)
    n_experts, n_used, n_tokens, width, inner = 5, 2, 140, 256, 80
    ids = np.full((n_tokens, n_used), 3, np.int32)
    ids[:, 1] = rng.integers(0, 3, n_tokens)
    ids[0, 1] = -1
    data = [packed(type_name, (width, inner * n_experts), seed) for seed in range(2)]
    x = rng.standard_normal((n_tokens, width), np.float32)
    bias = rng.standard_normal((n_experts, inner)).astype(np.float32)

    def build(p: Program) -> list:
        id_value = p.array(ids)
        groups = p.graph.moe_group(id_value, n_experts)
        up, gate = (p.weight(d, type_name, (width, inner, n_experts)) for d in data)
        single = p.graph.mul_mat_id(up, p.array(x), id_value, groups, p.array(bias), per_slot=False)
        hidden = p.graph.mul_mat_id_up_gate(up, gate, p.array(x), id_value, groups, "silu")
        return [p.graph.moe_combine(out, None, id_value) for out in (single, hidden)]

    assert_same(build)


def test_batches_and_f16_results() -> None:
    rng = np.random.default_rng(4)
    heads, n_in, n_out, n_tokens = 3, 64, 24, 12
    data = packed("q8_0", (n_in, n_out * heads), 1)
    x = rng.standard_normal((n_tokens, heads, n_in), np.float32)

    def build(p: Program) -> list:
        w, q, out = p.weight(data, "q8_0", (n_in, n_out, heads)), p.array(x), []
        for type_id in (F32, F16):
            out.append(p.graph.new(n_out, heads, n_tokens, type_id=type_id))
            p.graph.mul_mat(w, q.permute(0, 2, 1), dst=out[-1].permute(0, 2, 1))
        return out

    assert_same(build)


def test_columns_counted_at_run_time() -> None:
    data = packed("q8_0", (64, 40), 1)
    x = np.random.default_rng(4).standard_normal((160, 64), np.float32)

    def build(p: Program) -> list:
        rows = p.array(x).view((64, 160), (256,), 0, dynamic_dim=1)
        w = p.weight(data, "q8_0", (64, 40))
        return [p.graph.mul_mat(w, rows, dst=p.graph.new(40, 160, dynamic_dim=1, type_id=F32))]

    for n_kv in (7, 150):
        assert_same(build, n_kv)


def test_few_tokens_and_floats_stay_with_mma() -> None:
    def kernel(type_name: str, n_tokens: int, first: int) -> str:
        p = Program(launch.Target(large={"": launch.Large(wgmma=first)}))
        p.graph.mul_mat(
            p.weight(packed(type_name, (64, 32), 1), type_name, (64, 32)), p.array(np.ones((n_tokens, 64), np.float32))
        )
        return kernels_of(p)[-1]

    assert [kernel("q4_0", n, 32) for n in (8, 31, 32)] == ["matvec4_q4_0", "matmul_q4_0", "wgmma_q4_0"]
    assert kernel("q4_0", 32, 0) == "matmul_q4_0" and kernel("f16", 32, 1) == "matmul_f16"


def test_experts_count_by_the_mean_of_their_tokens() -> None:
    p = Program(launch.Target(large={"": launch.Large(wgmma=32)}))
    w = p.weight(packed("q4_0", (64, 32 * 4), 1), "q4_0", (64, 32, 4))
    found = []
    for n_tokens in (63, 64):
        ids = p.array(np.zeros((n_tokens, 2), np.int32))
        groups = p.graph.moe_group(ids, 4)
        p.graph.mul_mat_id(w, p.array(np.ones((n_tokens, 64), np.float32)), ids, groups, per_slot=False)
        found.append(kernels_of(p)[-1])
    assert found == ["matmul_q4_0", "wgmma_q4_0"]


MISTAKES = {  # in matmul_wgmma.cuh: (line, what stands there instead, error)
    "no proxy fence": ("        fence_async();\n", "", "without a proxy fence"),
    "no wait for the copies": ("        wait_copies<0>();\n", "", "results|that nobody wrote"),
    "no barrier behind the copies": (
        "        __syncthreads();\n    };",
        "    };",
        "without a barrier|race|that nobody wrote|at a block barrier",
    ),
    "no fence of registers": ("        wgmma_fence(a[set]);\n", "", "without wgmma_fence|no wgmma_fence"),
    "products are not waited for": ("wgmma_finish<1>(of_group)", "wgmma_finish<2>(of_group)", "differ"),
    "one stage": ("stages + k % kStagesS8", "stages + k % 1", "operands|race|without a barrier|differ|results"),
    "rows of eight elsewhere": ("(depth / 16 ^ row % 8)", "(depth / 16 ^ row % 4)", "differ"),
    "tokens of the other group": ("column / 8 % 2 * kGroupTokens", "(1 - column / 8 % 2) * kGroupTokens", "differ"),
    "halves exchanged": ("a[2 - 2 * half] = a[3 - 2 * half] = 0", "a[2 * half] = a[1 + 2 * half] = 0", "differ"),
}


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error of the emulation, or because results differ."""
    right, wrong, error = MISTAKES[mistake]
    text = (emulator.KERNELS / "matmul_wgmma.cuh").read_text()
    assert text.count(right) == 1
    (tmp_path / "matmul_wgmma.cuh").write_text(text.replace(right, wrong))
    types = '#include "matmul_wgmma.cuh"\n#include "unpack/kquants.cuh"\n#include "unpack/legacy.cuh"\n'
    source = tmp_path / "wgmma_two.cu"
    source.write_text(types + "IKPY_WEIGHT_TYPE(q6_k, UnpackQ6_K);\nIKPY_WEIGHT_TYPE(q8_0, UnpackQ8_0);\n")
    others = [emulator.KERNELS / name for name in ("weights_kquants.cu", "weights_legacy.cu", "act_prepare.cu")]
    machine = emulator.build([source, *others], checked=True)
    monkeypatch.setattr(emulator, "library", lambda *, checked: machine)
    monkeypatch.setattr(programs, "DEVICE", None)
    x = np.random.default_rng(7).standard_normal((20, 512), np.float32)
    with pytest.raises((emulator.EmulationError, AssertionError), match=error):
        for type_name in ("q8_0", "q6_K"):
            data = packed(type_name, (512, 64), 2)
            assert_same(
                lambda p, data=data, name=type_name: [p.graph.mul_mat(p.weight(data, name, (512, 64)), p.array(x))]
            )
