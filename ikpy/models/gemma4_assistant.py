"""gemma4-assistant: drafters of Gemma 4, layers without keys and values that attend to the caches of the model."""

from __future__ import annotations

import math

from ikpy.errors import UnsupportedError, UsageError
from ikpy.graph.ir import Value
from ikpy.models.base import Architecture
from ikpy.models.batch import BatchGraph
from ikpy.models.gemma4 import Gemma4
from ikpy.models.hparams import HeadSizes, HParams
from ikpy.models.keys import Keys
from ikpy.models.rope import RopeParams
from ikpy.models.weights import WeightSource

NO_CACHE = -1
# Groups of tokens by which a part of the output matrix can be chosen; all of it is used.
UNUSED = ("masked_embd_centroids.weight", "masked_embd_ordering")


class Gemma4Assistant(Gemma4):
    """Reads the model's embedding of a token beside a state of the model's width, and gives such a state back.

    Every layer attends to what the last layer of its kind with a cache has stored, at the position behind it.
    """

    why_not_alone = "the drafter reads caches of a Gemma 4 model"
    target: Gemma4 | None = None

    # hyper-parameters and tensors

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.final_softcap = 0.0
        self.target_size = keys.u32("embedding_length_out")
        for name in ("expert_count", "embedding_length_per_layer_input"):
            if keys.u32(name, 0):
                raise UnsupportedError(f"{keys.gguf.path}: {keys.arch}.{name} {keys.u32(name)}: drafters have none")
        return hp

    def read_cache_layers(self, keys: Keys, hp: HParams) -> list[int]:
        return [NO_CACHE] * hp.n_layer

    @property
    def predicts_alone(self) -> bool:
        return self.target is None

    @property
    def reads_states(self) -> bool:
        return True

    @property
    def state_size(self) -> int:
        return self.target_size

    def load(self, weights: WeightSource) -> None:
        hp, d = self.hp, self.hp.n_embd
        self.norm_biases, self.logit_bias = {}, None
        self.output = weights.take("token_embd.weight", (d, hp.n_vocab))
        self.output_norm = self.take_norm(weights, self.output_norm_name)
        self.joining = weights.take("nextn.pre_projection.weight", (2 * self.target_size, d))
        self.giving = weights.take("nextn.post_projection.weight", (d, self.target_size))
        self.load_global(weights)
        self.layers = [self.load_layer(weights, il, f"blk.{il}") for il in range(hp.n_layer)]
        weights.skip(*UNUSED)

    def beside(self, target: Architecture, weights: WeightSource) -> None:
        """Takes the embedding of the model that it drafts for, and finds the caches that it attends to. UsageError if
        they do not fit.
        """
        path, hp = weights.gguf.path, target.hp
        if type(target) is not Gemma4:
            raise UsageError(f"the drafter reads caches of a gemma4 model; {path} is one of architecture {hp.arch}")
        if (width := self.target_size) != hp.n_embd:
            raise UsageError(f"the drafter reads states of {width} numbers, those of {path} have {hp.n_embd}")
        last = {is_window: target.cache_layers[il] for il, is_window in enumerate(target.is_window)}
        for il, is_window in enumerate(self.is_window):
            if is_window not in last:
                raise UsageError(f"layer {il} of the drafter attends to a cache of a kind that {path} has not")
            self._check_cache(il, target, last[is_window], path)
        self.token_embd = weights.take("token_embd.weight", (self.target_size, hp.n_vocab))
        self.cache_layers = [last[is_window] for is_window in self.is_window]
        self.target = target

    def _check_cache(self, il: int, target: Gemma4, layer: int, path: str) -> None:
        def cached(arch: Gemma4, at: int) -> tuple[HeadSizes, tuple[str, int]]:
            return arch.head_sizes(at), arch.window(at)

        ours, theirs, heads = cached(self, il), cached(target, layer), target.hp.n_head_kv[layer]
        if ours != theirs or self.hp.n_head[il] % heads:
            (sizes, window), (own, own_window) = theirs, ours
            raise UsageError(
                f"layer {il} of the drafter has {self.hp.n_head[il]} heads of {own.k} and a window of {own_window[1]}; "
                f"{path} caches {heads} of {sizes.k} for one of {window[1]}"
            )

    # graph

    def rope_params(self, layer: int, context: RopeParams) -> RopeParams:
        """Those of the keys that the layer meets."""
        assert self.target is not None
        return self.target.rope_params(self.cache_layers[layer], context)

    def embed(self, b: BatchGraph) -> Value:
        assert b.states is not None
        g, d = b.graph, self.target_size
        token = g.scale(g.get_rows(self.token_embd, b.inputs["tokens"]), math.sqrt(d))
        both = g.new(2 * d, b.n_tokens)
        g.copy(token, both.slice0(0, d))
        g.copy(b.states.reshape(d, b.n_tokens), both.slice0(d, d))
        return g.mul_mat(self.joining, both)

    def build(self, b: BatchGraph) -> Value | None:
        logits = super().build(b)
        if b.embeddings is not None:
            b.embeddings = b.graph.mul_mat(self.giving, b.embeddings)
        return logits
