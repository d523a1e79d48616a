"""Drafters of Gemma 4 as llama.cpp (the xllamacpp package) computes them, and how far ours are from that.

    python benchmarks/peer_assistant.py capture MODEL.gguf DRAFT.gguf --tokens 1,5,9 --guesses 4 --out FILE.npz
    python -m benchmarks.peer_assistant check MODEL.gguf DRAFT.gguf FILE.npz

`capture` needs xllamacpp and numpy alone. The model reads all tokens but the last, the drafter that one and then its
own likeliest ones, at the same position. The file gets `tokens` [T], `states` [T - 1, W] of the model, and of the
drafter `read` [n], `logits` [n, V] and `given` [n, W], its states. Caches are F32.
"""

from __future__ import annotations

import numpy as np

if __package__:
    from benchmarks.peer_commands import arguments
    from benchmarks.peer_prediction import Peer
else:
    from peer_commands import arguments  # type: ignore[no-redef]
    from peer_prediction import Peer  # type: ignore[no-redef]


def capture(model: str, draft: str, tokens: list[int], n: int, out: str) -> None:
    """Writes what the peer computes."""
    peer, pos = Peer(model, draft, flash=False), len(tokens) - 1  # flash attention rounds to f16
    _, states = peer.run(peer.target, tokens[:-1])
    state, read = states[-1:], tokens[-1:]
    logits, given = list[np.ndarray](), list[np.ndarray]()
    for _ in range(n):
        found, state = peer.run(peer.drafting, read[-1:], state, pos)
        logits.append(found[0])
        given.append(state[0])
        read.append(int(found[0].argmax()))
    np.savez(out, tokens=tokens, states=states, read=read[:-1], logits=logits, given=given)


def check(model: str, draft: str, captured: str) -> None:
    """Prints the largest difference of every array of ours, relative to the largest value."""
    from ikpy import Batch, Context, ContextParams, Model
    from ikpy.engine.cache_reader import CacheReader
    from ikpy.engine.reading_layer import cache_reading_layers

    def report(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        error = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max()
        print(f"{name}: {error.max():.1e} at row {error.argmax()}")

    peer, target = np.load(captured), Model.load(model)
    tokens = peer["tokens"].tolist()
    context = Context(target, ContextParams(n_ctx=512, type_k="f32", type_v="f32", token_states=True))
    context.decode(Batch.single(tokens[:-1], logits="none"))
    assert context.token_states is not None
    report("states of the model", context.token_states, peer["states"])
    reader, state = CacheReader(cache_reading_layers(target, draft), context, 1, print), peer["states"][-1]
    logits, given = list[np.ndarray](), list[np.ndarray]()
    for token in peer["read"].tolist():
        found, state = reader.evaluate(token, len(tokens) - 1, 0, state)
        logits.append(found)
        given.append(state)
    report("logits of the drafter", np.stack(logits), peer["logits"])
    report("its states", np.stack(given), peer["given"])


def main() -> None:
    """Command line."""
    args = arguments(__doc__, "draft", guesses=4)
    if args.command == "check":
        check(args.model, args.draft, args.captured)
    else:
        capture(args.model, args.draft, args.tokens, args.guesses, args.out)


if __name__ == "__main__":
    main()
