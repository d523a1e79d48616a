"""`ikpy convert` of EAGLE-3 drafters: logits and drafts by their definition, forms of checkpoints, errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.reading_draft import ReadingDraft
from ikpy.engine.reading_layer import reading_layer
from ikpy.errors import FileFormatError, IkpyError, UsageError
from ikpy.gguf.reader import GGUFFile
from tests.cpu.convert import eagle3_checkpoints as drafters
from tests.cpu.convert.checkpoints import amend, change_tensors, convert, copy
from tests.cpu.convert.eagle3_checkpoints import GUESSED, HEAD, HEADS, KV, LAYERS
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref

BOUND = 5e-5
TOKENS = np.random.default_rng(3).integers(3, 380, 37)
IDS = "eagle_aux_hidden_state_layer_ids"
NESTED: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "transformer_layer_config": {},
    IDS: [1, 3, 6],
    "norm_before_residual": True,
}
FORMS: dict[str, dict[str, Any]] = {
    "specforge": {"eagle_config": {IDS: [0, 2, 5], "use_aux_hidden_state": True}},
    "own-embedding": {"embeds": True, "prefix": "model."},
    "speculators": {"layer": "layers.0.", "embeds": True, "nested": True},
    "whole-vocabulary": {"draft_vocab_size": 384},
    "wide": {"hidden_size": 96, "embeds": True, "architectures": ["LlamaForCausalLM"]},
}
READ = {"specforge": [1, 3, 6], "speculators": [1, 3, 6]}


def settings(**more: Any) -> ContextParams:
    return ContextParams(**{"n_ctx": 256, "n_threads": 1, "type_k": "f32", "type_v": "f32", **more})


def form(name: str, target: Path) -> dict[str, Any]:
    """Arguments of `write`; the speculators package puts what is of the layer into an object of its own."""
    values = dict(FORMS[name])
    if values.pop("nested", False):
        own = drafters.config(target)
        outer = ("architectures", "draft_vocab_size", "tie_word_embeddings", "model_type")
        inner = {n: v for n, v in own.items() if n not in outer}
        values |= dict.fromkeys(inner) | NESTED | {"transformer_layer_config": {**inner, "model_type": "llama"}}
    return values


def layer(w: dict[str, np.ndarray], tokens: np.ndarray, states: np.ndarray, *, normed: bool) -> tuple[Any, Any]:
    """Logits [T, guessed] and states [T, W] in float64 of tokens [T] and the states [T, W] before them."""
    w = {name: array.astype(np.float64) for name, array in w.items()}
    token = ref.rms_norm(w["token_embd"][tokens], w["attn_norm"], 1e-5)
    state = ref.rms_norm(states, w["attn_norm_2"], 1e-5)
    x, both = state if normed else states, np.concatenate([token, state], axis=1)
    angles = ref.plain_angles(HEAD, 10000.0, np.arange(len(tokens), dtype=np.float64))
    q, k, v = ((both @ w[f"attn_{name}"].T).reshape(-1, n, HEAD) for name, n in (("q", HEADS), ("k", KV), ("v", KV)))
    q, k = (ref.rotate(rows, angles, neox=True) for rows in (q, k))
    x = x + ref.attend(q, k, v, 1 / math.sqrt(HEAD)).reshape(len(tokens), -1) @ w["attn_output"].T
    rows = ref.rms_norm(x, w["ffn_norm"], 1e-5)
    x = x + (ref.silu(rows @ w["ffn_gate"].T) * (rows @ w["ffn_up"].T)) @ w["ffn_down"].T
    return ref.rms_norm(x, w["output_norm"], 1e-5) @ w["output"].T, x


def embedding(model: GGUFFile) -> np.ndarray:
    """That of the target, f32."""
    return model.data(model.tensors["token_embd.weight"]).view("<f4").reshape(-1, 64)


@pytest.mark.parametrize("name", FORMS)
def test_logits_and_drafts(name: str, tmp_path: Path) -> None:
    target = drafters.target(tmp_path)
    given = form(name, target)
    weights = drafters.write(tmp_path / "drafter", target, **given)
    (tmp_path / "model").mkdir()
    whole = convert(target, tmp_path / "model", outtype="f32")
    file = convert(tmp_path / "drafter", tmp_path, outtype="f32", target=str(target))
    assert list(file.metadata["eagle3.target_layers"]) == READ.get(name, [2, LAYERS // 2, LAYERS - 3])
    assert ("token_embd.weight" in file.tensors) == given.get("embeds", False)
    assert file.metadata["tokenizer.ggml.pre"] == whole.metadata["tokenizer.ggml.pre"]
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert list(file.metadata[key]) == list(whole.metadata[key]), key
    model = Model.load(whole.path)
    head = reading_layer(model, file.path)
    reader = Context(model, settings(token_states=True))
    reader.decode(Batch.single(TOKENS, logits="none"))
    states, w = reader.token_states, {"token_embd": embedding(whole), **weights}
    assert states is not None
    truth, further = layer(w, TOKENS[1:], states[:-1].astype(np.float64), normed=name == "speculators")
    context = Context(head, settings(embeddings=True))
    logits = context.decode(Batch.single(TOKENS[1:], logits="all"), np.ascontiguousarray(states[:-1]))
    checks.hold("logits", logits, truth, BOUND)
    assert context.embeddings is not None
    checks.hold("states", context.embeddings, further, BOUND)

    ids = drafters.guessed(384) if name != "whole-vocabulary" else np.arange(384)
    mapped = getattr(head.arch, "target_tokens")  # noqa: B009
    drafter = ReadingDraft(Context(head, settings(embeddings=True)), mapped, p_min=0.0, n_ctx=256)
    drafter.observe(TOKENS[:-1].tolist(), states[:-1])
    tokens, found = TOKENS[1:].tolist(), list[int]()
    rows = states[:-1].astype(np.float64)
    for _ in range(3):
        logits, further = layer(w, np.array(tokens + found), rows, normed=name == "speculators")
        found.append(int(ids[logits[-1].argmax()]))
        rows = np.concatenate([rows, further[-1:]])
    assert drafter.draft(TOKENS.tolist(), 3) == found


def test_states_are_those_of_the_layers_named(tmp_path: Path) -> None:
    """What the model gives is the matrix times the inputs of the layers: two drafters that differ in one layer alone
    get other states."""
    target = drafters.target(tmp_path)
    (tmp_path / "model").mkdir()
    whole = convert(target, tmp_path / "model", outtype="f32")
    found = []
    for number, ids in enumerate(([0, 2, 5], [0, 2, 4])):
        drafters.write(tmp_path / f"d{number}", target, eagle_config={IDS: ids})
        file = convert(tmp_path / f"d{number}", tmp_path, outtype="f32", target=str(target))
        model = Model.load(whole.path)
        reading_layer(model, file.path)
        context = Context(model, settings(token_states=True))
        context.decode(Batch.single(TOKENS, logits="none"))
        found.append(context.token_states)
    assert np.abs(found[0] - found[1]).max() > 0.01


def test_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = drafters.target(tmp_path), tmp_path / "drafter"
    drafters.write(draft, target)
    assert main(["convert", str(target), "--outfile", str(tmp_path / "m.gguf")]) == 0
    small = ["--outtype", "f16", "--outfile", str(tmp_path / "d.gguf")]
    assert main(["convert", str(draft), "--target-model-dir", str(target), *small]) == 0
    common = ["-m", str(tmp_path / "m.gguf"), "-p", "a b a b", "-n", "12", "--temp", "0", "-t", "1", "-c", "128"]
    capsys.readouterr()
    assert main(["cli", *common, "-no-cnv"]) == 0
    plain = capsys.readouterr().out
    drafted = ["-md", str(tmp_path / "d.gguf"), "--spec-type", "eagle3", "--draft-p-min", "0"]
    assert main(["cli", *common, "-no-cnv", *drafted]) == 0
    shown = capsys.readouterr()
    assert shown.out == plain and "statistics eagle3" in shown.err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 2}, "a drafter of 2 layers"),
        ({"norm_before_fc": True}, "norm_before_fc true"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm true"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state false"),
        ({"eagle_config": 3}, "'eagle_config' is 3, not an object"),
        ({"eagle_config": {IDS: [1, 2]}}, r"reads layers \[2, 3\] of a model of 8; 3 of them"),
        ({"eagle_config": {IDS: [1, 2, 2]}}, r"reads layers \[2, 3, 3\] of a model of 8"),
        ({"eagle_config": {IDS: [-1, 2, 3]}}, r"reads layers \[0, 3, 4\] of a model of 8"),
        ({"eagle_config": {IDS: 3}}, rf"'{IDS}' is 3, not a list"),
        ({"eagle_config": {IDS: [1, 2, 7]}}, r"reads layers \[2, 3, 8\] of a model of 8"),
        ({"target_hidden_size": 65}, "states of 65 numbers, those of .* have 64; give the model"),
        ({"vocab_size": 400}, "a vocabulary of 400 tokens, .* has 384"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"draft_vocab_size": 95}, "'d2t' must be 95 integers"),
    ],
)
def test_configurations_that_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    target, draft = drafters.target(tmp_path), tmp_path / "drafter"
    drafters.write(draft, target)
    amend(draft, **values)
    with pytest.raises(FileFormatError, match=message) as caught:
        convert(draft, tmp_path, target=str(target))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("d2t"), "d2t .tokens of the 96 guesses. is missing"),
        (lambda t: t.pop("fc.weight"), "fc.weight .from 'fc'. is missing"),
        (lambda t: t.pop("lm_head.weight"), "output.weight .from 'lm_head'. is missing"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "layer 0 lacks blk.0.attn_norm_2.weight .from 'hidden_norm'"),
        (lambda t: t.update({"midlayer.self_attn.q_proj.bias": ("F32", (64,), bytes(256))}), "has no bias for"),
        (lambda t: t.update({"extra.weight": ("F32", (4,), bytes(16))}), "'extra.weight' has no place"),
        (lambda t: t.update(d2t=("I64", (GUESSED,), bytes(8 * GUESSED))), "'d2t' and 't2d' name other tokens"),
        (lambda t: t.update(d2t=("I64", (GUESSED,), bytes([255]) * (8 * GUESSED))), "does not name 96 of the 384"),
        (lambda t: t.update(d2t=("F32", (GUESSED,), bytes(4 * GUESSED))), "'d2t' must be 96 integers"),
    ],
)
def test_tensors_that_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    target, draft = drafters.target(tmp_path), tmp_path / "drafter"
    drafters.write(draft, target)
    change_tensors(draft, change)
    with pytest.raises(IkpyError, match=message):
        convert(draft, tmp_path, target=str(target))


def test_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A drafter needs one, a model has none; a folder without a tokenizer is none."""
    target, draft = drafters.target(tmp_path), tmp_path / "drafter"
    drafters.write(draft, target)
    with pytest.raises(UsageError, match="a drafter; --target names the folder"):
        convert(draft, tmp_path)
    with pytest.raises(UsageError, match="--target is for drafters"):
        convert(copy("qwen3", tmp_path), tmp_path, target=str(target))
    assert main(["convert", str(draft), "--mmproj", "--target", str(target)]) == 1
    assert "--mmproj and --target do not go together" in capsys.readouterr().err
    with pytest.raises(FileFormatError, match="no such folder"):
        convert(draft, tmp_path, target=str(tmp_path / "none"))
    (target / "model.safetensors").unlink()  # the weights of the target are not needed
    convert(draft, tmp_path, target=str(target))
    drafters.write(tmp_path / "wide", target, hidden_size=96)
    with pytest.raises(FileFormatError, match="embed_tokens is missing, and that of the model has 64 columns"):
        convert(tmp_path / "wide", tmp_path, target=str(target))
