"""With many threads work is cut into smaller pieces. Products stay those of one thread, to the last bit; attention adds
up more ranges of cells."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.matmul_plans import Program
from benchmarks.reference_attention import BF16, F16, Q5_1, Q8_0, TYPE_NAMES
from ikpy import Batch, Context, ContextParams, Model, default_model_path
from ikpy.graph.elementwise import UNARY_KINDS
from tests.cpu.kernels.attention_cases import run_case, tolerance_of
from tests.cpu.kernels.test_matmul import (
    DECODED_TYPES,
    EXPERTS,
    FAST_TYPES,
    USED,
    activations,
    grouped,
    random_weight,
    routing,
    rows_of,
)

K = 256


def assert_same(program: Program, out: np.ndarray, n_threads: int) -> None:
    """Runs with one thread and with many; out is [..., rows]."""
    program.run(1)
    expected = out.copy()
    assert np.isfinite(expected).all() and np.ptp(expected) > 0
    out[:] = np.nan
    program.run(n_threads)
    wrong = np.argwhere(out != expected)
    assert not len(wrong), (
        f"{len(wrong)} differ, first {wrong[0]}: {out[tuple(wrong[0])]} != {expected[tuple(wrong[0])]}"
    )


@pytest.mark.parametrize("name", (*FAST_TYPES, *DECODED_TYPES))
@pytest.mark.parametrize("tokens", (1, 3, 11))
def test_rows_of_small_matrices(name: str, tokens: int) -> None:
    """80 rows are 3 blocks; 64 threads get 4 rows each, or 16 of interleaved types."""
    n = rows_of(name, 83)
    program, out = Program(), np.zeros((tokens, n), np.float32)
    act, fmt = program.prepared(activations((tokens, K), 1), name, tokens)
    weight = program.weight(random_weight(name, K, n, 0)[0], name, (K, n))
    program.op("mul_mat", program.array(out), [weight, act], {0: fmt, 1: tokens})
    assert_same(program, out, 64)


@pytest.mark.parametrize("name", ("F32", "BF16", "Q4_K", "Q8_0", "IQ4_KS", "IQ2_XS", "IQ3_KT", "Q4_K_R4"))
def test_up_and_gate(name: str) -> None:
    n = rows_of(name, 50)
    program, out = Program(), np.zeros((2, n), np.float32)
    act, fmt = program.prepared(activations((2, K), 1), name, 2)
    weights = [program.weight(random_weight(name, K, n, i)[0], name, (K, n)) for i in range(2)]
    program.op("mul_mat_up_gate", program.array(out), [*weights, act], {0: fmt, 1: 2, 2: UNARY_KINDS["silu"]})
    assert_same(program, out, 64)


@pytest.mark.parametrize("name", ("F32", "Q4_K", "IQ4_KS", "Q4_K_R4"))
@pytest.mark.parametrize("gated", (False, True))
def test_experts(name: str, gated: bool) -> None:
    n, tokens = rows_of(name, 50), 2
    ids = np.abs(routing(tokens))
    program, out = Program(), np.zeros((tokens, USED, n), np.float32)
    act, fmt = program.prepared(activations((tokens, K), 1), name)
    groups = grouped(program, ids)
    data = [np.concatenate([random_weight(name, K, n, 9 * i + e)[0] for e in range(EXPERTS)]) for i in range(1 + gated)]
    weights = [program.weight(d, name, (K, n, EXPERTS)) for d in data]
    ip = {0: fmt, 1: tokens, 2: UNARY_KINDS["silu"] if gated else 0, 3: USED, 4: EXPERTS}
    program.op("mul_mat_id_up_gate" if gated else "mul_mat_id", program.array(out), [*weights, act, groups], ip)
    assert_same(program, out, 100)


@pytest.mark.parametrize("tokens", (65, 131, 150, 512))
@pytest.mark.parametrize("name", ("F32", "Q4_K", "Q8_0"))
def test_tokens_of_small_matrices(name: str, tokens: int) -> None:
    program, out = Program(), np.zeros((tokens, 64), np.float32)
    act, fmt = program.prepared(activations((tokens, K), 1), name, tokens)
    weight = program.weight(random_weight(name, K, 64, 0)[0], name, (K, 64))
    program.op("mul_mat", program.array(out), [weight, act], {0: fmt, 1: tokens})
    assert_same(program, out, 64)


@pytest.mark.parametrize("columns", (32, 1000, 7168, 7200))
@pytest.mark.parametrize("tokens", (1, 3, 40))
def test_parts_of_activations(columns: int, tokens: int) -> None:
    program = Program()
    act, _ = program.prepared(activations((tokens, columns), 1), "Q8_0", tokens)
    buffer, results = program.arrays[act], []
    for n_threads in (1, 17, 64, 256):
        buffer[:] = 0xAA
        program.run(n_threads)
        results.append(buffer.copy())
        wrong = np.flatnonzero(results[-1] != results[0])
        assert not len(wrong), f"{n_threads} threads: byte {wrong[0]} of {len(buffer)}"
    assert (results[0] != 0xAA).mean() > 0.8


@pytest.mark.parametrize("kind", (F16, BF16, Q8_0, Q5_1), ids=TYPE_NAMES.get)
@pytest.mark.parametrize("tokens", (1, 2, 5))
@pytest.mark.parametrize("cells", (70, 300, 1000))
@pytest.mark.parametrize("shape", ((128, 1, 192, 128), (40, 1, 192, 128), (16, 2, 64, 64)), ids=str)
def test_attention(shape: tuple[int, ...], cells: int, tokens: int, kind: int) -> None:
    view = 64 if shape[1] == 1 else None
    options = {"k_type": kind, "v_type": kind, "view": view, "tolerance": tolerance_of(kind)}
    run_case(tokens, cells, *shape, threads=(1, 16, 17, 64, 100, 257), **options)


def test_attention_with_sinks_and_windows() -> None:
    for shape, view in (((128, 1, 192, 128), 64), ((16, 2, 64, 64), None)):
        options = {"view": view, "kind": 1, "n_swa": 200, "sinks": True, "threads": (1, 40, 130)}
        run_case(3, 700, *shape, **options)
        run_case(4, 700, *shape, n_seq=3, **options)


@pytest.mark.parametrize("n_threads", (17, 100))
def test_model_in_a_long_context(n_threads: int) -> None:
    """Work memory is that of all cells, of which few are used."""
    model, tokens, logits = Model.load(default_model_path()), list(range(5, 75)), []
    for n in (1, n_threads):
        context = Context(model, ContextParams(n_ctx=4096, n_threads=n, n_threads_batch=n))
        context.decode(Batch.single(tokens))
        logits.append(np.stack([context.decode(Batch.single([t], 70 + i))[0] for i, t in enumerate(tokens[:4])]))
    error = np.abs(logits[1] - logits[0]).max(axis=1)
    assert error.max() < 1e-3 * np.abs(logits[0]).max(), f"token {error.argmax()}: {error.max():.2e}"
