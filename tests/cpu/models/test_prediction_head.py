"""Multi-token prediction layers: logits of the definition, drafts that see what they should, text as without drafts."""

from __future__ import annotations

import json
import math
import zlib
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.head_draft import HeadDraft
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.sampling import Sampler, SamplingParams
from ikpy.engine.session import PREFIX
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.errors import FileFormatError, UsageError
from ikpy.llm import LLM
from ikpy.tools.generation import GrowingSequence
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel
from tests.cpu.models.test_zoo_holdouts import RMS, shape

D, HEADS, KV, HEAD, ROT, FF, EXPERTS, USED = 48, 3, 1, 32, 16, 40, 5, 2
LAYERS = 3  # the last one predicts
TOKENS = np.random.default_rng(7).integers(0, N_VOCAB, 20)


def glm4moe(*, own_matrices: bool) -> RandomModel:
    """Two layers and a prediction layer, which may bring an embedding and an output matrix of its own."""
    keys = {
        **shape(LAYERS, D, HEADS, KV, HEAD, FF),
        "rope.dimension_count": ROT,
        "leading_dense_block_count": 1,
        "expert_count": EXPERTS,
        "expert_used_count": USED,
        "expert_feed_forward_length": FF,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.3,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "nextn_predict_layers": 1,
    }
    m = RandomModel("glm4moe", 31, **keys, **RMS)
    m.matrix("token_embd", N_VOCAB, D)
    m.norm("output_norm", D)
    m.matrix("output", N_VOCAB, D)
    for il in range(LAYERS):
        p = f"blk.{il}"
        for name in ("attn_norm", "post_attention_norm"):
            m.norm(f"{p}.{name}", D)
        m.attention(p, D, HEADS, KV, HEAD)
        for name, n in (("q", HEADS), ("k", KV), ("v", KV)):
            m.vector(f"{p}.attn_{name}.bias", n * HEAD)
        if il == 0:
            m.ffn(p, D, FF)
            continue
        m.matrix(f"{p}.ffn_gate_inp", EXPERTS, D)
        m.vector(f"{p}.exp_probs_b.bias", EXPERTS)
        for name, rows, columns in (("gate", FF, D), ("up", FF, D), ("down", D, FF)):
            m.matrix(f"{p}.ffn_{name}_exps", EXPERTS, rows, columns)
        m.ffn(p, D, FF, "_shexp")
    p = f"blk.{LAYERS - 1}.nextn"
    m.matrix(f"{p}.eh_proj", D, 2 * D)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        m.norm(f"{p}.{name}", D)
    if own_matrices:
        m.matrix(f"{p}.embed_tokens", N_VOCAB, D)
        m.matrix(f"{p}.shared_head_head", N_VOCAB, D)
    return m


def head_logits(m: RandomModel, tokens: np.ndarray, states: np.ndarray) -> np.ndarray:
    """The prediction layer in float64: tokens [n] with the hidden states [n, D] behind the tokens before them."""
    e = Evaluation(m)
    il, n = LAYERS - 1, len(tokens)
    w = {name.removeprefix(f"blk.{il}."): value for name, value in e.w.items() if name.startswith(f"blk.{il}.")}
    table = w.get("nextn.embed_tokens", e.w["token_embd"])
    parts = (ref.rms_norm(table[tokens], w["nextn.enorm"], e.eps), ref.rms_norm(states, w["nextn.hnorm"], e.eps))
    x = np.concatenate(parts, axis=1) @ w["nextn.eh_proj"].T
    angles = ref.plain_angles(ROT, 10000.0, np.arange(n, dtype=np.float64))
    q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
    q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
    x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
    h = ref.rms_norm(x, w["post_attention_norm"], e.eps)
    out = e.ffn(il, h, suffix="_shexp")
    for t, row in enumerate(h):
        p = ref.sigmoid(w["ffn_gate_inp"] @ row)
        chosen = np.argsort(-(p + w["exp_probs_b.bias"]))[:USED]
        for c in chosen:
            hidden = ref.silu(w["ffn_gate_exps"][c] @ row) * (w["ffn_up_exps"][c] @ row)
            out[t] += 1.3 * p[c] / p[chosen].sum() * (w["ffn_down_exps"][c] @ hidden)
    output = w.get("nextn.shared_head_head", e.w["output"])
    return ref.rms_norm(x + out, w["nextn.shared_head_norm"], e.eps) @ output.T


