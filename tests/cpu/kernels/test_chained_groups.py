"""Products of many tokens with chained groups of 16 columns (kernels/matmul/chained_groups.hpp) against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.matmul_plans import Program
from ikpy._native import core, tier
from ikpy.graph.plan import OP_DTYPE, TENSOR_DTYPE
from ikpy.quants import by_name, dequantize
from tests.cpu.kernels.test_matmul import EXACT, activations, dense, random_weight
from tests.expected_products import effective

# Where a block has its 16 scales (int8) and the number that they are multiplied by (f16); the largest ratio of two
# scales that is chained: 32 for codes above 64.
TYPES = {"Q6_K": (192, 208, 128), "IQ6_K": (4, 0, 32)}


def read_groups(name: str, data: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N, groups, 16] and scales [N, groups] of the rows w [N, K] that `data` holds."""
    at, factor, _ = TYPES[name]
    blocks = data.reshape(w.shape[0], -1, by_name(name).block_bytes)
    factors = blocks[..., factor : factor + 2].copy().view(np.float16).astype(np.float64)
    scales = (blocks[..., at : at + 16].view(np.int8) * factors).reshape(w.shape[0], -1)
    codes = w.reshape(*scales.shape, 16) / np.where(scales == 0, 1, scales)[..., None]
    assert np.abs(codes - np.rint(codes)).max() < 1e-4
    return np.rint(codes), scales


def make_pair_of_extremes(name: str, data: np.ndarray) -> None:
    """Gives the first block the lowest codes and scales whose ratio is out of range for them."""
    at, factor, _ = TYPES[name]
    block = data[: by_name(name).block_bytes]
    kept = block[factor : factor + 2].copy()
    block[:] = 0
    block[factor : factor + 2] = kept
    block[at : at + 16] = (127, 1, 1, 127) * 4


def rounded_ratios(codes: np.ndarray, scales: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """What the sums of the first groups are multiplied by [N, pairs], and whether pairs are chained [N, pairs].

    The 16 rows of a panel's half are chained together: if no sum of theirs can leave the range of +-2^22.
    """
    first, second = scales[:, ::2], scales[:, 1::2]
    ratio = np.where(second == 0, 1, first / np.where(second == 0, 1, second))
    ratio = np.rint(ratio.astype(np.float32) * (2**22 / largest)) / (2**22 / largest)
    sizes = np.abs(codes).sum(axis=-1)
    fits = (np.abs(ratio) <= largest) & (np.abs(ratio) * sizes[:, ::2] + sizes[:, 1::2] < 2**22 / 128)
    return ratio, np.repeat(fits.reshape(-1, 16, fits.shape[1]).all(axis=1), 16, axis=0)


def chained_product(codes: np.ndarray, scales: np.ndarray, x: np.ndarray, largest: int) -> np.ndarray:
    """Product [T, N] with effective activations x [T, K]: first sums are rounded to units of the second scales."""
    ratio, fits = rounded_ratios(codes, scales, largest)
    assert fits.any() and not fits.all()
    steps = np.abs(x).reshape(len(x), -1, 32).max(axis=-1) / 127
    q = np.rint(x.reshape(*steps.shape, 2, 16) / np.where(steps == 0, 1, steps)[..., None, None])
    sums = np.einsum("tpgi,npgi->gtnp", q, codes.reshape(len(codes), -1, 2, 16), optimize=True)
    first, second = scales[:, ::2], scales[:, 1::2]
    chained = (np.rint(ratio * sums[0]) + sums[1]) * np.where(second == 0, first, second)
    apart = sums[0] * first + sums[1] * second
    return np.einsum("tnp,tp->tn", np.where(fits, chained, apart), steps)


@pytest.mark.skipif(tier not in ("avx512", "avxvnni"), reason="no dot products of bytes")
@pytest.mark.parametrize("name", TYPES)
def test_pairs_of_groups_are_chained(name: str) -> None:
    k, n = 1024, 96
    data = random_weight(name, k, n, 11)[0]
    make_pair_of_extremes(name, data)
    w = dequantize(data, name, (k, n)).reshape(n, k).astype(np.float64)
    codes, scales = read_groups(name, data, w)
    assert (scales == 0).any()
    for tokens in (128, 135):
        x = activations((tokens, k), tokens)
        q = effective(x, name)
        expected = chained_product(codes, scales, q, TYPES[name][2])
        error = np.abs(dense(name, data, k, n, x, threads=1) - expected) / (np.abs(q) @ np.abs(w).T)
        token, row = np.unravel_index(error.argmax(), error.shape)
        assert error[token, row] <= EXACT, (
            f"{tokens} tokens: worst at token {token}, row {row}: {error[token, row]:.2e}"
        )


@pytest.mark.parametrize("name", ["Q6_K", "IQ2_XS", "Q3_K", "Q2_K_R4", "IQ4_XS", "Q8_0"])
def test_sums_do_not_depend_on_threads(name: str) -> None:
    """Sets of tokens are cut to keep threads busy, never so far that another kernel takes one of them."""
    k, n = 1280, 96
    data = random_weight(name, k, n, 12)[0]
    for tokens in (64, 128, 200, 300, 520, 600, 640, 650):
        x = activations((tokens, k), tokens)
        one = dense(name, data, k, n, x, threads=1)
        assert np.isfinite(one).all()
        for threads in (2, 3, 5, 20, 33):
            np.testing.assert_array_equal(
                dense(name, data, k, n, x, threads=threads), one, err_msg=f"{tokens}, {threads}"
            )
        np.testing.assert_array_equal(dense(name, data, k, n, x[:512], threads=2), one[:512])


@pytest.mark.skipif(tier not in ("avx512", "avxvnni"), reason="no dot products of bytes")
def test_more_tokens_than_threads_share() -> None:
    """From 32 MiB on, where each thread makes what it needs."""
    k, n, tokens = 8192, 32, 4096
    data = random_weight("IQ4_K", k, n, 13)[0]
    x = np.tile(activations((256, k), 14), (tokens // 256, 1))
    found = dense("IQ4_K", data, k, n, x, threads=2).reshape(-1, 256, n)
    few = dense("IQ4_K", data, k, n, x[:256], threads=2)
    for part in found:
        np.testing.assert_array_equal(part, few)


def test_fewer_tokens_share_what_the_most_are_too_many_for() -> None:
    """Of a plan whose tokens vary, as expanded latents do, with the memory that was planned for the most."""
    k, n, most = 512, 32, 70000
    data = random_weight("Q6_K", k, n, 15)[0]
    x = np.tile(activations((250, k), 16), (most // 250, 1))
    program = Program()
    out = np.zeros((most, n), np.float32)
    act, fmt = program.prepared(x, "Q6_K")
    dst = program.array(out)
    program.op("mul_mat", dst, [program.weight(data, "Q6_K", (k, n)), act], {0: fmt})
    tensors, ops = np.array(program.tensors, TENSOR_DTYPE), np.array(program.ops, OP_DTYPE)
    plan = core.Plan(tensors, ops, [(dst, 1)])
    work = core.WorkMemory(plan.work_bytes(2))
    expected = dense("Q6_K", data, k, n, x[:250], threads=2)
    for tokens in (most, 50000, 1000, 250):
        out[:] = 0
        plan.run(tokens, 2, work)
        for start in (0, tokens // 250 // 2 * 250):
            np.testing.assert_allclose(
                out[start : start + 250], expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max()
            )
        assert (out[tokens:] == 0).all()
    plan.run(500, 3)
    assert plan.work_bytes(3) >= work.nbytes, "planned for the most, whatever ran before"
