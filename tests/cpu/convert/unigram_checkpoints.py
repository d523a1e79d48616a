"""Checkpoints of encoders whose tokenizer is Unigram."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.seeded_checkpoints import FF, D, Shapes, Tiny, V, head
from tests.cpu.vocab.double_array import charsmap

N_LAYER, HEADS = 3, 4
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
MAP = {"ﬁ": "fi", "\u3000": " ", "Ａ": "A", "\u0301": "", "①": "1", "\t": " ", "\n": " ", "\r": " "}
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"()-_/日本ßé"
PIECES = (
    "the",
    "an",
    "in",
    "ing",
    "er",
    "▁the",
    "▁a",
    "▁an",
    "▁old",
    "▁man",
    "▁and",
    "▁sea",
    "old",
    "man",
    "sea",
    "12",
)


def jina_shapes() -> Shapes:
    """Names and shapes of all tensors, as transformers saves them."""
    shapes: Shapes = {
        "embeddings.word_embeddings.weight": (V, D),
        "embeddings.token_type_embeddings.weight": (1, D),
        **_norm("embeddings.LayerNorm"),
        **_linear("pooler.dense", D, D),
    }
    for il in range(N_LAYER):
        p = f"layers.{il}"
        for name in "qkvo":
            shapes |= _linear(f"{p}.self_attn.{name}_proj", D, D)
        shapes |= _norm(f"{p}.post_attention_layernorm") | _norm(f"{p}.post_mlp_layernorm")
        shapes |= _linear(f"{p}.mlp.fc1", FF, D) | _linear(f"{p}.mlp.fc2", D, FF)
    return shapes


def _norm(name: str) -> Shapes:
    return {f"{name}.weight": (D,), f"{name}.bias": (D,)}


def _linear(name: str, n_out: int, n_in: int) -> Shapes:
    return {f"{name}.weight": (n_out, n_in), f"{name}.bias": (n_out,)}


JINA_V3 = Tiny(
    "jina-v3",
    {
        **head("JinaEmbeddingsV3", "jina_embeddings_v3"),
        "architectures": ["JinaEmbeddingsV3Model"],
        "hidden_act": "gelu",
        "intermediate_size": FF,
        "num_hidden_layers": N_LAYER,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 256,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        "torch_dtype": "bfloat16",
    },
    jina_shapes,
    is_encoder=True,
)
CHECKPOINTS = (JINA_V3,)


def published(tensors: made.Tensors) -> None:
    """Renames to the names of the published checkpoint, where q, k and v are one matrix."""
    changes = {
        "embeddings.LayerNorm": "emb_ln",
        "post_attention_layernorm": "norm1",
        "post_mlp_layernorm": "norm2",
        "self_attn.o_proj": "mixer.out_proj",
    }
    for il in range(N_LAYER):
        for end in ("weight", "bias"):
            parts = [tensors.pop(f"layers.{il}.self_attn.{x}_proj.{end}") for x in "qkv"]
            dtype, shape, _ = parts[0]
            tensors[f"layers.{il}.mixer.Wqkv.{end}"] = dtype, (3 * D, *shape[1:]), b"".join(p[2] for p in parts)
    for name in list(tensors):
        new = name
        for old, other in changes.items():
            new = new.replace(old, other)
        tensors[f"encoder.{new}" if new.startswith("layers.") else new] = tensors.pop(name)


def unigram_files(folder: Path, n_vocab: int = V, *, spaces: str = "WhitespaceSplit") -> Tokenizer:
    """Replaces the tokenizer of a checkpoint by a tiny one of XLM-RoBERTa's kind."""
    texts = [*SPECIALS, "▁", *PIECES, *LETTERS]
    vocab = [(text, -float(i) / 8 if i >= len(SPECIALS) else 0.0) for i, text in enumerate(texts)]
    vocab += [(f"▁word{i}", -30.0) for i in range(n_vocab - len(vocab) - 1)] + [("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=3))
    metaspace = pre_tokenizers.Metaspace()
    steps = [pre_tokenizers.WhitespaceSplit(), metaspace] if spaces else [metaspace]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)  # type: ignore[assignment]
    tokenizer.add_special_tokens([*SPECIALS, "<mask>"])
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    data: dict[str, Any] = made.read_json(path)
    table = base64.b64encode(charsmap(MAP)).decode()
    data["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": table}
    path.write_text(json.dumps(data), encoding="utf-8")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>"}
    settings |= {"pad_token": "<pad>", "mask_token": "<mask>", "cls_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("generation_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    return Tokenizer.from_file(str(path))
