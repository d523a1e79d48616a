"""`ikpy convert` of PLaMo 2 and 3, held to float64 evaluations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.engine.batch import Batch
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.vocab import Vocab
from tests.cpu.convert import checkpoints as made
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import test_arch_plamo as plamo
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.reference_models import RandomModel

OFFSETS = {
    "attn_norm": 1.0,
    "post_attention_norm": 0.2,
    "ffn_norm": 1.0,
    "post_ffw_norm": 5**-1.5,
    "output_norm": 1.0,
}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "pre_mixer_norm",
    "attn_qkv": "mixer.qkv_proj",
    "attn_output": "mixer.o_proj",
    "post_attention_norm": "post_mixer_norm",
    "ffn_norm": "pre_mlp_norm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_mlp_norm",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_x": "mixer.bcdt_proj",
    "ssm_dt": "mixer.dt_proj",
    "ssm_out": "mixer.out_proj",
}
HEAD_NORMS = {"attn_q_norm": "mixer.q_norm", "attn_k_norm": "mixer.k_norm"}
PARAMETERS = {
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_dt_norm": "mixer.dt_norm_weight",
    "ssm_b_norm": "mixer.B_norm_weight",
    "ssm_c_norm": "mixer.C_norm_weight",
    "attn_q_norm": "mixer.q_weight",
    "attn_k_norm": "mixer.k_weight",
}
N_VOCAB = 300
TOKEN_KINDS = (("<|plamo:unk|>", "UNKNOWN"), ("<|plamo:bos|>", "CONTROL"), ("<|plamo:eos|>", "CONTROL"))
WORDS = (("こ", -3.0), ("こん", -4.0), ("にちは", -5.0), ("Hello", -6.0), ("Hel", -2.0), ("lo", -3.5), (" ", -1.0))


def token_lines() -> list[list[Any]]:
    """Lines of tokenizer.jsonl."""
    lines: list[list[Any]] = [[text, 0.0, kind] for text, kind in TOKEN_KINDS]
    lines += [[f"<0x{byte:02X}>", 0.0, "BYTE"] for byte in range(256)]
    lines += [[text, score, "NORMAL"] for text, score in WORDS]
    return lines + [[f"word{i}", -9.0, "NORMAL"] for i in range(N_VOCAB - len(lines))]


def write(m: RandomModel, folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint of a model: norms less their offsets, decays as logarithms, rows of tokens repeated."""
    second = m.arch == "plamo2"
    names = {**NAMES, **({} if second else HEAD_NORMS)}
    offsets = {**OFFSETS, **({} if second else dict.fromkeys(HEAD_NORMS, 1.0))}
    tensors = {}
    for name, values in m.weights.items():
        layer, base = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+?)(?:\.weight)?", name).groups()  # type: ignore[union-attr]
        stored = np.log(-values) if base == "ssm_a" else values - np.float32(offsets.get(base, 0.0))
        if base in ("token_embd", "output"):
            stored = np.resize(stored, (N_VOCAB, plamo.D))
        elif base == "ssm_conv1d":
            stored = stored[:, None]
        published = f"{names[base]}.weight" if base in names else PARAMETERS[base]
        place = published if layer is None else f"model.layers.layers.{layer}.{published}"
        tensors[place] = ("F32", stored.shape, stored.astype(np.float32).tobytes())
    folder.mkdir(parents=True)
    made.write_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.jsonl").write_text("".join(json.dumps(line) + "\n" for line in token_lines()))
    tokens = {f"{role}_token": TOKEN_KINDS[i][0] for i, role in enumerate(("unk", "bos", "eos"))}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "add_bos_token": True}))
    return folder


def head(number: int, m: RandomModel) -> dict[str, Any]:
    return {
        "architectures": [f"Plamo{number}ForCausalLM"],
        "model_type": f"plamo{number}",
        "hidden_size": plamo.D,
        "intermediate_size": plamo.F,
        "max_position_embeddings": 256,
        "num_attention_heads": plamo.HEADS,
        "num_hidden_layers": m.keys["block_count"],
        "num_key_value_heads": plamo.KV,
        "rms_norm_eps": plamo.EPS,
        "vocab_size": N_VOCAB,
        "torch_dtype": "float32",
    }


def plamo3_config(m: RandomModel) -> dict[str, Any]:
    return {
        **head(3, m),
        "head_dim": plamo.HEAD,
        "rope_theta": plamo.BASE,
        "rope_local_theta": plamo.WINDOW_BASE,
        "sliding_window": plamo.WINDOW,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    }


