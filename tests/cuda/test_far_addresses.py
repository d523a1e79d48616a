"""Rows that lie more than 4 GiB apart: no offset within a tensor is computed in 32 bits.

Every tensor of two rows and more is copied to a mapping of which only the pages with rows exist; the kernels must give
the same bits from there.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import pytest

from ikpy.backends.cuda import launch
from ikpy.backends.cuda.launch import ACT_BF16, ACT_TILES
from ikpy.backends.cuda.memory import host_view
from ikpy.graph.fusion import fuse
from ikpy.graph.ir import F16, F32, Buffer, Node, Value
from ikpy.quants import registry
from tests.cuda import programs
from tests.cuda.programs import Program
from tests.cuda.test_kernels_attention import grouped, latent
from tests.cuda.test_kernels_weights import packed

pytestmark = pytest.mark.usefixtures("emulation")
FAR = (1 << 32) + (1 << 24)
NO_RESERVE = 0x4000
SPREAD_VALUES = (F32, F16)
Builder = Callable[[], tuple[Program, list[Value]]]


class Spread:
    """A program whose tensors have their rows far apart."""

    def __init__(self, program: Program) -> None:
        self.program = Program(program.target)
        self.program.arrays = program.arrays
        self._rows: dict[Buffer, int] = {}
        self._moved: dict[Buffer, tuple[Buffer, int]] = {}
        nodes = program.graph.nodes
        prepared = {node.dst.buffer for node in nodes if node.kind == "act_prepare"}
        for value in (v for node in nodes for v in (node.dst, *node.src, *node.writes) if v is not None):
            # Lists of numbers and prepared activations have layouts of their own.
            plain = value.buffer.address is not None or value.type_id in SPREAD_VALUES
            if plain and value.buffer not in prepared:
                row = value.strides[1] * registry.by_id(value.type_id).interleave
                self._rows[value.buffer] = max(row, self._rows.get(value.buffer, 0))
        self.program.graph.nodes = [
            Node(
                node.kind,
                self.moved(node.dst),
                [None if v is None else self.moved(v) for v in node.src],
                node.ip,
                node.fp,
                [self.moved(v) for v in node.writes],
            )
            for node in nodes
        ]

    def moved(self, value: Value) -> Value:
        """The same view of the tensor at its new place."""
        buffer, unit = value.buffer, self._rows.get(value.buffer, 0)
        if not unit or buffer.nbytes < 2 * unit:
            return value
        target, factor = self._place(buffer, unit)
        row, column = divmod(value.offset, unit)
        strides = (value.strides[0], *(stride * factor for stride in value.strides[1:]))
        return Value(
            target, value.type_id, value.shape, strides, row * unit * factor + column, value.dynamic_dim, value.name
        )

    def _place(self, buffer: Buffer, unit: int) -> tuple[Buffer, int]:
        if buffer not in self._moved:
            n = buffer.nbytes // unit
            factor = (FAR // ((n - 1) * unit) // 64 + 1) * 64
            size = -(-((n - 1) * unit * factor + unit) // mmap.PAGESIZE) * mmap.PAGESIZE
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
            memory = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
            if buffer.address is not None:
                source = host_view(buffer.address, buffer.nbytes)
                for r in range(n):
                    memory[r * unit * factor :][:unit] = source[r * unit :][:unit]
            self._moved[buffer] = Buffer(size, memory.ctypes.data, memory), factor
        return self._moved[buffer]


@pytest.fixture(autouse=True)
def one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are the same whichever threads take turns first; the other tests of kernels look at that."""
    monkeypatch.setattr(programs, "ORDERS", programs.ORDERS[:1])


def same_from_afar(build: Builder, n_kv: int = 0) -> None:
    """Fails unless the results are the same, bit for bit, with rows near and far."""
    program, results = build()
    expected = program.run(results, on_cuda=True, n_kv=n_kv)
    program, results = build()
    spread = Spread(program)
    places = [spread.moved(value) for value in results]
    assert any(place.buffer.nbytes > FAR for place in places)
    for ours, truth in zip(spread.program.run(places, on_cuda=True, n_kv=n_kv), expected, strict=True):
        assert ours.tobytes() == truth.tobytes()


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


LARGE = {
    "int8": launch.Large(),
    "int8 wgmma": launch.Large(wgmma=1),
    "bf16": launch.Large(1, ACT_BF16),
    "bf16 wgmma": launch.Large(1, ACT_TILES),
}


QUANTIZED = ("q8_0", "q4_k_r4", "iq4_ks")


@pytest.mark.parametrize(
    ("type_name", "n_tokens", "way"),
    [
        *((name, n, "int8") for name in (*QUANTIZED, "f16", "bf16", "f32") for n in (2, 20)),
        *((name, 20, way) for name in (*QUANTIZED, "bf16") for way in list(LARGE)[1:]),
        *((name, 1, "int8") for name in ("q2_K", "iq3_ks")),
    ],
)
def test_products(type_name: str, n_tokens: int, way: str) -> None:
    def build() -> tuple[Program, list[Value]]:
        p = Program(launch.Target(large={"": LARGE[way]}))
        w = p.weight(packed(type_name, (256, 24), 1), type_name, (256, 24))
        x = normal(n_tokens, 256) if n_tokens > 1 else normal(2, 1, 256)  # in batches, for more than one row of results
        return p, [p.graph.mul_mat(w, p.array(x))]

    same_from_afar(build)


