"""Emulated CUDA kernels of all weight types: decoded rows against the numpy decoders, products against the CPU."""

from __future__ import annotations

import re

import numpy as np
import pytest

from benchmarks.random_weights import random_tensor
from ikpy.backends.cuda import emulator, launch
from ikpy.backends.cuda.launch import products
from ikpy.graph.ir import F16, F32
from ikpy.quants import by_name, dequantize, registry
from ikpy.quants.tables import table
from tests.cuda.programs import Program
from tests.expected_products import assert_close, effective

QUANTIZED = sorted(launch.weight_types() - launch.FLOAT_WEIGHTS)
FLOATS = sorted(launch.FLOAT_WEIGHTS)
INTERLEAVED = sorted(name for name in QUANTIZED if by_name(name).interleave > 1)


def packed(type_name: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Bytes of a random weight; every bit pattern of codes occurs, scales are moderate."""
    if type_name in ("f32", "f16", "bf16"):
        x = np.random.default_rng(seed).standard_normal(shape, np.float32)
        if type_name == "bf16":
            return (x.view(np.uint32) >> 16).astype(np.uint16)
        return x.astype(type_name.replace("f", "float"))
    return random_tensor(by_name(type_name), shape, seed)


def values(data: np.ndarray, type_name: str, shape: tuple[int, ...]) -> np.ndarray:
    return dequantize(data.reshape(-1).view(np.uint8), type_name, shape, compute_scale=True)


def test_every_stored_type_has_kernels() -> None:
    stored = {row.name for row in registry.all_types() if row.is_quantized and not row.activation_only}
    assert stored - {"i2_s"} == set(QUANTIZED)


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_rows_equal_the_numpy_decoder(type_name: str) -> None:
    shape = (512, 16)
    data = packed(type_name, shape, 3)
    expected = values(data, type_name, shape)
    p = Program()
    ids = np.array([3, 15, 0, 6, 9, 9], np.int32)
    rows = p.graph.get_rows(p.weight(data, type_name, shape), p.array(ids))
    (actual,) = p.run([rows], on_cuda=True)
    # Scales are multiplied in another order than the format says.
    error = np.abs(actual.reshape(6, 512) - expected[ids]) / (np.abs(expected[ids]).max() + 1e-30)
    row, column = np.unravel_index(np.argmax(error), error.shape)
    assert error[row, column] < 3e-7, (
        f"{type_name} row {ids[row]} element {column}: {actual.reshape(6, 512)[row, column]} instead of "
        f"{expected[ids[row], column]}"
    )


def check_product(type_name: str, n_in: int, n_out: int, n_tokens: int, bound: float) -> None:
    rng = np.random.default_rng(n_tokens)
    data = packed(type_name, (n_in, n_out), 5)
    w = values(data, type_name, (n_in, n_out)).astype(np.float64)
    x = rng.standard_normal((n_tokens, n_in), np.float32)
    p = Program()
    out = p.graph.mul_mat(p.weight(data, type_name, (n_in, n_out)), p.array(x))
    (actual,) = p.run([out], on_cuda=True)
    assert_close(actual.reshape(n_tokens, n_out), w, effective(x, type_name), bound, f"{type_name} {n_tokens} tokens")


@pytest.mark.parametrize("n_tokens", [1, 5, 20])
@pytest.mark.parametrize("type_name", QUANTIZED)
def test_product(type_name: str, n_tokens: int) -> None:
    check_product(type_name, 512, 48, n_tokens, 2e-6)


@pytest.mark.parametrize("n_tokens", [1, 7])
@pytest.mark.parametrize("type_name", ["q4_0", "q6_K", "q2_K", "iq4_ks", "q4_0_r8", "f16", "bf16"])
def test_products_that_follow_each_other_are_launched_at_once(type_name: str, n_tokens: int) -> None:
    """As those of queries, keys and values are, of different sizes and with biases; results are the same as apart."""
    rng = np.random.default_rng(n_tokens)
    x, bias = rng.standard_normal((n_tokens, 1024), np.float32), rng.standard_normal(24).astype(np.float32)
    weights = [packed(type_name, (1024, n), n) for n in (48, 24, 24, 72, 16)]
    results = []
    for merge in (False, True):
        p = Program(merge=merge)
        q, k, v, more, last = (
            p.weight(w, type_name, (1024, n)) for w, n in zip(weights, (48, 24, 24, 72, 16), strict=True)
        )
        a = p.array(x)
        found = [p.graph.mul_mat(q, a), p.graph.mul_mat(k, a, p.array(bias)), p.graph.mul_mat(v, a)]
        found += [p.graph.mul_mat_up_gate(more, more, a, "silu"), p.graph.mul_mat(last, a)]
        results.append(p.run(found, on_cuda=True))
        vectors = [step for step in p.launches if step.kernel.startswith("matvec")]
        assert len(vectors) == (2 if merge else 5)
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_products_that_are_not_launched_at_once() -> None:
    """Of results of the one before, of other types or numbers of tokens."""
    rng = np.random.default_rng(0)
    square, other = packed("q4_0", (512, 512), 1), packed("q8_0", (512, 512), 1)
    p = Program(merge=True)
    w, w8 = p.weight(square, "q4_0", (512, 512)), p.weight(other, "q8_0", (512, 512))
    f = p.weight(packed("f32", (512, 512), 1), "f32", (512, 512))
    x, y = p.array(rng.standard_normal((1, 512), np.float32)), p.array(rng.standard_normal((7, 512), np.float32))
    first = p.graph.mul_mat(f, x)
    second = p.graph.mul_mat(f, first)
    results = [first, second, p.graph.mul_mat(w, x), p.graph.mul_mat(w8, x), p.graph.mul_mat(w8, y)]
    p.run(results, on_cuda=True)
    names = [step.kernel for step in p.launches if step.kernel.startswith("matvec")]
    assert names == ["matvec1_f32", "matvec1_f32", "matvec1_q4_0", "matvec1_q8_0", "matvec4_q8_0"]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type_name", ["q4_0", "q4_K", "iq2_ks", "f16", "bf16"])
def test_broken_activations_stay_visible(type_name: str, broken: float) -> None:
    """As on the CPU: all products of a row with a NaN or an infinity are useless, others are not."""
    for n_tokens in (2, 20):
        x = np.ones((n_tokens, 512), np.float32)
        x[1, 77] = broken
        p = Program()
        out = p.graph.mul_mat(p.weight(packed(type_name, (512, 48), 5), type_name, (512, 48)), p.array(x))
        (actual,) = p.run([out], on_cuda=True)
        finite = np.isfinite(actual.reshape(n_tokens, 48))
        assert finite[0].all() and not finite[1].any() and finite[2:].all()


@pytest.mark.parametrize("n_tokens", [1, 6, 21])
@pytest.mark.parametrize("type_name", FLOATS)
def test_float_product(type_name: str, n_tokens: int) -> None:
    check_product(type_name, 136, 48, n_tokens, 2e-6)


@pytest.mark.parametrize("type_name", ["q4_0", "iq4_nl", "q5_1", "q4_0_r8"])
def test_row_lengths_that_fill_no_tile(type_name: str) -> None:
    check_product(type_name, 96, 72, 1, 2e-6)
    check_product(type_name, 160, 72, 130, 2e-6)


@pytest.mark.parametrize("type_name", ["q6_K", "q2_K", "iq3_ks", "f16"])
def test_long_rows_are_shared_by_warps(type_name: str) -> None:
    check_product(type_name, 4096, 10, 1, 2e-6)
    check_product(type_name, 4096, 10, 3, 2e-6)


@pytest.mark.parametrize("type_name", ["iq2_xxs", "iq3_xxs"])
def test_long_rows_with_copies_of_tables(type_name: str) -> None:
    """Four warps share rows of up to 8,192 columns; below, and for shorter ones, a block has one table."""
    check_product(type_name, 8192, 10, 1, 2e-6)
    check_product(type_name, 8192 - 256, 10, 1, 2e-6)


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_rows_of_an_odd_number_of_blocks(type_name: str) -> None:
    """Rows start at the smallest multiple of bytes that occurs: loads that ask for more alignment are errors."""
    n_in = by_name(type_name).block_elements * (1 if by_name(type_name).block_elements >= 64 else 3)
    check_product(type_name, n_in, 48, 1, 2e-6)
    check_product(type_name, n_in, 48, 20, 2e-6)


@pytest.mark.parametrize("type_name", FLOATS)
def test_more_rows_than_a_grid_holds(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MAX_GRID_YZ", 3)
    check_product(type_name, 32, 48, 2, 2e-6)


def test_weights_that_start_off_a_16_byte_boundary() -> None:
    """Columns of a larger matrix: rows are at multiples of 16 bytes, their starts are not."""
    rng = np.random.default_rng(4)
    p = Program()
    data = rng.standard_normal((40, 72)).astype(np.float16)
    part = p.weight(data, "f16", (72, 40)).view((64, 40), (144,), 2 * 4)
    few, many = (p.array(rng.standard_normal((n, 64), np.float32)) for n in (2, 20))
    p.compare(p.graph.mul_mat(part, few), p.graph.mul_mat(part, many), bound=1e-5)


@pytest.mark.parametrize("n_tokens", [2, 40])
@pytest.mark.parametrize("type_name", ["q4_K", "q8_0", "iq3_k_r4", "f16", "f32"])
def test_up_and_gate_with_biases(type_name: str, n_tokens: int) -> None:
    rng = np.random.default_rng(1)
    p = Program()
    shape = (256, 40)
    up, gate = (p.weight(packed(type_name, shape, seed), type_name, shape) for seed in (1, 2))
    x = p.array(rng.standard_normal((n_tokens, 256), np.float32))
    biases = [p.array(rng.standard_normal(40).astype(np.float32)) for _ in range(2)]
    results = [p.graph.mul_mat_up_gate(up, gate, x, kind, *biases) for kind in ("silu", "swiglu_oai")]
    results.append(p.graph.mul_mat(up, x, biases[0]))
    p.compare(*results, bound=1e-5)


@pytest.mark.parametrize("n_out", [1, 5, 22])
@pytest.mark.parametrize("type_name", sorted(products.SET_ROWS))
def test_rows_that_lanes_take_in_turn(type_name: str, n_out: int) -> None:
    """A warp has two sets of rows, or one of up and one of gate, of which some are not there."""
    rng = np.random.default_rng(n_out)
    p = Program()
    shape = (1280, n_out)
    up, gate = (p.weight(packed(type_name, shape, seed), type_name, shape) for seed in (1, 2))
    x, bias = (p.array(rng.standard_normal((1, n), np.float32)) for n in shape)
    p.compare(p.graph.mul_mat_up_gate(up, gate, x, "relu", bias, None), p.graph.mul_mat(up, x, bias), bound=2e-5)


@pytest.mark.parametrize("n_blocks", [3, 9])
@pytest.mark.parametrize("type_name", INTERLEAVED)
def test_lanes_that_have_no_columns(type_name: str, n_blocks: int) -> None:
    """Up and gate, and a second set that is not there: rows are no multiple of those of a warp, columns of those of a
    step.
    """
    rng = np.random.default_rng(n_blocks)
    p = Program()
    row = by_name(type_name)
    shape = (256 * n_blocks, 3 * row.interleave)
    up, gate = (p.weight(packed(type_name, shape, seed), type_name, shape) for seed in (1, 2))
    x, bias = (p.array(rng.standard_normal((1, n), np.float32)) for n in shape)
    p.compare(p.graph.mul_mat_up_gate(up, gate, x, "relu", bias, None), p.graph.mul_mat(up, x, bias), bound=1e-5)


def test_sets_of_rows_are_those_of_the_kernels() -> None:
    work = (emulator.KERNELS / "matvec_work.cuh").read_text()
    sizes = re.findall(r"constexpr int kPartRows = (\d+), kLaneRows = (\d+);", work)[0]
    part_rows, lane_rows = map(int, sizes)
    found = {}
    for path in (emulator.KERNELS / "unpack").glob("*.cuh"):
        text = path.read_text()
        for body in re.split(r"\nstruct Unpack", text)[1:]:
            name = re.split(r"\W", body)[0].lower()
            if "using Part = Part" in body:
                found[name] = part_rows
            elif "using Own = Own" in body and by_name(name).interleave == 1:
                found[name] = lane_rows
        found |= {name.lower(): lane_rows for name in re.findall(r"using Unpack(\w+) = UnpackGrid<", text)}
    assert found == products.SET_ROWS


def test_rows_together_are_those_of_the_kernels() -> None:
    texts = [path.read_text() for path in (emulator.KERNELS / "unpack").glob("*.cuh")]
    bases = {name: base for text in texts for name, *base in re.findall(r"struct (Own\w+) : (\w+)<?(\d*)", text)}
    found = {}
    for unpacker, own in (
        pair for text in texts for pair in re.findall(r"struct Unpack(\w+) : [^}]*?Own = (\w+)", text)
    ):
        base, rows = bases[own]
        while base != "OwnTraits":
            base, of_base = bases[base]
            rows = of_base or rows
        found[unpacker.lower()] = int(rows)
    expected = {name.lower(): products.lane_rows(name.lower()) for name in INTERLEAVED}
    interleaved = {name: rows for name, rows in found.items() if by_name(name).interleave > 1}
    assert interleaved == {name: rows for name, rows in expected.items() if rows > 1}
    assert len(expected) - len(interleaved) == 3
    assert {rows for name, rows in found.items() if name not in interleaved} == {1}


@pytest.mark.parametrize(("name", "shape"), [("iq5nl", "k m b a"), ("iq6nl", "one centre d c b a")])
def test_cubics_are_the_levels(name: str, shape: str) -> None:
    """Of every code, each step rounded to f16, as `CubicIq5nl` and `CubicIq6nl` do."""
    text = (emulator.KERNELS / "unpack" / "parts_iq56.cuh").read_text()
    body = text.partition(f"struct Cubic{name.capitalize()}")[2].partition("\n};")[0]
    numbers = np.array([int(n, 16) for n in re.findall(r"both\((\w+)\)", body)], np.uint16).view(np.float16)
    assert len(numbers) == len(shape.split())
    expected = table(f"{name}_values")
    x = 64.0 + np.arange(len(expected) // 2)

    def step(a: np.ndarray, b: np.ndarray | float, c: np.float16) -> np.ndarray:
        return (a * b + np.float64(c)).astype(np.float16).astype(np.float64)

    x = step(x, float(numbers[0]), numbers[1])
    square = step(x, x, numbers[2]) if len(numbers) == 4 else step(x, float(numbers[2]), numbers[3])
    slope = square if len(numbers) == 4 else step(square, x, numbers[4])
    np.testing.assert_array_equal(step(slope, x, numbers[-1]) - 1536, expected[: len(x)])


@pytest.mark.parametrize("n_tokens", [1, 3, 30])
@pytest.mark.parametrize("type_name", ["q4_K", "q2_K", "iq2_xxs", "q4_k_r4", "iq1_s_r4", "iq4_xs_r8", "tq2_0", "bf16"])
def test_experts(type_name: str, n_tokens: int) -> None:
    rng = np.random.default_rng(4)
    n_experts, n_used, width, inner = 6, 2, 256, 256
    p = Program()
    ids = np.stack([rng.permutation(n_experts)[:n_used] for _ in range(n_tokens)]).astype(np.int32)
    ids[0, 1] = -1
    id_value = p.array(ids)
    groups = p.graph.moe_group(id_value, n_experts)
    up, gate, down = (
        p.weight(packed(type_name, (width, inner * n_experts), seed), type_name, (width, inner, n_experts))
        for seed in range(3)
    )
    x = p.array(rng.standard_normal((n_tokens, width), np.float32))
    bias = p.array(rng.standard_normal((n_experts, inner)).astype(np.float32))
    single = p.graph.mul_mat_id(up, x, id_value, groups, bias, per_slot=False)
    hidden = p.graph.mul_mat_id_up_gate(up, gate, x, id_value, groups, "silu")
    summed = p.graph.moe_combine(hidden, None, id_value)
    outputs = p.graph.mul_mat_id(down, hidden, id_value, groups, per_slot=True)
    total = p.graph.moe_combine(outputs, None, id_value)
    plain = p.graph.moe_combine(single, None, id_value)
    p.compare(summed, plain, bound=1e-3 if type_name == "tq2_0" else 1e-5)
    # The second product rounds its input to 8 bits or bf16, where another order of sums shows.
    p.compare(total, bound=2e-2 if type_name == "tq2_0" else 3e-3)


@pytest.mark.parametrize("type_name", ["f16", "q8_0"])
def test_batched_and_strided(type_name: str) -> None:
    """Heads as batches, results written into another order and as f16."""
    rng = np.random.default_rng(4)
    p = Program()
    heads, n_in, n_out, n_tokens = 3, 64, 24, 12
    w = p.weight(packed(type_name, (n_in, n_out * heads), 1), type_name, (n_in, n_out, heads))
    q = p.array(rng.standard_normal((n_tokens, heads, n_in), np.float32))
    out = p.graph.new(n_out, heads, n_tokens)
    p.graph.mul_mat(w, q.permute(0, 2, 1), dst=out.permute(0, 2, 1))
    half = p.graph.new(n_out, heads, n_tokens, type_id=F16)
    p.graph.mul_mat(w, q.permute(0, 2, 1), dst=half.permute(0, 2, 1))
    p.compare(out, bound=1e-5)
    p.compare(half, bound=1e-3)


def test_columns_counted_at_run_time() -> None:
    rng = np.random.default_rng(4)
    p = Program()
    w = p.weight(packed("q8_0", (64, 40), 1), "q8_0", (64, 40))
    cached = p.array(rng.standard_normal((160, 64), np.float32))
    rows = cached.view((64, 160), (256,), 0, dynamic_dim=1)
    out = p.graph.mul_mat(w, rows, dst=p.graph.new(40, 160, dynamic_dim=1, type_id=F32))
    for n_kv in (7, 150):
        expected = p.run([out], on_cuda=False, n_kv=n_kv)[0].reshape(160, 40)[:n_kv]
        actual = p.run([out], on_cuda=True, n_kv=n_kv)[0].reshape(160, 40)[:n_kv]
        np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())
