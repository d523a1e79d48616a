"""Random models of plain blocks in many forms, and their float64 evaluation by the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.cpu import definition_checks as checks
from tests.cpu import reference_models as ref
from tests.cpu.definition_checks import TOKENS
from tests.cpu.reference_models import N_VOCAB, Evaluation, RandomModel

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
    for each head) or "behind" (one row for all, behind the rotation). clamp: bound of q, k and v, 0 for none.
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
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of a test."""
        parts = (self.arch, self.parallel, "fused" if self.fused else "", self.head_norms, *self.biases)
        return "-".join(part for part in parts if part)


def model(form: Form) -> RandomModel:
    """A random model."""
    keys = checks.shape(form.n_layer, D, HEADS, form.kv, HEAD, F)
    epsilon = "attention.layer_norm_rms_epsilon" if form.norms == "rms" else "attention.layer_norm_epsilon"
    m = RandomModel(form.arch, form.seed, **{**keys, epsilon: 1e-5, "rope.dimension_count": form.rotated, **form.keys})
    checks.frame(m, D, tied=form.tied)
    if form.norms == "bare":
        del m.weights["output_norm"]
    if form.norms == "biased":
        m.vector("output_norm.bias", D)
    if "output" in form.biases:
        m.vector("output.bias", N_VOCAB)
    if form.positions:
        m.matrix("position_embd", m.keys["context_length"], D)
    for il in range(form.n_layer):
        _layer(m, form, f"blk.{il}")
    return m


def _layer(m: RandomModel, form: Form, p: str) -> None:
    names = {"attn_norm", form.attention_norm} | (set() if form.parallel == "one" else {"ffn_norm"})
    for name in sorted(names) if form.norms != "bare" else ():
        m.norm(f"{p}.{name}", D)
        if form.norms == "biased":
            m.vector(f"{p}.{name}.bias", D)
    sizes = {"q": HEADS * HEAD, "k": form.kv * HEAD, "v": form.kv * HEAD}
    for name, n in {"qkv": sum(sizes.values())}.items() if form.fused else sizes.items():
        m.matrix(f"{p}.attn_{name}", n, D)
        if "qkv" in form.biases:
            m.vector(f"{p}.attn_{name}.bias", n)
    for name, heads in (("q", HEADS), ("k", form.kv)) if form.head_norms else ():
        m.norm(f"{p}.attn_{name}_norm", *((heads, HEAD) if form.head_norms == "apart" else (HEAD,)))
    m.matrix(f"{p}.attn_output", D, HEADS * HEAD)
    for name, rows, columns in (("gate", F, D), ("up", 2 * F if form.fused_ffn else F, D), ("down", D, F)):
        if name != "gate" or (form.gated and not form.fused_ffn):
            m.matrix(f"{p}.ffn_{name}", rows, columns)
            if "ffn" in form.biases:
                m.vector(f"{p}.ffn_{name}.bias", rows)
    if "out" in form.biases:
        m.vector(f"{p}.attn_output.bias", D)


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
        if form.head_norms and form.head_norms != "behind":
            q, k = self.normed(q, f"{p}.attn_q_norm"), self.normed(k, f"{p}.attn_k_norm")
        if angles is not None:
            q, k = (ref.rotate(x, angles, neox=form.neox) for x in (q, k))
        if form.head_norms == "behind":
            q, k = self.normed(q, f"{p}.attn_q_norm"), self.normed(k, f"{p}.attn_k_norm")
        return self.project(ref.attend(q, k, v, 1 / math.sqrt(self.e.head)), f"{p}.attn_output")

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
        angles = None if form.positions else ref.plain_angles(form.rotated, form.base, pos)
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
