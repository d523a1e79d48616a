"""EAGLE-3 drafters as llama.cpp (the xllamacpp package) computes them, and how far ours are from that.

    python benchmarks/peer_eagle3.py capture MODEL.gguf DRAFT.gguf --tokens 1,5,9 --out FILE.npz
    python -m benchmarks.peer_eagle3 check MODEL.gguf DRAFT.gguf FILE.npz

`capture` needs xllamacpp and numpy alone. The file gets `tokens` [T], `joined` [T, W] (what the drafter makes of the
inputs of the model's layers), and of the drafter `logits` [T - 1, V] and `states` [T - 1, W], whose entry i read token
i + 1 and row i of `joined` at position i. Caches are F32.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

if __package__:
    from benchmarks.peer_commands import arguments
    from benchmarks.peer_prediction import BOOL, DECODE, F32, I32, POINTER, U32, fields, library
else:
    from peer_commands import arguments  # type: ignore[no-redef]
    from peer_prediction import BOOL, DECODE, F32, I32, POINTER, U32, fields, library  # type: ignore[no-redef]


class PlainBatch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [("n_tokens", I32), *fields(POINTER, "token embd pos n_seq_id seq_id logits")]


def declared(lib: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A function with its types."""
    function = getattr(lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


def rows(address: int, n: int, width: int) -> np.ndarray:
    """A copy of rows f32 [n, width]."""
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(F32)), (n, width)).copy()


def plain_batch(n: int, tokens: list[int] | None, states: np.ndarray, kept: list[Any]) -> PlainBatch:
    """Rows [n, W], with tokens at positions from 0 on if there are some."""
    kept.append(states)
    if tokens is None:
        return PlainBatch(n, None, states.ctypes.data, None, None, None, None)
    sequence = (I32 * 1)(0)
    arrays = (I32 * n)(*tokens), (I32 * n)(*range(n)), (I32 * n)(*[1] * n), (ctypes.c_int8 * n)(*[1] * n)
    sequences = (POINTER * n)(*[ctypes.addressof(sequence)] * n)
    kept += [sequence, sequences, *arrays]
    token, pos, count, wanted = map(ctypes.addressof, arrays)
    return PlainBatch(n, token, states.ctypes.data, pos, count, ctypes.addressof(sequences), wanted)


def capture(model: str, draft: str, tokens: list[int], out: str) -> None:
    """Writes what the peer computes."""
    lib, kept, n = library(), list[Any](), len(tokens)
    params = lib.llama_model_default_params()
    params.use_extra_bufts = False
    target, drafter = (lib.llama_model_load_from_file(path.encode(), params) for path in (model, draft))
    settings = lib.llama_context_default_params()
    settings.n_ctx = settings.n_outputs_max = settings.n_outputs_max_per_seq = 512
    settings.type_k = settings.type_v = 0
    settings.n_threads = settings.n_threads_batch = 1
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
    lib._Z26llama_set_embeddings_nextnP13llama_contextbb(drafts, True, False)
    batch = lib.llama_batch_ext_init(reads)
    for i, token in enumerate(tokens):
        lib.llama_batch_ext_add_token(batch, 0, token)
        kept.append((I32 * 4)(i, i, i, 0))
        lib.llama_batch_ext_set_pos(batch, i, kept[-1])
        lib.llama_batch_ext_set_output_logits(batch, i, True)
    encode, decode = (declared(lib, f"llama_{name}", I32, POINTER, PlainBatch) for name in ("encode", "decode"))
    width, own = lib.llama_model_n_embd_out(target), lib.llama_model_n_embd_out(drafter)
    if lib.llama_process(reads, DECODE, batch):
        raise RuntimeError("llama.cpp failed to evaluate the batch")
    inputs = np.concatenate([rows(given(reads, layer), n, width) for layer in layers], axis=1)
    if encode(drafts, plain_batch(n, None, inputs, kept)):
        raise RuntimeError("llama.cpp failed to join the inputs of the layers")
    joined = rows(lib._Z26llama_get_embeddings_nextnP13llama_context(drafts), n, own)
    if decode(drafts, plain_batch(n - 1, tokens[1:], np.ascontiguousarray(joined[:-1]), kept)):
        raise RuntimeError("llama.cpp failed to evaluate the drafter")
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(target))
    state = lib._Z30llama_get_embeddings_nextn_ithP13llama_contexti
    logits = [rows(lib.llama_get_logits_ith(drafts, i), 1, n_vocab) for i in range(n - 1)]
    states = [rows(state(drafts, i), 1, own) for i in range(n - 1)]
    np.savez(out, tokens=tokens, joined=joined, logits=np.concatenate(logits), states=np.concatenate(states))


def check(model: str, draft: str, captured: str) -> None:
    """Prints the largest difference of every array of ours, relative to the largest value."""
    from ikpy import Batch, Context, ContextParams, Model
    from ikpy.engine.reading_layer import reading_layer
    from ikpy.models.eagle3 import Eagle3

    def settings(**more: bool) -> ContextParams:
        return ContextParams(n_ctx=512, type_k="f32", type_v="f32", **more)  # type: ignore[arg-type]

    def report(name: str, ours: np.ndarray | None, theirs: np.ndarray) -> None:
        assert ours is not None
        known = np.isfinite(theirs[0])
        error = np.abs(ours[:, known] - theirs[:, known]).max(axis=1) / np.abs(theirs[:, known]).max()
        print(f"{name}: {error.max():.1e} at row {error.argmax()}")

    peer, target = np.load(captured), Model.load(model)
    tokens, layer = peer["tokens"].tolist(), reading_layer(target, draft)
    assert isinstance(layer.arch, Eagle3)
    context = Context(target, settings(token_states=True))
    context.decode(Batch.single(tokens, logits="all"))
    report("what the drafter reads", context.token_states, peer["joined"])
    context = Context(layer, settings(embeddings=True))
    logits = context.decode(Batch.single(tokens[1:], logits="all"), np.ascontiguousarray(peer["joined"][:-1]))
    mapped = layer.arch.target_tokens
    spread = np.full(peer["logits"].shape, -np.inf, np.float32)
    spread[:, slice(None) if mapped is None else mapped] = logits
    report("its logits", spread, peer["logits"])
    report("its states", context.embeddings, peer["states"])


def main() -> None:
    """Command line."""
    args = arguments(__doc__, "draft")
    if args.command == "check":
        check(args.model, args.draft, args.captured)
    else:
        capture(args.model, args.draft, args.tokens, args.out)


if __name__ == "__main__":
    main()
