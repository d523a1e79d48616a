"""From the hidden states of a text's tokens to one vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.batch import Batch
from ikpy.errors import UsageError

if TYPE_CHECKING:
    from ikpy.engine.context import Context

POOLINGS = ("none", "mean", "cls", "last", "rank")
States = NDArray[np.float32]


def pool(
    states: States,
    pooling: str,
    classifier: Callable[[States], States] | None = None,
    projection: Callable[[States], States] | None = None,
) -> States:
    """Vector of a text from the states float32 [n_tokens, n_embd] of its tokens.

    'mean' of all, 'cls' the first, 'last' the last, 'rank' the scores of the model's classification head; 'none' leaves
    them as they are. projection: the model's matrices behind pooling. Raises UsageError for 'rank' without a head.
    """
    if pooling == "rank":
        if classifier is None:
            raise UsageError("pooling 'rank' needs a model with a classification head (tensors cls, cls.output)")
        return classifier(states)
    if pooling not in POOLINGS:
        raise UsageError(f"pooling '{pooling}' is not one of {', '.join(POOLINGS)}")
    if pooling == "mean":
        states = states.mean(axis=0, dtype=np.float64).astype(np.float32)
    elif pooling != "none":
        states = np.array(states[0 if pooling == "cls" else -1], dtype=np.float32)
    return states if projection is None else projection(states)


def token_states(context: Context, tokens: Sequence[int]) -> States:
    """States of the last layer f32 [n_tokens, n_embd] of a text that fits the context, whose cache is cleared."""
    context.kv.clear()
    at_once = not context.graph_params.causal or context.model.arch.decoder_start is not None
    step = len(tokens) if at_once else context.n_batch
    states = []
    for start in range(0, len(tokens), step):
        context.decode(Batch.single(tokens[start : start + step], start, 0, "all"))
        assert context.embeddings is not None
        states.append(context.embeddings)
    return np.concatenate(states)
