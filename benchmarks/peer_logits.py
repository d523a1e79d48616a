"""Log-probabilities of a model as another engine computes them, for tests of architectures.

    python -m benchmarks.peer_logits MODEL.gguf --peer ik|xllamacpp --tokens 1,5,9 --out tests/data/peer_logits/NAME.npz

The file gets `tokens` (int32 [T]), `logprobs` (float32 [T, n_vocab], row t after tokens 0 to t) and `peer` (name and
version). The tokens are given as they are: a model of random weights needs no more than a vocabulary of any words.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.peer_commands import tokens_of
from benchmarks.peers import IkLlama, XLlama

WORD = 4
"""An ordinary token: special ones end a completion without its probabilities."""


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Rows of logits [T, n_vocab] as log-probabilities, float32."""
    z = logits.astype(np.float64)
    z -= z.max(-1, keepdims=True)
    return (z - np.log(np.exp(z).sum(-1, keepdims=True))).astype(np.float32)


def ik_logits(path: str, tokens: list[int]) -> np.ndarray:
    """Logits [T, n_vocab] of ik_llama.cpp, token by token, F16 cache and flash attention."""
    from ik_llama_cpp._internals import make_batch_single

    peer = IkLlama(path, n_ctx=512, n_threads=1)
    n_vocab = peer.context.model.n_vocab
    rows = []
    for position, token in enumerate(tokens):
        if peer.context.decode(make_batch_single(token, position)):
            raise RuntimeError(f"ik_llama.cpp failed to decode token {position}")
        rows.append(ik_row(peer.context, n_vocab))
    peer.close()
    return np.stack(rows)


def ik_row(context: Any, n_vocab: int) -> np.ndarray:
    """Logits of the last token, copied."""
    return np.ctypeslib.as_array(context.get_logits(), (n_vocab,)).copy()


def xllamacpp_logprobs(path: str, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [T, n_vocab] of llama.cpp: a completion of one token for every prefix."""
    peer = XLlama(path, n_ctx=512, n_threads=1)
    rows = []
    for end in range(1, len(tokens) + 1):
        request = {
            "prompt": tokens[:end],
            "n_predict": 1,
            "n_probs": 1 << 20,
            "ignore_eos": True,
            "logit_bias": [[WORD, 1000]],  # the probabilities are those before it
            "cache_prompt": False,
        }
        answer = peer.server.handle_completions(request)
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        row = np.full(len(top), -np.inf, np.float32)
        for entry in top:
            row[entry["id"]] = entry["logprob"]
        rows.append(row)
    peer.close()
    return np.stack(rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", choices=("ik", "xllamacpp"), required=True)
    parser.add_argument("--tokens", required=True, type=tokens_of)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    if args.peer == "ik":
        name, logprobs = "ik-llama-cpp-python", log_softmax(ik_logits(args.model, args.tokens))
    else:
        name, logprobs = "xllamacpp", xllamacpp_logprobs(args.model, args.tokens)
    np.savez_compressed(
        args.out, tokens=np.array(args.tokens, np.int32), logprobs=logprobs, peer=f"{name} {version(name)}"
    )


if __name__ == "__main__":
    main()
