"""Emulated CUDA kernels of everything but matrix products and attention, against the CPU backend."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy.backends.cuda import emulator, launch
from ikpy.graph.builder import RopeSections
from ikpy.graph.elementwise import UNARY_KINDS
from ikpy.graph.fusion import fuse
from ikpy.quants import registry
from tests.cuda.programs import Program


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.usefixtures("emulation")
def test_launch_errors_are_reported() -> None:
    machine = emulator.library()
    with pytest.raises(emulator.EmulationError, match="no kernel of this name"):
        machine.launch("nothing", (1, 1, 1), (32, 1, 1), 0, [])


@pytest.mark.parametrize("n", [64, 33])
@pytest.mark.parametrize("kind", sorted(UNARY_KINDS))
def test_unary_and_gated(rng: np.random.Generator, kind: str, n: int) -> None:
    p = Program()
    x, y = p.array(4 * normal(rng, 3, 5, n)), p.array(4 * normal(rng, 3, 5, n))
    gated = kind not in ("tanh", "gelu_erf", "softplus")
    results = [p.graph.gated(x, y, kind, limit) for limit in (0.0, 2.5)] if gated else []
    if kind != "swiglu_oai":
        results.append(p.graph.unary(x, kind))
    p.compare(*results, bound=1e-6)


@pytest.mark.parametrize("n", [64, 33])
def test_arithmetic_with_broadcast(rng: np.random.Generator, n: int) -> None:
    p = Program()
    x = p.array(normal(rng, 3, 5, n))
    same, row, per_token = p.array(normal(rng, 3, 5, n)), p.array(normal(rng, n)), p.array(normal(rng, 3, 1, 1))
    results = [p.graph.add(x, same), p.graph.mul(x, row), p.graph.mul(x, per_token)]
    results += [p.graph.scale(x, 0.3, 1.5), p.graph.softcap(x, 2.0), p.graph.xielu(x, 0.8, 0.6, 0.5, -0.1)]
    results.append(p.graph.signed_root(x, 0.25))
    p.compare(*results, bound=1e-6)


def test_norms(rng: np.random.Generator) -> None:
    p = Program()
    x, w, b = p.array(normal(rng, 3, 5, 200)), p.array(normal(rng, 200)), p.array(normal(rng, 200))
    per_head = p.array(normal(rng, 5, 200))
    results = [p.graph.rms_norm(x, w, 1e-5), p.graph.rms_norm(x, None, 1e-6), p.graph.rms_norm(x, per_head, 1e-5)]
    results += [p.graph.layer_norm(x, w, b, 1e-5), p.graph.layer_norm(x, None, None, 1e-5)]
    results.append(p.graph.rms_norm(x.slice0(8, 96), None, 1e-5))
    p.compare(*results, bound=2e-6)


def test_fused_add_and_norm(rng: np.random.Generator) -> None:
    p = Program()
    x, y, w = p.array(normal(rng, 3, 130)), p.array(normal(rng, 3, 130)), p.array(normal(rng, 130))
    total = p.graph.add(x, y)
    normed = p.graph.rms_norm(total, w, 1e-5)
    p.graph.nodes = fuse(p.graph.nodes)
    assert [node.kind for node in p.graph.nodes] == ["rms_norm"]
    p.compare(total, normed, bound=2e-6)


@pytest.mark.parametrize("n", [256, 320])
def test_norm_fused_with_preparation(rng: np.random.Generator, n: int) -> None:
    results = []
    data = [normal(rng, 3, n), normal(rng, 3, n), normal(rng, n)]
    for join in (False, True):
        p = Program()
        x, y, w = map(p.array, data)
        total = p.graph.add(x, y)
        normed = p.graph.rms_norm(total, w, 1e-5)
        prepared = p.graph.prepare(normed, 2)[0]
        nodes = fuse(p.graph.nodes)
        one = launch.joined(*nodes)
        assert one is not None
        p.graph.nodes = [one] if join else nodes
        assert [node.kind for node in p.graph.nodes] == (["rms_norm_q8"] if join else ["rms_norm", "act_prepare"])
        results.append(p.run([total, normed, prepared], on_cuda=True))
    padded = -(-n // 256) * 256 * 15 // 8
    stride = launch.act_row_bytes(1, n)
    assert np.array_equal(results[0][0], results[1][0])
    assert np.array_equal(results[0][1], results[1][1])
    rows = [r[2].reshape(-1).view(np.uint8)[: 3 * stride].reshape(3, stride)[:, :padded] for r in results]
    assert np.array_equal(rows[0], rows[1])  # the gaps between rows are not written


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("ext", [0.0, 1.0])
def test_rope(rng: np.random.Generator, neox: bool, ext: float) -> None:
    p = Program()
    pos = p.array(np.array([0, 3, 77, 1000], np.int32))
    factors = p.array(1 + rng.random(24, np.float32))
    x = p.array(normal(rng, 4, 3, 64))
    table = p.graph.rope_table(pos, 48, factors, [10000.0, 0.25 if ext else 1.0, ext, 1.1, 4.0, 15.0])
    p.graph.rope(x, table, neox=neox, offset=16)
    p.compare(table, x, bound=2e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lengths", [(10, 8, 6, 0), (5, 4, 3, 2), (4, 9, 7, 0)])
def test_rope_in_sections(rng: np.random.Generator, lengths: tuple[int, int, int, int], interleaved: bool) -> None:
    """Also sections that are shorter than the heads, and a fourth one."""
    p = Program()
    pos = p.array(rng.integers(0, 900, (5, 4)).astype(np.int32))
    params = [10000.0, 0.5, 1.0, 1.1, 4.0, 15.0]
    p.compare(p.graph.rope_table(pos, 48, None, params, sections=RopeSections(lengths, interleaved)), bound=2e-5)


def test_rope_back(rng: np.random.Generator) -> None:
    """A table with negative sines undoes a rotation."""
    p = Program()
    pos = p.array(np.array([0, 3, 77, 1000], np.int32))
    values = normal(rng, 4, 3, 64)
    x = p.array(values.copy())
    for inverse in (False, True):
        table = p.graph.rope_table(pos, 48, None, [10000.0, 1.0, 0.0, 1.0, 0.0, 0.0], inverse=inverse)
        p.graph.rope(x, table, neox=False, offset=16)
    for on_cuda in (False, True):
        assert np.abs(p.run([x], on_cuda=on_cuda, n_kv=1)[0][0] - values).max() < 1e-5


def test_attention_temperature(rng: np.random.Generator) -> None:
    p = Program()
    pos = p.array(np.array([0, 8191, 8192, 100000], np.int32))
    p.compare(p.graph.attention_temperature(pos, 0.1, 8192, 1), bound=1e-6)


@pytest.mark.parametrize("type_name", registry.CACHE_TYPES)
def test_cache_store_and_copy(rng: np.random.Generator, type_name: str) -> None:
    p = Program()
    row = registry.by_name(type_name).row_nbytes(96)
    cache = p.weight(np.zeros(10 * 2 * row, np.uint8), type_name, (96, 2, 10))
    x = p.array(normal(rng, 3, 2, 96))
    p.graph.kv_store(x, cache, p.array(np.array([7, -1, 2], np.int32)))
    read = p.graph.copy(cache, p.graph.new(96, 2, 10))
    copied = p.graph.copy(x, p.graph.new(96, 2, 3, type_id=cache.type_id))
    back = p.graph.copy(copied, p.graph.new(96, 2, 3))
    # Refitted scales may differ in the last bit of an f16.
    p.compare(read, back, bound=2e-3 if type_name in ("q6_0", "iq4_nl") else 1e-7)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type_name", registry.CACHE_TYPES)
def test_broken_values_stay_visible_in_caches(rng: np.random.Generator, type_name: str, broken: float) -> None:
    """A block holds one scale: all of it is no number then, and other blocks are what they were."""
    p = Program()
    kind = registry.by_name(type_name)
    cache = p.weight(np.zeros(4 * kind.row_nbytes(96), np.uint8), type_name, (96, 1, 4))
    values = normal(rng, 4, 1, 96)
    for cell, place in enumerate((0, 41, 95)):
        values[cell, 0, place] = broken
    p.graph.kv_store(p.array(values), cache, p.array(np.arange(4, dtype=np.int32)))
    read = p.graph.copy(cache, p.graph.new(96, 1, 4))
    unit = 96 if type_name == "q8_KV" else 32
    for on_cuda in (False, True):
        found = p.run([read], on_cuda=on_cuda)[0].reshape(4, 96)
        for cell, place in enumerate((0, 41, 95)):
            assert not np.isfinite(found[cell, place])
            others = np.arange(96) // unit != place // unit
            assert np.isfinite(found[cell, others]).all()
        assert np.isfinite(found[3]).all()


def test_hadamard(rng: np.random.Generator) -> None:
    p = Program()
    x = p.array(normal(rng, 4, 3, 96))
    p.graph.hadamard(x, 32)
    y = p.array(normal(rng, 4, 3, 128))
    p.graph.hadamard(y.slice0(64, 64), 64)
    p.compare(x, y, bound=1e-6)


@pytest.mark.parametrize("transform", [0, 64])
@pytest.mark.parametrize("type_name", ["f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "bf16"])
def test_cache_shift(rng: np.random.Generator, type_name: str, transform: int) -> None:
    p = Program()
    row = registry.by_name(type_name).row_nbytes(64)
    cache = p.weight(np.zeros(6 * 2 * row, np.uint8), type_name, (64, 2, 6))
    p.graph.kv_store(p.array(normal(rng, 6, 2, 64)), cache, p.array(np.arange(6, dtype=np.int32)))
    deltas = p.array(np.array([0, 3, 0, -2, 1, 0], np.int32))
    table = p.graph.rope_table(deltas, 32, None, [10000.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    p.graph.kv_shift(cache, table, deltas, neox=False, offset=32, hadamard=transform)
    p.compare(p.graph.copy(cache, p.graph.new(64, 2, 6)), bound=1e-4 if type_name in ("f16", "q8_0", "bf16") else 1e-2)


@pytest.mark.parametrize("window", ["none", "sliding", "chunked", "symmetric"])
@pytest.mark.parametrize(("causal", "own"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("in_pictures", [False, True])
def test_mask(rng: np.random.Generator, window: str, causal: bool, own: bool, in_pictures: bool) -> None:
    p = Program()
    n = 96
    cell_pos = rng.permutation(n).astype(np.int32)
    cell_pos[rng.integers(0, n, 10)] = -1
    cells = [p.array(cell_pos), p.array(rng.integers(0, 4, n).astype(np.int64))]
    pos, seq = (p.array(np.array(v, np.int32)) for v in ([0, 40, 90, 95, 5], [0, 1, 0, 1, 7]))
    until = p.array(np.array([0, 44, 93, 95, 9], np.int32)) if in_pictures else None
    mask, ranges = p.graph.kq_mask(*cells, pos, seq, window=window, n_swa=32, causal=causal, own=own, until=until)
    expected = p.run([mask, ranges], on_cuda=False, n_kv=64)
    actual = p.run([mask, ranges], on_cuda=True, n_kv=64)
    seen = n if own else 64
    assert np.array_equal(actual[0].view(np.uint16)[..., :seen], expected[0].view(np.uint16)[..., :seen])
    assert np.array_equal(actual[1], expected[1])


def test_mask_of_compressed_cells_behind_a_window(rng: np.random.Generator) -> None:
    """No window applies to these."""
    p = Program()
    cells = [p.array(rng.permutation(96).astype(np.int32)), p.array(rng.integers(0, 4, 96).astype(np.int64))]
    ends = np.arange(3, 96, 4, dtype=np.int32)
    further = p.array(ends), p.array(np.tile(np.int64([1, 2, 3]), 8))
    positions, sequences = np.array([0, 40, 90, 95], np.int32), np.array([0, 1, 0, 1], np.int32)
    mask, ranges = p.graph.kq_mask(
        *cells,
        p.array(positions),
        p.array(sequences),
        window="sliding",
        n_swa=32,
        causal=True,
        own=True,
        further=further,
    )
    expected, actual = (p.run([mask, ranges], on_cuda=on_cuda, n_kv=64) for on_cuda in (False, True))
    assert np.array_equal(actual[0].view(np.uint16), expected[0].view(np.uint16))
    assert np.array_equal(actual[1], expected[1])
    members = np.tile([1, 2, 3], 8) >> sequences[:, None] & 1
    assert np.array_equal(expected[0][0, 0, :, 96:] == 0, (ends <= positions[:, None]) & (members == 1))


ROUTES = {
    "softmax": {"gating": "softmax", "normalize": True},
    "sigmoid bias groups": {"gating": "sigmoid", "bias": True, "groups": (4, 2), "scale": 2.5, "normalize": True},
    "selected softmax": {"gating": "selected_softmax"},
    "softplus": {"gating": "sqrt_softplus", "epsilon": 1e-20, "normalize": True},
    "selected sigmoid": {"gating": "selected_sigmoid"},
    "sparse mixer": {"gating": "sparse_mixer"},
    "reduced sparse mixer": {"gating": "sparse_mixer", "reduction": (2, 0.9)},
    "reduced": {"gating": "softmax", "reduction": (2, 0.6)},
    "reduced selected softmax": {"gating": "selected_softmax", "reduction": (2, 0.9)},
}


@pytest.mark.parametrize("n_expert", [40, 1000])
@pytest.mark.parametrize("case", sorted(ROUTES))
def test_routing(rng: np.random.Generator, case: str, n_expert: int) -> None:
    p = Program()
    options = dict(ROUTES[case])
    logits = normal(rng, 9, n_expert)
    logits[3] = 0.5  # all equal: the larger index wins
    bias = p.array(normal(rng, n_expert)) if options.pop("bias", False) else None
    ids, weights = p.graph.moe_route(p.array(logits), 4, bias=bias, **options)
    groups = p.graph.moe_group(ids, n_expert)
    outputs, addend = p.array(normal(rng, 9, 4, 50)), p.array(normal(rng, 9, 50))
    combined = p.graph.moe_combine(outputs, weights, ids, addend)
    plain = p.graph.moe_combine(outputs, None, ids)
    expected = p.run([ids, weights, groups, combined, plain], on_cuda=False)
    actual = p.run([ids, weights, groups, combined, plain], on_cuda=True)
    n = n_expert + 1 + int(expected[2].reshape(-1)[n_expert])
    assert np.array_equal(actual[0], expected[0])
    assert np.array_equal(actual[2].reshape(-1)[:n], expected[2].reshape(-1)[:n])
    for a, e in zip(actual, expected, strict=True):
        if e.dtype.kind == "f":
            np.testing.assert_allclose(a, e, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("gating", ["sqrt_softplus", "softmax", "selected_softmax", "selected_sigmoid", "sparse_mixer"])
def test_experts_of_a_table(rng: np.random.Generator, gating: str) -> None:
    """Also of tokens and experts that there are not."""
    p = Program()
    table = rng.integers(0, 40, (20, 6)).astype(np.int32)
    table[5], table[6, 2:4] = -3, (40, 2**31 - 1)
    tokens = np.array([0, 19, 20, -1, 5, 6, 7, 2**31 - 1, -(2**31)], np.int32)
    fixed = p.array(table), p.array(tokens)
    logits = p.array(normal(rng, 9, 40))
    ids, weights = p.graph.moe_route(logits, 6, gating=gating, normalize=True, scale=1.5, epsilon=1e-20, fixed=fixed)
    p.compare(ids, weights, bound=1e-6)


def test_get_rows_of_floats(rng: np.random.Generator) -> None:
    p = Program()
    ids = p.array(np.array([4, 0, -1, 4, 2], np.int32))
    tables = [p.array(normal(rng, 5, 40)), p.array(normal(rng, 5, 40).astype(np.float16))]
    rows = [p.graph.get_rows(table, ids) for table in tables]
    p.compare(*rows, bound=0)
    for found in p.run(rows, on_cuda=False):
        assert not found.reshape(5, 40)[2].any() and found.any(), "id -1 gives zeros"


@pytest.mark.parametrize("n", [256, 320, 40])
def test_prepared_activations_are_those_of_the_cpu(rng: np.random.Generator, n: int) -> None:
    p = Program()
    x = normal(rng, 2, 3, n)
    x[0, 1, :32] = 0
    value = p.array(x)
    results = [p.graph.prepare(value, type_id)[0] for type_id in (2, 0, 30)]
    expected = [a.view(np.uint8) for a in p.run(results, on_cuda=False)]
    actual = [a.view(np.uint8) for a in p.run(results, on_cuda=True)]
    from ikpy.backends.cuda.launch import act_row_bytes

    padded = -(-n // 256) * 256
    for fmt, used, a, e in zip((1, 0, 2), (padded * 15 // 8, 4 * n, 2 * n), actual, expected, strict=True):
        stride = act_row_bytes(fmt, n)
        rows_a, rows_e = a.reshape(-1)[: 6 * stride].reshape(6, stride), e.reshape(-1)[: 6 * stride].reshape(6, stride)
        assert np.array_equal(rows_a[:, :used], rows_e[:, :used]), f"format {fmt}"


def test_neighbours_that_touch_different_memory_are_launched_at_once(rng: np.random.Generator) -> None:
    """Norms, rotations and stores of queries, keys and values, of different sizes; twins do what two launches do."""
    data = [normal(rng, 3, 6, 64), normal(rng, 3, 2, 64), normal(rng, 64), normal(rng, 64)]
    results = []
    for merge in (False, True):
        p = Program(merge=merge)
        q, k, q_norm, k_norm = map(p.array, data)
        pos, cells = p.array(np.array([3, 4, 9], np.int32)), p.array(np.array([5, -1, 2], np.int32))
        table = p.graph.rope_table(pos, 48, None, [10000.0, 1.0, 0.0, 1.0, 0.0, 0.0])
        x, y = p.graph.rms_norm(q, q_norm, 1e-5), p.graph.rms_norm(k, k_norm, 1e-6)
        p.graph.rope(x, table, neox=True)
        p.graph.rope(y, table, neox=True)
        row = registry.by_name("q8_0").row_nbytes(64)
        caches = [p.weight(np.zeros(10 * 2 * row, np.uint8), "q8_0", (64, 2, 10)), p.array(normal(rng, 10, 6, 64) * 0)]
        p.graph.kv_store(y, caches[0], cells)
        p.graph.kv_store(x, caches[1], cells)
        read = p.graph.copy(caches[0], p.graph.new(64, 2, 10))
        results.append(p.run([x, y, read, caches[1]], on_cuda=True))
        kernels = [step.kernel for step in p.launches]
        twins = {"rms_norm_two", "rope_two", "kv_store_two"}
        assert twins <= set(kernels) if merge else not twins & set(kernels), kernels
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_stores_to_columns_of_the_same_rows_are_launched_at_once(rng: np.random.Generator) -> None:
    """As latents and rotated keys are stored; columns that overlap are not."""
    for second, expected in ((32, ["kv_store_two"]), (16, ["kv_store", "kv_store"])):
        p = Program(merge=True)
        cache = p.array(np.zeros((10, 1, 96), np.float16))
        x, y = p.array(normal(rng, 3, 1, 32)), p.array(normal(rng, 3, 1, 64))
        cells = p.array(np.array([7, 1, 2], np.int32))
        p.graph.kv_store(x, cache.slice0(0, 32), cells)
        p.graph.kv_store(y, cache.slice0(second, 64), cells)
        p.compare(cache, bound=0)
        assert [step.kernel for step in p.launches] == expected


def test_neighbours_that_depend_on_each_other_stay_apart(rng: np.random.Generator) -> None:
    p = Program(merge=True)
    x, w = p.array(normal(rng, 3, 64)), p.array(normal(rng, 64))
    first = p.graph.rms_norm(x, w, 1e-5)
    second = p.graph.rms_norm(first, w, 1e-5)  # reads what the first one wrote
    p.graph.rms_norm(x, w, 1e-5)
    p.run([first, second], on_cuda=True)
    assert [step.kernel for step in p.launches] == ["rms_norm", "rms_norm_two"]


@pytest.mark.parametrize("n_tokens", [1, 30, 70])
def test_assignments_sorted_by_expert(rng: np.random.Generator, n_tokens: int) -> None:
    """Few in one launch, many in two; some are dropped."""
    p = Program()
    ids = rng.integers(-1, 40, (n_tokens, 8)).astype(np.int32)
    groups = p.graph.moe_group(p.array(ids), 40)
    (actual,) = p.run([groups], on_cuda=True)
    flat, found = ids.reshape(-1), actual.reshape(-1)
    entries = [i for e in range(40) for i in np.flatnonzero(flat == e)]
    assert len(p.launches) == (1 if n_tokens < 70 else 2)
    assert found[:41].tolist() == [0, *np.cumsum([np.sum(flat == e) for e in range(40)]).tolist()]
    assert found[41 : 41 + len(entries)].tolist() == entries