def params(**changes: object) -> ContextParams:
    return ContextParams(**{"n_ctx": 256, "n_threads": 2, "type_k": "f32", "type_v": "f32", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("own_matrices", [False, True])
@pytest.mark.parametrize("n_ubatch", [512, 7])
def test_logits(own_matrices: bool, n_ubatch: int, tmp_path: Path) -> None:
    model = glm4moe(own_matrices=own_matrices)
    head = Model.load(model.write(tmp_path / "model.gguf")).prediction_head()
    states = np.random.default_rng(1).normal(size=(len(TOKENS), D)).astype(np.float32)
    wanted = head_logits(model, TOKENS, states.astype(np.float64))
    context = Context(head, params(n_ubatch=n_ubatch))
    ours = [context.decode(Batch.single(TOKENS[:15], logits="all"), states[:15])]
    ours += [context.decode(Batch.single(TOKENS[i : i + 1], i), states[i : i + 1]) for i in range(15, len(TOKENS))]
    error = np.abs(np.concatenate(ours) - wanted).max(axis=1) / np.abs(wanted).max()
    assert error.max() < 5e-5, f"position {error.argmax()} off by {error.max():.1e} relative"


class Watched(Context):
    """Remembers what the head was given."""

    seen: list[tuple[list[int], list[int], np.ndarray]]

    def decode(self, batch: Batch, states: np.ndarray | None = None, *, copy: bool = True) -> np.ndarray:
        assert states is not None
        self.seen.append((batch.tokens.tolist(), batch.pos.tolist(), states.copy()))
        return super().decode(batch, states, copy=copy)


@pytest.mark.parametrize("p_min", [0.0, 0.02, 0.9])
def test_text_and_states(p_min: float, tmp_path: Path) -> None:
    """Greedy text is that of plain decoding; the head meets every token, the prompt's too, with the state before it."""
    loaded = Model.load(glm4moe(own_matrices=False).write(tmp_path / "model.gguf"))
    prompt, n = TOKENS.tolist(), 40
    head = Watched(loaded.prediction_head(), params(embeddings=True, n_batch=16))
    head.seen = []
    texts = []
    for speculator in (None, Speculator([HeadDraft(head, p_min=p_min, n_ctx=256)], SpeculativeParams(n_max=3))):
        main = Context(loaded, params(token_states=speculator is not None, n_ubatch=7))
        sequence = GrowingSequence(main, speculator=speculator)
        sampler = Sampler(SamplingParams(temperature=0.0), N_VOCAB)
        logits = sequence.feed(prompt)
        texts.append(list(islice(sequence.generate(sampler, logits, frozenset()), n)))
    assert texts[0] == texts[1]
    text = prompt + texts[0]
    main.kv.clear()
    main.decode(Batch.single(text, logits="none"))
    assert main.token_states is not None
    entries = {}
    for tokens, pos, states in head.seen:  # drafted entries are made again
        entries.update({p: (t, s) for p, t, s in zip(pos, tokens, states, strict=True)})
    for i in range(len(text) - 5):
        token, state = entries[i]
        assert token == text[i + 1], f"entry {i}"
        assert np.abs(state - main.token_states[i]).max() < 1e-3, f"entry {i}"


def test_keeping_states_does_not_change_logits(tmp_path: Path) -> None:
    """Bit by bit, whatever rows are asked for; the states are those that a head would read."""
    loaded = Model.load(glm4moe(own_matrices=False).write(tmp_path / "model.gguf"))
    plain, keeping = (Context(loaded, params(n_ubatch=64, token_states=kept)) for kept in (False, True))
    tokens = np.random.default_rng(5).integers(0, N_VOCAB, 150)
    every = np.ones(len(tokens), np.bool_)
    expected = None
    for logits in (every, every & False, np.arange(len(tokens)) % 7 == 3):
        batch = Batch(tokens, np.arange(len(tokens)), [0] * len(tokens), logits)
        found = []
        for context in (plain, keeping):
            context.kv.clear()
            found.append(context.decode(batch))
        assert np.array_equal(*found)
        assert plain.token_states is None and keeping.token_states is not None
        expected = keeping.token_states if expected is None else expected
        assert np.abs(keeping.token_states - expected).max() < 1e-5


def observed(drafter: HeadDraft, text: list[int], states: np.ndarray, *steps: int) -> None:
    """Shows the text in pieces that end at the given lengths."""
    start = 0
    for end in steps:
        drafter.observe(text[:end], states[start:end])
        start = end


def wanted_draft(model: RandomModel, text: list[int], states: np.ndarray, start: int = 0) -> int:
    """Most likely token behind a text according to the definition, from an entry on."""
    n = len(text) - 1
    return int(head_logits(model, np.array(text[start + 1 :]), states[start:n].astype(np.float64))[-1].argmax())


def test_drafts_are_those_of_the_definition(tmp_path: Path) -> None:
    """Behind prompts in pieces, in rounds of drafts, behind texts that changed, and with too few cells."""
    model = glm4moe(own_matrices=True)
    head = Model.load(model.write(tmp_path / "model.gguf")).prediction_head()
    context = Context(head, params(embeddings=True, n_batch=16))
    drafter = HeadDraft(context, p_min=0.0, n_ctx=128)
    states = np.random.default_rng(2).normal(size=(300, D)).astype(np.float32)
    text = np.random.default_rng(3).integers(0, N_VOCAB, 300).tolist()
    assert drafter.draft(text[:5], 3) == [], "no state was observed"
    observed(drafter, text, states, 30, 31, 40)
    drafts = drafter.draft(text[:41], 3)
    assert len(drafts) == 3 and drafts[0] == wanted_draft(model, text[:41], states)
    assert drafter.draft(text[:41], 3) == [], "nothing new was observed"
    assert context.kv.used_cells == 40, "drafted tokens leave the cache again"
    drafter.observe(text[:43], states[40:43])
    assert drafter.draft(text[:44], 2)[0] == wanted_draft(model, text[:44], states)
    other = [*text[:20], *text[100:130]]
    drafter.observe(other[:19], states[18:19])
    drafter.observe(other[:45], states[19:45])
    assert drafter.draft(other[:46], 1) == [wanted_draft(model, other[:46], states)], "another text from token 20 on"
    observed(drafter, text, states, 200)
    # Micro-batches of 16: the cells are used up before entry 144, half of them go.
    assert drafter.draft(text[:201], 1) == [wanted_draft(model, text[:201], states, 144 - 64)]
    assert sorted(context.kv.pos[context.kv.pos >= 0].tolist()) == list(range(80, 200))


def test_texts_with_gaps_and_shared_beginnings(tmp_path: Path) -> None:
    """Tokens whose states were not observed are missing in the head's cache; what heads share is stored once."""
    model = glm4moe(own_matrices=True)
    head = Model.load(model.write(tmp_path / "model.gguf")).prediction_head()
    context = Context(head, params(embeddings=True, n_seq_max=2))
    first, second = (HeadDraft(context, p_min=0.0, n_ctx=128, seq_id=i) for i in range(2))
    states = np.random.default_rng(2).normal(size=(100, D)).astype(np.float32)
    text = np.random.default_rng(3).integers(0, N_VOCAB, 100).tolist()
    observed(first, text, states, 40)
    second.adopt(first, 24)
    assert context.kv.used_cells == 39
    other = [*text[:24], *text[60:80]]
    second.observe(other, states[24:44])
    assert len(second.draft([*other, 5], 2)) == 2
    assert first.draft(text[:41], 1) == [wanted_draft(model, text[:41], states)], "each has its own text"
    first.observe(text[:60], states[50:60])
    assert first.draft(text[:61], 1)
    pos = context.kv.pos[(context.kv.seq & np.uint64(1)) != 0]
    assert sorted(pos.tolist()) == [*range(40), *range(50, 60)]
    second.observe(text[:10], states[:10])
    assert second.draft(text[:11], 1) == [wanted_draft(model, text[:11], states)], "a text that begins anew"


@pytest.mark.parametrize("shared", [False, True])
def test_a_context_shift_moves_the_entries(shared: bool, tmp_path: Path) -> None:
    """The head drafts as one that was given the shortened text, but for the entry at the seam."""
    head = Model.load(glm4moe(own_matrices=True).write(tmp_path / "model.gguf")).prediction_head()
    drafter, fresh = (
        HeadDraft(Context(head, params(embeddings=True, n_seq_max=2)), p_min=0.0, n_ctx=128) for _ in range(2)
    )
    states = np.random.default_rng(2).normal(size=(100, D)).astype(np.float32)
    text = np.random.default_rng(3).integers(0, N_VOCAB, 100).tolist()
    observed(drafter, text, states, 60)
    if shared:
        other = HeadDraft(drafter._contexts[0], p_min=0.0, n_ctx=128, seq_id=1)
        other.adopt(drafter, 50)
    drafter.shift(8, 20)
    left = [*text[:8], *text[28:70]]
    states_left = np.concatenate([states[:8], states[28:70]])
    observed(fresh, left, states_left, 40)
    fresh._catch_up()
    fresh._contexts[0].kv.seq_rm(0, 7, 8)
    for one in (drafter, fresh):
        assert one._text == left[:40]
        assert sorted(entries(one)) == [*range(7), *range(8, 39)]
    for n in (41, 44):
        assert drafter.draft(left[:n], 3) == fresh.draft(left[:n], 3) != []
        for one in (drafter, fresh):
            one.observe(left[:43], states_left[40:43])
    if shared:
        assert sorted(entries(other)) == list(range(49)), "the other slot's text stays"


def test_a_shift_of_a_text_that_the_head_knows_in_part(tmp_path: Path) -> None:
    head = Model.load(glm4moe(own_matrices=True).write(tmp_path / "model.gguf")).prediction_head()
    states = np.random.default_rng(2).normal(size=(100, D)).astype(np.float32)
    text = np.random.default_rng(3).integers(0, N_VOCAB, 100).tolist()
    for known in (0, 5, 12, 29):
        drafter = HeadDraft(Context(head, params(embeddings=True)), p_min=0.0, n_ctx=128)
        if known:
            observed(drafter, text, states, known)
        drafter.shift(8, 20)
        left = [*text[:8], *text[28:70]]
        drafter.observe(left[:45], np.concatenate([states[:8], states[28:70]])[20:45])
        assert len(drafter.draft(left[:46], 2)) == 2
        assert set(range(20, 45)) <= set(entries(drafter)) <= {*range(min(known, 7)), *range(8, 9), *range(19, 45)}


def test_states_of_heads(tmp_path: Path) -> None:
    """A head goes on from a copy in memory and from a file as the one that made them."""
    model = glm4moe(own_matrices=True)
    head = Model.load(model.write(tmp_path / "model.gguf")).prediction_head()
    context = Context(head, params(embeddings=True, n_seq_max=2))
    states = np.random.default_rng(2).normal(size=(100, D)).astype(np.float32)
    text = np.random.default_rng(3).integers(0, N_VOCAB, 100).tolist()
    first = HeadDraft(context, p_min=0.0, n_ctx=128)
    assert first.take_state() is None
    observed(first, text, states, 40)
    state = first.take_state()
    assert state is not None and state.nbytes > first.state_nbytes > 0
    first.write_state(tmp_path / "state")
    second = HeadDraft(context, p_min=0.0, n_ctx=128, seq_id=1)
    second.put_state(state)
    third = HeadDraft(Context(head, params(embeddings=True)), p_min=0.0, n_ctx=128)
    observed(third, text[::-1], states, 30)
    third.read_state(tmp_path / "state")
    for drafter in (second, third):
        drafter.observe(text[:45], states[38:45])  # the end of a restored text is evaluated again
        assert drafter.draft(text[:46], 1) == [wanted_draft(model, text[:46], states)]
    data = (tmp_path / "state").read_bytes()
    magic, version, _, length = PREFIX.unpack_from(data)
    header = json.loads(data[PREFIX.size : PREFIX.size + length])
    header["tokens"] = header["tokens"][:-1]  # fewer than have entries
    content = json.dumps(header).encode() + data[PREFIX.size + length :]
    wrong = PREFIX.pack(magic, version, zlib.crc32(content), len(json.dumps(header))) + content
    for damaged in (b"something else", wrong):
        (tmp_path / "state").write_bytes(damaged)
        with pytest.raises(FileFormatError):
            third.read_state(tmp_path / "state")
        assert not entries(third)


def entries(drafter: HeadDraft) -> list[int]:
    """Positions that the head's cache holds for the drafter."""
    kv = drafter._contexts[0].kv
    return kv.pos[(kv.seq & np.uint64(1 << drafter._seq_id)) != 0].tolist()


def right_head(model: RandomModel) -> RandomModel:
    """Makes the next token depend on the last one alone, so that the head knows it."""
    for name, w in model.weights.items():
        if "attn_output" in name or "ffn_down" in name:
            w[:] = 0
    p = f"blk.{LAYERS - 1}.nextn"
    model.weights[f"{p}.eh_proj"] = np.eye(D, 2 * D, dtype=np.float32)
    model.weights[f"{p}.enorm"][:] = 1
    model.weights[f"{p}.shared_head_norm"] = model.weights["output_norm"]
    return model


def test_a_right_head_has_all_its_drafts_accepted(tmp_path: Path) -> None:
    """Three drafted tokens a round."""
    model = right_head(glm4moe(own_matrices=False))
    model.words = ["word"]
    path = model.write(tmp_path / "model.gguf")
    plain = LLM(path, n_ctx=256, n_threads=1)
    drafting = LLM(path, n_ctx=256, n_threads=1, speculative=SpeculativeParams(types=("mtp",), n_max=3, p_min=0.0))
    texts = [llm.generate([3, 5, 7], 60, temperature=0.0, ignore_eos=True) for llm in (plain, drafting)]
    assert texts[0] == texts[1] and len(texts[0]) > 60
    assert drafting.speculator is not None
    n_drafted = drafting.speculator.n_drafted
    assert n_drafted >= 39
    assert n_drafted - drafting.speculator.n_accepted < 3, "only the end of the text may cut a draft short"


def test_models_without_a_head(tmp_path: Path) -> None:
    model = glm4moe(own_matrices=False)
    for name in [name for name in model.weights if ".nextn." in name]:
        del model.weights[name]
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    with pytest.raises(UsageError, match="no layers that predict further tokens"):
        loaded.prediction_head()
    with pytest.raises(UsageError, match="the model reads no states"):
        Context(loaded, params()).decode(Batch.single([1]), np.zeros((1, D), np.float32))
    path = glm4moe(own_matrices=False).write(tmp_path / "head.gguf")
    with pytest.raises(UsageError, match=r"hidden states of shape \(1, 48\) are needed"):
        Context(Model.load(path).prediction_head(), params()).decode(Batch.single([1]))


def test_the_log_says_that_a_loaded_text_is_unknown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = glm4moe(own_matrices=False)
    model.words = [f"w{i}" for i in range(N_VOCAB - 8)]
    line = ["cli", "-m", str(model.write(tmp_path / "model.gguf")), "-t", "1", "-c", "256", "-p", "w1 w2 w3 w4 w5"]
    line += ["-n", "4", "--temp", "0", "--prompt-cache", str(tmp_path / "cache")]
    known = []
    for options in (["-mtp"], [], ["-mtp"]):
        assert main([*line, *options]) == 0
        known.append("the prediction layer does not know this text" not in capfd.readouterr().err)
    assert known == [True, True, False]
