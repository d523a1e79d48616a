"""Prediction layers as llama.cpp (the xllamacpp package) computes them, and how far ours are from that.

    python benchmarks/peer_prediction.py capture MODEL.gguf --tokens 1,5,9 --heads 2 --out FILE.npz
    python -m benchmarks.peer_prediction check MODEL.gguf FILE.npz

`capture` needs xllamacpp and numpy alone. The file gets `tokens` [T], `logits` [T, V] and `states` [T, W] of the model,
and of every layer `logits0` [T - 1, V] and `states0` [T - 1, W], whose entry i read token i + 1 and the state behind
token i at position i. Caches are F32. `--draft FILE` names a file of the layers alone (`ikpy convert --mtp`).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

if __package__:
    from benchmarks.peer_commands import arguments
else:
    from peer_commands import arguments  # type: ignore[no-redef]

DECODE = 1
PREDICTING = 1
BOOL, I32, U32, F32, POINTER = ctypes.c_bool, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one type."""
    return [(name, kind) for name in names.split()]


class ModelParams(ctypes.Structure):
    """llama_model_params of October 2026."""

    _fields_ = [
        *fields(POINTER, "devices tensor_buft_overrides"),
        *fields(I32, "n_gpu_layers split_mode load_mode lazy_mode main_gpu"),
        *fields(POINTER, "tensor_split progress progress_data kv_overrides"),
        *fields(BOOL, "vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp"),
        ("rest", ctypes.c_char * 64),
    ]


class ContextParams(ctypes.Structure):
    """llama_context_params of October 2026."""

    _fields_ = [
        *fields(U32, "n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq"),
        *fields(I32, "n_threads n_threads_batch ctx_type rope_scaling pooling attention flash_attn"),
        *fields(F32, "freq_base freq_scale ext_factor attn_factor beta_fast beta_slow"),
        *fields(U32, "orig_ctx"),
        *fields(F32, "defrag"),
        *fields(POINTER, "eval eval_data"),
        *fields(I32, "type_k type_v"),
        *fields(POINTER, "unknown abort abort_data"),
        *fields(BOOL, "embeddings offload_kqv no_perf op_offload swa_full kv_unified"),
        *fields(POINTER, "samplers n_samplers ctx_other"),
        ("rest", ctypes.c_char * 64),
    ]


class Row(ctypes.Structure):
    """llama_embd."""

    _fields_ = [("data", POINTER), ("n_rows", ctypes.c_size_t), ("n_embd", ctypes.c_size_t)]


