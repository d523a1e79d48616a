"""Random DFlash drafters for the model of LLaMA's kind of eagle3_model.py, by their definition in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ikpy.quants import registry
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import eagle3_model as eagle3
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import N_VOCAB, RandomModel

D, HEADS, KV, HEAD, FF, LAYERS, BLOCK, WINDOW, RANK = eagle3.D, 4, 2, 32, 96, 3, 6, 12, 32
TAPS, GROUP, BEST = 3, 16, 7
READ = (1, 2, 4)
MASK = 7
KNOWN = 50
IS_WINDOW = [1, 0, 1]
EPS = checks.RMS["attention.layer_norm_rms_epsilon"]


def drafter(
    *, windows: bool = False, own: bool = False, markov: str = "", selector: bool = False, capped: bool = False
) -> RandomModel:
    """own: whether it has an embedding and an output matrix of its own, the latter of some tokens only. markov: of
    "anchor" the head of a block whose first token guesses, of "bonus" one whose first does not, "" none. selector: with
    convolutions and a selector of candidates; capped: whose logits are scaled and capped.
    """
    m = RandomModel("dflash", 91, **checks.shape(LAYERS, D, HEADS, KV, HEAD, FF), **checks.RMS)
    m.keys |= {"target_layers": list(READ), "block_size": BLOCK, "rope.freq_base": 10000.0}
    m.outer_keys["tokenizer.ggml.mask_token_id"] = MASK
    m.numbered_words = True
    if windows:
        m.keys |= {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [bool(w) for w in IS_WINDOW]}
    m.matrix("fc", D, len(READ) * D)
    m.norm("enc.output_norm", D)
    m.norm("output_norm", D)
    if own:
        m.matrix("token_embd", N_VOCAB, D)
        m.matrix("output", KNOWN, D)
        tokens = np.sort(m.random.permutation(N_VOCAB)[:KNOWN]).astype(np.int64)
        m.weights["d2t"], m.bare = tokens, ("d2t",)
        m.encoded["d2t"] = registry.by_name("i64").id, tokens.view(np.uint8)
    for il in range(LAYERS):
        p = f"blk.{il}"
        for name in ("attn_norm", "ffn_norm"):
            m.norm(f"{p}.{name}", D)
        for name in ("attn_q_norm", "attn_k_norm"):
            m.norm(f"{p}.{name}", HEAD)
        m.attention(p, D, HEADS, KV, HEAD)
        m.ffn(p, D, FF)
    if markov:
        m.keys["sample_from_anchor"] = markov == "anchor"
        m.matrix("markov_w1", N_VOCAB, RANK)
        m.weights["markov_w1"] *= 4
        m.matrix("markov_w2", KNOWN if own else N_VOCAB, RANK)
        m.matrix("conf_proj", 1, D + RANK)
        m.vector("conf_proj.bias", 1)
    if selector:
        add_selector(m)
    if capped:
        m.keys |= {"logit_scale": 0.7, "final_logit_softcapping": 3.0}
    return m


def add_selector(m: RandomModel) -> None:
    """What DFlash 2 has more."""
    m.keys |= {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": BEST}
    for name in ("predecessor", "successor"):
        m.matrix(f"selector_{name}", N_VOCAB, RANK)
        m.weights[f"selector_{name}"] *= 3
    m.matrix("selector_hidden", RANK, D)
    m.bare = (*m.bare, "_conv_base")
    for il in range(LAYERS):
        for name in ("attn", "ffn"):
            base = m.random.normal(0, 0.2, (2, TAPS, D)).astype(np.float32)
            base[:, 0] += 1
            m.weights[f"blk.{il}.{name}_conv_base"] = base
            m.matrix(f"blk.{il}.{name}_conv_proj", 2 * TAPS * (D // GROUP), D)
            m.weights[f"blk.{il}.{name}_conv_proj"] *= np.float32(0.2)


def convolved(x: np.ndarray, base: np.ndarray, filters: np.ndarray, side: int) -> np.ndarray:
    """x [B, D] with a filter of its own for every token and group of channels; rows before the block are zeros."""
    out = np.zeros_like(x)
    own = filters.reshape(len(x), 2, TAPS, -1)
    for t in range(len(x)):
        for tap in range(min(TAPS, t + 1)):
            out[t] += (base[side, tap] + np.repeat(own[t, side, tap], GROUP)) * x[t - tap]
    return out


def heads(w: ref.Weights, name: str, h: np.ndarray) -> np.ndarray:
    x = (h @ w[name].T).reshape(len(h), -1, HEAD)
    return x if name.endswith("v") else ref.rms_norm(x, w[f"{name}_norm"], EPS)


def rotated(x: np.ndarray, start: int) -> np.ndarray:
    pos = np.arange(start, start + len(x), dtype=np.float64)
    return ref.rotate(x, ref.plain_angles(HEAD, 10000.0, pos), neox=True)


def around(w: ref.Weights, name: str, h: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """What a branch reads instead of h [B, D], and what becomes of what it gives."""
    if f"{name}_base" not in w:
        return h, lambda y: y
    base, filters = w[f"{name}_base"], h @ w[f"{name}_proj"].T
    return convolved(h, base, filters, 0), lambda y: convolved(y, base, filters, 1)


def block(m: RandomModel, of: RandomModel, inputs: np.ndarray, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [B, rows] and states [B, D] of a block of tokens behind inputs [T, 3 * D] of layers of the model."""
    own = {name: each.astype(np.float64) for name, each in m.weights.items()}
    ends = {name: of.weights[name].astype(np.float64) for name in ("token_embd", "output")} | own
    is_window = IS_WINDOW if "attention.sliding_window" in m.keys else [0] * LAYERS
    n, n_block = len(inputs), len(tokens)
    state = ref.rms_norm(inputs @ own["fc"].T, own["enc.output_norm"], EPS)
    x = ends["token_embd"][tokens]
    for il in range(LAYERS):
        p = f"blk.{il}.attn"
        h, behind = around(own, f"{p}_conv", ref.rms_norm(x, own[f"{p}_norm"], EPS))
        q = rotated(heads(own, f"{p}_q", h), n)
        k = np.concatenate([rotated(heads(own, f"{p}_k", state), 0), rotated(heads(own, f"{p}_k", h), n)])
        v = np.concatenate([heads(own, f"{p}_v", state), heads(own, f"{p}_v", h)])
        out = np.zeros((n_block, HEADS * HEAD))
        for t in range(n_block):
            first = max(0, n + t - WINDOW + 1) if is_window[il] else 0
            for head in range(HEADS):
                group = head // (HEADS // KV)
                odds = ref.softmax(k[first:, group] @ q[t, head] / math.sqrt(HEAD))
                out[t, head * HEAD : (head + 1) * HEAD] = odds @ v[first:, group]
        x = x + behind(out @ own[f"{p}_output"].T)
        h, behind = around(own, f"blk.{il}.ffn_conv", ref.rms_norm(x, own[f"blk.{il}.ffn_norm"], EPS))
        gate, up, down = (own[f"blk.{il}.ffn_{name}"] for name in ("gate", "up", "down"))
        x = x + behind((ref.silu(h @ gate.T) * (h @ up.T)) @ down.T)
    y = ref.rms_norm(x, own["output_norm"], EPS)
    logits = y @ ends["output"].T
    if "logit_scale" in m.keys:
        cap = m.keys["final_logit_softcapping"]
        logits = cap * np.tanh(logits * m.keys["logit_scale"] / cap)
    return logits, y


