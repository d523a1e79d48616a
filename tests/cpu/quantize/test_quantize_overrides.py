"""`ikpy quantize --override-kv`: stored types, and values with which a file could not be loaded."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy import Model, default_model_path
from ikpy.cli.quantize import run
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.vocab import Vocab
from tests.shared import DATA


def test_overrides_keep_the_types_that_readers_want(tmp_path, capfd):
    """A model with a whole number replaced can be loaded; of new keys u32 is usual."""
    source, out = str(DATA / "zoo" / "qwen3moe.gguf"), str(tmp_path / "o.gguf")
    overrides = {
        "qwen3moe.expert_used_count=int:1": 4,
        "qwen3moe.attention.layer_norm_rms_epsilon=float:1e-5": 6,
        "a.b=int:3": 4,
        "a.c=int:-3": 5,
        "a.d=int:5000000000": 10,
        "a.e=int:-5000000000": 11,
        "a.f=bool:true": 7,
        "a.g=str:x": 8,
        "general.name=str:3": 8,
    }
    arguments = [item for text in overrides for item in ("--override-kv", text)]
    assert run([*arguments, source, out, "Q8_0"]) == 0
    with GGUFFile.open(out) as file:
        assert {key: file.value_type(key.partition("=")[0]) for key in overrides} == overrides
        assert file.metadata["a.e"] == -5000000000
    assert Model.load(out).hparams.n_expert_used == 1
    for text, message in (
        ("qwen3moe.expert_used_count=int:-1", "--override-kv qwen3moe.expert_used_count: "),
        ("general.alignment=int:64", "--override-kv general.alignment: the key describes the file itself"),
        ("split.count=int:2", "--override-kv split.count: the key describes the file itself"),
        ("general.name=int:3", "--override-kv general.name: value 3 is not of the key's type string"),
        ("qwen3moe.rope.freq_base=int:20000", "value 20000 is not of the key's type float32"),
        ("qwen3moe.context_length=str:abc", "value 'abc' is not of the key's type uint32"),
        ("qwen3moe.context_length=bool:true", "value True is not of the key's type uint32"),
        ("tokenizer.ggml.tokens=str:abc", "value 'abc' is not of the key's type array"),
        ("qwen3moe.rope.scaling.factor=int:2", "value 2 is not of the key's type float32"),  # the file has no such key
        ("qwen3moe.rope.scaling.original_context_length=int:-2", "-2 is not in the range of the key"),
    ):
        (tmp_path / "o.gguf").unlink(missing_ok=True)
        assert run(["--override-kv", text, source, out, "Q8_0"]) == 1
        assert message in "".join(capfd.readouterr())
        assert not (tmp_path / "o.gguf").exists()


def test_a_value_for_all_layers_may_be_overridden_by_one(tmp_path):
    """Where a file has an array of them."""
    source, out, key = str(tmp_path / "in.gguf"), str(tmp_path / "o.gguf"), "llama.attention.head_count"
    with GGUFWriter(source) as writer:
        writer.add("general.architecture", GGUFValueType.STRING, "llama")
        writer.add("llama.block_count", GGUFValueType.UINT32, 2)
        writer.add_array(key, GGUFValueType.INT32, [4, 4])
        writer.add_tensor("token_embd.weight", (256, 64), 0)
        writer.write("token_embd.weight", np.zeros((64, 256), np.float32))
    assert run(["--override-kv", f"{key}=float:2", source, out, "Q8_0"]) == 1
    assert run(["--override-kv", f"{key}=int:2", source, out, "Q8_0"]) == 0
    with GGUFFile.open(out) as file:
        assert (file.get(key), file.value_type(key)) == (2, GGUFValueType.UINT32)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("add_eos_token=str:true", "key tokenizer.ggml.add_eos_token has the wrong type: expected a bool"),
        ("add_space_prefix=float:1", "key tokenizer.ggml.add_space_prefix has the wrong type: expected a bool"),
        ("scores=int:3", "key tokenizer.ggml.scores has the wrong type: expected an array of numbers"),
        ("eom_token_id=str:7", "key tokenizer.ggml.eom_token_id has the wrong type: expected an integer"),
    ],
)
def test_values_that_the_vocabulary_cannot_have(override, message, tmp_path, capfd):
    """Of keys that the file lacks."""
    out = tmp_path / "o.gguf"
    arguments = ["--override-kv", f"tokenizer.ggml.{override}", str(default_model_path()), str(out), "Q8_0"]
    assert run(arguments) == 1
    assert f"--override-kv: {message}" in "".join(capfd.readouterr())
    assert not out.exists()


def test_other_keys_of_a_tokenizer(tmp_path):
    out = tmp_path / "o.gguf"
    overrides = ["add_eos_token=bool:true", "eom_token_id=int:7", "pre=str:of-another-program"]
    arguments = [item for text in overrides for item in ("--override-kv", f"tokenizer.ggml.{text}")]
    assert run([*arguments, str(default_model_path()), str(out), "Q8_0"]) == 0
    with GGUFFile.open(out) as file:
        vocab = Vocab.from_metadata({**file.metadata, "tokenizer.ggml.pre": "llama-bpe"})
        assert (vocab.add_eos, vocab.eom) == (True, 7)
