"""What the engine must meet for a random model: its float64 evaluation, and the stored answer of another engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.session import put_state, take_state
from ikpy.errors import IkpyError
from tests.cpu.models import reference_models as ref
from tests.cpu.models.peer_captures import check_against_peer
from tests.cpu.models.reference_models import N_VOCAB, RandomModel

TOKENS = np.random.default_rng(5).integers(4, N_VOCAB, 40)
LONG = np.random.default_rng(8).integers(4, N_VOCAB, 170)
POS = np.arange(len(TOKENS), dtype=np.float64)
RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
FLOAT_BOUND = 5e-5  # of the largest logit, with an F32 cache
N_STEPS = 4
N_CACHED = 20  # tokens of the second sequence


def shape(n_layer: int, d: int, heads: int, kv: int, head: int, f: int) -> dict[str, int]:
    """The usual dimension keys."""
    return {
        "block_count": n_layer,
        "embedding_length": d,
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
        "feed_forward_length": f,
    }


def frame(model: RandomModel, d: int, *, tied: bool) -> None:
    """Embedding, final norm and output matrix; a vocabulary that other engines load."""
    model.numbered_words = True
    model.matrix("token_embd", N_VOCAB, d)
    model.norm("output_norm", d)
    if not tied:
        model.matrix("output", N_VOCAB, d)


def experts(model: RandomModel, prefix: str, d: int, f: int, n_expert: int) -> None:
    """Router and experts of a layer."""
    model.matrix(f"{prefix}.ffn_gate_inp", n_expert, d)
    for name, rows, columns in (("gate", f, d), ("up", f, d), ("down", d, f)):
        model.matrix(f"{prefix}.ffn_{name}_exps", n_expert, rows, columns)


def routed(w: ref.Weights, h: np.ndarray, weights: np.ndarray, n_used: int) -> np.ndarray:
    """Sum over the n_used experts of largest weight of weight times expert, for h [T, D] and weights [T, E]."""
    out = np.zeros_like(h)
    for t, row in enumerate(h):
        for e in np.argsort(-weights[t])[:n_used]:
            hidden = ref.silu(w["ffn_gate_exps"][e] @ row) * (w["ffn_up_exps"][e] @ row)
            out[t] += weights[t, e] * (w["ffn_down_exps"][e] @ hidden)
    return out


def layer_weights(e: ref.Evaluation, il: int) -> ref.Weights:
    """Weights of a layer without its prefix."""
    prefix = f"blk.{il}."
    return {name.removeprefix(prefix): w for name, w in e.w.items() if name.startswith(prefix)}


def decoded(path: Path, **params: object) -> dict[str, np.ndarray]:
    """Logits of all tokens: as one batch, with the last ones as single steps, behind another sequence.

    The batch has two threads, which take several times as long as one beside other tests.
    """
    settings = ContextParams(n_ctx=256, n_threads=1, n_seq_max=2, **params)  # type: ignore[arg-type]
    n = len(TOKENS)
    whole = Context(Model.load(path), replace(settings, n_threads=2)).decode(Batch.single(TOKENS, logits="all"))
    steps = Context(Model.load(path), settings)
    parts = [steps.decode(Batch.single(TOKENS[: n - N_STEPS], logits="all"))]
    parts += [steps.decode(Batch.single(TOKENS[i : i + 1], i)) for i in range(n - N_STEPS, n)]
    second = Context(Model.load(path), settings)
    second.decode(Batch.single(TOKENS[:N_CACHED][::-1]))
    behind = second.decode(Batch.single(TOKENS, seq_id=1, logits="all"))
    return {"one batch": whole, "single steps": np.concatenate(parts), "second sequence": behind}


def check_definition(model: RandomModel, truth: np.ndarray, folder: Path, bound: float = FLOAT_BOUND) -> Path:
    """Holds the engine to truth [T, V] in all its forms; the file of the model."""
    path = model.write(folder / "model.gguf")
    for flash in (False, True):
        for form, logits in decoded(path, flash_attn=flash, type_k="f32", type_v="f32").items():
            hold(f"{form}, flash={flash}", logits, truth, bound)
    return path


def check_latent_mode(model: RandomModel, truth: np.ndarray, mla: int, folder: Path, bound: float) -> None:
    """Holds LONG in a mode of latent attention, also prompts whose cells are expanded. truth: [T, V]."""
    path = model.write(folder / "model.gguf")
    for n_ubatch in (512, 50):
        settings = ContextParams(n_ctx=256, n_threads=1, n_ubatch=n_ubatch, mla=mla, type_k="f32", type_v="f32")
        context = Context(Model.load(path, ModelParams(mla=mla)), settings)
        hold(f"micro-batches of {n_ubatch}", context.decode(Batch.single(LONG, logits="all")), truth, bound)


def check_sequences(context: Context, evaluate: Callable[[np.ndarray], np.ndarray], bound: float) -> None:
    """Holds a sequence that went back, one that shares its cells and a saved one, in a context of three."""
    context.decode(Batch.single(TOKENS))
    assert context.kv.rewind(0, 21) == 21
    other = np.concatenate([TOKENS[:21], LONG[:19]])
    truth = evaluate(other)
    hold("back", context.decode(Batch.single(other[21:], 21, logits="all")), truth[21:], bound)
    context.kv.seq_rm(0, 30, -1)
    context.kv.seq_cp(0, 1)
    put_state(context, 2, take_state(context, 0, other[:30].tolist()))
    for seq in (1, 2):
        logits = context.decode(Batch.single(other[30:], 30, seq, logits="all"))
        hold(f"sequence {seq}", logits, truth[30:], bound)


def check_quantized_cache(path: Path, truth: np.ndarray, bound: float) -> None:
    """Q8_0 keys and values move the logits of every token by less than bound of the largest, but they move them.

    With experts it is the median token, since a rounded key may let a router choose another expert here and there.
    """
    routes = Model.load(path).hparams.n_expert > 0
    for form, logits in decoded(path, flash_attn=True, type_k="q8_0", type_v="q8_0").items():
        errors = np.abs(logits - truth).max(axis=1) / np.abs(truth).max()
        error = float(np.median(errors) if routes else errors.max())
        token = "the median token" if routes else f"token {errors.argmax()}"
        assert FLOAT_BOUND < error < bound, f"{form}, Q8_0 cache: {token} is off by {error:.1e} relative"


def context_of(path: Path, **params: Any) -> Context:
    """A context of the usual size on a model file."""
    settings = {"n_ctx": 256, "n_threads": 1, **params}
    return Context(Model.load(path, ModelParams(mla=settings.get("mla", 3))), ContextParams(**settings))


def refuses(model: RandomModel, key: str, value: Any, message: str, folder: Path) -> None:
    """Holds that a file of the model with another value of a key is refused with this message."""
    model.keys[key] = value
    with pytest.raises(IkpyError, match=message):
        Model.load(model.write(folder / "model.gguf"))


def hold(form: str, logits: np.ndarray, truth: np.ndarray, bound: float) -> None:
    """Holds every token of logits [T, V] to the definition, relative to the largest logit."""
    error = np.abs(logits - truth).max(axis=1) / np.abs(truth).max()
    worst = int(error.argmax())
    assert error[worst] < bound, f"{form}: position {worst} off by {error[worst]:.1e} relative"


def check_peer(path: Path, name: str, tolerance: float) -> None:
    """Holds log-probabilities (F16 cache, flash attention) to the capture of another engine."""
    context = Context(Model.load(path), ContextParams(n_ctx=256, n_threads=2, flash_attn=True))
    check_against_peer(name, TOKENS, context.decode(Batch.single(TOKENS, logits="all")), tolerance)


def chosen(scores: np.ndarray, n_used: int, bias: np.ndarray | float = 0.0) -> np.ndarray:
    """scores [T, E] of the n_used experts per token for which scores + bias are largest, 0 for the others."""
    kept = np.argsort(-(scores + bias), axis=1)[:, :n_used]
    out = np.zeros_like(scores)
    np.put_along_axis(out, kept, np.take_along_axis(scores, kept, 1), 1)
    return out


def sigmoid_routed(w: ref.Weights, h: np.ndarray, n_used: int, scale: float = 1.0) -> np.ndarray:
    """Experts by sigmoid, chosen with exp_probs_b added, their weights renormalised and multiplied by scale."""
    weights = chosen(ref.sigmoid(h @ w["ffn_gate_inp"].T), n_used, w["exp_probs_b.bias"])
    return routed(w, h, scale * weights / weights.sum(-1, keepdims=True), n_used)


def check_shift(path: Path) -> None:
    """A text moved to later positions is continued as where it was: RoPE knows distances only."""
    moved_by, token = 37, TOKENS[-1:]
    params = ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32")
    still, moved = (Context(Model.load(path), params) for _ in range(2))
    for context in (still, moved):
        context.decode(Batch.single(TOKENS[:-1]))
    n = len(TOKENS) - 1
    moved.kv.seq_add(0, 0, -1, moved_by)
    expected, found = still.decode(Batch.single(token, n)), moved.decode(Batch.single(token, n + moved_by))
    hold(f"moved by {moved_by}", found, expected, FLOAT_BOUND)
    elsewhere = still.decode(Batch.single(token, n + moved_by))
    assert np.abs(elsewhere - expected).max() > 0.01 * np.abs(expected).max(), "the model does not know positions"
