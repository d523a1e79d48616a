"""Base classes of the architectures: what each file in this folder declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from ikpy.graph.builder import Graph
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph, CacheSpec, GraphParams
from ikpy.models.hparams import HParams, read_hparams
from ikpy.models.keys import Keys
from ikpy.models.rope import RopeParams
from ikpy.models.weights import WeightSource

Log = Callable[[str], None]


class Architecture:
    """A loaded model of one GGUF architecture: hyper-parameters, weights, and the graph of a micro-batch."""

    rope_neox: ClassVar[bool] = False
    # Group S of model semantics 3.1: user RoPE scaling does not reach these, only a user base does.
    rope_scale_from_metadata: ClassVar[bool] = False

    def __init__(self, keys: Keys, weights: WeightSource, log: Log) -> None:
        self.hp: HParams = self.read_hparams(keys)
        self.log = log
        self.load(weights)

    def read_hparams(self, keys: Keys) -> HParams:
        """Hyper-parameters; architectures with further keys extend this."""
        return read_hparams(keys)

    def load(self, weights: WeightSource) -> None:
        """Takes every tensor of the model from weights."""
        raise NotImplementedError

    def prepare(self, mla: int) -> None:
        """Derives tensors that a context with this MLA mode needs; nothing for most architectures."""

    def effective_mla(self, mla: int) -> int:
        """The MLA mode a context will use; 0 for architectures without latent attention."""
        return 0

    def rope_params(self, context: RopeParams) -> RopeParams:
        """RoPE parameters of ordinary layers."""
        if not self.rope_scale_from_metadata:
            return context
        return RopeParams(**{**context.__dict__, "freq_scale": self.hp.rope_freq_scale})

    def cache_specs(self, layer: int, params: GraphParams) -> list[CacheSpec]:
        """Cache tensors of a layer."""
        hp = self.hp
        heads = hp.n_head_kv[layer]
        return [
            CacheSpec("k", hp.n_embd_head_k, heads, params.type_k),
            CacheSpec("v", hp.n_embd_head_v, heads, params.type_v),
        ]

    def shift_part(self, params: GraphParams) -> tuple[str, int, int] | None:
        """Cache name, first element and length of the rotated part of cached keys; None: cannot be shifted."""
        return "k", 0, self.hp.n_rot

    def add_shift(
        self, g: Graph, layer: int, cache: Value, deltas: Value, n_rot: int, offset: int, params: GraphParams
    ) -> None:
        """Adds the re-rotation of a layer's cached keys by deltas i32 [n_ctx]."""
        factors = self.rope_factors(layer)
        table = g.rope_table(deltas, n_rot, factors, self.rope_params(params.rope).kernel_params(n_rot))
        g.kv_shift(cache, table, deltas, neox=self.rope_neox, offset=offset)

    def rope_factors(self, layer: int) -> Value | None:
        """Frequency factors of a layer, if it has any."""
        return None

    def build(self, b: BatchGraph) -> Value | None:
        """Adds the nodes of a micro-batch; returns logits f32 [V, n_outputs], None if no output is asked for."""
        raise NotImplementedError


class Decoder(Architecture):
    """The usual frame: embedding, layers, final norm, output matrix (model semantics 2.1)."""

    output_required: ClassVar[bool] = False

    def load(self, weights: WeightSource) -> None:
        hp = self.hp
        self.token_embd = weights.take("token_embd.weight", (hp.n_embd, hp.n_vocab))
        self.output_norm = weights.take("output_norm.weight", (hp.n_embd,))
        output = weights.take("output.weight", (hp.n_embd, hp.n_vocab), required=self.output_required)
        self.output = output or self.token_embd
        self.load_global(weights)
        self.layers = [self.load_layer(weights, il, f"blk.{il}") for il in range(hp.n_layer)]

    def load_global(self, weights: WeightSource) -> None:
        """Further tensors that belong to no layer."""

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> object:
        """Takes the tensors of a layer."""
        raise NotImplementedError

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        """One layer: x [D, T] -> [D, T] (only the output rows in the last layer)."""
        raise NotImplementedError

    def norm(self, b: BatchGraph, x: Value, weight: Value) -> Value:
        """The architecture's norm with its epsilon."""
        return b.graph.rms_norm(x, weight, self.hp.norm_eps)

    def embed(self, b: BatchGraph) -> Value:
        """Token embeddings [D, T]."""
        return b.graph.get_rows(self.token_embd, b.inputs["tokens"])

    def logits(self, b: BatchGraph, y: Value) -> Value:
        """Output matrix on the normed rows."""
        return b.graph.mul_mat(self.output, y)

    def build(self, b: BatchGraph) -> Value | None:
        x = self.embed(b)
        for il in range(self.hp.n_layer):
            x = self.layer(b, il, x)
        if b.n_outputs == 0:
            return None
        y = self.norm(b, x, self.output_norm)
        b.embeddings = y
        return self.logits(b, y)
