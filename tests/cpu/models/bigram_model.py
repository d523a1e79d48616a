"""A language model whose next token depends on the last one only: a stand-in for a context in tool tests."""

from __future__ import annotations

import numpy as np

from ikpy.engine.batch import Batch


class BigramCells:
    """Records what a tool does to the KV cache."""

    recurrent = None

    def __init__(self) -> None:
        self.cells: dict[int, dict[int, int]] = {}
        self.clears = 0
        self.removable = 512

    def clear(self) -> None:
        self.cells = {}
        self.clears += 1

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        cells = self.cells.get(seq, {})
        for position in [p for p in cells if p >= p0 and (p1 < 0 or p < p1)]:
            del cells[position]
        return True

    def rewind(self, seq: int, length: int) -> int:
        self.seq_rm(seq, length, -1)
        return length

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        cells = self.cells.get(seq, {})
        moved = {p + delta if p >= p0 and (p1 < 0 or p < p1) else p: token for p, token in cells.items()}
        self.cells[seq] = moved

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        self.cells[dst] = dict(self.cells.get(src, {}))


class BigramContext:
    """``table``: float32 [n_vocab, n_vocab] logits of the next token given the last."""

    def __init__(self, table: np.ndarray, n_ctx: int = 512, n_batch: int = 512) -> None:
        self.table = table.astype(np.float32)
        self.n_ctx = self.n_ctx_seq = n_ctx
        self.n_batch = n_batch
        self.kv = BigramCells()
        self.batches: list[Batch] = []
        self.max_uniform_tokens = n_batch
        self.known_maxima = None

    def decode(self, batch: Batch, *, copy: bool = True) -> np.ndarray:
        assert len(batch) <= self.n_batch, f"{len(batch)} tokens given to a context with n_batch={self.n_batch}"
        self.batches.append(batch)
        for token, position, ids in zip(batch.tokens, batch.pos, batch.seq_ids, strict=True):
            for seq in ids if isinstance(ids, tuple) else (int(ids),):
                cells = self.kv.cells.setdefault(seq, {})
                held = set(range(int(position))) <= set(cells)
                assert held, f"sequence {seq}: position {position} without the ones before it"
                assert position < self.n_ctx, f"position {position} outside a context of {self.n_ctx}"
                cells[int(position)] = int(token)
        return self.table[batch.tokens[batch.logits]]


class ByteVocab:
    """Tokens are the bytes of UTF-8, preceded by token 256 when the model wants a begin token; 257 ends."""

    bos, eos = 256, 257
    add_eos = False
    n_vocab = 258

    def __init__(self, add_bos: bool = True) -> None:
        self.add_bos = add_bos

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        start = [self.bos] if self.add_bos and add_special else []
        return start + list(text.encode("utf-8"))

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


def random_table(seed: int = 3, n_vocab: int = 258, scale: float = 2.0) -> np.ndarray:
    """A reproducible logits table."""
    return np.random.default_rng(seed).normal(0, scale, (n_vocab, n_vocab)).astype(np.float32)
