"""Drafts for models with recurrent layers: the last tokens of a sequence are taken back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy import LLM
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.recurrent import pieces_by_state
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.errors import ResourceError, UsageError
from ikpy.tools.speculation import MAX_KEPT_STATES, DraftFiles, kept_states
from tests.cpu.engine.test_recurrent_states import go_on
from tests.cpu.engine.test_speculative import PARAMS, N, Oracle, drafters, generate, prompts
from tests.cpu.models.recurrent_model import MODELS, expected, hold, new_context, text, write_model
from tests.cpu.models.test_arch_qwen3next import N_LAYER, D, predicting


@pytest.fixture(scope="module", params=MODELS)
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), arch=request.param)


# tokens that are taken back


def test_wrong_guesses_are_taken_back(path: Path) -> None:
    """Of all lengths, after single tokens and right behind each other."""
    tokens = text(70, 40)
    truth = expected(path, tokens)
    context = new_context(path, 2, n_kept_states=4)
    at = 10
    go_on(context, tokens[:at], 0)
    for right, wrong in ((0, 4), (1, 3), (3, 1), (4, 0), (0, 1), (2, 2), (0, 0), (0, 0), (1, 1)):
        guessed = tokens[: at + 1 + right] + text(71, wrong)
        logits = go_on(context, guessed, at)
        hold(f"from {at} on", logits[: 1 + right], truth[at : at + 1 + right])
        at += 1 + right
        context.kv.seq_rm(0, at, -1)
        assert context.kv.seq_pos_max(0) == at - 1
    hold("behind all", go_on(context, tokens, at), truth[at:])


def test_sequences_at_random(path: Path) -> None:
    """Three sequences with guesses of their own in batches of several pieces."""
    texts = [text(seed, 60) for seed in (72, 73, 74)]
    truths = [expected(path, tokens) for tokens in texts]
    context = new_context(path, 3, n_ubatch=8, n_kept_states=5)
    rng = np.random.default_rng(75)
    done = [0, 0, 0]
    for _ in range(40):
        batch, parts = Batch(), []
        for seq in rng.permutation(3).tolist():
            right = min(int(rng.integers(0, 7)), 60 - done[seq])
            if right == 0:
                continue
            wrong = int(rng.integers(0, 7 - right)) if right < 6 else 0
            batch.add(texts[seq][done[seq] : done[seq] + right] + text(76, wrong), done[seq], seq, "all")
            parts.append((seq, right, wrong))
        if not parts:
            continue
        logits, row = context.decode(batch), 0
        for seq, right, wrong in parts:
            start, done[seq] = done[seq], done[seq] + right
            hold(f"sequence {seq} from {start}", logits[row : row + right], truths[seq][start : done[seq]])
            context.kv.seq_rm(seq, done[seq], -1)
            row += right + wrong
    assert min(done) > 30


def test_how_far_back_a_sequence_can_go(path: Path) -> None:
    tokens = text(77, 30)
    context = new_context(path, 3, n_kept_states=3)
    states = context.kv.recurrent
    assert states is not None and context.kv.removable == 3 and states.n_slots == 3 * 4
    for start, end in ((0, 10), (10, 13), (13, 14), (14, 18)):
        go_on(context, tokens[:end], start)
    assert [context.kv.reusable(0, n) for n in (18, 17, 16, 15, 14)] == [18, 17, 16, 15, 0], "the last three"
    context.kv.seq_cp(0, 1, -1, 16)
    hold("a copy up to one", go_on(context, tokens, 16, 1), expected(path, tokens)[16:])
    context.kv.seq_cp(0, 1, -1, 14)
    with pytest.raises(ResourceError, match="the state of sequence 1 was lost"):
        go_on(context, tokens, 14, 1)
    context.kv.seq_cp(0, 2)
    hold("a copy of the sequence", go_on(context, tokens, 18, 2), expected(path, tokens)[18:])
    assert context.kv.rewind(0, 17) == 17
    other = tokens[:17] + text(78, 4)
    hold("rewound", go_on(context, other, 17), expected(path, other)[17:])
    context.kv.keep_checkpoint(0)
    go_on(context, other + tokens[:3], 21)
    assert context.kv.rewind(0, 22) == 22
    assert context.kv.rewind(0, 21) == 21, "a checkpoint"
    context.kv.seq_rm(0, 19, -1)
    with pytest.raises(ResourceError, match="the state of sequence 0 was lost"):
        go_on(context, other, 19)


def test_a_failed_batch_takes_the_copies_it_wrote_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = text(79, 20)
    context = new_context(path, 1, n_kept_states=3)
    go_on(context, tokens[:8], 0)
    go_on(context, tokens[:12], 8)
    with monkeypatch.context() as patch:
        patch.setattr(context, "_evaluate", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            go_on(context, tokens[:14], 12)
    assert context.kv.reusable(0, 12) == 11
    assert context.kv.rewind(0, 12) == 11
    hold("afterwards", go_on(context, tokens, 11), expected(path, tokens)[11:])


def test_tokens_of_a_draft_stay_in_one_piece() -> None:
    batch = Batch()
    for seq, n in enumerate((5, 3, 12, 4, 4, 1)):
        batch.add(list(range(n)), 0, seq, "all")

    def pieces(n: int, n_whole: int) -> list[list[int]]:
        return [[ids[0] for ids in piece.seq_ids] for piece in pieces_by_state(batch, n, n_whole)]

    assert [len(piece) for piece in pieces(7, 1)] == [7, 7, 7, 7, 1]
    found = pieces(7, 4)
    assert found == [[0] * 5, [1] * 3 + [2] * 4, [2] * 7, [2] + [3] * 4, [4] * 4 + [5]]
    assert [len(piece) for piece in pieces(3, 4)] == [3, 2, 3, 3, 3, 3, 3, 3, 3, 3], "four are longer than a piece"
    assert len(pieces(64, 4)) == 1


# drafts


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 4}], ids=["greedy", "sampled"])
def test_the_text_is_that_of_plain_decoding(path: Path, sampling: dict) -> None:
    """With all kinds of drafters, of which one is the model itself, whose drafts go back to checkpoints."""
    ctx = Context(Model.load(path), ContextParams(n_ctx=256, n_threads=1, n_kept_states=6))
    accepted = 0
    for prompt in prompts(path):
        plain, _ = generate(ctx, prompt, None, **sampling)
        for drafter in drafters(ctx, prompt + plain):
            speculator = Speculator([drafter], PARAMS)
            found, sequence = generate(ctx, prompt, speculator, **sampling)
            assert found == plain, drafter.name
            assert sequence.tokens == prompt + plain[:-1]
            assert ctx.kv.used_cells == len(sequence.tokens), "rejected tokens left the cache"
            if isinstance(drafter, Oracle) and drafter.wrong == 0:
                accepted += speculator.n_accepted
    assert accepted > N


def test_no_draft_is_longer_than_what_can_be_taken_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n_kept in (0, 1, 3):
        ctx = Context(Model.load(path), ContextParams(n_ctx=256, n_threads=1, n_kept_states=n_kept))
        prompt = prompts(path)[1]
        plain, _ = generate(ctx, prompt, None, n=20)
        speculator = Speculator([Oracle(prompt + plain)], PARAMS)
        drafts: list[list[int]] = []
        monkeypatch.setattr(
            speculator, "draft", lambda *args, draft=speculator.draft, to=drafts: to.append(draft(*args)) or to[-1]
        )
        assert generate(ctx, prompt, speculator, n=20)[0] == plain
        assert max(map(len, drafts)) == n_kept


def test_a_right_prediction_layer_has_all_its_drafts_accepted(tmp_path: Path) -> None:
    """Next tokens depend on the last one alone, and the layer knows them."""
    model = predicting("qwen35moe", experts=True)
    for name, w in model.weights.items():
        if "attn_output" in name or "ffn_down" in name or "ssm_out" in name:
            w[:] = 0
    head = f"blk.{N_LAYER}.nextn"
    model.weights[f"{head}.eh_proj"] = np.eye(D, 2 * D, dtype=np.float32)
    model.weights[f"{head}.enorm"][:] = 1
    model.weights[f"{head}.shared_head_norm"] = model.weights["output_norm"]
    path = model.write(tmp_path / "model.gguf")
    drafting = SpeculativeParams(types=("mtp",), n_max=3, p_min=0.0)
    llms = [LLM(path, n_ctx=256, n_threads=1, speculative=params) for params in (None, drafting)]
    texts = [llm.generate([3, 5, 7], 60, temperature=0.0, ignore_eos=True) for llm in llms]
    assert texts[0] == texts[1]
    speculator = llms[1].speculator
    assert speculator is not None and speculator.n_drafted >= 39
    assert speculator.n_drafted - speculator.n_accepted < 3, "only the end of the text may cut a draft short"


def test_from_python(path: Path) -> None:
    """Drafts of a model with recurrent layers, the same one."""
    prompt, settings = text(80, 9) * 3, {"n_ctx": 256, "n_threads": 2}
    plain = LLM(path, **settings).generate(prompt, 40, temperature=0.0, ignore_eos=True)
    for n_max in (5, 40):
        params = SpeculativeParams(p_min=0.0, n_max=n_max)
        llm = LLM(path, speculative=params, draft_files=DraftFiles(path), **settings)
        assert llm.generate(prompt, 40, temperature=0.0, ignore_eos=True) == plain
        assert llm.speculator is not None and llm.speculator.n_accepted > 20
        assert llm.context.kv.removable == kept_states(params) == min(params.n_max, MAX_KEPT_STATES)
    with pytest.raises(UsageError, match="-1 kept states"):
        LLM(path, n_kept_states=-1, **settings)
