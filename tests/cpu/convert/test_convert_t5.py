"""`ikpy convert` of T5, mT5, UMT5 and their encoders: names, keys, tokenizers, what is refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import IkpyError
from ikpy.vocab import Vocab
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.seeded_checkpoints import Tiny
from tests.cpu.convert.t5_checkpoints import DECODERS, T5, T5_ENCODER, UMT5, UMT5_ENCODER, decoder_tokens
from tests.cpu.convert.test_convert_seeded import TOLERANCE, converted
from tests.cpu.convert.unigram_checkpoints import MAP, PIECES, unigram_files
from tests.cpu.vocab.double_array import charsmap

TEXTS = ("the old man and the sea", "  The old   man\tand\nthe sea.  ", "ﬁning Ａ 12 ①", "zzz 123 x", "a", "")


def test_encoders(tmp_path: Path) -> None:
    folder = tiny.write(T5_ENCODER, tmp_path / "checkpoint")
    tokenizer = unigram_files(folder)
    file = made.convert(folder, tmp_path)
    keys = {name.removeprefix("t5encoder."): value for name, value in file.metadata.items()}
    assert (keys["block_count"], keys["attention.head_count"], keys["attention.key_length"]) == (3, 6, 16)
    assert (keys["attention.relative_buckets_count"], keys["context_length"]) == (32, 512)
    assert keys["attention.causal"] is False and "decoder_start_token_id" not in keys
    assert file.tensors["enc.blk.0.attn_rel_b.weight"].type_id == 0, "biases are f32"
    vocab = Vocab.from_metadata(file.metadata)
    for text in TEXTS:
        assert vocab.tokenize(text) == tokenizer.encode(text).ids, text


def test_embeddings_that_are_stored_several_times(tmp_path: Path) -> None:
    folder = tiny.write(T5_ENCODER, tmp_path / "checkpoint")

    def repeat(tensors: made.Tensors) -> None:
        tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"]
        tensors["decoder.embed_tokens.weight"] = tensors["shared.weight"]

    def differ(tensors: made.Tensors) -> None:
        dtype, shape, data = tensors["shared.weight"]
        tensors["encoder.embed_tokens.weight"] = dtype, shape, data[::-1]

    made.change_tensors(folder, repeat)
    assert "token_embd.weight" in made.convert(folder, tmp_path).tensors
    made.change_tensors(folder, lambda tensors: tensors.pop("shared.weight") and None)
    assert "token_embd.weight" in made.convert(folder, tmp_path).tensors
    other = tiny.write(T5_ENCODER, tmp_path / "other")
    made.change_tensors(other, differ)
    with pytest.raises(IkpyError, match=r"'encoder.embed_tokens.weight' is not 'shared.weight'"):
        Conversion(other)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj 'gated-silu'"),
        ({"feed_forward_proj": "gelu"}, "feed_forward_proj 'gelu'"),
        ({"relative_attention_max_distance": 64}, "relative_attention_max_distance 64"),
        ({"architectures": ["T5ForTokenClassification"]}, "class 'T5ForTokenClassification' is not supported"),
        ({"num_layers": 2}, r"encoder\.block\.2"),
        ({"num_layers": 4}, r"enc\.blk\.3"),
        ({"d_kv": 8}, "attn_q"),
    ],
)
def test_what_no_file_can_say(config: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(IkpyError, match=what) as error:
        Conversion(tiny.write(T5_ENCODER, tmp_path / "checkpoint", **config))
    assert "\n" not in str(error.value)


def test_missing_biases(tmp_path: Path) -> None:
    """Layers of UMT5 have biases of their own, those of T5 share the first one's."""
    folder = tiny.write(UMT5_ENCODER, tmp_path / "checkpoint")
    name = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    made.change_tensors(folder, lambda tensors: tensors.pop(name.format(1)) and None)
    with pytest.raises(IkpyError, match=r"enc.blk.1.attn_rel_b.weight is missing"):
        Conversion(folder)
    made.change_tensors(folder, lambda tensors: tensors.pop(name.format(0)) and None)
    with pytest.raises(IkpyError, match=r"enc.blk.0.attn_rel_b.weight"):
        Conversion(folder)


