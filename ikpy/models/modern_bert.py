"""modern-bert: ModernBERT and its kin (arXiv:2412.13663), norms before the branches, windows to both sides."""

from __future__ import annotations

from ikpy.errors import UnsupportedError
from ikpy.graph.ir import Value
from ikpy.models.batch import FULL, SYMMETRIC, BatchGraph, Window
from ikpy.models.blocks import DenseFFN, Experts, dense_ffn
from ikpy.models.classifier import HEAD_POOLINGS, Classifier
from ikpy.models.hparams import POOLINGS, HParams
from ikpy.models.keys import Keys
from ikpy.models.normed_states import NormedStates
from ikpy.models.transformer import Layer, Transformer
from ikpy.models.weights import WeightSource
from ikpy.models.windows import periodic_window_layers

# hidden_activation of files -> that of gates; GELU is the exact one.
ACTIVATIONS = {"gelu": "gelu_erf", "silu": "silu", "swish": "silu"}


class ModernBert(NormedStates, Transformer):
    """No biases; the first layer of three has no window, the very first no norm before attention."""

    layer_norm = True
    fused_qkv = "required"
    fused_ffn = True
    rope_neox = True
    rotates_whole_head = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window", 0)
        if hp.n_swa:
            self.has_window = periodic_window_layers(keys, hp.n_layer, 3, full_first=True)
        name = keys.string("hidden_activation", "gelu")
        if name not in ACTIVATIONS:
            raise UnsupportedError(f"{keys.gguf.path}: {keys.arch}.hidden_activation '{name}' is not supported")
        self.hidden_activation = ACTIVATIONS[name]
        number = keys.u32("classifier.pooling_type", POOLINGS.index("mean"))
        if number >= len(POOLINGS) or POOLINGS[number] not in HEAD_POOLINGS:
            raise UnsupportedError(f"{keys.gguf.path}: {keys.arch}.classifier.pooling_type {number} is not supported")
        self.head_pooling = POOLINGS[number]
        return hp

    @property
    def classifier(self) -> Classifier | None:
        return self._classifier

    def window(self, layer: int) -> Window:
        return (SYMMETRIC, self.hp.n_swa) if self.has_window and self.has_window[layer] else FULL

    # tensors

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        self.embd_norm = weights.take("token_embd_norm.weight", (self.hp.n_embd,))
        n, eps = self.hp.n_embd, self.hp.norm_eps
        self._classifier = Classifier.take(weights, n, eps, activation="gelu", pooling=self.head_pooling)

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Layer:
        d = (self.hp.n_embd,)
        return Layer(
            attn_norm=weights.take(f"{prefix}.attn_norm.weight", d, required=il > 0),
            attn=self.load_attention(weights, il, prefix),
            ffn_norm=weights.take(f"{prefix}.ffn_norm.weight", d),
            ffn=self.load_ffn(weights, il, prefix),
        )

    # graph

    def embed(self, b: BatchGraph) -> Value:
        return self.norm(b, super().embed(b), self.embd_norm)

    def ffn(self, b: BatchGraph, ffn: DenseFFN | Experts, x: Value) -> Value:
        assert isinstance(ffn, DenseFFN)
        return dense_ffn(b, ffn, x, self.hidden_activation)
