"""LFM2-Audio: a FastConformer, a norm and two matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ikpy.convert.config import Config
from ikpy.convert.projectors.conformers import Conformer, fast_front
from ikpy.convert.projectors.tensors import Wanted, linear, norm, table
from ikpy.errors import FileFormatError


class Lfm2Audio(Conformer):
    """A FastConformer, a norm and two matrices. What speaks is left out but for a table that llama.cpp wants to see."""

    kind = "lfm2a"
    parts = ("conformer.", "audio_adapter.", "audio_embedding.")
    encoder_key = "encoder"
    layer = "conformer.layers"
    batch_norm = "conv.batch_norm"
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "subsampling": ("dw_striding",),
        "subsampling_factor": (8,),
        "causal_downsampling": (False,),
        "reduction": (None,),
        "self_attention_model": ("rel_pos",),
        "att_context_size": ([-1, -1],),
        "xscaling": (False,),
        "untie_biases": (True,),
        "conv_norm_type": ("batch_norm",),
        "conv_context_size": (None,),
        "feat_out": (-1,),
        "use_bias": (True,),
    }
    heard: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "sample_rate": (16000,),
        "normalize": ("per_feature",),
        "window_size": (0.025,),
        "window_stride": (0.01,),
        "window": ("hann",),
        "n_fft": (512,),
        "log": (True,),
        "frame_splicing": (1,),
        "pad_to": (0,),
        "pad_value": (0.0, 0),
    }
    modules: ClassVar[Mapping[str, str]] = {
        "ffn_norm": "norm_feed_forward1",
        "ffn_up": "feed_forward1.linear1",
        "ffn_down": "feed_forward1.linear2",
        "ln1": "norm_self_att",
        **{f"attn_{part}": f"self_attn.linear_{part}" for part in ("q", "k", "v", "out")},
        "linear_pos": "self_attn.linear_pos",
        "norm_conv": "norm_conv",
        "conv_pw1": "conv.pointwise_conv1",
        "conv_dw": "conv.depthwise_conv",
        "conv_pw2": "conv.pointwise_conv2",
        "ffn_norm_1": "norm_feed_forward2",
        "ffn_up_1": "feed_forward2.linear1",
        "ffn_down_1": "feed_forward2.linear2",
        "ln2": "norm_out",
    }
    defaults: ClassVar[Mapping[str, Any]] = {"ff_expansion_factor": 4, "conv_kernel_size": 9}

    def find_text_width(self) -> int:
        values = self.checkpoint.config.get("lfm")
        if not isinstance(values, dict):
            raise FileFormatError(f"{self.config.path}: there is no 'lfm', the text model")
        return Config(values, self.config.path.with_name("config.json (lfm)")).count("hidden_size")

    @property
    def n_mel(self) -> int:
        return self.audio.count("feat_in")

    @property
    def n_ff(self) -> int:
        return self.audio.bounded("ff_expansion_factor", self.n * self.audio.count("ff_expansion_factor"))

    @property
    def channels(self) -> int:
        """Of the convolutions in front, -1: as many as a state has elements."""
        found = self.audio.integer("subsampling_conv_channels", default=-1)
        return self.n if found == -1 else self.audio.bounded("subsampling_conv_channels", found)

    def check(self) -> None:
        super().check()
        self.audio.require(f"d_model {self.n}", self.n % 2 == 0)
        for name, known in self.fixed.items():
            self.check_value(self.audio, name, *known)
        values = self.checkpoint.config.get("preprocessor")
        if not isinstance(values, dict):
            raise FileFormatError(f"{self.config.path}: there is no 'preprocessor'")
        preprocessor = Config(values, self.config.path.with_name("config.json (preprocessor)"))
        for name, known in {**self.heard, "features": (self.n_mel,)}.items():
            self.check_value(preprocessor, name, *known)

    def module(self, full: str, target: str, source: str) -> Iterator[Wanted]:
        yield from super().module(full, target, source)
        if target == "conv_dw":
            yield Wanted(f"{full}.bias", f"{source}.bias", (self.n,))
        if target == "linear_pos":
            prefix, heads = full.removesuffix(".linear_pos"), (self.n_head, self.n // self.n_head)
            for part in "uv":
                name = f"pos_bias_{part}"
                yield table(f"{prefix}.{name}", f"{source.removesuffix('linear_pos')}{name}", *heads)

    def has_bias(self, target: str) -> bool:
        return target != "linear_pos"

    def tensors(self) -> Iterator[Wanted]:
        sources = ("conformer.pre_encode.conv", "conformer.pre_encode.out")
        yield from fast_front(sources, self.channels, self.n_mel, self.n)
        yield from self.layers()
        yield from norm("mm.a.mlp.0", "audio_adapter.model.0", self.n)
        inner = self.adapter_width()
        yield from linear("mm.a.mlp.1", "audio_adapter.model.1", inner, self.n)
        yield from linear("mm.a.mlp.3", "audio_adapter.model.3", self.n_text, inner)
        yield from self.spoken()

    def adapter_width(self) -> int:
        """Elements between both matrices, as the tensors have them."""
        found = self.checkpoint.tensors.get("audio_adapter.model.1.weight")
        return found.shape[0] if found is not None and found.shape else self.n_text

    def spoken(self) -> Iterator[Wanted]:
        """Embeddings of the sounds that the model makes."""
        tensors = self.checkpoint.tensors
        name = "audio_embedding.embedding.weight"
        rows = tensors[name].shape[0] if name in tensors and tensors[name].shape else 0
        yield Wanted("a.position_embd.weight", name, (rows, self.n_text))
        for target, module, shape in (
            ("a.position_embd_norm", "embedding_norm", (self.n_text,)),
            ("a.embd_to_logits", "to_logits", (rows, self.n_text)),
        ):
            if f"audio_embedding.{module}.weight" in tensors:
                yield Wanted(f"{target}.weight", f"audio_embedding.{module}.weight", shape)
