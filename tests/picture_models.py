"""A tiny random gemma3 and a tiny random projector for it, in the layout of published files; pictures."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
from PIL import Image

from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from tests.cpu.media.tower_kinds import TOWERS
from tests.cpu.models.reference_models import RandomModel

CONTROL, NORMAL, BYTE = 3, 1, 6
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for item in message.content %}"
    "{% if item.type == 'image' %}<start_of_image>{% elif item.type == 'text' %}{{ item.text }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
D, HEADS, HEAD, LAYERS, WIDTH = 64, 2, 32, 6, 96
V_D, V_HEADS, V_LAYERS, V_WIDTH = 32, 2, 2, 64
IMAGE, PATCH, MERGE = 112, 14, 2
N_ROWS = (IMAGE // PATCH // MERGE) ** 2
"""Rows of a picture."""


def vocabulary() -> tuple[list[str], list[int]]:
    """Texts and types of the tokens: special ones, bytes, letters, words."""
    pieces = ["\u2581", *LETTERS, *(f"\u2581{letter}" for letter in LETTERS)]
    tokens = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    kinds = [CONTROL] * len(SPECIAL) + [BYTE] * 256 + [NORMAL] * len(pieces)
    return tokens, kinds


class RandomText(RandomModel):
    """gemma3 with six layers, of which the last sees everything, and a vocabulary that writes any text."""

    def __init__(self, seed: int, d: int = D) -> None:
        self.tokens, self.kinds = vocabulary()
        super().__init__(
            "gemma3",
            seed,
            **{
                "vocab_size": len(self.tokens),
                "block_count": LAYERS,
                "embedding_length": d,
                "feed_forward_length": WIDTH,
                "attention.head_count": HEADS,
                "attention.head_count_kv": 1,
                "attention.key_length": HEAD,
                "attention.value_length": HEAD,
                "attention.layer_norm_rms_epsilon": 1e-6,
                "attention.sliding_window": 24,
                "rope.freq_base": 1e6,
            },
        )
        self.matrix("token_embd", len(self.tokens), d)
        self.norm("output_norm", d)
        for il in range(LAYERS):
            p = f"blk.{il}"
            for name in ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"):
                self.norm(f"{p}.{name}", d)
            self.attention(p, d, HEADS, 1, HEAD)
            self.norm(f"{p}.attn_q_norm", HEAD)
            self.norm(f"{p}.attn_k_norm", HEAD)
            self.ffn(p, d, WIDTH)

    def _write_numbered_words(self, out: GGUFWriter) -> None:
        out.add("tokenizer.ggml.model", GGUFValueType.STRING, "llama")
        out.add("tokenizer.ggml.pre", GGUFValueType.STRING, "default")
        out.add_array("tokenizer.ggml.tokens", GGUFValueType.STRING, self.tokens)
        out.add_array("tokenizer.ggml.scores", GGUFValueType.FLOAT32, [-float(i) for i in range(len(self.tokens))])
        out.add_array("tokenizer.ggml.token_type", GGUFValueType.INT32, self.kinds)
        for name, value in (("padding", 0), ("eos", 1), ("bos", 2), ("unknown", 3), ("eot", 5)):
            out.add(f"tokenizer.ggml.{name}_token_id", GGUFValueType.UINT32, value)
        out.add("tokenizer.ggml.add_bos_token", GGUFValueType.BOOL, True)
        out.add("tokenizer.ggml.add_eos_token", GGUFValueType.BOOL, False)
        out.add("tokenizer.ggml.add_space_prefix", GGUFValueType.BOOL, False)
        out.add("tokenizer.chat_template", GGUFValueType.STRING, TEMPLATE)


class RandomGridText(RandomText):
    """qwen3vl: positions of pictures have rows and columns, and two of its layers get features of them."""

    def __init__(self, seed: int) -> None:
        self.tokens, self.kinds = vocabulary()
        keys = {
            "vocab_size": len(self.tokens),
            "block_count": 3,
            "embedding_length": D,
            "feed_forward_length": WIDTH,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e4,
            "rope.dimension_sections": [7, 5, 4, 0],
            "n_deepstack_layers": 2,
        }
        RandomModel.__init__(self, "qwen3vl", seed, **keys)
        self.matrix("token_embd", len(self.tokens), D)
        self.matrix("output", len(self.tokens), D)
        self.norm("output_norm", D)
        for il in range(3):
            p = f"blk.{il}"
            for name, size in (("attn_norm", D), ("ffn_norm", D), ("attn_q_norm", HEAD), ("attn_k_norm", HEAD)):
                self.norm(f"{p}.{name}", size)
            self.attention(p, D, 4, 2, HEAD)
            self.ffn(p, D, WIDTH)


class RandomPredictingText(RandomText):
    """qwen35 whose layers all attend, with features of pictures behind two of them, and one that predicts further
    tokens.
    """

    def __init__(self, seed: int) -> None:
        self.tokens, self.kinds = vocabulary()
        keys = {
            "vocab_size": len(self.tokens),
            "block_count": 4,
            "nextn_predict_layers": 1,
            "embedding_length": D,
            "feed_forward_length": WIDTH,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e4,
            "rope.dimension_count": HEAD,
            "rope.dimension_sections": [7, 5, 4, 0],
            "n_deepstack_layers": 2,
            "full_attention_interval": 1,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 64,
            "ssm.state_size": 32,
            "ssm.time_step_rank": 2,
            "ssm.group_count": 1,
        }
        RandomModel.__init__(self, "qwen35", seed, **keys)
        self.matrix("token_embd", len(self.tokens), D)
        self.matrix("output", len(self.tokens), D)
        self.norm("output_norm", D)
        for il in range(4):
            p = f"blk.{il}"
            for name, size in (
                ("attn_norm", D),
                ("post_attention_norm", D),
                ("attn_q_norm", HEAD),
                ("attn_k_norm", HEAD),
            ):
                self.norm(f"{p}.{name}", size)
            self.attention(p, D, 4, 2, HEAD)
            self.matrix(f"{p}.attn_q", 2 * 4 * HEAD, D)
            self.ffn(p, D, WIDTH)
        self.matrix("blk.3.nextn.eh_proj", D, 2 * D)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            self.norm(f"blk.3.nextn.{name}", D)


def with_words(model: RandomText) -> RandomText:
    """The model, which writes its vocabulary."""
    model.numbered_words = True
    return model


def write_text(path: Path, d: int = D) -> Path:
    """A text model."""
    return with_words(RandomText(1, d)).write(path)


def write_grid_text(path: Path, *, predicts: bool = False) -> Path:
    """A text model that tells rows and columns of pictures apart, and may predict further tokens."""
    return with_words(RandomPredictingText(4) if predicts else RandomGridText(3)).write(path)


def write_grid_projector(path: Path) -> Path:
    """A projector for it."""
    tower = TOWERS["qwen3vl"]
    return tower.write(path, tower.weights())


def write_projector(path: Path, d: int = D, kind: str = "gemma3") -> Path:
    """A SigLIP encoder with gemma3's pooling for text models with d channels."""
    model = RandomModel(
        "clip",
        2,
        **{
            "has_vision_encoder": True,
            "projector_type": kind,
            "use_gelu": True,
            "vision.image_size": IMAGE,
            "vision.patch_size": PATCH,
            "vision.embedding_length": V_D,
            "vision.feed_forward_length": V_WIDTH,
            "vision.projection_dim": d,
            "vision.block_count": V_LAYERS,
            "vision.attention.head_count": V_HEADS,
            "vision.attention.layer_norm_epsilon": 1e-6,
            "vision.image_mean": [0.5, 0.5, 0.5],
            "vision.image_std": [0.5, 0.5, 0.5],
            "vision.projector.scale_factor": MERGE,
        },
    )
    model.weights["v.patch_embd"] = model.random.normal(0, 0.05, (V_D, 3, PATCH, PATCH)).astype(np.float32)
    model.vector("v.patch_embd.bias", V_D)
    model.weights["v.position_embd"] = model.random.normal(0, 0.3, ((IMAGE // PATCH) ** 2, V_D)).astype(np.float32)
    for il in range(V_LAYERS):
        p = f"v.blk.{il}"
        for name in ("ln1", "ln2"):
            model.norm(f"{p}.{name}", V_D)
            model.vector(f"{p}.{name}.bias", V_D)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            model.matrix(f"{p}.{name}", V_D, V_D)
            model.vector(f"{p}.{name}.bias", V_D)
        model.matrix(f"{p}.ffn_up", V_WIDTH, V_D)
        model.vector(f"{p}.ffn_up.bias", V_WIDTH)
        model.matrix(f"{p}.ffn_down", V_D, V_WIDTH)
        model.vector(f"{p}.ffn_down.bias", V_D)
    model.norm("v.post_ln", V_D)
    model.vector("v.post_ln.bias", V_D)
    model.weights["mm.input_projection"] = model.random.normal(0, 0.3, (V_D, d)).astype(np.float32)
    model.norm("mm.soft_emb_norm", V_D)
    return model.write(path)


def png(seed: int, width: int = IMAGE, height: int = IMAGE) -> bytes:
    """A picture of random coloured rectangles, as a PNG file."""
    random = np.random.default_rng(seed)
    pixels = np.full((height, width, 3), 200, np.uint8)
    for _ in range(6):
        y, x = random.integers(0, height), random.integers(0, width)
        pixels[y : y + height // 2, x : x + width // 2] = random.integers(0, 256, 3)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def data_uri(data: bytes, kind: str = "image/png") -> str:
    """A file as browsers write it into pages."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
