"""Child process: logits of ikpy for token ids from stdin, as float32 to a .npy file.

    IKPY_AMX=0 python peer_logits.py MODEL OUT < ids.npy

Runs apart from the tests because the tile unit is turned off for a whole process.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np

from ikpy import Batch, Context, ContextParams, Model


def logits_of(path: Path, chunks: np.ndarray) -> np.ndarray:
    """Logits float32 [chunks, tokens, V] for ids int32 [chunks, tokens], without latent cache and flash attention."""
    context = Context(Model.load(path), ContextParams(n_ctx=chunks.shape[1], n_threads=1, mla=0, flash_attn=False))
    parts = []
    for ids in chunks:
        context.kv.clear()
        parts.append(context.decode(Batch.single(ids, logits="all")))
    return np.stack(parts)


def main() -> None:
    path, out = sys.argv[1:]
    np.save(out, logits_of(Path(path), np.load(io.BytesIO(sys.stdin.buffer.read()))))


if __name__ == "__main__":
    main()
