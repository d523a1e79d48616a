"""Drafters of architecture dflash as llama.cpp (the xllamacpp package) computes them, and how far ours are from that.

    python benchmarks/peer_dflash.py capture MODEL.gguf DRAFT.gguf --tokens 1,5,9 --block 6 --mask 7 --out FILE.npz
    python -m benchmarks.peer_dflash check MODEL.gguf DRAFT.gguf FILE.npz

`capture` needs xllamacpp and numpy alone. The model reads all tokens but the last, which begins the block, masks behind
it. The file gets `tokens` [T], `block` [B], `logits` [B, V] of the drafter, of DSpark's `odds` [B], and of DFlash 2
`lattice` [B, W] (candidates of a place, scores by the candidate before and this one). Caches are F32.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ikpy.models.dflash import DFlash

if __package__:
    from benchmarks.peer_commands import arguments
    from benchmarks.peer_eagle3 import PlainBatch, declared, plain_batch, rows
    from benchmarks.peer_prediction import BOOL, DECODE, I32, POINTER, U32, library
else:
    from peer_commands import arguments  # type: ignore[no-redef]
    from peer_eagle3 import PlainBatch, declared, plain_batch, rows  # type: ignore[no-redef]
    from peer_prediction import BOOL, DECODE, I32, POINTER, U32, library  # type: ignore[no-redef]


def placed(n: int, start: int, tokens: list[int] | None, states: np.ndarray | None, kept: list[Any]) -> PlainBatch:
    """Tokens, or rows [n, W], at positions from ``start`` on; logits are wanted of tokens."""
    wide = np.zeros((n, 1), np.float32) if states is None else np.ascontiguousarray(states)
    batch = plain_batch(n, tokens or [0] * n, wide, kept)
    batch.embd, batch.token = (None, batch.token) if states is None else (batch.embd, None)
    arrays = (I32 * n)(*range(start, start + n)), (ctypes.c_int8 * n)(*[states is None] * n)
    kept += arrays
    batch.pos, batch.logits = map(ctypes.addressof, arrays)
    return batch


def capture(model: str, draft: str, tokens: list[int], n_block: int, mask: int, out: str) -> None:
    """Writes what the peer computes."""
    lib, kept, n = library(), list[Any](), len(tokens) - 1
    params = lib.llama_model_default_params()
    params.use_extra_bufts = False
    target, drafter = (lib.llama_model_load_from_file(path.encode(), params) for path in (model, draft))
    settings = lib.llama_context_default_params()
    settings.n_ctx = settings.n_outputs_max = settings.n_outputs_max_per_seq = 512
    settings.type_k = settings.type_v = 0
    settings.n_threads = settings.n_threads_batch = 1
    settings.flash_attn = 0  # which rounds to f16
    reads = lib.llama_init_from_model(target, settings)
    settings.ctx_other = reads
    drafts = lib.llama_init_from_model(drafter, settings)
    ids = declared(lib, "_Z28llama_model_target_layer_idsPK11llama_model", POINTER, POINTER)(drafter)
    count = declared(lib, "_Z30llama_model_target_layer_ids_nPK11llama_model", U32, POINTER)(drafter)
    layers = np.ctypeslib.as_array(ctypes.cast(ids, ctypes.POINTER(I32)), (count,)).tolist()
    keep = declared(lib, "_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, POINTER, U32, BOOL)
    given = declared(lib, "_Z30llama_get_embeddings_layer_inpP13llama_contextj", POINTER, POINTER, U32)
    for layer in layers:
        keep(reads, layer, True)
    n_best = declared(lib, "_Z33llama_model_dflash_selector_top_kPK11llama_model", I32, POINTER)(drafter)
    lib._Z26llama_set_embeddings_nextnP13llama_contextbb(drafts, True, n_best == 0)
    batch = lib.llama_batch_ext_init(reads)
    for i, token in enumerate(tokens[:-1]):
        lib.llama_batch_ext_add_token(batch, 0, token)
        kept.append((I32 * 4)(i, i, i, 0))
        lib.llama_batch_ext_set_pos(batch, i, kept[-1])
        lib.llama_batch_ext_set_output_logits(batch, i, True)
    decode = declared(lib, "llama_decode", I32, POINTER, PlainBatch)
    width, own = lib.llama_model_n_embd_out(target), lib.llama_model_n_embd_out(drafter)
    if lib.llama_process(reads, DECODE, batch):
        raise RuntimeError("llama.cpp failed to evaluate the batch")
    inputs = np.concatenate([rows(given(reads, layer), n, width) for layer in layers], axis=1)
    declared(lib, "llama_set_causal_attn", None, POINTER, BOOL)(drafts, False)
    if decode(drafts, placed(n, 0, None, inputs, kept)):
        raise RuntimeError("llama.cpp failed to read the inputs of the layers")
    block = [tokens[-1], *[mask] * (n_block - 1)]
    if decode(drafts, placed(n_block, n, block, None, kept)):
        raise RuntimeError("llama.cpp failed to evaluate the block")
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(target))
    logits = np.concatenate([rows(lib.llama_get_logits_ith(drafts, i), 1, n_vocab) for i in range(n_block)])
    found = {"tokens": tokens, "block": block, "logits": logits}
    state = lib._Z30llama_get_embeddings_nextn_ithP13llama_contexti
    if n_best:
        found["lattice"] = rows(lib._Z26llama_get_embeddings_nextnP13llama_context(drafts), n_block, own)
    said = [None if n_best else state(drafts, i) for i in range(n_block)]
    if all(said):
        found["odds"] = np.concatenate([rows(address, 1, own)[:, 0] for address in said])
    np.savez(out, **found)  # type: ignore[arg-type]


def check(model: str, draft: str, captured: str) -> None:
    """Prints the largest difference of the logits of every guess, relative to the largest value."""
    from ikpy import Batch, Context, ContextParams, Model
    from ikpy.engine.block_draft import MarkovSteps
    from ikpy.engine.reading_layer import reading_layer
    from ikpy.models.dflash import DFlash

    settings = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 512, "type_k": "f32", "type_v": "f32"}
    peer, target = np.load(captured), Model.load(model)
    tokens, block, layers = peer["tokens"].tolist(), peer["block"].tolist(), reading_layer(target, draft)
    arch = layers.arch
    assert isinstance(arch, DFlash)
    context = Context(target, ContextParams(**settings, token_states=True))  # type: ignore[arg-type]
    context.decode(Batch.single(tokens[:-1], logits="none"))
    states = context.token_states
    assert states is not None
    context = Context(layers, ContextParams(**settings, embeddings=True, swa_full=True))  # type: ignore[arg-type]
    context.decode(Batch.single(tokens[:-1], logits="none"), states)
    zeros = np.zeros((len(block), arch.state_size), np.float32)
    logits = context.decode(Batch.single(block, len(tokens) - 1, logits="all"), zeros)
    steps, odds = None if arch.markov is None else MarkovSteps(arch.markov, 1), []
    first = 0 if steps is None or arch.guesses_first else 1
    token = tokens[-1]
    for i in range(first, len(block) if steps else 0):
        assert steps is not None and context.embeddings is not None
        logits[i] += steps.added(token)
        odds.append(steps.odds(context.embeddings[i]) if steps.knows_odds else 0.0)
        best = int(logits[i].argmax())
        token = best if arch.target_tokens is None else int(arch.target_tokens[best])
    theirs = peer["logits"]
    known = slice(None) if arch.target_tokens is None else arch.target_tokens
    error = np.abs(logits - theirs[:, known]).max(axis=1) / np.abs(theirs[:, known]).max()
    print(f"logits of the block: {error.max():.1e} at row {error.argmax()}")
    if arch.selector is not None:
        assert context.embeddings is not None
        error = max(_errors_of_selector(arch, logits, context.embeddings, peer["lattice"], tokens[-1]))
        print(f"scores of the selector: {error:.1e}")
    if odds and "odds" in peer:
        print(f"odds: {np.abs(np.array(odds) - peer['odds'][first:]).max():.1e}")


def _errors_of_selector(
    arch: DFlash, logits: np.ndarray, states: np.ndarray, lattice: np.ndarray, token: int
) -> Iterator[float]:
    """Largest difference of the scores of every place, along the peer's choices."""
    from ikpy.engine.block_draft import SelectorWalk

    assert arch.selector is not None
    walk, n, chosen = SelectorWalk(arch.selector), arch.selector.n_best, 0
    for i in range(1, len(logits)):
        theirs, by_choice = lattice[i, :n].astype(np.int64), lattice[i, n : n + n * n].reshape(n, n)[chosen]
        ours, scores = walk.scores(logits[i], states[i], token, arch.target_tokens)
        if set(ours.tolist()) != set(theirs.tolist()):
            raise RuntimeError(f"place {i}: candidates {sorted(ours)}, the peer's {sorted(theirs)}")
        yield float(np.abs(scores[np.argsort(ours)] - by_choice[np.argsort(theirs)]).max() / np.abs(by_choice).max())
        chosen = int(by_choice.argmax())
        token = int(theirs[chosen])


def main() -> None:
    """Command line."""
    args = arguments(__doc__, "draft", block=6, mask=7)
    if args.command == "check":
        check(args.model, args.draft, args.captured)
    else:
        capture(args.model, args.draft, args.tokens, args.block, args.mask, args.out)


if __name__ == "__main__":
    main()
