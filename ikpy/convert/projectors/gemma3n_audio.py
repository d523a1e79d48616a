"""The encoder of sound of Gemma 3n, which is in the same file as that of pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import sound_keys
from ikpy.convert.projectors.tensors import Wanted, linear

_FRONT = "audio_tower.subsample_conv_projection"
_ROWS = 188
# Names of GGUF files within a layer -> modules of the checkpoint.
_NORMS = {
    "ffn_norm": "ffw_layer_start.pre_layer_norm",
    "ffn_post_norm": "ffw_layer_start.post_layer_norm",
    "ln1": "attention.pre_attn_norm",
    "ln2": "attention.post_norm",
    "conv_norm": "lconv1d.pre_layer_norm",
    "norm_conv": "lconv1d.conv_norm",
    "ffn_norm_1": "ffw_layer_end.pre_layer_norm",
    "ffn_post_norm_1": "ffw_layer_end.post_layer_norm",
    "layer_pre_norm": "norm",
}
_MATRICES = {
    "ffn_up": "ffw_layer_start.ffw_layer_1",
    "ffn_down": "ffw_layer_start.ffw_layer_2",
    "attn_q": "attention.attn.q_proj",
    "attn_k": "attention.attn.k_proj",
    "attn_v": "attention.attn.v_proj",
    "attn_out": "attention.post",
    "linear_pos": "attention.attn.relative_position_embedding.pos_proj",
    "conv_pw1": "lconv1d.linear_start",
    "conv_pw2": "lconv1d.linear_end",
    "ffn_up_1": "ffw_layer_end.ffw_layer_1",
    "ffn_down_1": "ffw_layer_end.ffw_layer_2",
}


class Gemma3nAudio:
    """values: `audio_config`. n_text: elements of a token's embedding."""

    kind = "gemma3na"
    parts = ("audio_tower.", "embed_audio.")
    unused = ("embed_audio.embedding_post_projection_norm.",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 1536,
        "input_feat_size": 128,
        "vocab_size": 128,
        "conf_num_attention_heads": 8,
        "conf_num_hidden_layers": 12,
        "conf_conv_kernel_size": 5,
        "sscp_conv_channel_size": [128, 32],
    }
    fixed: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-6,
        "gradient_clipping": 1e10,
        "conf_attention_chunk_size": 12,
        "conf_attention_context_left": 13,
        "conf_attention_context_right": 0,
        "conf_attention_logit_cap": 50.0,
        "conf_reduction_factor": 4,
        "conf_residual_weight": 0.5,
        "sscp_conv_group_norm_eps": 1e-3,
        "sscp_conv_kernel_size": [[3, 3], [3, 3]],
        "sscp_conv_stride_size": [[2, 2], [2, 2]],
    }
    heard: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "sampling_rate": (16000,),
        "frame_length": (512,),
        "hop_length": (160,),
        "fft_length": (1024,),
        "min_frequency": (125.0,),
        "max_frequency": (7600.0,),
        "preemphasis": (0.97,),
        "preemphasis_htk_flavor": (True,),
        "input_scale_factor": (1.0,),
        "mel_floor": (1e-5,),
        "dither": (0.0,),
        "per_bin_mean": (None,),
        "per_bin_stddev": (None,),
    }

    def __init__(self, checkpoint: Checkpoint, values: dict[str, Any], n_text: int) -> None:
        folder = checkpoint.folder
        self.audio = Config({**self.defaults, **values}, folder / "config.json (audio_config)")
        self.listening = Config(checkpoint.json("preprocessor_config.json"), folder / "preprocessor_config.json")
        self.whole, self.n_text = Config(checkpoint.config, folder / "config.json"), n_text
        self.n = self.audio.count("hidden_size")
        self.n_ff = 4 * self.n
        self.n_head = self.audio.count("conf_num_attention_heads")
        self.n_layer = self.audio.count("conf_num_hidden_layers")
        self.n_mel = self.audio.count("input_feat_size")
        self.taps = self.audio.count("conf_conv_kernel_size")
        channels = self.audio.get("sscp_conv_channel_size")
        fits = isinstance(channels, list) and len(channels) == 2 and all(type(n) is int and n > 0 for n in channels)
        self.audio.require(f"sscp_conv_channel_size {channels}", fits)
        self.channels = channels

    def check(self) -> None:
        """Refuse configurations that a file of this kind cannot express."""
        audio = self.audio
        for name, usual in self.fixed.items():
            value = audio.get(name, default=usual)
            audio.require(f"{name} {value}", value == usual)
        for name, known in self.heard.items():
            value = self.listening.get(name, default=known[0])
            self.listening.require(f"{name} {value}", value in known)
        audio.require(f"{self.n_head} heads in {self.n}", 0 < self.n_head <= self.n and self.n % self.n_head == 0)
        audio.require(f"input_feat_size {self.n_mel}", 0 < self.n_mel <= 256)
        audio.require(f"conf_conv_kernel_size {self.taps}", 0 < self.taps <= 64)
        rows = self.whole.get("audio_soft_tokens_per_image", default=_ROWS)
        self.whole.require(f"audio_soft_tokens_per_image {rows}", rows == _ROWS)

    def keys(self) -> Keys:
        """Metadata under "clip."."""
        return {
            "has_audio_encoder": True,
            "audio.projector_type": self.kind,
            **sound_keys(self, 1e-6),
        }

    def tensors(self) -> Iterator[Wanted]:
        """All tensors, in file order."""
        n_in = 1
        for i, n_out in enumerate(self.channels):
            source = f"{_FRONT}.conv_{i}"
            yield Wanted(f"a.conv1d.{i}.weight", f"{source}.conv.weight", (n_out, n_in, 3, 3), floats=True)
            yield Wanted(f"a.conv1d.{i}.norm.weight", f"{source}.norm.weight", (n_out,))
            n_in = n_out
        n_joined = (self.n_mel + 3) // 4 * n_in
        yield from linear("a.pre_encode.out", f"{_FRONT}.input_proj_linear", self.n, n_joined, bias=False)
        for il in range(self.n_layer):
            yield from self.layer(f"a.blk.{il}", f"audio_tower.conformer.{il}")
        yield Wanted("mm.a.embedding.weight", "embed_audio.embedding.weight", (self.audio.count("vocab_size"), self.n))
        for name in ("hard", "soft"):
            yield Wanted(f"mm.a.{name}_emb_norm.weight", f"embed_audio.{name}_embedding_norm.weight", (self.n,))
        name = "embed_audio.embedding_projection"
        yield from linear("mm.a.input_projection", name, self.n_text, self.n, bias=False)

    def layer(self, target: str, source: str) -> Iterator[Wanted]:
        """A layer of the encoder."""
        n = self.n
        for name, module in _NORMS.items():
            yield Wanted(f"{target}.{name}.weight", f"{source}.{module}.weight", (n,))
        sizes = {"ffn_up": (self.n_ff, n), "ffn_down": (n, self.n_ff), "conv_pw1": (2 * n, n)}
        for name, module in _MATRICES.items():
            shape = sizes.get(name.removesuffix("_1"), (n, n))
            yield Wanted(f"{target}.{name}.weight", f"{source}.{module}.weight", shape)
        head = (n // max(1, self.n_head),)
        yield Wanted(f"{target}.per_dim_scale", f"{source}.attention.attn.per_dim_scale", head)
        dw = f"{source}.lconv1d.depthwise_conv1d.weight"
        yield Wanted(f"{target}.conv_dw.weight", dw, (n, 1, self.taps), exact=True)
