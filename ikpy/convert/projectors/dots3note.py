"""dots3 note: RMSNorm and gated networks, experts in some layers, a norm and two matrices behind squares of patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import Projector, pixel_keys
from ikpy.convert.projectors.dots3note_audio import Dots3NoteAudio
from ikpy.convert.projectors.tensors import Wanted, linear, norm, patches

_MERGE = 2
_NETWORK = {"ffn_gate": "fc1", "ffn_down": "fc2", "ffn_up": "fc3"}


class Dots3Note(Projector):
    """Names of its repository. Sigmoid scores and a bias choose the experts of a patch. Sound is there where the
    configuration has an encoder of it."""

    kind = "dots3note_v"
    parts = ("vision_encoder.", *Dots3NoteAudio.parts)
    renames: ClassVar[Mapping[str, str]] = Dots3NoteAudio.renames
    layer = "vision_encoder.blocks"
    modules: ClassVar[Mapping[str, str]] = {
        "ln1": "norm_1",
        "attn_qkv": "attn.qkv",
        "attn_q_norm": "attn.q_norm",
        "attn_k_norm": "attn.k_norm",
        "attn_out": "attn.proj",
        "ln2": "norm_2",
    }
    activations = ("silu",)
    norm_bias = False
    eps = 1e-5
    usual_image_size = 560
    defaults: ClassVar[Mapping[str, int | float]] = {
        "intermediate_size": 4224,
        "moe_intermediate_size": 2112,
        "num_hidden_layers": 42,
        "patch_size": 14,
    }

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        values: Any = checkpoint.config.get("audio_config")
        sizes: Any = values.get("whisper_config") if isinstance(values, dict) else None
        self.sound = Dots3NoteAudio(checkpoint, values, sizes, self.n_text) if isinstance(sizes, dict) else None

    def find_width(self) -> int:
        return self.vision.count("embed_dim", "hidden_size", default=1536)

    def find_heads(self) -> int:
        return self.vision.count("num_heads", "num_attention_heads", default=24)

    @property
    def experts(self) -> list[int]:
        """Experts of every layer, 0 for those with one network."""
        usual: Any = [-1] * 25 + list(range(4, 65, 4)) + [64]
        counts = self.vision.get("pyramid_num_routed", default=usual)
        fits = isinstance(counts, list) and len(counts) == self.n_layer and all(type(n) is int for n in counts)
        self.vision.require(f"pyramid_num_routed for other than {self.n_layer} layers", fits)
        return [max(0, self.vision.bounded("pyramid_num_routed", abs(n)) if n > 0 else 0) for n in counts]

    @property
    def n_used(self) -> int:
        """Experts that a patch takes."""
        return self.vision.count("capacity_factor", "num_experts_per_tok", default=2)

    def check(self) -> None:
        super().check()
        vision, few = self.vision, min(filter(None, self.experts), default=self.n_used)
        vision.require(f"{self.n_used} experts used of {few}", 0 < self.n_used <= few)
        given = vision.get("mlp_layer_types", "per_layer_config", default=None)
        vision.require("mlp_layer_types", given is None)
        for name, known in (("spatial_merge_size", _MERGE), ("adapter_merge_size", _MERGE), ("router_scale", 1)):
            self.check_value(vision, name, known)
        self.check_value(vision, "router_scaling_factor", 1)
        self.check_value(vision, "adapter_in_dim", self.n)
        self.check_value(vision, "adapter_out_dim", self.n_text)
        for name in ("use_bias", "attention_bias", "mlp_bias"):
            self.check_value(vision, name, False)
        self.check_rope(10000)
        if self.sound:
            self.sound.check()

    def keys(self) -> Keys:
        keys = super().keys() | {
            "vision.spatial_merge_size": _MERGE,
            "vision.expert_used_count": self.n_used,
            **pixel_keys(*self.processor.pixels()),
        }
        if self.sound is None:
            return keys
        return keys | {"vision.projector_type": keys.pop("projector_type")} | self.sound.keys()

    def notes(self) -> list[str]:
        if self.sound:
            return []
        return ["sound is left out: 'audio_config' of config.json has no 'whisper_config', the sizes of its encoder"]

    def left_out(self) -> tuple[str, ...]:
        return self.unused if self.sound else (*self.unused, *Dots3NoteAudio.parts)

    def has_bias(self, target: str) -> bool:
        return False

    def layers(self) -> Iterator[Wanted]:
        yield from super().layers()
        n, width = self.n, self.vision.count("moe_intermediate_size")
        for il, n_expert in enumerate(self.experts):
            target, source = f"v.blk.{il}", f"{self.layer}.{il}.mlp"
            if n_expert:
                yield Wanted(f"{target}.ffn_gate_inp.weight", f"{source}.gate_weight", (n_expert, n), exact=True)
                yield Wanted(f"{target}.exp_probs_b.weight", f"{source}.router_bias", (n_expert,))
            for name, module in _NETWORK.items():
                rows, columns = (n, width) if name == "ffn_down" else (width, n)
                full, path = f"{target}.{name}_exps.weight", f"{source}.experts.{{e}}.{module}.weight"
                if n_expert:
                    yield Wanted(full, path, (rows, columns), stack=n_expert)
                else:
                    yield from linear(f"{target}.{name}", f"{source}.{module}", *self.shape(name), bias=False)

    def tensors(self) -> Iterator[Wanted]:
        p, n = "vision_encoder", self.n
        yield from patches(f"{p}.patch_embed.proj", n, self.patch_size)
        yield from norm("v.pre_ln", f"{p}.patch_embed.norm", n, bias=False)
        yield from self.layers()
        yield from norm("mm.post_norm", f"{p}.post_trunk_norm", n, bias=False)
        yield from norm("mm.input_norm", f"{p}.adapter.ln_q", n)
        merged = n * _MERGE**2
        names = (f"{p}.adapter.mlp.0", f"{p}.adapter.mlp.2")
        yield from self.two_layers(("mm.0", "mm.2"), names, (merged, merged, self.n_text))
        if self.sound:
            yield from self.sound.tensors()
