"""Matrices of GPTQ, AWQ, NVFP4 and bitsandbytes for the tests of `ikpy convert`, written from the definitions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ikpy.convert.words import e4m3_values
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.integer_checkpoints import Entry, plain

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = np.linspace(-1, 1, 16, dtype=np.float32) ** 3
Parts = dict[str, Entry]


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes [n, m] as rows of 32-bit words, one code after the other, the lowest bits first."""
    rows = []
    for row in codes:
        number = sum(int(code) << (bits * i) for i, code in enumerate(row))
        n_words = -(-bits * len(row) // 32)
        rows.append(np.frombuffer(number.to_bytes(4 * n_words, "little"), "<i4"))
    return np.stack(rows)


def words(values: np.ndarray) -> Entry:
    return "I32", values.shape, np.ascontiguousarray(values, "<i4").tobytes()


@dataclass
class Codes:
    """Random codes [rows, columns], zero points and scales [rows, groups], the group of every column."""

    rows: int
    columns: int
    bits: int
    group_size: int
    seed: int = 0
    symmetric: bool = True
    shuffled: bool = False
    codes: np.ndarray = field(init=False)
    zeros: np.ndarray = field(init=False)
    scales: np.ndarray = field(init=False)
    groups: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        random, top = np.random.default_rng(self.seed), 1 << self.bits
        n_groups = -(-self.columns // self.group_size)
        self.codes = random.integers(0, top, (self.rows, self.columns))
        self.scales = random.uniform(0.003, 0.05, (self.rows, n_groups)).astype(np.float16)
        self.zeros = np.full((self.rows, n_groups), top // 2)
        if not self.symmetric:
            self.zeros = random.integers(1, top, (self.rows, n_groups))
        self.groups = np.arange(self.columns) // self.group_size
        if self.shuffled:
            random.shuffle(self.groups)

    def values(self) -> np.ndarray:
        """What the matrix is, float64."""
        steps = self.codes - self.zeros[:, self.groups]
        return steps * self.scales.astype(np.float64)[:, self.groups]

    def gptq(self, *, v2: bool = False, g_idx: bool = True) -> Parts:
        """qweight [columns * bits / 32, rows], qzeros [groups, rows * bits / 32], scales [groups, rows]."""
        zeros = self.zeros if v2 else self.zeros - 1
        parts = {
            "qweight": words(stream(self.codes, self.bits).T),
            "qzeros": words(stream(zeros.T, self.bits)),
            "scales": plain(np.ascontiguousarray(self.scales.T)),
        }
        if g_idx:
            parts["g_idx"] = plain(self.groups.astype(np.int32))
        return parts

    def gemm(self) -> Parts:
        """qweight [columns, rows / 8], qzeros [groups, rows / 8], scales [groups, rows]."""
        order = (np.arange(self.rows).reshape(-1, 8)[:, AWQ_ORDER]).reshape(-1)
        return {
            "qweight": words(stream(self.codes.T[:, order], 4)),
            "qzeros": words(stream(self.zeros.T[:, order], 4)),
            "scales": plain(np.ascontiguousarray(self.scales.T)),
        }

    def gemv(self) -> Parts:
        """qweight [rows, columns / 8], qzeros [rows, w], scales [rows, 8 w]: padded to a multiple of some words."""
        n_words = -(-self.zeros.shape[1] // 8) + 1
        zeros, scales = (np.zeros((self.rows, 8 * n_words), t) for t in (np.int64, np.float16))
        zeros[:, : self.zeros.shape[1]], scales[:, : self.zeros.shape[1]] = self.zeros, self.scales
        return {"qweight": words(stream(self.codes, 4)), "qzeros": words(stream(zeros, 4)), "scales": plain(scales)}


def gptq_config(**values: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True} | values


def awq_config(**values: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"} | values


@dataclass
class Nvfp4:
    """Random codes e2m1 [rows, columns], scales e4m3 [rows, columns / 16] and a factor."""

    rows: int
    columns: int
    seed: int = 0
    factor: float = 0.0009765
    codes: np.ndarray = field(init=False)
    scales: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self.codes = random.integers(0, 16, (self.rows, self.columns)).astype(np.uint8)
        self.scales = random.integers(0, 127, (self.rows, self.columns // 16)).astype(np.uint8)
        self.scales[:, 0] = 126

    def values(self) -> np.ndarray:
        scales = e4m3_values()[self.scales].astype(np.float64).repeat(16, axis=1)
        return E2M1[self.codes] * scales * np.float64(np.float32(self.factor))

    def _nibbles(self) -> Entry:
        packed = self.codes[:, ::2] | self.codes[:, 1::2] << 4
        return "U8", packed.shape, packed.tobytes()

    def modelopt(self) -> Parts:
        return {
            "weight": self._nibbles(),
            "weight_scale": ("F8_E4M3", self.scales.shape, self.scales.tobytes()),
            "weight_scale_2": ("F32", (), np.float32(self.factor).tobytes()),
            "input_scale": ("F32", (), np.float32(0.01).tobytes()),
        }

    def compressed(self) -> Parts:
        """The factor is stored as what scales are divided by: a power of two, whose inverse is exact."""
        self.factor = 2.0**-10
        return {
            "weight_packed": self._nibbles(),
            "weight_scale": ("F8_E4M3", self.scales.shape, self.scales.tobytes()),
            "weight_global_scale": plain(np.array([1024], np.float32)),
            "input_global_scale": plain(np.array([80], np.float32)),
        }


def modelopt_config(algorithm: str = "NVFP4", **values: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]} | values


def nf4(values: np.ndarray, *, nested: bool, block: int = 64) -> tuple[Parts, np.ndarray]:
    """A matrix in the levels NF4 of blocks of consecutive values: its parts and what they mean, float64."""
    flat = values.reshape(-1, block)
    absmax = np.abs(flat).max(1).astype(np.float32)
    codes = np.abs(flat[:, :, None] / absmax[:, None, None] - NF4).argmin(-1).astype(np.uint8).reshape(-1)
    packed = codes[::2] << 4 | codes[1::2]
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(values.shape)}
    parts = {"weight": ("U8", (len(packed), 1), packed.tobytes()), "weight.quant_map": plain(NF4)}
    if nested:
        offset, table = float(absmax.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
        outer = np.array([np.abs(part - offset).max() for part in np.split(absmax, range(256, len(absmax), 256))])
        outer = outer.astype(np.float32)
        per_block = outer[np.arange(len(absmax)) // 256]
        inner = np.abs((absmax - offset)[:, None] / per_block[:, None] - table).argmin(-1).astype(np.uint8)
        absmax = (table[inner].astype(np.float64) * per_block + offset).astype(np.float32)
        parts |= {
            "weight.absmax": ("U8", inner.shape, inner.tobytes()),
            "weight.nested_absmax": plain(outer),
            "weight.nested_quant_map": plain(table),
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        parts["weight.absmax"] = plain(absmax)
    text = json.dumps(state).encode()
    parts["weight.quant_state.bitsandbytes__nf4"] = ("U8", (len(text),), text)
    meaning = NF4[codes].astype(np.float64).reshape(flat.shape) * absmax[:, None]
    return parts, meaning.reshape(values.shape)


def replace_matrix(tensors: made.Tensors, module: str, parts: Parts) -> None:
    """Other tensors for module.weight: parts by the endings of their names."""
    tensors.pop(f"{module}.weight", None)
    tensors.update({f"{module}.{end}": entry for end, entry in parts.items()})


def checkpoint(tmp_path: Path, config: dict[str, Any], modules: dict[str, Parts], name: str = "llama") -> Path:
    """A tiny checkpoint with other tensors for some modules."""
    folder = made.copy(name, tmp_path)

    def change(tensors: made.Tensors) -> None:
        for module, parts in modules.items():
            replace_matrix(tensors, module, parts)

    made.change_tensors(folder, change)
    made.amend(folder, quantization_config=config)
    return folder
