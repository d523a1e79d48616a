"""Tiny checkpoints of Jina Embeddings v2 and NeoBERT, whose classes are no part of transformers, with WordPiece
tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.seeded_checkpoints import FF, HEADS, D, Shapes, Tiny, V, head

N_LAYER = 2
WORDS = ("the", "old", "man", "sea", "and", "boat", ".", "!", "?", "'", "##s", "##ing", "##er")


def bert_shapes(network: Shapes, *, prefix: str = "", code: bool = False, norm: str = "mlp.layernorm") -> Shapes:
    """Names and shapes; network: of a layer. code: with the norms of models of code."""
    e = f"{prefix}embeddings"
    shapes: Shapes = {f"{e}.word_embeddings.weight": (V, D), f"{e}.token_type_embeddings.weight": (2, D)}
    shapes |= {f"{e}.LayerNorm.{x}": (D,) for x in ("weight", "bias")}
    for il in range(N_LAYER):
        p = f"{prefix}encoder.layer.{il}"
        matrices = [f"attention.self.{name}" for name in ("query", "key", "value")] + ["attention.output.dense"]
        shapes |= {f"{p}.{name}.weight": (D, D) for name in matrices} | {f"{p}.{name}.bias": (D,) for name in matrices}
        norms = ["attention.output.LayerNorm", norm]
        norms += ["attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1"] if code else []
        shapes |= {f"{p}.{name}.{x}": (D,) for name in norms for x in ("weight", "bias")}
        shapes |= {f"{p}.{name}": shape for name, shape in network.items()}
    return shapes


def jina_config(name: str, **values: Any) -> dict[str, Any]:
    return {
        **head(name, "bert"),
        "architectures": [name],
        "feed_forward_type": "geglu",
        "hidden_act": "gelu",
        "intermediate_size": FF,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 256,
        "num_attention_heads": HEADS,
        "num_hidden_layers": N_LAYER,
        "position_embedding_type": "alibi",
        "type_vocab_size": 2,
        **values,
    }


GLU: Shapes = {"mlp.gated_layers.weight": (2 * FF, D), "mlp.wo.weight": (D, FF), "mlp.wo.bias": (D,)}
CODE: Shapes = {
    "mlp.up_gated_layer.weight": (2 * FF, D),
    "mlp.down_layer.weight": (D, FF),
    "mlp.down_layer.bias": (D,),
}
PLAIN: Shapes = {
    "intermediate.dense.weight": (FF, D),
    "intermediate.dense.bias": (FF,),
    "output.dense.weight": (D, FF),
    "output.dense.bias": (D,),
}
JINA = Tiny("jina-v2", jina_config("JinaBertModel"), lambda: bert_shapes(GLU), is_encoder=True)
JINA_CODE = Tiny(
    "jina-v2-code",
    jina_config("JinaBertForMaskedLM"),
    lambda: bert_shapes(CODE, prefix="bert.", code=True, norm="layer_norm_2"),
    is_encoder=True,
)
JINA_PLAIN = Tiny(
    "jina-v2-plain",
    jina_config("JinaBertModel", feed_forward_type="original"),
    lambda: bert_shapes(PLAIN, norm="output.LayerNorm"),
    is_encoder=True,
)
_HEAD: Shapes = {
    "bert.pooler.dense.weight": (D, D),
    "bert.pooler.dense.bias": (D,),
    "classifier.weight": (1, D),
    "classifier.bias": (1,),
}
JINA_RANKER = Tiny(
    "jina-reranker",
    jina_config("JinaBertForSequenceClassification", id2label={"0": "LABEL_0"}),
    lambda: bert_shapes(GLU, prefix="bert.") | _HEAD,
    is_encoder=True,
)


def neo_shapes() -> Shapes:
    """Names and shapes; intermediate_size is half as much again as the width."""
    shapes: Shapes = {"model.encoder.weight": (V, D), "model.layer_norm.weight": (D,), "decoder.weight": (V, D)}
    for il in range(N_LAYER):
        p = f"model.transformer_encoder.{il}"
        matrices: Shapes = {"qkv": (3 * D, D), "wo": (D, D), "ffn.w12": (2 * FF, D), "ffn.w3": (D, FF)}
        matrices |= {"attention_norm": (D,), "ffn_norm": (D,)}
        shapes |= {f"{p}.{name}.weight": shape for name, shape in matrices.items()}
    return shapes | {"decoder.bias": (V,)}


NEO_BERT = Tiny(
    "neo-bert",
    {
        **head("NeoBERT", "neobert"),
        "architectures": ["NeoBERTLMHead"],
        "intermediate_size": 3 * FF // 2,
        "max_length": 256,
        "norm_eps": 1e-5,
        "num_attention_heads": HEADS,
        "num_hidden_layers": N_LAYER,
    },
    neo_shapes,
    is_encoder=True,
)


def write(kind: Tiny, folder: Path, **config: Any) -> Path:
    """The checkpoint with a tokenizer of words and their pieces."""
    folder = tiny.write(kind, folder, **config)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    texts = [*special, *WORDS, *map(chr, range(ord("a"), ord("z") + 1))]
    texts += [f"##{chr(x)}" for x in range(ord("a"), ord("z") + 1)]
    texts += [f"word{i}" for i in range(V - len(texts))]
    tokenizer = Tokenizer(models.WordPiece({text: i for i, text in enumerate(texts)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pairs = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=pairs)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
