"""Products by the tile unit (AMX): bf16 weights unpacked from every type times bf16 activations."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.matmul_plans import Program
from ikpy._native import core
from ikpy.graph.builder import Graph
from ikpy.graph.elementwise import UNARY_KINDS
from ikpy.quants import by_name
from ikpy.quants.repack import PERMUTATIONS
from tests.cpu.kernels.test_matmul import (
    EXPERTS,
    FAST_TYPES,
    USED,
    activations,
    assert_gated,
    gated,
    grouped,
    random_weight,
    routing,
    rows_of,
)
from tests.expected_products import assert_close, effective

if not core.has_tiles():
    pytest.skip("this CPU or build has no AMX tiles with bf16", allow_module_level=True)

TILE_TYPES = tuple(n for n in FAST_TYPES if core.activation_format(by_name(n).id, 512) == 2)
# Weights are rounded to bf16: half a unit of 8 significant bits each.
WEIGHT_ROUNDING = 2.0**-8 * 1.01


def product(name: str, data: np.ndarray, k: int, n: int, x: np.ndarray, threads: int = 2) -> np.ndarray:
    """mul_mat with activations prepared for tiles; result [T, N]."""
    program = Program()
    out = np.full((x.shape[0], n), 7, np.float32)
    act, fmt = program.prepared(x, name, 512)
    program.op("mul_mat", program.array(out), [program.weight(data, name, (k, n)), act], {0: fmt, 1: x.shape[0]})
    program.run(threads)
    return out


def test_types_that_use_tiles() -> None:
    assert set(FAST_TYPES) - set(TILE_TYPES) == {"F32", "F16"}
    assert core.activation_format(by_name("Q4_K").id, 1) == 1, "a single token must keep int8 activations"
    assert core.activation_format(by_name("F16").id, 512) == (4 if core.rounds_f16_activations() else 3)
    assert core.activation_format(by_name("F16").id, 1) == 0, "a single token must keep f32 activations"


@pytest.mark.parametrize(
    ("n_used", "n_tokens", "fmt"),
    [(8, 191, 1), (8, 192, 2), (128, 23, 1), (128, 24, 2)],
    ids=["11 rows", "12 rows", "all experts, small batch", "all experts"],
)
def test_experts_take_the_format_of_tiles_from_twelve_rows_on(n_used: int, n_tokens: int, fmt: int) -> None:
    """Never in a batch that dense products of all types find small: drafts count on that."""
    graph, n_experts = Graph(core), 128
    assert core.activation_format(by_name("Q4_K").id, 23) == 1
    weight = graph.new(256, 32, n_experts, type_id=by_name("Q4_K").id)
    ids = graph.new(n_used, n_tokens)
    assert graph.prepare_for_experts(graph.new(256, n_tokens), weight, ids)[1] == fmt


@pytest.mark.parametrize("name", TILE_TYPES)
def test_product_of_every_type(name: str) -> None:
    """Token counts around the tile height, row counts that leave parts of a block, of a half and of an item."""
    for k, n_rows in ((768, 77), (256, 130), (1024, 16)):
        n = rows_of(name, n_rows)
        data, w = random_weight(name, k, n, 1)
        for tokens in (16, 24, 33, 47):
            x = activations((tokens, k), tokens)
            assert_close(
                product(name, data, k, n, x), w, effective(x, name, 512), WEIGHT_ROUNDING, f"{name}, {tokens} tokens"
            )


@pytest.mark.parametrize("name", ("Q2_K", "Q4_K", "Q5_K", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_KS", "IQ3_S"))
@pytest.mark.parametrize("tokens", (70, 224, 225))
def test_sets_of_many_tokens(name: str, tokens: int) -> None:
    """Several passes over unpacked weights, the largest set of rows of this length, and one token more."""
    k, n = 2304, rows_of(name, 170)
    data, w = random_weight(name, k, n, 1)
    x = activations((tokens, k), tokens)
    for threads in (1, 2):
        y = product(name, data, k, n, x, threads)
        assert_close(y, w, effective(x, name, 512), WEIGHT_ROUNDING, f"{name}, {tokens} tokens, {threads} threads")


@pytest.mark.parametrize("name", TILE_TYPES)
def test_results_do_not_depend_on_the_number_of_tokens(name: str) -> None:
    """Few tokens and many go through different kernels, which must round weights alike."""
    k, n = 2304, rows_of(name, 70)
    data, _ = random_weight(name, k, n, 1)
    x = activations((240, k), 2)
    many, few = product(name, data, k, n, x)[:40], product(name, data, k, n, x[:40])
    error = np.abs(few - many).max(axis=0) / np.abs(many).max()
    assert error.max() < 2e-6, f"{name}: row {error.argmax()} differs by {error.max():.1e} of the largest product"


def assert_same_weights(name: str, other: str, k: int, n: int, tokens: int) -> None:
    """Every product of a matrix and the same one with rows interleaved, bit for bit."""
    data, _ = random_weight(name, k, n, 1)
    packed = core.repack(data, by_name(name).id, by_name(other).id, k, n)
    x = activations((tokens, k), 2)
    plain, interleaved = product(name, data, k, n, x), product(other, np.asarray(packed), k, n, x)
    error = np.abs(plain - interleaved)
    token, row = np.unravel_index(error.argmax(), error.shape)
    what = f"{name} and {other}, {tokens} tokens of {k}: {np.count_nonzero(error)} products differ, worst at "
    assert not error.any(), f"{what}token {token}, row {row}: {plain[token, row]} and {interleaved[token, row]}"


NAMES = {by_name(name).name: name for name in TILE_TYPES}
PAIRS = sorted(
    (NAMES[plain], NAMES[other])
    for plain, other in PERMUTATIONS
    if {plain, other} <= NAMES.keys() and by_name(plain).interleave < by_name(other).interleave
)


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_interleaved_rows_are_rounded_like_plain_ones(name: str, other: str) -> None:
    """Rows that end inside a chunk where the type has such, parts of a block, one pass and several."""
    n = rows_of(other, 90)
    for k in (512, 768 + max(32, by_name(name).block_elements)):
        for tokens in (24, 40, 240):
            assert_same_weights(name, other, k, n, tokens)


@pytest.mark.parametrize("name", TILE_TYPES)
def test_nearer_to_the_float_product_than_required(name: str) -> None:
    """Relative rms of the whole product against float weights and activations; 0.6 % is allowed."""
    k, n, tokens = 1024, rows_of(name, 64), 64
    data, w = random_weight(name, k, n, 3)
    x = np.random.default_rng(4).standard_normal((tokens, k)).astype(np.float32)
    exact = x @ w.T
    error = np.sqrt(np.mean((product(name, data, k, n, x) - exact) ** 2) / np.mean(exact**2))
    assert error < 0.003, f"{name}: {100 * error:.3f} %"


SHORT_BLOCKS = (
    "Q4_0",
    "Q8_0",
    "IQ4_NL",
    "MXFP4",
    "BF16",
    "BF16_R16",
    "Q4_0_R8",
    "Q5_0_R4",
    "Q8_0_R8",
    "MXFP4_R8",
    "Q4_0_4x4",
)


@pytest.mark.parametrize("name", SHORT_BLOCKS)
@pytest.mark.parametrize("k", (32, 96, 320))
def test_short_and_odd_rows(name: str, k: int) -> None:
    n = rows_of(name, 45)
    data, w = random_weight(name, k, n, 2)
    x = activations((40, k), 1)
    x[:, -32:] = 1  # the first group is zero
    assert_close(product(name, data, k, n, x), w, effective(x, name, 512), WEIGHT_ROUNDING, f"{name}, K {k}")


@pytest.mark.parametrize("threads", (1, 3, 8))
def test_threads_share_the_work(threads: int) -> None:
    data, w = random_weight("Q4_K", 512, 300, 5)
    x = activations((530, 512), 2)
    y = product("Q4_K", data, 512, 300, x, threads)
    assert_close(y, w, effective(x, "Q4_K", 512), WEIGHT_ROUNDING, f"{threads} threads")


@pytest.mark.parametrize("name", ("Q4_K", "IQ4_KS", "Q8_0", "IQ4_K_R4"))
def test_up_and_gate(name: str) -> None:
    k, f, tokens = 512, rows_of(name, 149), 50
    (up_data, up), (gate_data, gate) = random_weight(name, k, f, 1), random_weight(name, k, f, 2)
    x = activations((tokens, k), 8) * np.float32(1 / np.abs(up).max() / 64)
    program = Program()
    out = np.zeros((tokens, f), np.float32)
    act, fmt = program.prepared(x, name, 512)
    src = [program.weight(up_data, name, (k, f)), program.weight(gate_data, name, (k, f)), act]
    program.op("mul_mat_up_gate", program.array(out), src, {0: fmt, 1: tokens, 2: UNARY_KINDS["silu"]})
    program.run()
    seen = effective(x, name, 512)
    assert_gated(out, gated("silu", seen @ gate.T, seen @ up.T), name, 1e-2)


@pytest.mark.parametrize("name", ("Q4_0", "IQ2_K", "IQ2_KS", "IQ4_KS_R4", "BF16", "BF16_R16"))
@pytest.mark.parametrize("row_per_slot", (False, True))
@pytest.mark.parametrize(("k", "n_rows", "tokens"), ((512, 150, 130), (4096, 40, 300)))
def test_experts_gather_their_tokens(name: str, row_per_slot: bool, k: int, n_rows: int, tokens: int) -> None:
    """The longer rows fill the cache with fewer tokens than some experts get: these take two sets."""
    n = rows_of(name, n_rows)
    parts = [random_weight(name, k, n, e) for e in range(EXPERTS)]
    ids = routing(tokens)
    x = activations((tokens * USED if row_per_slot else tokens, k), 4)
    program = Program()
    out = np.full((tokens, USED, n), 99, np.float32)
    act, fmt = program.prepared(x, name, 512)
    groups = grouped(program, ids)
    weight = program.weight(np.concatenate([p[0] for p in parts]), name, (k, n, EXPERTS))
    ip = {0: fmt, 1: tokens, 2: int(row_per_slot), 3: USED, 4: EXPERTS}
    program.op("mul_mat_id", program.array(out), [weight, act, groups], ip)
    program.run(3)
    seen = effective(x, name, 512)
    for t in range(tokens):
        for slot, e in enumerate(ids[t]):
            if e < 0:
                assert (out[t, slot] == 99).all(), f"token {t}, slot {slot} was written"
                continue
            row = seen[[t * USED + slot if row_per_slot else t]]
            assert_close(out[t, slot][None], parts[e][1], row, WEIGHT_ROUNDING, f"{name}, token {t}, expert {e}")


FLOATS = ("F16", "BF16", "BF16_R16")


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("tokens", (2, 3, 4, 5, 8, 17, 32, 33, 70))
def test_small_batches_of_float_weights(name: str, tokens: int) -> None:
    k, n = 288, rows_of(name, 205)
    data, w = random_weight(name, k, n, 1)
    x = activations((tokens, k), tokens)
    y = product(name, data, k, n, x, threads=3)
    assert_close(y, w, effective(x, name, 512), 2e-5, f"{name}, {tokens} tokens")


@pytest.mark.parametrize("name", FLOATS)
def test_one_matrix_per_batch_of_float_weights(name: str) -> None:
    k, n, heads = 128, rows_of(name, 300), 5
    parts = [random_weight(name, k, n, h) for h in range(heads)]
    for tokens in (2, 8, 20, 70):
        x = activations((heads, tokens, k), 4)
        program = Program()
        out = np.zeros((heads, tokens, n), np.float32)
        act, fmt = program.prepared(x, name, 512)
        weight = program.weight(np.concatenate([p[0] for p in parts]), name, (k, n, heads))
        program.op("mul_mat", program.array(out), [weight, act], {0: fmt, 1: tokens})
        program.run(2)
        for h in range(heads):
            assert_close(out[h], parts[h][1], effective(x[h], name, 512), 2e-5, f"{name}, {tokens} tokens, head {h}")


@pytest.mark.parametrize("k", (48, 80, 176))
@pytest.mark.parametrize("tokens", (5, 33))
def test_groups_of_rows_that_end_inside_a_tile(k: int, tokens: int) -> None:
    data, w = random_weight("BF16_R16", k, 48, 1)
    x = activations((tokens, k), tokens)
    y = product("BF16_R16", data, k, 48, x)
    assert_close(y, w, effective(x, "BF16_R16", 512), 2e-5, f"K {k}, {tokens} tokens")


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("tokens", (4, 9, 24, 150))
def test_experts_of_float_weights(name: str, tokens: int) -> None:
    """Groups of one token to many: row products, few tokens and panels in one op, gated and not."""
    k, n = 320, rows_of(name, 150)
    up, gate = ([random_weight(name, k, n, e + s) for e in range(EXPERTS)] for s in (0, 50))
    ids = routing(tokens)
    ids[1:, 0] = np.where(ids[1:, 1] == 2, ids[1:, 0], 2)  # most tokens choose expert 2
    x = activations((tokens, k), 4) * np.float32(0.02)
    program = Program()
    plain, fused = np.zeros((2, tokens, USED, n), np.float32)
    act, fmt = program.prepared(x, name, 512)
    groups = grouped(program, ids)
    weights = [program.weight(np.concatenate([p[0] for p in w]), name, (k, n, EXPERTS)) for w in (up, gate)]
    ip = {0: fmt, 1: tokens, 2: 0, 3: USED, 4: EXPERTS}
    program.op("mul_mat_id", program.array(plain), [weights[0], act, groups], ip)
    ip[2] = UNARY_KINDS["silu"]
    program.op("mul_mat_id_up_gate", program.array(fused), [*weights, act, groups], ip)
    program.run(2)
    seen = effective(x, name, 512)
    for t in range(tokens):
        for slot, e in enumerate(ids[t]):
            if e >= 0:
                row = seen[t][None]
                assert_close(plain[t, slot][None], up[e][1], row, 2e-5, f"{name}, token {t}, expert {e}")
                expected = gated("silu", row @ gate[e][1].T, row @ up[e][1].T)
                assert_gated(fused[t, slot][None], expected, name, 1e-3)
