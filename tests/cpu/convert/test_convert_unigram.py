"""`ikpy convert` of encoders with Unigram tokenizers: Jina Embeddings v3."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ikpy
from ikpy.convert import Conversion
from ikpy.errors import FileFormatError, IkpyError, UnsupportedError
from ikpy.vocab import Vocab
from ikpy.vocab.ugm import CharsMap
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.test_convert_encoders import states_of
from tests.cpu.convert.unigram_checkpoints import JINA_V3, published, unigram_files
from tests.cpu.vocab.double_array import charsmap

TEXTS = (
    "the old man and the sea",
    "  The old   man\tand\nthe sea.  ",
    "ﬁning Ａ 12 ① 日本",
    "zzz unknown 中 123 x",
    "e\u0301 ß é",
    "a",
    "",
)


def written(tmp_path: Path, **config: Any) -> Path:
    """The checkpoint with a tokenizer of its kind."""
    folder = tiny.write(JINA_V3, tmp_path / "checkpoint", **config)
    unigram_files(folder)
    return folder


def test_tokens_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    folder = written(tmp_path)
    tokenizer = unigram_files(folder)
    file = made.convert(folder, tmp_path)
    keys = {name.removeprefix("tokenizer.ggml."): value for name, value in file.metadata.items()}
    assert (keys["model"], keys["bos_token_id"], keys["eos_token_id"], keys["unknown_token_id"]) == ("t5", 0, 2, 3)
    assert (keys["add_bos_token"], keys["add_eos_token"], keys["mask_token_id"]) == (True, True, tiny.V - 1)
    assert keys["precompiled_charsmap"].dtype == np.uint8 and keys["token_type_count"] == 1
    vocab = Vocab.from_metadata(file.metadata)
    for text in TEXTS:
        assert vocab.tokenize(text) == tokenizer.encode(text).ids, text
    assert vocab.tokenize("a<mask>b", parse_special=True) == tokenizer.encode("a<mask>b").ids


def test_published_names(tmp_path: Path) -> None:
    """With q, k and v in one matrix, which stays one."""
    (tmp_path / "other").mkdir()
    first = made.convert(written(tmp_path), tmp_path, outtype="f32")
    other = written(tmp_path / "other")
    made.change_tensors(other, published)
    second = made.convert(other, tmp_path / "other", outtype="f32")
    assert "blk.0.attn_qkv.weight" in second.tensors and "blk.0.attn_q.weight" in first.tensors
    np.testing.assert_allclose(states_of(second), states_of(first), atol=1e-5)


def test_embeddings_are_means_of_states(tmp_path: Path) -> None:
    file = made.convert(written(tmp_path), tmp_path, outtype="f32")
    keys = {name.removeprefix("jina-bert-v3."): value for name, value in file.metadata.items()}
    assert keys["pooling_type"] == 1 and keys["attention.causal"] is False and keys["rope.freq_base"] == 20000
    llm = ikpy.LLM(file.path, n_threads=1, type_k="f32", type_v="f32")
    wanted = llm.token_embeddings(TEXTS[0]).mean(axis=0)
    np.testing.assert_allclose(llm.embed(TEXTS[0])[0], wanted / np.linalg.norm(wanted), atol=2e-5)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic'"),
    ],
)
def test_what_no_file_can_say(config: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(IkpyError, match=what) as error:
        Conversion(written(tmp_path, **config))
    assert "\n" not in str(error.value)


def test_a_missing_bias(tmp_path: Path) -> None:
    folder = written(tmp_path)
    made.change_tensors(folder, lambda tensors: tensors.pop("layers.1.mlp.fc1.bias"))
    with pytest.raises(UnsupportedError, match=r"needs blk.1.ffn_up.bias, which the checkpoint lacks"):
        Conversion(folder)


def change_tokenizer(folder: Path, **values: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(made.read_json(path) | values), encoding="utf-8")


def test_other_normalizers_are_refused(tmp_path: Path) -> None:
    """Small letters alone: no key says so."""
    folder = written(tmp_path)
    change_tokenizer(folder, normalizer={"type": "Lowercase"})
    with pytest.raises(UnsupportedError, match="no GGUF tokenizer gives the tokens of this one"):
        Conversion(folder)


def broken_map(at: int, value: int) -> str:
    """A table of characters of which one word is another."""
    data = bytearray(charsmap({"ﬁ": "fi", "Ａ": "A"}))
    data[at : at + 4] = value.to_bytes(4, "little")
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("table", "what"),
    {
        "no base64": ("%%%", "not a text in base64"),
        "no text": (None, "not a text in base64"),
        "too short": ("AAAA", "array size does not fit"),
        "size": (broken_map(0, 1 << 20), "array size does not fit"),
        "offset of the root": (broken_map(4, 1 << 30), "is outside the array"),
        "replacement": (broken_map(-4, 0x41FF4100), "not UTF-8"),
    }.values(),
)
def test_a_broken_table_of_characters(
    table: str | None, what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, and no panic of the package that would have read it."""
    folder = written(tmp_path)
    change_tokenizer(folder, normalizer={"type": "Precompiled", "precompiled_charsmap": table})
    with pytest.raises(FileFormatError, match=what) as error:
        Conversion(folder)
    assert "\n" not in str(error.value) and capfd.readouterr().err == ""


def test_damaged_tables_of_characters() -> None:
    """Tables that pass the check are looked up without an error, whatever is looked up."""
    rng = np.random.default_rng(3)
    whole = np.frombuffer(charsmap({"ﬁ": "fi", "Ａ": "A", "x́": "x"}), np.uint8)
    n_passed = 0
    for _ in range(300):
        data = whole.copy()
        data[rng.integers(4, len(data), 2)] = rng.integers(0, 256, 2)
        table = CharsMap(data.tobytes())
        try:
            table.check()
        except FileFormatError:
            continue
        n_passed += 1
        for text in ("ﬁ", "Ａb", "x́", *map(chr, range(1, 256))):
            table.longest_prefix(text.encode(), 0)
    assert 10 < n_passed < 290