def varint(n: int) -> bytes:
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def field(number: int, value: bytes | int) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def piece_model(kind: int = 1) -> bytes:
    """A sentencepiece model of the kind Unigram (1) or BPE (2) with a map of characters."""
    texts = [
        ("<pad>", 3),
        ("</s>", 3),
        ("<unk>", 2),
        *((text, 1) for text in (*"▁abcdefghijklmnopqrstuvwxyz", *PIECES)),
    ]
    out = b""
    for text, number in texts:
        score = struct.pack("<f", -5.0 if len(text) > 1 else -10.0)
        piece = field(1, text.encode()) + varint(2 << 3 | 5) + score + field(3, number)
        out += field(1, piece)
    return out + field(2, field(3, kind)) + field(3, field(1, b"own") + field(2, charsmap(MAP)))


def test_tokenizers_of_sentencepiece_files(tmp_path: Path) -> None:
    """The file alone: its pieces, its map of characters, an end token, and T5's tokens for gaps behind them."""
    folder = tiny.write(T5_ENCODER, tmp_path / "checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    (folder / "spiece.model").write_bytes(piece_model())
    file = made.convert(folder, tmp_path)
    vocab = Vocab.from_metadata(file.metadata)
    n = 3 + 27 + len(PIECES)
    assert file.metadata["tokenizer.ggml.model"] == "t5" and isinstance(
        file.metadata["tokenizer.ggml.precompiled_charsmap"], np.ndarray
    )
    ids = vocab.tokenize("  ﬁn   the man ", add_special=True)
    assert [vocab.token_text(i) for i in ids] == ["▁", "f", "in", "▁the", "▁man", "</s>"]
    assert vocab.token_text(n) == "<extra_id_99>" and vocab.token_text(n + 99) == "<extra_id_0>"
    assert vocab.tokenize("the<extra_id_0>", add_special=False, parse_special=True)[-1] == n + 99
    (folder / "spiece.model").write_bytes(piece_model(2))
    with pytest.raises(IkpyError, match="a BPE model"):
        Conversion(folder)


def logits_of(path: Path) -> np.ndarray:
    """Logits [T, V] of the decoder's tokens behind the text of the golden tokens."""
    context = Context(Model.load(path), ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32"))
    text = tiny.tokens()
    context.decode(Batch.single(text + tiny.V, 0, logits="none"))
    return context.decode(Batch.single(decoder_tokens(), len(text), logits="all", turn=len(text)))


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_logits(kind: Tiny, tmp_path: Path) -> None:
    """Those that transformers recorded, divided where the output matrix is the token embedding."""
    golden = np.load(kind.golden)
    file = converted(kind, tmp_path)
    n = golden["logits"].shape[1]
    error = np.abs(logits_of(Path(file.path))[golden["rows"], :n] - golden["logits"]).max(axis=1)
    assert error.max() <= TOLERANCE, f"token {golden['rows'][error.argmax()]} is off by {error.max():.1e}"
    assert ("output.weight" in file.tensors) == (kind is UMT5)
    keys = {name.removeprefix("t5."): value for name, value in file.metadata.items()}
    assert keys["decoder_start_token_id"] == 0 and keys["decoder_block_count"] == kind.config["num_decoder_layers"]


def test_output_matrices(tmp_path: Path) -> None:
    """What is not divided needs a matrix of its own in the file: the checkpoint's, or the token embedding again."""
    folder = tiny.write(UMT5, tmp_path / "checkpoint")
    made.change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight") and None)
    with pytest.raises(IkpyError, match=r"the output matrix \(lm_head.weight\) is missing"):
        Conversion(folder)
    for values in ({"scale_decoder_outputs": False, "tie_word_embeddings": True}, {"model_type": "mt5"}):
        folder = tiny.write(UMT5, tmp_path / "-".join(values), **{"tie_word_embeddings": True, **values})
        made.change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight") and None)
        tensors = made.convert(folder, tmp_path).tensors
        assert tensors["output.weight"].shape == tensors["token_embd.weight"].shape
    tied = tiny.write(UMT5, tmp_path / "tied", tie_word_embeddings=True)
    assert "output.weight" not in made.convert(tied, tmp_path).tensors


def test_incomplete_decoders(tmp_path: Path) -> None:
    for lost, message in (
        ("decoder.block.1.layer.1.EncDecAttention.k.weight", "dec.blk.1.cross_attn_k.weight"),
        ("decoder.final_layer_norm.weight", "dec.output_norm.weight"),
        ("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "dec.blk.0.attn_rel_b.weight"),
    ):
        folder = tiny.write(T5, tmp_path / lost)
        made.change_tensors(folder, lambda tensors, name=lost: tensors.pop(name) and None)  # type: ignore[misc]
        with pytest.raises(IkpyError, match=message) as error:
            Conversion(folder)
        assert "\n" not in str(error.value)