@pytest.mark.parametrize("n_tokens", [2, 30])
@pytest.mark.parametrize("way", ["int8", "int8 wgmma"])
@pytest.mark.parametrize("type_name", ["q4_K", "q8_0_r8", "bf16"])
def test_experts(type_name: str, way: str, n_tokens: int) -> None:
    def build() -> tuple[Program, list[Value]]:
        p, n_experts, n_used = Program(launch.Target(large={"": LARGE[way]})), 4, 2
        rng = np.random.default_rng(1)
        ids = p.array(np.stack([rng.permutation(n_experts)[:n_used] for _ in range(n_tokens)]).astype(np.int32))
        groups = p.graph.moe_group(ids, n_experts)
        up, gate = (
            p.weight(packed(type_name, (256, 256 * n_experts), seed), type_name, (256, 256, n_experts))
            for seed in (1, 2)
        )
        hidden = p.graph.mul_mat_id_up_gate(up, gate, p.array(normal(n_tokens, 256)), ids, groups, "silu")
        bias = p.array(normal(n_experts, 256))
        single = p.graph.mul_mat_id(up, p.array(normal(n_tokens, 256)), ids, groups, bias, per_slot=False)
        return p, [hidden, single, p.graph.moe_combine(single, None, ids)]

    same_from_afar(build)


@pytest.mark.parametrize("type_name", ["q6_K", "iq2_k_r4", "f16", "bf16_r16"])
def test_rows(type_name: str) -> None:
    def build() -> tuple[Program, list[Value]]:
        p, ids = Program(), np.array([47, 3, 31, 0], np.int32)
        return p, [p.graph.get_rows(p.weight(packed(type_name, (256, 48), 1), type_name, (256, 48)), p.array(ids))]

    same_from_afar(build)


def stored(type_name: str) -> tuple[Program, list[Value]]:
    """Rows in a cache, shifted, and as floats again."""
    p = Program()
    row = registry.by_name(type_name).row_nbytes(64)
    cache = p.weight(np.zeros(6 * 2 * row, np.uint8), type_name, (64, 2, 6))
    p.graph.kv_store(p.array(normal(6, 2, 64)), cache, p.array(np.arange(6, dtype=np.int32)))
    deltas = p.array(np.array([0, 3, 0, -2, 1, 0], np.int32))
    table = p.graph.rope_table(deltas, 32, None, [10000.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    p.graph.kv_shift(cache, table, deltas, neox=False, offset=32)
    return p, [cache, p.graph.copy(cache, p.graph.new(64, 2, 6))]


@pytest.mark.parametrize("type_name", ["f16", "q8_0", "bf16", "q6_0"])
def test_caches(type_name: str) -> None:
    same_from_afar(lambda: stored(type_name))


@pytest.mark.parametrize("n_tokens", [1, 25])
@pytest.mark.parametrize(("n", "type_name"), [(64, "f16"), (128, "q8_0"), (32, "f16"), (128, "bf16")])
def test_attention(n: int, type_name: str, n_tokens: int) -> None:
    def build() -> tuple[Program, list[Value]]:
        case = grouped(n, n_tokens, type_name)
        return case.p, [case.out]

    same_from_afar(build, n_kv=88)


@pytest.mark.parametrize("heads", [16, 24])
@pytest.mark.parametrize("type_name", ["f16", "q8_0"])
def test_latent_attention(type_name: str, heads: int) -> None:
    def build() -> tuple[Program, list[Value]]:
        case = latent(type_name, heads, 2)
        return case.p, [case.out]

    same_from_afar(build, n_kv=56)


def test_elements_and_norms() -> None:
    def build() -> tuple[Program, list[Value]]:
        p = Program()
        x, y, w = p.array(normal(3, 5, 128)), p.array(normal(3, 5, 128)), p.array(normal(128))
        g, found = p.graph, []
        found += [g.add(x, y), g.scale(x, 2.0), g.gated(x, y, "silu"), g.copy(x, g.new(128, 5, 3, type_id=F16))]
        found += [g.rms_norm(x, w, 1e-5), g.layer_norm(x, w, None, 1e-5)]
        total = g.add(p.array(normal(9, 128)), p.array(normal(9, 128)))
        found += [total, g.rms_norm(total, w, 1e-5)]
        table = g.rope_table(p.array(np.array([5, 9, 70000], np.int32)), 64, None, [10000.0, 1.0, 0.0, 1.0, 0.0, 0.0])
        found.append(g.rope(g.scale(p.array(normal(3, 4, 128)), 2.0), table, neox=True))
        g.nodes = fuse(g.nodes)
        return p, found

    same_from_afar(build)
