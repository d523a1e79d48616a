"""Child process: sums of squared matmul inputs of the reference library, for token ids from stdin, to a .npz file.

    python reference_activations.py MODEL N_CTX OUT < ids.npy

For every weight NAME of the blocks: "NAME" float64 [matrices, n] and "NAME rows" [matrices]. The library calls back
after every matrix multiplication; fields of its tensors are read at their offsets in that build.
"""

from __future__ import annotations

import ctypes
import io
import sys

import numpy as np
from ik_llama_cpp import _ctypes_api as api
from ik_llama_cpp._internals import IkContext, IkModel

from tests.cpu.models.reference_logits import evaluate, without_latent_cache

NE, NB, OP, SRC, DATA, NAME = 16, 48, 80, 160, 256, 264


def pointer(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


def shape(tensor: int) -> list[int]:
    """ne0 first."""
    return list((ctypes.c_int64 * 4).from_address(tensor + NE))


def values(tensor: int, kind: type) -> np.ndarray:
    """A contiguous tensor's numbers, numpy order."""
    ne = shape(tensor)
    array = (kind * int(np.prod(ne))).from_address(pointer(tensor + DATA))
    return np.ctypeslib.as_array(array).reshape(ne[::-1])


def expert_ids(tensor: int) -> np.ndarray:
    """Experts of every token [tokens, used]; the rows are a part of longer ones."""
    n_used, n_tokens = shape(tensor)[:2]
    stride = ctypes.c_size_t.from_address(tensor + NB + 8).value
    base = pointer(tensor + DATA)
    return np.array([(ctypes.c_int32 * n_used).from_address(base + stride * t)[:] for t in range(n_tokens)])


class Collector:
    """Adds up what goes into the matrix multiplications."""

    def __init__(self) -> None:
        self.sums: dict[str, np.ndarray] = {}
        self.rows: dict[str, np.ndarray] = {}
        self.op_name = api._lib.ggml_op_name
        self.op_name.restype = ctypes.c_char_p
        self.callback = api.ggml_backend_sched_eval_callback(self.node)

    def node(self, tensor: int, ask: bool, _: object) -> bool:
        op = self.op_name(ctypes.c_int.from_address(tensor + OP)).decode()
        weight = pointer(tensor + SRC)
        if op not in ("MUL_MAT", "MUL_MAT_ID") or not weight:
            return not ask
        name = ctypes.string_at(weight + NAME).decode()
        if not name.startswith("blk.") or not name.endswith(".weight"):
            return not ask
        if not ask:
            self.add(name, weight, values(pointer(tensor + SRC + 8), ctypes.c_float), tensor, op == "MUL_MAT_ID")
        return True

    def add(self, name: str, weight: int, x: np.ndarray, tensor: int, has_experts: bool) -> None:
        squares = x.astype(np.float64) ** 2
        if not has_experts:
            self.put(name, squares.reshape(-1, x.shape[-1]).sum(axis=0)[None], np.array([x.size // x.shape[-1]]))
            return
        ids = expert_ids(pointer(tensor + SRC + 16))
        n_tokens, n_used = ids.shape
        n_expert = shape(weight)[2]
        sums = np.zeros((n_expert, x.shape[-1]))
        rows = np.zeros(n_expert)
        per_expert = np.broadcast_to(squares[0], (n_tokens, n_used, x.shape[-1]))
        np.add.at(sums, ids.reshape(-1), per_expert.reshape(-1, x.shape[-1]))
        np.add.at(rows, ids.reshape(-1), 1)
        self.put(name, sums, rows)

    def put(self, name: str, sums: np.ndarray, rows: np.ndarray) -> None:
        self.sums[name] = self.sums.get(name, 0) + sums
        self.rows[name] = self.rows.get(name, 0) + rows


def main() -> None:
    path, n_ctx, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    chunks = np.load(io.BytesIO(sys.stdin.buffer.read()))
    without_latent_cache()
    collector = Collector()
    defaults = api.llama_context_default_params

    def context_params() -> object:
        params = defaults()
        params.cb_eval = collector.callback
        params.fused_moe_up_gate = params.fused_up_gate = params.graph_reuse = False
        return params

    api.llama_context_default_params = context_params
    model = IkModel(path)
    context = IkContext(model, n_ctx=n_ctx, n_threads=2, flash_attn=False)
    for ids in chunks:
        evaluate(context, ids)
    rows = {f"{name} rows": value for name, value in collector.rows.items()}
    np.savez(out, **collector.sums, **rows)


if __name__ == "__main__":
    main()
