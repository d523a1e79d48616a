"""Records the rows that vision towers of transformers make of random pictures in float32, for test_vision_towers.py.

pip install torch transformers        # 5.24 or newer
python -m scripts.make_vision_golden
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers.models.dots3_note import modeling_dots3_note as dots3note
from transformers.models.exaone4_5 import modeling_exaone4_5 as exaone45
from transformers.models.glm4v import modeling_glm4v as glm4v
from transformers.models.glm5_next import modeling_glm5_next as glm5
from transformers.models.glm_ocr import modeling_glm_ocr as glm_ocr
from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi
from transformers.models.llava import modeling_llava as llava
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as minimax_m3
from transformers.models.mistral3 import modeling_mistral3 as mistral3
from transformers.models.paddleocr_vl import modeling_paddleocr_vl as paddleocr
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen25
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
from transformers.models.step3p7 import modeling_step3p7 as step3

from scripts.tower_goldens import State, layers, load, record, renamed
from tests.cpu.media.tower_kinds import STEP3VL, TOWERS
from tests.cpu.media.vision_towers import GOLDEN_ROWS, GOLDENS, Tower, Weights


def pixels(tower: Tower) -> np.ndarray:
    """The picture as float32 [h, w, 3]."""
    return ((tower.picture() / 255 - np.array(tower.mean)) / np.array(tower.std)).astype(np.float32)


def patches(tower: Tower, merge: int, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches [n, 3, frames, p, p] square by square, and (1, rows, columns)."""
    p, image = tower.patch, pixels(tower)
    rows, columns = image.shape[0] // p, image.shape[1] // p
    grid = image.reshape(rows // merge, merge, p, columns // merge, merge, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    flat = np.repeat(grid.reshape(rows * columns, 3, 1, p, p), frames, axis=2)
    return torch.from_numpy(flat.copy()), torch.tensor([[1, rows, columns]])


def frames_of(weights: Weights) -> np.ndarray:
    """Both filters as those of a film."""
    return np.stack([weights["v.patch_embd.weight"], weights["v.patch_embd.weight.1"]], axis=2)


def joined_qkv(tower: Tower, state: State, weights: Weights) -> None:
    """q, k and v as one tensor."""
    for i in range(tower.layers):
        for end in ("weight", "bias"):
            parts = [weights[f"v.blk.{i}.attn_{part}.{end}"] for part in "qkv"]
            state[f"blocks.{i}.attn.qkv.{end}"] = np.concatenate(parts)


def qwen(tower: Tower, w: Weights) -> torch.Tensor:
    """Qwen2-VL and Qwen2.5-VL."""
    sizes = {"depth": tower.layers, "num_heads": tower.heads, "patch_size": tower.patch, "spatial_merge_size": 2}
    if tower.windows:
        full = [i for i in range(tower.layers) if (i + 1) % tower.windows == 0]
        config = qwen25.Qwen2_5_VLVisionConfig(
            hidden_size=tower.d,
            intermediate_size=tower.ff,
            out_hidden_size=tower.text,
            fullatt_block_indexes=full,
            **sizes,
        )
        model_class, ffn = qwen25.Qwen2_5_VisionTransformerPretrainedModel, ("gate_proj", "up_proj", "down_proj")
    else:
        config = qwen2.Qwen2VLVisionConfig(
            embed_dim=tower.d, hidden_size=tower.text, mlp_ratio=tower.ff // tower.d, **sizes
        )
        model_class, ffn = qwen2.Qwen2VisionTransformerPretrainedModel, ("", "fc1", "fc2")
    config._attn_implementation = "eager"
    names = {"ln1": "norm1", "ln2": "norm2", "attn_out": "attn.proj", "ffn_up": f"mlp.{ffn[1]}"}
    names |= {"ffn_gate": f"mlp.{ffn[0]}", "ffn_down": f"mlp.{ffn[2]}"}
    heads = {"v.post_ln.": "merger.ln_q.", "mm.0.": "merger.mlp.0.", "mm.2.": "merger.mlp.2."}
    state = renamed(w, layers(tower.layers, names, "blocks") | heads)
    state["patch_embed.proj.weight"] = frames_of(w)
    joined_qkv(tower, state, w)
    return load(model_class(config), state)(*patches(tower, 2, 2)).pooler_output


def exaone(tower: Tower, w: Weights) -> torch.Tensor:
    """EXAONE 4.5."""
    full = [i for i in range(tower.layers) if (i + 1) % tower.windows == 0]
    config = exaone45.Exaone4_5_VisionConfig(
        depth=tower.layers,
        num_heads=tower.heads,
        num_key_value_heads=tower.kv,
        patch_size=tower.patch,
        hidden_size=tower.d,
        intermediate_size=tower.ff,
        out_hidden_size=tower.text,
        fullatt_block_indexes=full,
    )
    config._attn_implementation = "eager"
    names = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj"}
    names |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    heads = {"v.post_ln.": "merger.ln_q.", "mm.0.": "merger.mlp.0.", "mm.2.": "merger.mlp.2."}
    state = renamed(w, layers(tower.layers, names, "blocks") | heads)
    state["patch_embed.proj.weight"] = frames_of(w)
    return load(exaone45.Exaone4_5_VisionModel(config), state)(*patches(tower, 2, 2)).pooler_output


def minimax(tower: Tower, w: Weights) -> torch.Tensor:
    """MiniMax M3."""
    config = minimax_m3.MiniMaxM3VLVisionConfig(
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        patch_size=tower.patch,
        hidden_size=tower.d,
        intermediate_size=tower.ff,
        layer_norm_eps=tower.eps,
    )
    config._attn_implementation = "eager"
    names = {"ln1": "layer_norm1", "ln2": "layer_norm2", "attn_out": "self_attn.out_proj"}
    names |= {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"} | {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
    turned = {k: thirds(tower, v) if "attn_q" in k or "attn_k" in k else v for k, v in w.items()}
    state = renamed(turned, layers(tower.layers, names, "layers") | {"v.pre_ln.": "pre_layrnorm."})
    state["embeddings.proj.weight"] = frames_of(w)
    flat, grid = patches(tower, 2, 2)
    states = load(minimax_m3.MiniMaxM3VLVisionModel(config), state)(flat, grid).last_hidden_state[0]
    whole = minimax_m3.MiniMaxM3VLConfig(
        vision_config=config.to_dict(), text_config={"hidden_size": tower.text}, projector_hidden_size=tower.ff
    )
    names = {"mm.1.": "linear_1.", "mm.2.": "linear_2."}
    names |= {"mm.merger.fc1.": "merge_linear_1.", "mm.merger.fc2.": "merge_linear_2."}
    return load(minimax_m3.MiniMaxM3VLMultiModalProjector(whole), renamed(w, names))(states)


def thirds(tower: Tower, w: np.ndarray) -> np.ndarray:
    """Rows of q or k whose pairs lie in thirds of a head, reordered so that they are half of all these apart."""
    head = w.reshape(tower.heads, tower.d // tower.heads, -1)
    third = head.shape[1] // 3 // 2
    pairs = head[:, : 6 * third].reshape(tower.heads, 3, 2, third, -1).transpose(0, 2, 1, 3, 4)
    return np.concatenate([pairs.reshape(tower.heads, 6 * third, -1), head[:, 6 * third :]], axis=1).reshape(w.shape)


def qwen3vl(tower: Tower, w: Weights) -> torch.Tensor:
    """Qwen3-VL: rows and their further parts side by side."""
    config = qwen3.Qwen3VLVisionConfig(
        depth=tower.layers,
        hidden_size=tower.d,
        intermediate_size=tower.ff,
        num_heads=tower.heads,
        patch_size=tower.patch,
        out_hidden_size=tower.text,
        num_position_embeddings=tower.side**2,
        deepstack_visual_indexes=list(tower.deep),
    )
    config._attn_implementation = "eager"
    names = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj"}
    names |= {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}
    rest = {"v.post_ln.": "merger.norm.", "mm.0.": "merger.linear_fc1.", "mm.2.": "merger.linear_fc2."}
    rest |= {"v.position_embd.": "pos_embed.", "v.patch_embd.bias": "patch_embed.proj.bias"}
    for i, il in enumerate(tower.deep):
        for old, new in (("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2")):
            rest[f"v.deepstack.{il}.{old}."] = f"deepstack_merger_list.{i}.{new}."
    state = renamed(w, layers(tower.layers, names, "blocks") | rest)
    state["patch_embed.proj.weight"] = frames_of(w)
    found = load(qwen3.Qwen3VLVisionModel(config), state)(*patches(tower, 2, 2))
    return torch.cat([found.pooler_output, *found.deepstack_features], dim=-1)


def halves(tower: Tower, w: np.ndarray, *, in_turn: bool) -> np.ndarray:
    """Rows of q or k whose pairs are neighbours, reordered so that they are half a head apart.

    in_turn: the pairs that turn by columns and by rows follow each other in turn.
    """
    n = tower.d // tower.heads // 2
    pairs = w.reshape(tower.heads, n, 2, -1)
    if in_turn:
        pairs = pairs.reshape(tower.heads, 2, n // 2, 2, -1).transpose(0, 2, 1, 3, 4).reshape(tower.heads, n, 2, -1)
    return pairs.transpose(0, 2, 1, 3).reshape(w.shape)


def pixtral_rows(tower: Tower, w: Weights) -> torch.Tensor:
    """Pixtral and Mistral 3, with the row of [IMG_BREAK] between lines, and LightOnOCR without."""
    config = pixtral.PixtralVisionConfig(
        hidden_size=tower.d,
        intermediate_size=tower.ff,
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        patch_size=tower.patch,
        image_size=1024,
        hidden_act="silu",
    )
    config._attn_implementation = "eager"
    names = {"ln1": "attention_norm", "ln2": "ffn_norm", "attn_out": "attention.o_proj"}
    names |= {f"attn_{part}": f"attention.{part}_proj" for part in "qkv"}
    names |= {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
    w = {k: halves(tower, v, in_turn=False) if "attn_q" in k or "attn_k" in k else v for k, v in w.items()}
    state = renamed(w, layers(tower.layers, names, "transformer.layers") | {"v.pre_ln.": "ln_pre."})
    state["patch_conv.weight"] = w["v.patch_embd.weight"]
    image = torch.from_numpy(pixels(tower)).permute(2, 0, 1)[None]
    x = load(pixtral.PixtralVisionModel(config), state)(image).last_hidden_state
    linears = {"mm.1.": "linear_1.", "mm.2.": "linear_2."}
    whole = {"vision_config": config.to_dict(), "projector_hidden_act": "gelu"}
    if tower.merge > 1:
        text = {"model_type": "mistral", "hidden_size": tower.text, "rms_norm_eps": tower.eps}
        whole |= {"multimodal_projector_bias": True, "text_config": text}
        projector = mistral3.Mistral3MultiModalProjector(
            mistral3.Mistral3Config(**whole, spatial_merge_size=tower.merge)
        )
        linears |= {"mm.input_norm.": "norm.", "mm.patch_merger.": "patch_merger.merging_layer."}
        found = load(projector, renamed(w, linears))(x[0], [image.shape[-2:]])
    else:
        text = {"model_type": "mistral", "hidden_size": tower.text}
        projector = llava.LlavaMultiModalProjector(
            llava.LlavaConfig(**whole, vision_feature_layer=-1, text_config=text)
        )
        found = load(projector, renamed(w, linears))(x)[0]
    if tower.kind == "lightonocr":
        return found
    lines = found.reshape(image.shape[-2] // tower.patch // tower.merge, -1, tower.text)
    end = torch.from_numpy(w["v.token_embd.img_break"]).expand(len(lines), 1, tower.text)
    return torch.cat([lines, end], dim=1).reshape(-1, tower.text)[:-1]


def kimi_rows(tower: Tower, w: Weights) -> torch.Tensor:
    """Kimi K2.5."""
    config = kimi.Kimi_K25VisionConfig(
        hidden_size=tower.d,
        intermediate_size=tower.ff,
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        patch_size=tower.patch,
        pos_emb_height=tower.side,
        pos_emb_width=tower.side,
    )
    config._attn_implementation = "eager"
    names = {"ln1": "norm1", "ln2": "norm2", "attn_out": "attn.proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    names |= {f"attn_{part}": f"attn.{part}_proj" for part in "qkv"}
    w = {k: halves(tower, v, in_turn=True) if "attn_q" in k or "attn_k" in k else v for k, v in w.items()}
    rest = {"v.patch_embd.": "patch_embed.proj.", "v.post_ln.": "final_layernorm."}
    state = renamed(w, layers(tower.layers, names, "layers") | rest)
    state["patch_embed.pos_emb.position_embeddings"] = w["v.position_embd.weight"]
    flat, grid = patches(tower, 1, 1)
    merged = load(kimi.Kimi_K25VisionModel(config), state)(flat[:, :, 0], grid_thw=grid).pooler_output
    text = {"model_type": "deepseek_v3", "hidden_size": tower.text}
    whole = kimi.Kimi_K25Config(text_config=text, vision_config=config.to_dict(), projection_hidden_size=tower.d)
    names = {"mm.input_norm.": "pre_norm.", "mm.1.": "in_proj.", "mm.2.": "out_proj."}
    return load(kimi.Kimi_K25MultimodalProjection(whole), renamed(w, names))(merged).reshape(-1, tower.text)


def paddle_rows(tower: Tower, w: Weights) -> torch.Tensor:
    """PaddleOCR-VL."""
    config = paddleocr.PaddleOCRVisionConfig(
        hidden_size=tower.d,
        intermediate_size=tower.ff,
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        patch_size=tower.patch,
        image_size=tower.side * tower.patch,
        layer_norm_eps=tower.eps,
    )
    config._attn_implementation = "eager"
    names = {"ln1": "layer_norm1", "ln2": "layer_norm2", "attn_out": "self_attn.out_proj"}
    names |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    rest = {"v.patch_embd.": "embeddings.patch_embedding.", "v.position_embd.": "embeddings.position_embedding."}
    state = renamed(w, layers(tower.layers, names, "encoder.layers") | rest | {"v.post_ln.": "post_layernorm."})
    flat, grid = patches(tower, 1, 1)
    found = load(paddleocr.PaddleOCRVisionTransformer(config), state)(flat[None, :, :, 0], grid_thw=grid)
    whole = paddleocr.PaddleOCRVLConfig(text_config={"hidden_size": tower.text}, vision_config=config.to_dict())
    names = {"mm.input_norm.": "pre_norm.", "mm.1.": "linear_1.", "mm.2.": "linear_2."}
    projector = load(paddleocr.PaddleOCRProjector(whole), renamed(w, names))
    return projector(found.last_hidden_state.reshape(-1, tower.d), grid)


def dots3note_rows(tower: Tower, w: Weights) -> torch.Tensor:
    """dots3 note."""
    inner, experts = w["v.blk.1.ffn_gate_exps.weight"], "blocks.1.mlp.experts"
    config = dots3note.Dots3NoteVisionConfig(
        hidden_size=tower.d,
        intermediate_size=tower.ff,
        moe_intermediate_size=inner.shape[1],
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        patch_size=tower.patch,
        rms_norm_eps=tower.eps,
        pyramid_num_routed=[-1, len(inner), -1],
        capacity_factor=tower.further["expert_used_count"],
        adapter_in_dim=tower.d,
        adapter_out_dim=tower.text,
    )
    config._attn_implementation = config._experts_implementation = "eager"
    names = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj"}
    names |= {f"attn_{part}_norm": f"attn.{part}_norm" for part in "qk"} | {"ffn_gate_inp": "mlp.gate"}
    names |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    rest = {"v.patch_embd.": "patch_embed.proj.", "v.pre_ln.": "patch_embed.norm.", "mm.post_norm.": "norm."}
    rest |= {"mm.input_norm.": "merger.ln_q.", "mm.0.": "merger.mlp.0.", "mm.2.": "merger.mlp.2."}
    state = renamed(w, layers(tower.layers, names, "blocks") | rest)
    state["blocks.1.mlp.e_score_correction_bias"] = w["v.blk.1.exp_probs_b.weight"]
    state[f"{experts}.gate_up_proj"] = np.concatenate([inner, w["v.blk.1.ffn_up_exps.weight"]], axis=1)
    state[f"{experts}.down_proj"] = w["v.blk.1.ffn_down_exps.weight"]
    flat, grid = patches(tower, 2, 1)
    return load(dots3note.Dots3NoteVisionModel(config), state)(flat, grid).pooler_output


def glm_rows(tower: Tower, w: Weights) -> torch.Tensor:
    """GLM-4.1V, GLM-OCR and GLM-5.3 Flash."""
    sizes = {"depth": tower.layers, "hidden_size": tower.d, "num_heads": tower.heads, "patch_size": tower.patch}
    sizes |= {"rms_norm_eps": tower.eps, "out_hidden_size": tower.text}
    inner = len(w["mm.gate.weight"])
    if tower.side:
        module, size = glm4v.Glm4vVisionModel, tower.side * tower.patch
        config = glm4v.Glm4vVisionConfig(intermediate_size=inner, image_size=size, **sizes)
    elif tower.kind == "glm4v":
        module = glm_ocr.GlmOcrVisionModel
        config = glm_ocr.GlmOcrVisionConfig(intermediate_size=tower.ff, **sizes)
    else:
        module = glm5.Glm5NextVisionModel
        limit = tower.further["swiglu_clamp"]
        config = glm5.Glm5NextVisionConfig(
            intermediate_size=tower.ff, projection_intermediate_size=inner, swiglu_limit=limit, **sizes
        )
    config._attn_implementation = "eager"
    names = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj"}
    names |= {f"attn_{part}_norm": f"attn.{part}_norm" for part in "qk"}
    names |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    rest = {f"mm.{part}.": f"merger.{part}_proj." for part in ("gate", "up", "down")}
    rest |= {"v.norm_embd.": "post_conv_layernorm.", "v.post_ln.": "post_layernorm.", "mm.patch_merger.": "downsample."}
    rest |= {"mm.model.fc.": "merger.proj.", "mm.post_norm.": "merger.post_projection_norm."}
    rest |= {"v.position_embd.": "embeddings.position_embedding.", "v.patch_embd.bias": "patch_embed.proj.bias"}
    state = renamed(w, layers(tower.layers, names, "blocks") | rest)
    state["patch_embed.proj.weight"] = frames_of(w)
    return load(module(config), state)(*patches(tower, 2, 2)).pooler_output


def step_rows(tower: Tower, w: Weights) -> torch.Tensor:
    """Step 3.7 Flash."""
    config = step3.Step3p7VisionConfig(
        hidden_size=tower.d,
        mlp_ratio=(tower.ff + 0.5) / tower.d,
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        patch_size=tower.patch,
        image_size=tower.side * tower.patch,
        layer_norm_eps=tower.eps,
    )
    config._attn_implementation = "eager"
    w = dict(w)
    for name in [name for name in w if "attn_qkv" in name]:
        q, k, v = np.split(w[name], 3)
        parts = halves(tower, q, in_turn=False), halves(tower, k, in_turn=False), v
        w |= {name.replace("qkv", part): rows for part, rows in zip("qkv", parts, strict=True)}
    names = {"ln1": "layernorm_before", "ln2": "layernorm_after", "attn_out": "self_attn.out_proj"}
    names |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    rest = {"v.patch_embd.": "embeddings.patch_embedding.", "v.position_embd.": "embeddings.position_embedding."}
    rest |= {"v.pre_ln.": "pre_layernorm.", "mm.0.": "downsampler1.", "mm.1.": "downsampler2."}
    state = renamed(w, layers(tower.layers, names, "layers") | rest)
    for il, i in [(il, i) for il in range(tower.layers) for i in (1, 2)]:
        state[f"layers.{il}.lambda_{i}"] = w[f"v.blk.{il}.ls{i}.weight"]
    image = torch.from_numpy(pixels(tower).transpose(2, 0, 1)[None].copy())
    found = load(step3.Step3p7VisionModel(config), state)(image).last_hidden_state[0]
    return found @ torch.from_numpy(w["mm.model.fc.weight"].T.copy())


MODELS: dict[str, Callable[[Tower, Weights], torch.Tensor]] = {
    "qwen2vl": qwen,
    "qwen25vl": qwen,
    "qwen3vl": qwen3vl,
    "pixtral": pixtral_rows,
    "mistral3": pixtral_rows,
    "kimik25": kimi_rows,
    "glm4v": glm_rows,
    "glm_ocr": glm_rows,
    "glm5v": glm_rows,
    "dots3note_v": dots3note_rows,
    "lightonocr": pixtral_rows,
    "exaone4_5": exaone,
    "minimax_m3": minimax,
    "paddleocr": paddle_rows,
    "step3vl": step_rows,
}


if __name__ == "__main__":
    record(MODELS, {**TOWERS, "step3vl": STEP3VL}, list(GOLDEN_ROWS), GOLDENS)