def new_plamo2() -> RandomModel:
    """Layers 1 and 3 attend; heads of the scan are as wide as those of attention."""
    return plamo.new_plamo2(251)


def plamo2_config(m: RandomModel) -> dict[str, Any]:
    return {
        **head(2, m),
        "hidden_size_per_head": plamo.HEAD,
        "mamba_d_conv": plamo.TAPS,
        "mamba_d_state": plamo.STATE,
        "mamba_enabled": True,
        "mamba_num_heads": plamo.SCAN_HEADS,
        "mamba_step": 2,
        "tie_word_embeddings": False,
    }


def converted(m: RandomModel, config: dict[str, Any], tmp_path: Path) -> GGUFFile:
    return made.convert(write(m, tmp_path / "checkpoint", config), tmp_path, outtype="f32")


def hold(file: GGUFFile, truth: np.ndarray) -> None:
    logits = checks.context_of(Path(file.path), type_k="f32", type_v="f32").decode(Batch.single(TOKENS, logits="all"))
    checks.hold(str(file.metadata["general.architecture"]), logits[:, : truth.shape[1]], truth, plamo.BOUND)


def test_plamo3(tmp_path: Path) -> None:
    model, truth = plamo.plamo3()
    file = converted(model, plamo3_config(model), tmp_path)
    hold(file, truth)
    assert file.metadata["plamo3.attention.sliding_window"] == plamo.WINDOW
    assert "divides them by rules of its own" in Conversion(tmp_path / "checkpoint").notes[0]


def test_plamo2(tmp_path: Path) -> None:
    model = new_plamo2()
    file = converted(model, plamo2_config(model), tmp_path)
    hold(file, plamo.plamo2_logits(model, TOKENS))
    assert set(file.tensors) >= {"blk.0.ssm_dt_norm", "blk.0.ssm_dt.bias", "blk.1.attn_q_norm.weight", "blk.0.ssm_d"}


def test_texts(tmp_path: Path) -> None:
    """The cheapest cut; bytes where no token is."""
    model = plamo.plamo3()[0]
    vocab = Vocab.from_metadata(converted(model, plamo3_config(model), tmp_path).metadata)
    lines = [line[0] for line in token_lines()]
    for text, pieces in (
        ("こんにちは", ["こん", "にちは"]),
        ("こ こ", ["こ", " ", "こ"]),
        ("Hello", ["Hel", "lo"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("", []),
    ):
        ids = vocab.tokenize(text, add_special=False)
        assert [lines[i] for i in ids] == pieces
        assert vocab.detokenize(ids) == text
    assert vocab.bos == 1 and vocab.eos == 2 and vocab.tokenize("こ", add_special=True)[0] == 1


def test_what_cannot_be(tmp_path: Path) -> None:
    model = plamo.plamo3()[0]
    config = plamo3_config(model)
    for i, (name, value, message) in enumerate(
        (
            ("rope_scaling_factor", 2.0, "rope_scaling_factor 2"),
            ("sliding_window", None, "a window of None"),
            ("scale_embedding", True, "scale_embedding true"),
        )
    ):
        folder = write(model, tmp_path / str(i), {**config, name: value})
        with pytest.raises(FileFormatError, match=message):
            Conversion(folder)
    folder = write(model, tmp_path / "tokens", config)
    good = (folder / "tokenizer.jsonl").read_text().splitlines()
    for lines, message in (
        (['["a", 0.0, "NORMAL"]', '{"b": 1}'], "line 2 is no token"),
        ([*good, good[-1]], f"line {len(good) + 1} is no token"),
        ([line for line in good if "0x41" not in line], "<0x41> is missing"),
    ):
        (folder / "tokenizer.jsonl").write_text("\n".join(lines))
        with pytest.raises(FileFormatError, match=rf"tokenizer\.jsonl: {message}"):
            Conversion(folder)


def test_layers_that_attend(tmp_path: Path) -> None:
    """The middle one of every mamba_step layers; of few layers the last."""
    for step, n_layer, attends in ((2, 5, (1, 3)), (4, 5, (2,)), (16, 3, (2,))):
        model = plamo.new_plamo2(252, attends, n_layer)
        config = {**plamo2_config(model), "mamba_step": step}
        file = converted(model, config, tmp_path / str(step))
        hold(file, plamo.plamo2_logits(model, TOKENS))


def test_windows_of_plamo2_are_noted(tmp_path: Path) -> None:
    model = new_plamo2()
    folder = write(model, tmp_path / "checkpoint", {**plamo2_config(model), "attention_window_size": 32})
    assert any("windows of 32 tokens" in note for note in Conversion(folder).notes)
