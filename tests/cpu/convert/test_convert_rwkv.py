"""`ikpy convert` of RWKV-6 and RWKV-7 World, ARWKV and QRWKV6, held to float64 evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion, ConvertOptions
from ikpy.convert.config import Config
from ikpy.convert.families.rwkv import Arwkv7, Rwkv6
from ikpy.convert.world_tokens import WORLD
from ikpy.engine.batch import Batch
from ikpy.errors import FileFormatError, IkpyError
from ikpy.gguf.reader import GGUFFile
from ikpy.vocab import BUILTIN_TEMPLATES, Vocab
from tests.cpu.convert import rwkv_checkpoints as made
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import test_arch_rwkv as rwkv
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.reference_models import N_VOCAB, RandomModel

MODELS: dict[str, Callable[[int], RandomModel]] = {
    "rwkv7": rwkv.new_rwkv7,
    "arwkv7": rwkv.new_arwkv7,
    "arwkv7 without gates": lambda seed: rwkv.new_arwkv7(seed, rwkv.UNGATED, normed=False),
    "rwkv6": lambda seed: rwkv.new_rwkv6(seed, rescale=0),
    "rwkv6qwen2": rwkv.new_rwkv6qwen2,
}


PUBLISHED = Arwkv7.n_ranks, Rwkv6.ranks


@pytest.fixture(autouse=True)
def tiny_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that configurations do not tell are those of the tests' models."""
    monkeypatch.setattr(Arwkv7, "n_ranks", rwkv.ARWKV.ranks)
    monkeypatch.setattr(Rwkv6, "ranks", rwkv.FINCH.ranks)


def model_of(name: str) -> RandomModel:
    """A model whose norms have the epsilon of its checkpoint."""
    m = MODELS[name](181)
    if m.arch == "rwkv7":
        m.keys["attention.layer_norm_epsilon"] = made.rwkv7_config(m)["norm_eps"]
    return m


