"""A context whose decode calls are counted and timed for the timings block."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ikpy.engine.batch import Batch
    from ikpy.engine.context import Context
    from ikpy.engine.kv_cache import KVCache
    from ikpy.engine.sampler_parts import KnownMaxima
    from ikpy.tools.run_logs import Timings


class TimedContext:
    """What the tools need of a context, with its time going into ``timings``."""

    def __init__(self, context: Context, timings: Timings) -> None:
        self.context = context
        self.timings = timings

    @property
    def n_ctx(self) -> int:
        """Cells of the context."""
        return self.context.n_ctx

    @property
    def n_ctx_seq(self) -> int:
        """Tokens of one sequence at most."""
        return self.context.n_ctx_seq

    @property
    def n_batch(self) -> int:
        """Most tokens of one decode call."""
        return self.context.n_batch

    @property
    def max_uniform_tokens(self) -> int:
        """Most tokens of a batch that are rounded as single ones are."""
        return self.context.max_uniform_tokens

    @property
    def kv(self) -> KVCache:
        """The cache."""
        return self.context.kv

    @property
    def moves_media(self) -> bool:
        """As of the context."""
        return self.context.moves_media

    @property
    def token_states(self) -> NDArray[np.float32] | None:
        """Hidden states of all tokens of the last decode, if the context keeps them."""
        return self.context.token_states

    @property
    def known_maxima(self) -> KnownMaxima:
        """As :attr:`ikpy.engine.context.Context.known_maxima`."""
        return self.context.known_maxima

    def decode(self, batch: Batch, *, copy: bool = True) -> NDArray[np.float32]:
        """As :meth:`ikpy.engine.context.Context.decode`."""
        began = time.perf_counter()
        logits = self.context.decode(batch, copy=copy)
        self.timings.add_decode(len(batch), time.perf_counter() - began)
        return logits