def library() -> ctypes.CDLL:
    """The engine in the package, with the types of what is called."""
    import xllamacpp

    found = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.abi3.so"))))
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "llama_model_default_params": (ModelParams, []),
        "llama_context_default_params": (ContextParams, []),
        "llama_model_load_from_file": (POINTER, [ctypes.c_char_p, ModelParams]),
        "llama_init_from_model": (POINTER, [POINTER, ContextParams]),
        "llama_model_n_embd_out": (I32, [POINTER]),
        "llama_model_get_vocab": (POINTER, [POINTER]),
        "llama_vocab_n_tokens": (I32, [POINTER]),
        "llama_get_memory": (POINTER, [POINTER]),
        "llama_memory_seq_rm": (BOOL, [POINTER, I32, I32, I32]),
        "llama_batch_ext_init": (POINTER, [POINTER]),
        "llama_batch_ext_add_token": (I32, [POINTER, I32, I32]),
        "llama_batch_ext_set_pos": (BOOL, [POINTER, I32, POINTER]),
        "llama_batch_ext_set_embd_state": (BOOL, [POINTER, I32, Row]),
        "llama_batch_ext_set_output_logits": (BOOL, [POINTER, I32, BOOL]),
        "llama_process": (I32, [POINTER, I32, POINTER]),
        "llama_get_logits_ith": (POINTER, [POINTER, I32]),
        "_Z26llama_set_embeddings_nextnP13llama_contextbb": (None, [POINTER, BOOL, BOOL]),
        "_Z26llama_get_embeddings_nextnP13llama_context": (POINTER, [POINTER]),
        "_Z30llama_get_embeddings_nextn_ithP13llama_contexti": (POINTER, [POINTER, I32]),
        "_Z28llama_set_nextn_layer_offsetP13llama_contexti": (None, [POINTER, I32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


class Peer:
    """A model and its prediction layers."""

    def __init__(self, path: str, draft: str | None = None, *, flash: bool = True) -> None:
        lib = self.lib = library()
        self.model = self._load(path)
        layers = self._load(draft) if draft else self.model
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.width = lib.llama_model_n_embd_out(self.model)
        settings = lib.llama_context_default_params()
        settings.n_ctx = settings.n_outputs_max = settings.n_outputs_max_per_seq = 512
        settings.type_k = settings.type_v = 0
        settings.n_threads = settings.n_threads_batch = 1
        if not flash:
            settings.flash_attn = 0
        self.target = lib.llama_init_from_model(self.model, settings)
        settings.ctx_type, settings.ctx_other = PREDICTING, self.target
        self.drafting = lib.llama_init_from_model(layers, settings)
        self._call("set_embeddings_nextnP13llama_contextbb", 26, self.target, True, False)
        self._call("set_embeddings_nextnP13llama_contextbb", 26, self.drafting, True, True)

    def _load(self, path: str) -> int:
        params = self.lib.llama_model_default_params()
        params.load_mtp, params.use_extra_bufts = True, False
        model: int | None = self.lib.llama_model_load_from_file(path.encode(), params)
        if not model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        return model

    def _call(self, name: str, length: int, *arguments: Any) -> Any:
        return getattr(self.lib, f"_Z{length}llama_{name}")(*arguments)

    def _array(self, address: int, n: int) -> np.ndarray:
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(F32)), (n,)).copy()

    def run(
        self, context: int, tokens: list[int], states: np.ndarray | None = None, start: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits [T, V] and states [T, W] of tokens from a position on."""
        lib, kept = self.lib, []
        batch = lib.llama_batch_ext_init(context)
        for i, token in enumerate(tokens):
            lib.llama_batch_ext_add_token(batch, 0, token)
            place = (I32 * 4)(*[start + i] * 3, 0)
            kept.append(place)
            lib.llama_batch_ext_set_pos(batch, i, place)
            lib.llama_batch_ext_set_output_logits(batch, i, True)
            if states is not None:
                row = states[i]
                lib.llama_batch_ext_set_embd_state(batch, i, Row(row.ctypes.data, 1, len(row)))
        if lib.llama_process(context, DECODE, batch):
            raise RuntimeError("llama.cpp failed to evaluate the batch")
        n = len(tokens)
        logits = np.stack([self._array(lib.llama_get_logits_ith(context, i), self.n_vocab) for i in range(n)])
        if states is None:
            found = self._array(self._call("get_embeddings_nextnP13llama_context", 26, context), n * self.width)
            return logits, found.reshape(n, self.width)
        name = "get_embeddings_nextn_ithP13llama_contexti"
        return logits, np.stack([self._array(self._call(name, 30, context, i), self.width) for i in range(n)])

    def head(self, number: int, tokens: list[int], states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those of a prediction layer."""
        self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.drafting), 0, 0, -1)
        self._call("set_nextn_layer_offsetP13llama_contexti", 28, self.drafting, number)
        return self.run(self.drafting, tokens, states)


def capture(path: str, draft: str | None, tokens: list[int], n_heads: int, out: str) -> None:
    """Writes what the peer computes."""
    peer = Peer(path, draft)
    logits, states = peer.run(peer.target, tokens)
    found = {"tokens": np.array(tokens, np.int32), "logits": logits, "states": states}
    for number in range(n_heads):
        found[f"logits{number}"], found[f"states{number}"] = peer.head(number, tokens[1:], states[:-1])
    np.savez(out, **found)  # type: ignore[arg-type]


def check(path: str, draft: str | None, captured: str) -> None:
    """Prints the largest difference of every row of ours, relative to the largest value."""
    from ikpy import Batch, Context, Model
    from ikpy import ContextParams as Settings

    peer, model = np.load(captured), Model.load(path)
    tokens = peer["tokens"].tolist()

    def settings(**more: bool) -> Settings:
        return Settings(n_ctx=512, type_k="f32", type_v="f32", type_indexer="f32", **more)  # type: ignore[arg-type]

    def report(name: str, ours: np.ndarray | None, theirs: np.ndarray) -> None:
        assert ours is not None
        error = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max()
        print(f"{name}: {error.max():.1e} at row {error.argmax()}")

    context = Context(model, settings(token_states=True))
    report("logits of the model", context.decode(Batch.single(tokens, logits="all")), peer["logits"])
    report("its states", context.token_states, peer["states"])
    layers = Model.load(draft) if draft else model
    for number, head in enumerate(layers.prediction_heads()):
        context = Context(head, settings(embeddings=True))
        logits = context.decode(Batch.single(tokens[1:], logits="all"), np.ascontiguousarray(peer["states"][:-1]))
        report(f"logits of layer {number}", logits, peer[f"logits{number}"])
        report("its states", context.embeddings, peer[f"states{number}"])


def main() -> None:
    """Command line."""
    args = arguments(__doc__, "--draft", heads=1)
    if args.command == "check":
        check(args.model, args.draft, args.captured)
    else:
        capture(args.model, args.draft, args.tokens, args.heads, args.out)


if __name__ == "__main__":
    main()
