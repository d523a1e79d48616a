"""Random DFlash drafters for the model of LLaMA's kind of eagle3_model.py, by their definition in float64."""

from __future__ import annotations

import math

import numpy as np

from ikpy.quants import registry
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import eagle3_model as eagle3
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import N_VOCAB, RandomModel

D, HEADS, KV, HEAD, FF, LAYERS, BLOCK, WINDOW, RANK = eagle3.D, 4, 2, 32, 96, 3, 6, 12, 32
READ = (1, 2, 4)
MASK = 7
KNOWN = 50
IS_WINDOW = [1, 0, 1]
EPS = checks.RMS["attention.layer_norm_rms_epsilon"]


def drafter(*, windows: bool = False, own: bool = False, markov: str = "") -> RandomModel:
    """own: whether it has an embedding and an output matrix of its own, the latter of some tokens only. markov: of
    "anchor" the head of a block whose first token guesses, of "bonus" one whose first does not, "" none.
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
    return m


def heads(w: ref.Weights, name: str, h: np.ndarray) -> np.ndarray:
    x = (h @ w[name].T).reshape(len(h), -1, HEAD)
    return x if name.endswith("v") else ref.rms_norm(x, w[f"{name}_norm"], EPS)


def rotated(x: np.ndarray, start: int) -> np.ndarray:
    pos = np.arange(start, start + len(x), dtype=np.float64)
    return ref.rotate(x, ref.plain_angles(HEAD, 10000.0, pos), neox=True)


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
        h = ref.rms_norm(x, own[f"{p}_norm"], EPS)
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
        x = x + out @ own[f"{p}_output"].T
        h = ref.rms_norm(x, own[f"blk.{il}.ffn_norm"], EPS)
        gate, up, down = (own[f"blk.{il}.ffn_{name}"] for name in ("gate", "up", "down"))
        x = x + (ref.silu(h @ gate.T) * (h @ up.T)) @ down.T
    y = ref.rms_norm(x, own["output_norm"], EPS)
    return y @ ends["output"].T, y


def guesses(m: RandomModel, of: RandomModel, text: list[int], n: int) -> tuple[list[int], list[float]]:
    """A draft behind a text whose last token the model has not read, and what the head says of every guess, or its
    probability.
    """
    inputs = eagle3.inputs_of_layers(of, np.array(text[:-1]))
    ids = m.weights.get("d2t", np.arange(N_VOCAB))
    first = 0 if m.keys.get("sample_from_anchor") and "markov_w1" in m.weights else 1
    logits, states = block(m, of, inputs, [text[-1], *[MASK] * (n - 1 + first)])
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
