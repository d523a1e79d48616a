"""`ikpy convert`: vocabularies that give other tokens than tokenizer.json are refused or noted, with an example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ikpy.convert import Conversion, ConvertOptions
from ikpy.errors import FileFormatError, UnsupportedError
from tests.cpu.convert import checkpoints as made


def tokenizer_with(tmp_path: Path, name: str = "llama", model: Any = None, **values: Any) -> Path:
    """A checkpoint whose tokenizer.json has other values; model: those of its BPE model."""
    folder = made.copy(name, tmp_path)
    data = made.read_json(folder / "tokenizer.json")
    data["model"] |= model or {}
    (folder / "tokenizer.json").write_text(json.dumps({**data, **values}), encoding="utf-8")
    return folder


def added(content: str, **flags: bool) -> dict[str, Any]:
    """The last token of the vocabulary as an added one."""
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": 383, "content": content, **usual, **flags}


LOWER = {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"normalizer": LOWER}, r"has \['i', .*\] there, \['I', .*\] in the file \(normalizer Lowercase\)"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, LOWER]}}, r"normalizer NFC, Lowercase\)"),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, r"normalizer Strip\)"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "no GGUF tokenizer gives the tokens"),
    ],
)
def test_other_tokens_for_plain_text_are_refused(values, message, tmp_path):
    folder = tokenizer_with(tmp_path, **values)
    with pytest.raises(UnsupportedError, match=message):
        Conversion(folder)
    assert "probe texts" in Conversion(folder, ConvertOptions(pre="llama-bpe")).notes[0]


def test_a_space_in_front_that_byte_level_files_do_not_put_is_refused(tmp_path):
    folder = made.copy("llama", tmp_path)
    data = made.read_json(folder / "tokenizer.json")
    data["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="no GGUF tokenizer gives the tokens"):
        Conversion(folder)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("llama", {"normalizer": {"type": "NFC"}}, "(normalizer NFC)"),
        ("mistral", {"normalizer": None, "pre_tokenizer": {
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False,
        }}, "3 of 15 probe texts"),
    ],
)  # fmt: skip
def test_other_tokens_for_some_texts_are_noted(name, values, message, tmp_path):
    notes = Conversion(tokenizer_with(tmp_path, name, **values)).notes
    assert len(notes) == 1 and message in notes[0]


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_depend_on_what_is_beside_them_are_noted(flag, tmp_path):
    folder = made.copy("llama", tmp_path)
    tokens = made.read_json(folder / "tokenizer.json")["added_tokens"][:-1]
    made.amend(folder, "tokenizer.json", added_tokens=[*tokens, added("extra", **{flag: True})])
    assert (
        f"1 added tokens are found otherwise in a text, which no key can say; the first is 'extra' ({flag})"
        in (Conversion(folder).notes[0])
    )


@pytest.mark.parametrize("side", ["Left", "Right"])
def test_saved_padding_and_truncation_are_no_part_of_the_tokenizer(side, tmp_path):
    """Padded on the left, texts seem not to begin with BOS; truncated, all are short."""
    padding = {"strategy": {"Fixed": 20}, "direction": side, "pad_to_multiple_of": None, "pad_id": 380}
    folder = tokenizer_with(
        tmp_path,
        padding={**padding, "pad_type_id": 0, "pad_token": "<|end_of_text|>"},
        truncation={"direction": side, "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        model={"dropout": 0.5},
    )
    plan = Conversion(folder)
    assert plan.metadata["tokenizer.ggml.add_bos_token"] and not plan.metadata["tokenizer.ggml.add_eos_token"]
    assert not plan.notes


def test_steps_of_pre_tokenizers_may_be_nested(tmp_path):
    folder = made.copy("llama", tmp_path)
    split, byte_level = made.read_json(folder / "tokenizer.json")["pre_tokenizer"]["pretokenizers"]
    inner = {"type": "Sequence", "pretokenizers": [byte_level]}
    made.amend(folder, "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [split, inner]})
    assert Conversion(folder).metadata["tokenizer.ggml.pre"] == "llama-bpe"


def test_vocabularies_that_would_not_load_are_refused(tmp_path):
    folder = made.copy("llama", tmp_path)
    tokens = made.read_json(folder / "tokenizer.json")["added_tokens"][:-1]
    made.amend(folder, "tokenizer.json", added_tokens=[*tokens, added("l")])
    with pytest.raises(FileFormatError, match=r"token 'l' appears twice"):
        Conversion(folder)


def test_tokenizers_that_the_library_panics_at_are_refused(tmp_path):
    with pytest.raises(FileFormatError, match=r"tokenizer\.json: slice index"):
        Conversion(tokenizer_with(tmp_path, model={"continuing_subword_prefix": "##"}))


def test_changes_of_texts_by_sentencepiece_are_noted(tmp_path):
    """Later messages of one kind are merged into the first: 3 is the normalizer, 2 the trainer."""
    folder = made.copy("mixtral", tmp_path)
    (folder / "tokenizer.json").unlink()
    assert Conversion(folder).notes == []
    path = folder / "tokenizer.model"
    normalizer = b"\x0a\x08nmt_nfkc" + b"\x12\x02\x01\x02" + b"\x20\x01"
    trainer = b"\xc0\x01\x01"
    path.write_bytes(path.read_bytes() + b"\x1a" + bytes([len(normalizer)]) + normalizer + b"\x12\x03" + trainer)
    assert Conversion(folder).notes == [
        "tokenizer.model changes texts as no key can say: characters are normalised (nmt_nfkc), spaces at the ends and "
        "doubled ones are removed, spaces belong to the word in front of them"
    ]
