"""Sizes of micro-batches on devices: a new size is planned anew, so that sizes near to each other share a plan.

A plan of 36 layers takes the host 35 ms, of DeepSeek-V3 on four GPUs that divide layers half a second
(docs/gpu.md, "Sizes of batches"); prompts of a server hardly ever have the same length. What is added repeats the last
token in the same cell of the cache: it writes the same values there once more and chooses the same experts.
"""

from __future__ import annotations

MOST_EXACT = 16
"""Tokens of a micro-batch that is planned as it is: those of parallel generation and of drafts."""


def padded_tokens(n_tokens: int, n_ubatch: int) -> int:
    """Tokens to evaluate: up to an eighth more, no more than a micro-batch may have."""
    if n_tokens <= MOST_EXACT:
        return n_tokens
    step = 1 << n_tokens.bit_length() - 4
    return min(-(-n_tokens // step) * step, n_ubatch)


def padded_outputs(n_outputs: int, n_tokens: int, n_padded: int) -> int:
    """Outputs of a micro-batch of n_tokens that was padded to n_padded: all, or the next power of two below all.

    Graphs with as many outputs as tokens take all tokens in order, whatever outputs a batch names.
    """
    if n_outputs == n_tokens:
        return n_padded
    return min(1 << (n_outputs - 1).bit_length(), n_padded - 1) if n_outputs else 0
