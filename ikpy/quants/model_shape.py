"""What choosing types needs to know of a model: its sizes and the names of its embeddings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKEN_EMBEDDING = "token_embd.weight"
PER_LAYER_TOKEN_EMBEDDING = "per_layer_token_embd.weight"
OUTPUT = "output.weight"
EXTRA_OUTPUT = "output_extra.weight"
"""A second output matrix, which no model here reads."""
EMBEDDINGS = (TOKEN_EMBEDDING, PER_LAYER_TOKEN_EMBEDDING)
OWN_EMBEDDING = ".nextn.embed_tokens.weight"
"""How the name of a prediction layer's own embedding ends."""
_KEYS_AND_VALUES = re.compile(r"blk\.(\d{1,9})\.attn_[kv]\.weight")


def is_looked_up(name: str) -> bool:
    """Whether rows of a tensor are looked up by token: no product has it, so that no importance matrix knows it."""
    return name in EMBEDDINGS or name.endswith(OWN_EMBEDDING)


@dataclass(frozen=True)
class ModelShape:
    """What the policy needs to know of a model. ``n_head_kv`` is that of the first layer that has any, ``n_sharing``
    counts last layers that attend to the caches of earlier ones.
    """

    architecture: str
    n_layer: int
    n_head: int
    n_head_kv: int
    n_expert: int
    n_vocab: int
    n_embd: int
    has_output: bool
    n_attn_v: int
    n_sharing: int = 0

    @property
    def gqa_ratio(self) -> int:
        """Attention heads per key-value head; 1 where a model has no key-value heads."""
        return self.n_head // self.n_head_kv if self.n_head_kv else 1

    @property
    def size_class(self) -> str:
        """ "8B", "70B" or "" - the only classes a rule asks for."""
        arch, layers = self.architecture, self.n_layer
        if arch == "llama" and self.n_expert != 8:
            if layers == 36 or (layers == 32 and self.n_vocab >= 40000 and self.n_vocab != 49152):
                return "8B"
            return "70B" if layers == 80 and self.n_head != self.n_head_kv else ""
        if layers == 80 and arch in ("qwen2", "qwen2vl", "deci", "olmo"):
            return "70B"
        if layers == 36 and arch in ("qwen3", "qwen3vl") and self.n_embd != 2560:
            return "8B"
        return "8B" if (arch, layers) in (("cohere2", 32), ("mistral3", 34)) else ""

    @property
    def big_vocabulary(self) -> bool:
        """Large vocabulary with a rather small model: attention then deserves more bits."""
        return self.n_vocab >= 127999 and self.size_class in ("8B", "70B")

    def reads(self, name: str) -> bool:
        """Whether the model multiplies by a tensor: layers without a cache have keys and values in files, too."""
        found = _KEYS_AND_VALUES.match(name)
        return not found or int(found[1]) < self.n_layer - self.n_sharing

    @classmethod
    def of(cls, metadata: Mapping[str, Any], tensor_shapes: Mapping[str, Sequence[int]]) -> ModelShape:
        """From a model's metadata and its tensor shapes (ne0 first)."""
        arch = str(metadata.get("general.architecture", ""))

        def number(key: str, default: int = 0) -> int:
            value = metadata.get(f"{arch}.{key}")
            if isinstance(value, np.ndarray):
                value = next((n for n in value if n), 0)  # recurrent layers have no KV heads
            return int(value) if isinstance(value, int | np.integer) else default

        embedding = tensor_shapes.get(TOKEN_EMBEDDING, (0, 0))
        n_head = number("attention.head_count")
        return cls(
            architecture=arch,
            n_layer=number("block_count"),
            n_head=n_head,
            n_head_kv=number("attention.head_count_kv", n_head),
            n_expert=number("expert_count"),
            n_vocab=number("vocab_size", embedding[1] if len(embedding) > 1 else 0),
            n_embd=number("embedding_length"),
            has_output=OUTPUT in tensor_shapes,
            n_sharing=number("attention.shared_kv_layers"),
            n_attn_v=sum("attn_v.weight" in name or "attn_qkv.weight" in name for name in tensor_shapes),
        )
