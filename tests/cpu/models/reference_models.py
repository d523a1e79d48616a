"""Readable float64 evaluations of model definitions, and random models to run them on.

Weights are numpy arrays [n_out, n_in] (the reverse of ggml order) under their GGUF name without ".weight".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ikpy._native import core
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.graph.ir import F32
from ikpy.quants import registry

N_VOCAB = 160
Weights = dict[str, np.ndarray]
VALUE_TYPES = {
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    bool: GGUFValueType.BOOL,
    str: GGUFValueType.STRING,
}


class RandomModel:
    """Metadata and random float32 weights of a tiny model."""

    def __init__(self, arch: str, seed: int, **keys: Any) -> None:
        self.arch, self.keys = arch, {"vocab_size": N_VOCAB, "context_length": 512, **keys}
        self.random = np.random.default_rng(seed)
        self.weights: Weights = {}
        self.encoded: dict[str, tuple[int, np.ndarray]] = {}
        self.words: list[str] = []
        self.numbered_words = False
        self.outer_keys: dict[str, Any] = {}
        """Keys without the architecture in their names."""
        self.bare: tuple[str, ...] = ()  # ends of names without a suffix, beside the usual ones

    def matrix(self, name: str, *shape: int) -> None:
        """Rows of unit variance products: [.., n_out, n_in]."""
        self.weights[name] = self.random.normal(0, 1 / math.sqrt(shape[-1]), shape).astype(np.float32)

    def norm(self, name: str, *shape: int) -> None:
        """Norm weights around 1."""
        self.weights[name] = self.random.uniform(0.5, 1.5, shape).astype(np.float32)

    def vector(self, name: str, *shape: int) -> None:
        """Biases and sinks."""
        self.weights[name] = self.random.normal(0, 0.5, shape).astype(np.float32)

    def attention(self, prefix: str, d: int, heads: int, kv: int, head: int) -> None:
        """q, k, v and output projections."""
        for name, n in (("q", heads), ("k", kv), ("v", kv)):
            self.matrix(f"{prefix}.attn_{name}", n * head, d)
        self.matrix(f"{prefix}.attn_output", d, heads * head)

    def ffn(self, prefix: str, d: int, f: int, suffix: str = "") -> None:
        """gate, up and down."""
        self.matrix(f"{prefix}.ffn_gate{suffix}", f, d)
        self.matrix(f"{prefix}.ffn_up{suffix}", f, d)
        self.matrix(f"{prefix}.ffn_down{suffix}", d, f)

    def quantize(self, type_name: str) -> None:
        """Stores the expert tensors in another type; the weights become what that type holds."""
        kind = registry.by_name(type_name)
        for name, w in self.weights.items():
            if not name.endswith("_exps"):
                continue
            rows = w.reshape(-1, w.shape[-1])
            data = core.quantize(rows, kind.id, None, 1)
            self.encoded[name] = kind.id, data
            decoded = core.dequantize(data.reshape(-1), kind.id, rows.shape[1], len(rows), True)
            self.weights[name] = decoded.reshape(w.shape)

    def _write_words(self, out: GGUFWriter) -> None:
        """A WordPiece vocabulary: special tokens, words, fillers."""
        tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"\u2581{w}" for w in self.words)]
        tokens += [f"[unused{i}]" for i in range(len(tokens), self.keys["vocab_size"])]
        out.add("tokenizer.ggml.model", GGUFValueType.STRING, "bert")
        out.add_array("tokenizer.ggml.tokens", GGUFValueType.STRING, tokens)
        out.add_array("tokenizer.ggml.token_type", GGUFValueType.INT32, [3] * 4 + [1] * (len(tokens) - 4))
        n_types = len(self.weights["token_types"]) if "token_types" in self.weights else 1
        out.add("tokenizer.ggml.token_type_count", GGUFValueType.UINT32, n_types)
        for name, value in (("padding", 0), ("unknown", 1), ("cls", 2), ("bos", 2), ("seperator", 3), ("eos", 3)):
            out.add(f"tokenizer.ggml.{name}_token_id", GGUFValueType.UINT32, value)

    def _write_numbered_words(self, out: GGUFWriter) -> None:
        """A SentencePiece vocabulary of numbered words: other engines load no model without one."""
        tokens = ["<unk>", "<s>", "</s>", "<0x0A>"]
        tokens += [f"word{i}" for i in range(len(tokens), self.keys["vocab_size"])]
        out.add("tokenizer.ggml.model", GGUFValueType.STRING, "llama")
        out.add_array("tokenizer.ggml.tokens", GGUFValueType.STRING, tokens)
        out.add_array("tokenizer.ggml.scores", GGUFValueType.FLOAT32, [0.0] * len(tokens))
        out.add_array("tokenizer.ggml.token_type", GGUFValueType.INT32, [2, 3, 3, 6] + [1] * (len(tokens) - 4))

    def write(self, path: Path) -> Path:
        """The model as a GGUF file."""
        with GGUFWriter(path) as out:
            out.add("general.architecture", GGUFValueType.STRING, self.arch)
            if self.words:
                self._write_words(out)
            elif self.numbered_words:
                self._write_numbered_words(out)
            for key, value in {**{f"{self.arch}.{k}": v for k, v in self.keys.items()}, **self.outer_keys}.items():
                if isinstance(value, np.ndarray):
                    out.add_array(key, GGUFValueType[value.dtype.name.upper()], value.tolist())
                elif isinstance(value, list):
                    out.add_array(key, VALUE_TYPES[type(value[0])], value)
                else:
                    out.add(key, VALUE_TYPES[type(value)], value)
            bare = (".bias", ".scale", ".ssm_a", ".ssm_d", *self.bare)
            names = {n: n if n.endswith(bare) else f"{n}.weight" for n in self.weights}
            for name, w in self.weights.items():
                out.add_tensor(names[name], w.shape[::-1], self.encoded.get(name, (F32, w))[0])
            for name, w in self.weights.items():
                out.write(names[name], self.encoded.get(name, (F32, w))[1])
        return path


# elementary operations


def rms_norm(x: np.ndarray, w: np.ndarray | float, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def layer_norm(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def swiglu_oai(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def plain_angles(n: int, base: float, pos: np.ndarray, factors: np.ndarray | float = 1.0) -> np.ndarray:
    """Rotation angles [T, n/2]."""
    return pos[:, None] * base ** (-2 * np.arange(n // 2) / n) / factors


def yarn_angles(
    n: int, base: float, pos: np.ndarray, factor: float, n_ctx_orig: int, fast: float, slow: float
) -> np.ndarray:
    """YaRN (arXiv:2309.00071): pairs that turn often keep their angle, slow ones are divided by factor."""

    def corner(beta: float) -> float:
        return n * math.log(n_ctx_orig / (2 * math.pi * beta)) / (2 * math.log(base))

    low, high = max(0, math.floor(corner(fast))), min(n - 1, math.ceil(corner(slow)))
    ramp = np.clip((np.arange(n // 2) - low) / max(0.001, high - low), 0, 1)
    plain = plain_angles(n, base, pos)
    return plain / factor * ramp + plain * (1 - ramp)


def rotate(x: np.ndarray, angles: np.ndarray, *, neox: bool, magnitude: float = 1.0) -> np.ndarray:
    """x [T, H, d] with its first 2 * angles.shape[1] elements rotated."""
    n = angles.shape[1]
    first, second = (slice(0, n), slice(n, 2 * n)) if neox else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    c, s = np.cos(angles)[:, None] * magnitude, np.sin(angles)[:, None] * magnitude
    y = x.copy()
    y[..., first] = x[..., first] * c - x[..., second] * s
    y[..., second] = x[..., first] * s + x[..., second] * c
    return y


def alibi_slopes(heads: int, max_bias: float) -> np.ndarray:
    """Slopes of linear biases (arXiv:2108.12409): of the largest power of two of heads a geometric row that ends with
    2^-max_bias; the rest are those of twice as many heads, every second one from the first on.
    """
    n = 2 ** int(math.log2(heads))
    own = [2 ** (-max_bias * (i + 1) / n) for i in range(n)]
    finer = [2 ** (-max_bias * (i + 1) / (2 * n)) for i in range(2 * n)]
    return np.array(own + finer[::2][: heads - n])


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    *,
    visible: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
    cap: float = 0.0,
    sinks: np.ndarray | None = None,
    max_bias: float = 0.0,
    causal: bool = True,
) -> np.ndarray:
    """Causal attention of q [T, H, d] on k [T, Hk, d], v [T, Hk, dv]; visible(query, key) narrows it. [T, H*dv].

    max_bias: of linear biases by distance.
    """
    n, heads = q.shape[:2]
    group = heads // k.shape[1]
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]
    before = (j <= i) | (not causal)
    allowed = before if visible is None else before & visible(i, j)
    slopes = alibi_slopes(heads, max_bias) if max_bias else np.zeros(heads)
    out = np.empty((n, heads, v.shape[2]))
    for h in range(heads):
        z = scale * q[:, h] @ k[:, h // group].T
        z = cap * np.tanh(z / cap) if cap else z
        z = np.where(allowed, z - slopes[h] * np.abs(i - j), -np.inf)
        if sinks is not None:
            z = np.concatenate([z, np.full((n, 1), sinks[h])], axis=1)
        out[:, h] = softmax(z)[:, :n] @ v[:, h // group]
    return out.reshape(n, -1)


class Evaluation:
    """A model in float64 with the shapes that every architecture needs."""

    def __init__(self, model: RandomModel) -> None:
        self.keys = model.keys
        self.w = {name: w.astype(np.float64) for name, w in model.weights.items()}
        self.n_layer = self.keys["block_count"]
        self.eps = self.keys.get("attention.layer_norm_rms_epsilon") or self.keys["attention.layer_norm_epsilon"]
        self.head = self.keys.get("attention.key_length", 0)

    def heads(self, name: str, h: np.ndarray) -> np.ndarray:
        """A projection of h with its bias, split into heads [T, n, head]."""
        x = h @ self.w[name].T + self.w.get(f"{name}.bias", 0.0)
        return x.reshape(len(h), -1, self.head)

    def qkv(self, il: int, h: np.ndarray) -> list[np.ndarray]:
        """q, k, v of a layer."""
        return [self.heads(f"blk.{il}.attn_{name}", h) for name in "qkv"]

    def output(self, il: int, attended: np.ndarray) -> np.ndarray:
        """Output projection."""
        return attended @ self.w[f"blk.{il}.attn_output"].T + self.w.get(f"blk.{il}.attn_output.bias", 0.0)

    def ffn(
        self, il: int, h: np.ndarray, act: Callable[[np.ndarray], np.ndarray] = silu, suffix: str = ""
    ) -> np.ndarray:
        """Gated feed-forward network."""
        gate, up, down = (self.w[f"blk.{il}.ffn_{n}{suffix}"] for n in ("gate", "up", "down"))
        return (act(h @ gate.T) * (h @ up.T)) @ down.T
