"""`ikpy convert` of DFlash and DSpark drafters: the files are those of the tests of their layers; forms, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.errors import IkpyError
from tests.cpu.convert import dflash_checkpoints as drafters
from tests.cpu.convert import eagle3_checkpoints as eagle3
from tests.cpu.convert.checkpoints import amend, change_tensors, convert
from tests.cpu.models import dflash_model as dflash

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
DSPARK: dict[str, Any] = {"markov": True, "architectures": ["Qwen3DSparkModel"]}
BEHIND = {"projector_type": "dspark", "target_layer_ids": [0, 2, 5], "mask_token_id": 5, "block_size": 4}
SELECTOR = {
    "mask_token_id": drafters.MASK,
    "target_layer_ids": drafters.IDS,
    "conv_kernel_size": dflash.TAPS,
    "conv_group_size": dflash.GROUP,
    "selector_rank": dflash.RANK,
    "selector_top_k": dflash.BEST,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 20.0,
}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "authors": ({}, {}),
    "windows": (
        {"layer_types": WINDOWS, "sliding_window": 16},
        {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False, True]},
    ),
    "own output": ({"own": True, "prefix": "model."}, {}),
    "dspark": (DSPARK, {"sample_from_anchor": True}),
    "specforge": (
        {"markov": True, "own": True, "block_size": None, "dflash_config": BEHIND, "is_causal": True},
        {"sample_from_anchor": False, "target_layers": [1, 3, 6], "block_size": 4, "attention.causal": True},
    ),
    "dflash2": (
        {"selector": True, "architectures": ["DFlash2DraftModel"], "dflash_config": SELECTOR},
        {"logit_scale": 0.5, "final_logit_softcapping": 20.0, "selector_rank": dflash.RANK, "selector_top_k": 7},
    ),
    "no layers": ({"dflash_config": {"mask_token_id": 5}}, {"target_layers": [2, 4, 6]}),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_file(form: str, tmp_path: Path) -> None:
    """Tensors bit by bit, and keys, are those of the files whose layers are held to their definition."""
    given, keys = FORMS[form]
    target = eagle3.target(tmp_path)
    wanted = drafters.write(tmp_path / "drafter", **given)
    file = convert(tmp_path / "drafter", tmp_path, outtype="f32", target=str(target))
    bare = (".bias", "_conv_base")
    names = {name if name.endswith(bare) else f"{name}.weight": values for name, values in wanted.weights.items()}
    assert set(file.tensors) - {"d2t"} == set(names)
    for name, values in names.items():
        found = file.data(file.tensors[name]).view("<f4").reshape(values.shape)
        np.testing.assert_array_equal(found, values, name)
    usual = {"target_layers": [2, 3, 5], "block_size": dflash.BLOCK}
    others = {k: v for k, v in wanted.keys.items() if k not in ("vocab_size", "sample_from_anchor", *usual)}
    for key, value in {**others, **usual, **keys}.items():
        found = file.metadata[f"dflash.{key}"]
        assert (list(found) if isinstance(value, list) else found) == pytest.approx(value), key
    mask = (given.get("dflash_config") or {}).get("mask_token_id", drafters.MASK)
    assert file.metadata["tokenizer.ggml.mask_token_id"] == mask
    whole = convert(target, tmp_path)
    assert list(file.metadata["tokenizer.ggml.tokens"]) == list(whole.metadata["tokenizer.ggml.tokens"])


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
def test_programs(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = eagle3.target(tmp_path), tmp_path / "drafter"
    second: dict[str, Any] = {"selector": True, "dflash_config": SELECTOR}
    drafters.write(draft, **{"dspark": DSPARK, "dflash2": second}.get(kind, {}))
    assert main(["convert", str(target), "--outfile", str(tmp_path / "m.gguf")]) == 0
    small = ["--outtype", "f16", "--outfile", str(tmp_path / "d.gguf")]
    assert main(["convert", str(draft), "--target", str(target), *small]) == 0
    common = ["-m", str(tmp_path / "m.gguf"), "-p", "a b a b", "-n", "12", "--temp", "0", "-t", "1", "-c", "128"]
    capsys.readouterr()
    assert main(["cli", *common, "-no-cnv"]) == 0
    plain = capsys.readouterr().out
    drafted = ["-md", str(tmp_path / "d.gguf"), "--spec-type", kind.removesuffix("2"), "--draft-p-min", "0"]
    assert main(["cli", *common, "-no-cnv", *drafted]) == 0
    shown = capsys.readouterr()
    assert shown.out == plain and f"statistics {kind.removesuffix('2')}" in shown.err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention_bias": True}, "attention_bias true"),
        ({"hidden_size": 96}, "embed_tokens is missing, and that of the model has 64 columns instead of 96"),
        ({"dflash_config": 3}, "'dflash_config' is 3, not an object"),
        ({"dflash_config": {"fc_layernorm": True}}, "dflash_config.fc_layernorm True is not supported"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type 'domino' is not supported"),
        ({"dflash_config": {"markov_head_type": "gru"}}, "markov_head_type 'gru'"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "'mask_token_id' is None, not an integer"),
        ({"dflash_config": {"target_layer_ids": [1, 7]}}, r"reads what layers \[1, 7\] give, of a model of 8"),
        ({"dflash_config": {"target_layer_ids": [-1]}}, r"reads what layers \[-1\] give"),
        ({"block_size": "six"}, "'block_size' is 'six', not an integer"),
        ({"num_target_layers": 7}, r"for a model of 7 layers .num_target_layers., .* has 8; give the model"),
        ({"dflash_config": {"num_target_layers": "8"}}, r"for a model of '8' layers .num_target_layers., .* has 8;"),
        ({"aux_hidden_state_layer_ids": [1]}, "drafters of the speculators package are not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_configurations_that_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    target, draft = eagle3.target(tmp_path), tmp_path / "drafter"
    drafters.write(draft)
    amend(draft, **values)
    with pytest.raises(IkpyError, match=message) as caught:
        convert(draft, tmp_path, target=str(target))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "fc.weight .from 'fc'. is missing"),
        (lambda t: t.pop("hidden_norm.weight"), "enc.output_norm.weight .from 'hidden_norm'. is missing"),
        (lambda t: t.pop("markov_head.markov_w2.weight"), "markov_w2.weight .from 'markov_head.markov_w2'. is missing"),
        (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "layer 1 lacks blk.1.attn_k_norm.weight"),
        (lambda t: t.update({"extra.weight": ("F32", (4,), bytes(16))}), "'extra.weight' has no place"),
    ],
)
def test_tensors_that_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    target, draft = eagle3.target(tmp_path), tmp_path / "drafter"
    drafters.write(draft, **DSPARK)
    change_tensors(draft, change)
    with pytest.raises(IkpyError, match=message):
        convert(draft, tmp_path, target=str(target))
