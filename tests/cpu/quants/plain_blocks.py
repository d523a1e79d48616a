"""Random models of plain blocks in many forms, and their float64 evaluation by the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel

N, HEADS, HEAD, F = 3, 4, 32, 100
D = HEADS * HEAD
Function = Callable[[np.ndarray], np.ndarray]


def gelu_erf(x: np.ndarray) -> np.ndarray:
    """GELU by the error function."""
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def relu_squared(x: np.ndarray) -> np.ndarray:
    return np.square(np.maximum(x, 0))


@dataclass(frozen=True)
class Form:
    """What blocks have.

    norms: "layer", "biased" (LayerNorm with biases), "rms" or "bare" (LayerNorm without weights). parallel: "" (one
    branch after the other), "one" (side by side under one norm) or "two" (each under its own). rotated: elements of a
    head. biases: of "qkv", "out", "ffn" and "output". fused: q, k and v in one tensor. head_norms: "", "apart" (a row
    for each head), "behind" (one row for all, behind the rotation) or "all" (of all heads together, with biases).
    clamp: bound of q, k and v, 0 for none. max_bias: of linear biases, which take the place of the rotation. scale: of
    scores, times the root of the head size. embedding_norm: with a bias, as all norms.
    """

    arch: str
    seed: int
    norms: str = "biased"
    parallel: str = ""
    kv: int = 2
    rotated: int = HEAD
    neox: bool = True
    act: Function = ref.gelu
    gated: bool = False
    biases: tuple[str, ...] = ()
    fused: bool = False
    tied: bool = False
    head_norms: str = ""
    positions: bool = False
    clamp: float = 0.0
    n_layer: int = N
    attention_norm: str = "attn_norm"
    fused_ffn: bool = False
    base: float = 10000.0
    max_bias: float = 0.0
    scale: float = 1.0
    embedding_norm: bool = False
    heads: int = HEADS
    head: int = HEAD
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def d(self) -> int:
        """Elements of the residual stream."""
        return self.heads * self.head

    @property
    def name(self) -> str:
        """Of a test."""
        parts = (self.arch, self.parallel, "fused" if self.fused else "", self.head_norms, *self.biases)
        return "-".join(part for part in parts if part)


def model(form: Form) -> RandomModel:
    """A random model."""
    keys = checks.shape(form.n_layer, form.d, form.heads, form.kv, form.head, F)
    epsilon = "attention.layer_norm_rms_epsilon" if form.norms == "rms" else "attention.layer_norm_epsilon"
    rotated = form.head if form.max_bias else form.rotated
    m = RandomModel(form.arch, form.seed, **{**keys, epsilon: 1e-5, "rope.dimension_count": rotated, **form.keys})
    d = form.d
    checks.frame(m, d, tied=form.tied)
    if form.norms == "bare":
        del m.weights["output_norm"]
    if form.norms == "biased":
        m.vector("output_norm.bias", d)
    if "output" in form.biases:
        m.vector("output.bias", N_VOCAB)
    if form.positions:
        m.matrix("position_embd", m.keys["context_length"], d)
    if form.embedding_norm:
        m.norm("token_embd_norm", d)
        m.vector("token_embd_norm.bias", d)
    for il in range(form.n_layer):
        _layer(m, form, f"blk.{il}")
    return m


def _layer(m: RandomModel, form: Form, p: str) -> None:
    d = form.d
    names = {"attn_norm", form.attention_norm} | (set() if form.parallel == "one" else {"ffn_norm"})
    for name in sorted(names) if form.norms != "bare" else ():
        m.norm(f"{p}.{name}", d)
        if form.norms == "biased":
            m.vector(f"{p}.{name}.bias", d)
    sizes = {"q": form.heads * form.head, "k": form.kv * form.head, "v": form.kv * form.head}
    for name, n in {"qkv": sum(sizes.values())}.items() if form.fused else sizes.items():
        m.matrix(f"{p}.attn_{name}", n, d)
        if "qkv" in form.biases:
            m.vector(f"{p}.attn_{name}.bias", n)
    for name, heads in (("q", form.heads), ("k", form.kv)) if form.head_norms else ():
        sizes = {"apart": (heads, form.head), "all": (heads * form.head,)}
        m.norm(f"{p}.attn_{name}_norm", *sizes.get(form.head_norms, (form.head,)))
        if form.head_norms == "all":
            m.vector(f"{p}.attn_{name}_norm.bias", heads * form.head)
    m.matrix(f"{p}.attn_output", d, form.heads * form.head)
    for name, rows, columns in (("gate", F, d), ("up", 2 * F if form.fused_ffn else F, d), ("down", d, F)):
        if name != "gate" or (form.gated and not form.fused_ffn):
            m.matrix(f"{p}.ffn_{name}", rows, columns)
            if "ffn" in form.biases:
                m.vector(f"{p}.ffn_{name}.bias", rows)
    if "out" in form.biases:
        m.vector(f"{p}.attn_output.bias", d)


class Blocks:
    """The evaluation of a form."""

    def __init__(self, form: Form, m: RandomModel) -> None:
        self.form, self.e = form, Evaluation(m)
        self.heads = self.e.keys["attention.head_count"]

    def normed(self, x: np.ndarray, name: str) -> np.ndarray:
        """The norm of a name."""
        w, eps = self.e.w, self.e.eps
        if self.form.norms == "rms":
            return ref.rms_norm(x, w[name], eps)
        return ref.layer_norm(x, w.get(name, np.ones(1)), eps) + w.get(f"{name}.bias", 0.0)

    def project(self, x: np.ndarray, name: str) -> np.ndarray:
        """A matrix with its bias."""
        return x @ self.e.w[name].T + self.e.w.get(f"{name}.bias", 0.0)

    def attention(self, il: int, h: np.ndarray, angles: np.ndarray | None) -> np.ndarray:
        """Attention on the normed input, behind its output matrix."""
        form, p = self.form, f"blk.{il}"
        if form.fused:
            sizes = (self.heads * self.e.head, form.kv * self.e.head)
            parts = np.split(self.project(h, f"{p}.attn_qkv"), (sizes[0], sum(sizes)), axis=1)
        else:
            parts = [self.project(h, f"{p}.attn_{name}") for name in "qkv"]
        if form.clamp:
            parts = [np.clip(part, -form.clamp, form.clamp) for part in parts]
        q, k, v = (part.reshape(len(h), -1, self.e.head) for part in parts)
        if form.head_norms == "all":
            q, k = (
                self.normed(x.reshape(len(h), -1), f"{p}.attn_{name}_norm").reshape(x.shape)
                for name, x in (("q", q), ("k", k))
            )
        elif form.head_norms and form.head_norms != "behind":
            q, k = self.normed(q, f"{p}.attn_q_norm"), self.normed(k, f"{p}.attn_k_norm")
        if angles is not None:
            q, k = (ref.rotate(x, angles, neox=form.neox) for x in (q, k))
        if form.head_norms == "behind":
            q, k = self.normed(q, f"{p}.attn_q_norm"), self.normed(k, f"{p}.attn_k_norm")
        scale = form.scale / math.sqrt(self.e.head)
        return self.project(ref.attend(q, k, v, scale, max_bias=form.max_bias), f"{p}.attn_output")

    def network(self, il: int, h: np.ndarray) -> np.ndarray:
        """The feed-forward network on the normed input."""
        p, act = f"blk.{il}", self.form.act
        if self.form.fused_ffn:
            gate, up = np.split(self.project(h, f"{p}.ffn_up"), 2, axis=1)
            return self.project(act(gate) * up, f"{p}.ffn_down")
        up = self.project(h, f"{p}.ffn_up")
        hidden = act(self.project(h, f"{p}.ffn_gate")) * up if self.form.gated else act(up)
        return self.project(hidden, f"{p}.ffn_down")

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [T, V]."""
        form, pos = self.form, np.arange(len(tokens), dtype=np.float64)
        x = self.e.w["token_embd"][tokens]
        if form.positions:
            x = x + self.e.w["position_embd"][: len(tokens)]
        if form.embedding_norm:
            x = self.normed(x, "token_embd_norm")
        angles = None if form.positions or form.max_bias else ref.plain_angles(form.rotated, form.base, pos)
        for il in range(form.n_layer):
            p = f"blk.{il}"
            attended = self.attention(il, self.normed(x, f"{p}.{form.attention_norm}"), angles)
            if form.parallel:
                h = self.normed(x, f"{p}.{'attn' if form.parallel == 'one' else 'ffn'}_norm")
                x = x + attended + self.network(il, h)
            else:
                x = x + attended
                x = x + self.network(il, self.normed(x, f"{p}.ffn_norm"))
        head = "token_embd" if form.tied else "output"
        return self.normed(x, "output_norm") @ self.e.w[head].T + self.e.w.get("output.bias", 0.0)


def made(form: Form) -> tuple[RandomModel, np.ndarray]:
    """A random model and the logits of TOKENS."""
    m = model(form)
    return m, Blocks(form, m).logits(TOKENS)