def guesses(m: RandomModel, of: RandomModel, text: list[int], n: int) -> tuple[list[int], list[float]]:
    """A draft behind a text whose last token the model has not read, and what the head says of every guess, or its
    probability.
    """
    inputs = eagle3.inputs_of_layers(of, np.array(text[:-1]))
    ids = m.weights.get("d2t", np.arange(N_VOCAB))
    first = 0 if m.keys.get("sample_from_anchor") and "markov_w1" in m.weights else 1
    logits, states = block(m, of, inputs, [text[-1], *[MASK] * (n - 1 + first)])
    if "selector_hidden" in m.weights:
        return walk(m, logits[1:], states[1:], text[-1], ids)
    found, odds, token = list[int](), list[float](), text[-1]
    for given, state in zip(logits[first:], states[first:], strict=True):
        row = given
        if "markov_w1" in m.weights:
            step = m.weights["markov_w1"][token].astype(np.float64)
            row = given + m.weights["markov_w2"].astype(np.float64) @ step
            logit = m.weights["conf_proj"][0].astype(np.float64) @ np.concatenate([state, step])
            odds.append(float(ref.sigmoid(logit + m.weights["conf_proj.bias"][0])))
        else:
            odds.append(float(ref.softmax(row).max()))
        token = int(ids[row.argmax()])
        found.append(token)
    return found, odds


def walk(
    m: RandomModel, logits: np.ndarray, states: np.ndarray, token: int, ids: np.ndarray
) -> tuple[list[int], list[float]]:
    """The choices of the selector, and their probabilities among the candidates."""
    before, after, gate = (
        m.weights[f"selector_{name}"].astype(np.float64) for name in ("predecessor", "successor", "hidden")
    )
    found, odds = list[int](), list[float]()
    for row, state in zip(logits, states, strict=True):
        best = np.argsort(-row)[:BEST]
        scores = row[best] + after[ids[best]] @ (before[token] * (gate @ state))
        odds.append(float(ref.softmax(scores).max()))
        token = int(ids[best[scores.argmax()]])
        found.append(token)
    return found, odds
