"""`ikpy convert`: vocabularies, special tokens, chat templates."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers

from ikpy.convert import Conversion, ConvertOptions
from ikpy.convert.sentencepiece import read_model
from ikpy.errors import FileFormatError, UnsupportedError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.vocab import Vocab
from ikpy.vocab.pretokenizers import PRE_TOKENIZERS
from ikpy.vocab.text import byte_to_char
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.checkpoints import convert
from tests.shared import ROOT


def test_generation_ends_fill_eos_eot_and_eom(tmp_path):
    folder = made.copy("llama", tmp_path)
    made.amend(folder, "generation_config.json", eos_token_id=[380, 382, 381])
    keys = convert(folder, tmp_path).metadata
    assert [keys[f"tokenizer.ggml.{role}_token_id"] for role in ("eos", "eot", "eom")] == [380, 381, 382]


def test_special_tokens_that_no_key_can_say_are_noted(tmp_path):
    folder = made.copy("qwen2", tmp_path)
    assert Conversion(folder).notes == []
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<|im_start|>", "<|endoftext|>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> <|endoftext|> $A", special_tokens=ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert "'a' becomes '<|im_start|> <|endoftext|> a'" in Conversion(folder).notes[0]


def test_named_chat_templates(tmp_path):
    folder = made.copy("llama", tmp_path)
    (folder / "chat_template.jinja").unlink()
    templates = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    made.amend(folder, "tokenizer_config.json", chat_template=templates)
    keys = convert(folder, tmp_path).metadata
    assert keys["tokenizer.chat_template"] == "A" and keys["tokenizer.chat_template.tool_use"] == "B"
    assert list(keys["tokenizer.chat_templates"]) == ["default", "tool_use"]


def test_chat_templates_in_files_of_their_own(tmp_path):
    folder = made.copy("llama", tmp_path)
    more = folder / "additional_chat_templates"
    more.mkdir()
    (folder / "chat_template.jinja").write_text("A")
    (more / "tool_use.jinja").write_text("B")
    keys = convert(folder, tmp_path).metadata
    assert keys["tokenizer.chat_template"] == "A" and keys["tokenizer.chat_template.tool_use"] == "B"
    assert list(keys["tokenizer.chat_templates"]) == ["default", "tool_use"]


def test_a_chat_template_from_a_file(tmp_path):
    folder = made.copy("llama", tmp_path)
    (folder / "chat_template.jinja").unlink()
    assert any("has no chat template" in note for note in Conversion(folder).notes)
    given = tmp_path / "given.jinja"
    given.write_text("{{ messages[0].content }}")
    conversion = Conversion(folder, ConvertOptions(chat_template_file=str(given), outfile=str(tmp_path / "m.gguf")))
    assert not any("chat template" in note for note in conversion.notes)
    conversion.write()
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert file.metadata["tokenizer.chat_template"] == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("content", "message"), [(b"{% if %}", "line 1"), (b"\xff", "UTF-8|utf-8"), (None, "No such file")]
)
def test_a_chat_template_that_cannot_be_used(content, message, tmp_path):
    given = tmp_path / "given.jinja"
    if content is not None:
        given.write_bytes(content)
    with pytest.raises((FileFormatError, UsageError), match=f"given.jinja.*({message})"):
        Conversion(made.copy("llama", tmp_path), ConvertOptions(chat_template_file=str(given)))


def test_rows_without_a_token_are_filled(tmp_path):
    folder = made.copy("llama", tmp_path)
    rows = np.zeros((400, 64), np.float32)
    made.change_tensors(
        folder, lambda t: t.update({"model.embed_tokens.weight": made.bf16(rows), "lm_head.weight": made.bf16(rows)})
    )
    keys = convert(folder, tmp_path).metadata
    assert keys["llama.vocab_size"] == 400 and keys["tokenizer.ggml.tokens"][399] == "[PAD399]"
    assert keys["tokenizer.ggml.token_type"][399] == 5


def test_sentencepiece_model_alone(tmp_path):
    folder = made.copy("mixtral", tmp_path)
    (folder / "tokenizer.json").unlink()
    made.amend(folder, "added_tokens.json", **{"<extra>": 383})
    vocab = Vocab.from_metadata(convert(folder, tmp_path).metadata)
    expected = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    assert {text: vocab.tokenize(text, parse_special=True) for text in expected} == expected
    assert vocab.tokenize("<extra>", add_special=False) == [383]


def test_gemma4_keeps_its_merges(tmp_path):
    """Scores, as sentencepiece has them, would join any two parts that give a token: "ab" and "c" too."""
    folder = made.copy("gemma4", tmp_path)
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["▁", "a", "b", "c", "\n", "ab", "bc", "abc", "\n\n", "▁▁", "▁a"]
    merges = [("a", "b"), ("b", "c"), ("a", "bc"), ("\n", "\n"), ("▁", "▁"), ("▁", "a")]
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    data["model"] |= {"vocab": {text: i for i, text in enumerate(texts)}, "merges": merges}
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    keys = convert(folder, tmp_path).metadata
    assert keys["tokenizer.ggml.model"] == "gemma4" and "tokenizer.ggml.scores" not in keys
    tokenizer, vocab = Tokenizer.from_file(str(folder / "tokenizer.json")), Vocab.from_metadata(keys)
    for text in ("abc", "ab c", "  abcbc\n\nab\n", "aé🙂 c\tb", "</s>a"):
        assert vocab.tokenize(text, parse_special=True) == tokenizer.encode(text).ids, text
        assert vocab.detokenize(vocab.tokenize(text, add_special=False)) == text


def test_tiktoken_ranks_give_the_merges(tmp_path):
    folder = made.copy("qwen3", tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    bytes_of = {char: byte for byte, char in enumerate(byte_to_char())}
    ranks = {bytes(bytes_of[char] for char in text): i for text, i in data["model"]["vocab"].items()}
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    (folder / "tokenizer.json").unlink()
    added = {
        str(token["id"]): {"content": token["content"], "special": token["special"]} for token in data["added_tokens"]
    }
    made.amend(folder, "tokenizer_config.json", added_tokens_decoder=added)
    with pytest.raises(UnsupportedError, match="name it with --pre"):
        Conversion(folder)
    keys = convert(folder, tmp_path, pre="qwen2").metadata
    assert list(keys["tokenizer.ggml.merges"]) == [" ".join(merge) for merge in data["model"]["merges"]]
    vocab = Vocab.from_metadata(keys)
    expected = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    assert {text: vocab.tokenize(text, parse_special=True) for text in expected} == expected


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


LETTERS = "[^\\r\\n\\p{L}\\p{N}]?"
UPPER, LOWER = "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]", "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
TAIL = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
PUBLISHED = {
    "deepseek-llm": [
        _split("[\\r\\n]"),
        _split("\\s?[A-Za-zÀ-ÖØ-öø-ƺΑ-ΡΣ-ϵА-ҁ]+"),
        _split("\\s?[!-/:-~！-／：-～‘-‟　-。]+"),
        _split("\\s+$"),
        _split("[一-龥ࠀ-一가-퟿]+"),
        pre_tokenizers.Digits(individual_digits=True),
    ],
    "tekken": [_split(f"{LETTERS}{UPPER}*{LOWER}+|{LETTERS}{UPPER}+{LOWER}*|\\p{{N}}{TAIL}")],
    "refact": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False, use_regex=True)],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_pre_tokenizers_of_published_models(name, tmp_path):
    tokenizer = Tokenizer(models.BPE())
    steps = PUBLISHED[name]
    if name != "refact":
        steps = [*steps, pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(ROOT / "ikpy" / "assets" / "demo-text.txt")], trainer)
    folder = made.copy("deepseek-v2-lite", tmp_path)
    tokenizer.save(str(folder / "tokenizer.json"))
    made.amend(folder, "tokenizer_config.json", add_bos_token=False, clean_up_tokenization_spaces=name == "refact")
    keys = convert(folder, tmp_path).metadata
    found = PRE_TOKENIZERS[keys["tokenizer.ggml.pre"]]
    assert found.rule == PRE_TOKENIZERS[name].rule and found.clean_spaces == PRE_TOKENIZERS[name].clean_spaces
    vocab = Vocab.from_metadata(keys)
    for text in json.loads((folder / "tokens.json").read_text(encoding="utf-8")):
        assert vocab.tokenize(text) == tokenizer.encode(text).ids, text


def test_unknown_pre_tokenizer(tmp_path):
    folder = made.copy("llama", tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "[aeiou]"}
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="name one with --pre"):
        Conversion(folder)
    assert Conversion(folder, ConvertOptions(pre="qwen2")).metadata["tokenizer.ggml.pre"] == "qwen2"
    with pytest.raises(UnsupportedError, match="unknown pre-tokenizer type: 'nonsense'"):
        Conversion(folder, ConvertOptions(pre="nonsense"))


def test_missing_tokenizer(tmp_path):
    folder = made.copy("llama", tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedError, match="no tokenizer that can be converted"):
        Conversion(folder)


def test_damaged_sentencepiece_model(tmp_path):
    folder = made.copy("llama-spm", tmp_path)
    data = (folder / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model").write_bytes(data[: len(data) // 2 + 3])
    with pytest.raises(FileFormatError, match="not a sentencepiece model"):
        Conversion(folder)


@pytest.mark.parametrize(
    "model",
    [bytes([0x0A, 6, 0x08, *[0xFF] * 4, 0x07]), bytes([0x0A, 3, 0x0A, 1, 97, 0x1A, 5, 0x08, 5, 0x12, 1, 97])],
    ids=["piece", "normalizer"],
)
def test_numbers_where_a_sentencepiece_model_has_texts(model, tmp_path):
    """They are refused and not taken for a number of zero bytes, which may be gigabytes."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model)
    with pytest.raises(FileFormatError, match="not a sentencepiece model"):
        read_model(path)
