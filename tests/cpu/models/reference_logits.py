"""Child process: logits of the reference library for token ids from stdin, as float32 to a .npy file.

    python reference_logits.py MODEL N_CTX OUT [N_UBATCH] < ids.npy

One thread: two that wait for each other spin, at the cost of the tests beside them.
From 32 tokens on the library re-encodes several weight types, with loss; a smaller ubatch uses them as they are.
Runs apart from the tests because the library may end the process.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
from ik_llama_cpp import _ctypes_api as api
from ik_llama_cpp._internals import IkContext, IkModel, make_batch_range


def without_latent_cache(n_ubatch: int = 512) -> None:
    """MLA mode 0 for model and context: the package's own defaults disagree with each other."""
    model_defaults, context_defaults = api.llama_model_default_params, api.llama_context_default_params

    def model_params() -> Any:
        params = model_defaults()
        params.mla = 0
        return params

    def context_params() -> Any:
        params = context_defaults()
        params.mla_attn, params.n_ubatch = 0, n_ubatch
        return params

    api.llama_model_default_params, api.llama_context_default_params = model_params, context_params


def evaluate(context: IkContext, ids: np.ndarray) -> None:
    """Evaluates a chunk alone, with logits of all its tokens."""
    context.kv_cache_clear()
    batch = make_batch_range([int(t) for t in ids])
    for k in range(len(ids)):
        batch.logits[k] = 1
    if context.decode(batch):
        raise SystemExit("the reference failed to decode")


def main() -> None:
    path, n_ctx, out, *rest = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
    chunks = np.load(io.BytesIO(sys.stdin.buffer.read()))
    without_latent_cache(int(rest[0]) if rest else 512)
    model = IkModel(path)
    context = IkContext(model, n_ctx=n_ctx, n_threads=1, flash_attn=False)
    n_vocab = model.n_vocab
    logits = np.empty((*chunks.shape, n_vocab), np.float32)
    for i, ids in enumerate(chunks):
        evaluate(context, ids)
        for k in range(len(ids)):
            logits[i, k] = np.ctypeslib.as_array(context.get_logits(k), shape=(n_vocab,))
    np.save(out, logits)


if __name__ == "__main__":
    main()
