"""Drafters that read inputs of several layers of another model, joined by a matrix of their own."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ikpy.errors import FileFormatError, UsageError
from ikpy.models.base import LayerInputs
from ikpy.models.transformer import Transformer
from ikpy.models.weights import WeightSource
from ikpy.quants import registry

MAPPING = "d2t"
"""Tensor of the target's token for every row of the output matrix."""
JOINING = "fc.weight"
"""Matrix that joins what the layers of the target read."""
I64 = registry.by_name("i64").id


class LayerReading(Transformer):
    """Embedding and output matrix may be those of the model."""

    why_not_alone = "the drafter reads what layers of another model read"
    predicts_from_normed = False
    is_beside = False
    host_tensors: ClassVar[tuple[str, ...]] = (MAPPING,)
    """Tensors that no graph of the layers reads: they stay in host memory, wherever the layers are."""
    target_layers: tuple[int, ...]
    target_size: int

    @property
    def predicts_alone(self) -> bool:
        return not self.is_beside

    @property
    def reads_states(self) -> bool:
        return True

    def load(self, weights: WeightSource) -> None:
        hp, d = self.hp, self.hp.n_embd
        self.norm_biases, self.logit_bias = {}, None
        self.target_tokens = self._read_mapping(weights)
        embedding = weights.take("token_embd.weight", (d, hp.n_vocab), required=False)
        output = weights.take("output.weight", (d, self.n_rows), required=self.target_tokens is not None)
        self.own_ends = embedding, output
        self.output_norm = self.take_norm(weights, self.output_norm_name)
        self.joining = weights.take(JOINING, (len(self.target_layers) * self.target_size, d))
        self.load_global(weights)
        self.layers = [self.load_layer(weights, il, f"blk.{il}") for il in range(hp.n_layer)]

    @property
    def n_rows(self) -> int:
        """Tokens that can be guessed."""
        return self.hp.n_vocab if self.target_tokens is None else len(self.target_tokens)

    def _read_mapping(self, weights: WeightSource) -> np.ndarray | None:
        """Token i64 of the target for every row of the output matrix; None if it has a row for each of them."""
        info = weights.gguf.tensors.get(MAPPING)
        if info is None:
            return None
        weights.skip(MAPPING)
        path, n_vocab = weights.gguf.path, self.hp.n_vocab
        if info.type_id != I64 or len(info.shape) != 1:
            raise FileFormatError(f"{path}: tensor '{MAPPING}' must be a list of i64")
        if weights.header_only:
            return np.zeros(info.shape[0], np.int64)
        tokens = weights.gguf.data(info).view("<i8")
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= n_vocab:
            raise FileFormatError(f"{path}: tensor '{MAPPING}' names tokens outside the vocabulary of {n_vocab}")
        return tokens.astype(np.int64)

    def beside(self, target: WeightSource, n_layer: int) -> LayerInputs:
        """Takes what the file leaves out from the target, and tells what that must give. UsageError if they do not
        fit.
        """
        hp, path = self.hp, target.gguf.path
        if any(il >= n_layer for il in self.target_layers):
            raise UsageError(f"{path}: the drafter reads layer {max(self.target_layers)}, the model has {n_layer}")
        size = (hp.n_embd, hp.n_vocab)
        embedding, output = self.own_ends
        self.token_embd = embedding or target.take("token_embd.weight", size)
        own = output or target.take("output.weight", size, required=False)
        self.output = own or target.take("token_embd.weight", size)
        self.is_beside = True
        return LayerInputs(self.target_layers, self.joining)
