"""llama4: chunked attention, layers without RoPE, experts that read weighted inputs."""

from __future__ import annotations

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routing import Routing
from ikpy.models.transformer import Attention, Transformer

CHUNK = 8192
TEMPERATURE_SCALE, TEMPERATURE_PERIOD = 0.1, 8192
EXPERTS_WITHOUT_HEAD_NORM = 128  # Maverick


class Llama4(Transformer):
    """Three rotated layers over chunks of 8192 positions for every full one without RoPE."""

    rope_freqs_weight = "optional"
    window_rope_of_file = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_ff_exp = hp.n_ff_shared = keys.u32("expert_feed_forward_length")
        self.moe_step = keys.u32("interleave_moe_layer_step")
        if self.moe_step <= 0:
            raise FileFormatError(f"{keys.gguf.path}: interleave_moe_layer_step must be above 0")
        hp.routing = Routing(hp.n_expert_used, "selected_sigmoid", weigh_inputs=True)
        return hp

    def is_moe(self, layer: int) -> bool:
        return super().is_moe(layer) and (layer + 1) % self.moe_step == 0

    def is_rotated(self, layer: int) -> bool:
        return (layer + 1) % 4 != 0

    def window(self, layer: int) -> tuple[str, int]:
        return ("chunked", CHUNK) if self.is_rotated(layer) else ("none", 0)

    def place_heads(self, b: BatchGraph, il: int, attn: Attention, q: Value, k: Value) -> tuple[Value, Value]:
        g = b.graph
        if not self.is_rotated(il):
            return g.mul(q, b.attention_temperature(TEMPERATURE_SCALE, TEMPERATURE_PERIOD, offset=1)), k
        q, k = self.rotate(b, il, q), self.rotate(b, il, k)
        if self.hp.n_expert == EXPERTS_WITHOUT_HEAD_NORM:
            return q, k
        return g.rms_norm(q, None, self.hp.norm_eps), g.rms_norm(k, None, self.hp.norm_eps)
