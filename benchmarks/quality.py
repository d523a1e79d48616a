"""Perplexity of a model over a text under the settings of a context: what the tables of docs/models.md are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.vocab import Vocab


def text_tokens(model: Model, path: Path, limit: int) -> np.ndarray:
    """The first tokens int32 [limit] of a text."""
    vocab = Vocab.from_metadata(model.gguf.metadata)
    text = path.read_text(encoding="utf-8")[: 12 * limit]
    return np.array(vocab.tokenize(text, add_special=False)[:limit], np.int32)


def token_losses(context: Context, tokens: np.ndarray, chunk: int, bos: int | None) -> np.ndarray:
    """Negative log-likelihoods float64 [chunks, chunk - 1] of the tokens of whole chunks, each starting afresh."""
    rows = []
    for start in range(0, len(tokens) - chunk + 1, chunk):
        piece = tokens[start : start + chunk].copy()
        if bos is not None:
            piece[0] = bos
        context.kv.clear()
        parts = [
            context.decode(Batch.single(piece[i : i + context.n_batch], i, logits="all"))
            for i in range(0, chunk, context.n_batch)
        ]
        logits = np.concatenate(parts)[:-1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(logits).sum(axis=1))
        rows.append(log_sum - logits[np.arange(chunk - 1), piece[1:]])
    return np.stack(rows)


def perplexity(model: Model, tokens: np.ndarray, chunk: int, **settings: Any) -> float:
    """exp of the mean loss over the second half of every chunk."""
    bos = model.gguf.get("tokenizer.ggml.bos_token_id")
    context = Context(model, ContextParams(**({"n_ctx": chunk} | settings)))
    return float(np.exp(token_losses(context, tokens, chunk, bos)[:, chunk // 2 - 1 :].mean()))