def converted(folder: Path, **options: Any) -> Path:
    """The GGUF file of a checkpoint."""
    Conversion(folder, ConvertOptions(outfile=str(folder.parent / "model.gguf"), **options)).write()
    return folder.parent / "model.gguf"


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, tmp_path: Path) -> None:
    m = model_of(name)
    path = converted(made.write(m, tmp_path / "checkpoint"), outtype="f32")
    truth = {
        "rwkv7": lambda: rwkv.rwkv7_logits(m),
        "rwkv6": lambda: rwkv.rwkv6_logits(m),
        "rwkv6qwen2": lambda: rwkv.qwen2_logits(m, rwkv.QRWKV),
        "arwkv7": lambda: rwkv.qwen2_logits(m, rwkv.ARWKV if "blk.0.time_mix_g1" in m.weights else rwkv.UNGATED),
    }[m.arch]()
    logits = checks.context_of(path, type_k="f32", type_v="f32").decode(Batch.single(TOKENS, logits="all"))
    checks.hold(name, logits[:, :N_VOCAB], truth, 2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_files_are_as_llama_cpp_has_them(name: str, tmp_path: Path) -> None:
    """Names, shapes and types; of RWKV-7 something under the names that its first layer does not read."""
    m = model_of(name)
    with GGUFFile.open(converted(made.write(m, tmp_path / "checkpoint"), outtype="f16")) as file:
        own = GGUFFile.open(m.write(tmp_path / "own.gguf"))
        for tensor, info in own.tensors.items():
            rows = made.V if tensor in ("token_embd.weight", "output.weight") else info.shape[-1]
            assert file.tensors[tensor].shape == (*info.shape[:-1], rows), tensor
        assert file.tensors.keys() == own.tensors.keys()
        told = (".wkv.head_size", "_lora_rank", "_extra_dim", ".token_shift_count", ".attention.head_count_kv")
        keys = {key: value for key, value in own.metadata.items() if key.endswith(told)}
        assert keys == {key: value for key, value in file.metadata.items() if key in keys}
        assert file.metadata[f"{m.arch}.context_length"] == 1 << 20
        halves = {n.split(".", 2)[-1] for n, info in file.tensors.items() if info.type_id == 1}
        assert not {n for n in halves if "lerp" in n or "first" in n or n.endswith(("w1.weight", "w2.weight"))}
        assert "time_mix_key.weight" in halves


def test_shares_in_one_tensor(tmp_path: Path) -> None:
    """Of the first checkpoints of flash-linear-attention."""
    m = model_of("rwkv7")
    tensors = made.tensors_of(m)
    for il in range(rwkv.N_LAYER):
        parts = [tensors.pop(f"model.layers.{il}.attn.x_{letter}") for letter in made.SHARES7]
        tensors[f"model.layers.{il}.attn.x_x"] = np.concatenate(parts).reshape(6, -1)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    files = [
        GGUFFile.open(converted(made.write(m, tmp_path / place / "checkpoint", given), outtype="f32"))
        for place, given in (("a", None), ("b", tensors))
    ]
    name = "blk.1.time_mix_lerp_fused.weight"
    assert files[0].tensors[name].shape == files[1].tensors[name].shape
    np.testing.assert_array_equal(*(file.data(file.tensors[name]) for file in files))


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("rwkv7", {"norm_first": False}, "norm_first false"),
        ("rwkv7", {"norm_bias": False}, "norm_bias false"),
        ("rwkv7", {"hidden_act": "relu"}, "activation 'relu'"),
        ("rwkv7", {"attn": {"layers": [1]}}, "layers that attend"),
        ("rwkv7", {"value_dim": [64, 64, 64, 128]}, "values of another width"),
        ("rwkv7", {"norm_eps": 1e-3}, "an epsilon 0.032 of norms of heads"),
        ("rwkv7", {"v_low_rank_dim": None}, "'v_low_rank_dim' is missing"),
        ("arwkv7", {"wkv_version": 6}, "wkv_version 6"),
        ("arwkv7", {"num_wkv_heads": 3}, "3 heads of 32 in 64"),
        ("arwkv7", {"wkv_has_gate": False}, "has no place in architecture arwkv7"),
        ("arwkv7 without gates", {"wkv_has_group_norm": True}, "layer 0 lacks time_mix_ln.weight"),
        ("arwkv7", {"wkv_has_group_norm": False}, "ln_x.* has no place in architecture arwkv7"),
        ("rwkv6", {"head_size_divisor": 4}, "an epsilon 0.00016 of norms of heads"),
        ("rwkv6", {"attention_hidden_size": 32}, "attention_hidden_size 32"),
        ("rwkv6qwen2", {"use_rope": True}, "use_rope true"),
        ("rwkv6qwen2", {"balance_state": False}, "balance_state false"),
        ("rwkv6qwen2", {"gate_rank_type": 2}, "gates of low rank"),
    ],
)
def test_what_files_cannot_say(name: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(IkpyError, match=message) as error:
        Conversion(made.write(model_of(name), tmp_path / "checkpoint", **config))
    assert "\n" not in str(error.value)


def test_ranks_of_published_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which configurations tell nothing: ARWKV 7B, RWKV-6 1.6B and 7B."""
    assert PUBLISHED[0] == (64, 64, 32, 128)
    monkeypatch.setattr(Rwkv6, "ranks", PUBLISHED[1])
    for width, ranks, n_ff in ((2048, (32, 64), 7168), (4096, (64, 128), 14336)):
        values = {"hidden_size": width, "num_hidden_layers": 2, "head_size": 64, "intermediate_size": None}
        keys = Rwkv6(Config(values, Path("config.json"))).keys()
        assert (keys["time_mix_extra_dim"], keys["time_decay_extra_dim"]) == ranks
        assert keys["feed_forward_length"] == n_ff


def test_share_that_is_missing(tmp_path: Path) -> None:
    m = model_of("rwkv6")
    tensors = made.tensors_of(m)
    del tensors["rwkv.blocks.2.attention.time_maa_r"]
    with pytest.raises(FileFormatError, match=r"blk.2.time_mix_lerp_fused.weight needs 5 parts, found 4 \(part 3 is"):
        Conversion(made.write(m, tmp_path / "checkpoint", tensors))


def test_vocabulary(tmp_path: Path) -> None:
    """The longest token at every place; bytes that are no text; a turn ends with two newlines."""
    with GGUFFile.open(converted(made.write(model_of("rwkv7"), tmp_path / "checkpoint"), outtype="f32")) as file:
        vocab, metadata = Vocab.from_metadata(file.metadata), file.metadata
    assert metadata["tokenizer.ggml.model"] == "rwkv"
    assert metadata["tokenizer.chat_template"] == BUILTIN_TEMPLATES["rwkv-world"]
    first = 257  # behind the end of a text and the bytes
    ids = {word: first + i for i, word in enumerate(made.WORDS)}
    assert (vocab.bos, vocab.eos, vocab.eot) == (0, 0, ids["\n\n"])
    assert {0, ids["\n\n"]} <= vocab.eog
    for text, expected in (
        ("Hello world", [ids["Hello"], ids[" world"]]),
        ("Helo", [ids["Hel"], 1 + ord("o")]),
        ("Hellö", [ids["Hel"], 1 + ord("l"), 1 + 0xC3, 1 + 0xB6]),
        ("こんにちは", [ids["こん"], ids["にちは"]]),
        ("こ", [ids[b"\xe3\x81"], 1 + 0x93]),
        ("it's \"\\n\n\n\n", [ids["it's"], 33, 35, ids["\\n"], ids["\n\n"], 11]),
        (b"\xff\xe3", [1 + 0xFF, 1 + 0xE3]),
        ("<s>", [1 + ord(c) for c in "<s>"]),
        ("", []),
    ):
        assert vocab.tokenize(text) == expected, text
        given = text if isinstance(text, bytes) else text.encode()
        assert vocab.detokenize_bytes(expected) == given
    assert vocab.tokenize("<s>Hello", parse_special=True) == [0, ids["Hello"]]
    assert vocab.token_to_piece(299) == b"" and vocab.token_text(299) == "[PAD299]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:-1], "279 'word"], "line 288 is no id, literal and length"),
        (lambda lines: [*lines[:-1], "279 'word' 5"], "line 288 is no id, literal and length"),
        (lambda lines: [*lines[:-1], "279 7 1"], "line 288 is no id, literal and length"),
        (lambda lines: [*lines, lines[-1]], "line 289: id 288 is below 1 or that of an earlier line"),
        (lambda lines: ["0 'x' 1", *lines], "line 1: id 0 is below 1"),
        (lambda lines: lines[:65] + lines[66:], "byte 0x41 has no token"),
        (lambda lines: [*lines, "289 'Hello' 5"], "two tokens are equal"),
        (lambda lines: [*lines, "300 'more' 4"], "token 300 is beyond the 300 of the model"),
    ],
)
def test_damaged_vocabularies(change: Callable[[list[str]], list[str]], message: str, tmp_path: Path) -> None:
    folder = made.write(model_of("rwkv7"), tmp_path / "checkpoint")
    (folder / WORLD).write_text("\n".join(change(made.world_lines())), encoding="utf-8")
    with pytest.raises(FileFormatError, match=message):
        Conversion(folder)
