"""Records the rows that vision towers of transformers make of random pictures in float32, for test_vision_tiles.py.

pip install torch transformers        # 5.24 or newer
python -m scripts.make_tile_golden
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers.models.clip import modeling_clip as clip
from transformers.models.cohere2_vision import modeling_cohere2_vision as cohere2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.gemma4_unified import modeling_gemma4_unified as unified
from transformers.models.idefics3 import modeling_idefics3 as idefics3
from transformers.models.internvl import modeling_internvl as internvl
from transformers.models.janus import modeling_janus as janus
from transformers.models.lfm2_vl import modeling_lfm2_vl as lfm2
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.llava import modeling_llava as llava
from transformers.models.minicpmv4_6 import modeling_minicpmv4_6 as minicpm
from transformers.models.siglip import modeling_siglip as siglip
from transformers.models.siglip2 import modeling_siglip2 as siglip2

from scripts.tower_goldens import State, layers, load, record, renamed
from tests.cpu.media.tile_towers import GOLDEN_ROWS, GOLDENS, TOWERS, golden_picture
from tests.cpu.media.tile_weights import TileTower, Weights


def pixels(t: TileTower) -> torch.Tensor:
    """The picture as float32 [1, 3, h, w]."""
    x = (golden_picture(t) / 255 - np.array(t.mean)) / np.array(t.std)
    return torch.from_numpy(x.astype(np.float32)).permute(2, 0, 1)[None]


def flat_patches(t: TileTower) -> tuple[torch.Tensor, int, int]:
    """Patches [1, n, p * p * 3], colours innermost, with their rows and columns."""
    x, p = pixels(t)[0].permute(1, 2, 0), t.patch
    rows, columns = x.shape[0] // p, x.shape[1] // p
    grid = x.reshape(rows, p, columns, p, 3).permute(0, 2, 1, 3, 4)
    return grid.reshape(1, rows * columns, -1), rows, columns


def colours_inside(t: TileTower, w: Weights) -> np.ndarray:
    """Filters as a matrix for such patches."""
    return w["v.patch_embd.weight"].reshape(t.d, 3, t.patch, t.patch).transpose(0, 2, 3, 1).reshape(t.d, -1)


def sizes(t: TileTower) -> dict[str, int | float | str]:
    """What most configurations call alike."""
    return {
        "hidden_size": t.d,
        "intermediate_size": t.ff,
        "num_hidden_layers": t.layers,
        "num_attention_heads": t.heads,
        "patch_size": t.patch,
        "image_size": t.side,
        "attn_implementation": "eager",
    }


SIGLIP = {"ln1": "layer_norm1", "ln2": "layer_norm2", "attn_out": "self_attn.out_proj"}
SIGLIP |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
SIGLIP |= {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
TEXT = {"model_type": "llama", "num_attention_heads": 2}


def siglip_state(t: TileTower, w: Weights) -> State:
    names = {"v.patch_embd.": "embeddings.patch_embedding.", "v.position_embd.": "embeddings.position_embedding."}
    return renamed(w, layers(t.layers, SIGLIP, "encoder.layers") | names | {"v.post_ln.": "post_layernorm."})


def gemma3_rows(t: TileTower, w: Weights) -> torch.Tensor:
    config = siglip.SiglipVisionConfig(**sizes(t), vision_use_head=False, layer_norm_eps=t.eps)
    x = load(siglip.SiglipVisionModel(config), siglip_state(t, w))(pixels(t)).last_hidden_state
    text = {"model_type": "gemma3_text", "hidden_size": t.text}
    whole = gemma3.Gemma3Config(
        vision_config=config.to_dict(), text_config=text, mm_tokens_per_image=(t.grid // 4) ** 2
    )
    state = {"mm_input_projection_weight": w["mm.input_projection.weight"]}
    state["mm_soft_emb_norm.weight"] = w["mm.soft_emb_norm.weight"] - 1
    return load(gemma3.Gemma3MultiModalProjector(whole), state)(x)[0]


def llava_rows(t: TileTower, w: Weights) -> torch.Tensor:
    config = clip.CLIPVisionConfig(**sizes(t), layer_norm_eps=t.eps)
    names = {"v.class_embd": "embeddings.class_embedding", "v.position_embd.": "embeddings.position_embedding."}
    names |= {"v.patch_embd.": "embeddings.patch_embedding.", "v.pre_ln.": "pre_layrnorm."}
    state = renamed(w, layers(t.layers, SIGLIP, "encoder.layers") | names)
    tower = load(clip.CLIPVisionModel(config), state, "post_layernorm")
    x = tower(pixels(t), output_hidden_states=True).hidden_states[-2][:, 1:]
    whole = llava.LlavaConfig(vision_config=config.to_dict(), text_config={**TEXT, "hidden_size": t.text})
    x = torch.nn.functional.linear(x, *tensors(w, "mm.0"))
    return torch.nn.functional.linear(llava.LlavaMultiModalProjector(whole).act(x), *tensors(w, "mm.2"))[0]


def tensors(w: Weights, name: str) -> list[torch.Tensor]:
    """Weight and bias."""
    return [torch.from_numpy(w[f"{name}.{end}"]) for end in ("weight", "bias") if f"{name}.{end}" in w]


def idefics3_rows(t: TileTower, w: Weights) -> torch.Tensor:
    config = idefics3.Idefics3VisionConfig(**sizes(t), layer_norm_eps=t.eps)
    tower = load(idefics3.Idefics3VisionTransformer(config), siglip_state(t, w))
    mask = torch.ones((1, t.grid, t.grid), dtype=torch.bool)
    x = tower(pixels(t), patch_attention_mask=mask).last_hidden_state
    text = {**TEXT, "hidden_size": t.text}
    whole = idefics3.Idefics3Config(vision_config=config.to_dict(), text_config=text, scale_factor=2)
    state = renamed(w, {"mm.model.fc.": "modality_projection.proj."})
    return load(idefics3.Idefics3Connector(whole), state)(x)[0]


def internvl_rows(t: TileTower, w: Weights) -> torch.Tensor:
    size = {**sizes(t), "image_size": [t.side, t.side], "patch_size": [t.patch, t.patch]}
    config = internvl.InternVLVisionConfig(**size, attention_bias=True, layer_norm_eps=t.eps)
    names = {"ln1": "layernorm_before", "ln2": "layernorm_after", "attn_out": "attention.projection_layer"}
    rest = {"v.class_embd": "embeddings.cls_token", "v.position_embd.weight": "embeddings.position_embeddings"}
    rest |= {"v.patch_embd.": "embeddings.patch_embeddings.projection."}
    state = renamed(w, layers(t.layers, names | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}, "encoder.layer") | rest)
    for i in range(t.layers):
        for part, end in ((p, e) for p in range(3) for e in ("weight", "bias")):
            rows = w[f"v.blk.{i}.attn_qkv.{end}"][part * t.d : (part + 1) * t.d]
            state[f"encoder.layer.{i}.attention.{'qkv'[part]}_proj.{end}"] = rows
        for n in (1, 2):
            state[f"encoder.layer.{i}.lambda_{n}"] = w[f"v.blk.{i}.ls{n}.weight"]
    state["embeddings.cls_token"] = w["v.class_embd"][None, None]
    state["embeddings.position_embeddings"] = w["v.position_embd.weight"][None]
    x = load(internvl.InternVLVisionModel(config), state)(pixels(t)).last_hidden_state[:, 1:]
    x = internvl.InternVLModel.pixel_shuffle(None, x.reshape(1, t.grid, t.grid, -1), scale_factor=0.5)
    whole = internvl.InternVLConfig(vision_config=config.to_dict(), text_config={**TEXT, "hidden_size": 40})
    projector = internvl.InternVLMultiModalProjector(whole)
    projector.linear_2 = torch.nn.Linear(40, t.text)
    names = {"mm.model.mlp.0.": "layer_norm.", "mm.model.mlp.1.": "linear_1.", "mm.model.mlp.3.": "linear_2."}
    return load(projector, renamed(w, names))(x.reshape(1, -1, x.shape[-1]))[0]


def gemma4_rows(t: TileTower, w: Weights) -> torch.Tensor:
    size = {name: value for name, value in sizes(t).items() if name != "image_size"}
    config = gemma4.Gemma4VisionConfig(
        **size,
        num_key_value_heads=t.heads,
        head_dim=t.d // t.heads,
        position_embedding_size=w["v.position_embd.weight"].shape[1],
        use_clipped_linears=True,
        standardize=True,
    )
    names = {
        "ln1": "input_layernorm",
        "ln2": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    }
    names |= {"attn_post_norm": "post_attention_layernorm", "attn_out": "self_attn.o_proj"}
    names |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    names |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
    names |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    state = renamed(w, layers(t.layers, names, "encoder.layers") | {"v.std_": "std_"})
    for name in list(state):
        if name.endswith("_proj.weight"):
            state[name.replace("_proj.weight", "_proj.linear.weight")] = state.pop(name)
        elif name.endswith(("_min", "_max")):
            state[name] = state[name].reshape(())
    state["patch_embedder.input_proj.weight"] = colours_inside(t, w)
    state["patch_embedder.position_embedding_table"] = w["v.position_embd.weight"]
    flat, rows, columns = flat_patches(t)
    places = torch.tensor([[x, y] for y in range(rows) for x in range(columns)])[None]
    tower = gemma4.Gemma4VisionModel(config)
    infinite = {
        name: np.float32(value.item()) for name, value in tower.named_buffers() if name.endswith(("_min", "_max"))
    }
    tower = load(tower, {**{name: np.asarray(value) for name, value in infinite.items()}, **state}, "rotary")
    x = tower(pixel_values=flat, pixel_position_ids=places).last_hidden_state
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + t.eps)
    return torch.nn.functional.linear(x.reshape(-1, t.d), *tensors(w, "mm.input_projection"))


def llama4_rows(t: TileTower, w: Weights) -> torch.Tensor:
    config = llama4.Llama4VisionConfig(
        **{**sizes(t), "intermediate_size": t.ff},
        norm_eps=t.eps,
        pixel_shuffle_ratio=0.5,
        projector_input_dim=40,
        projector_output_dim=40,
        vision_output_dim=44,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    names = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm", "attn_out": "self_attn.o_proj"}
    names |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
    names |= {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    rest = {"v.class_embd": "class_embedding", "v.position_embd.weight": "positional_embedding_vlm"}
    rest |= {"v.pre_ln.": "layernorm_pre.", "v.post_ln.": "layernorm_post.", "v.patch_embd.": "patch_embedding.linear."}
    rest |= {"mm.model.mlp.1.": "vision_adapter.mlp.fc1.", "mm.model.mlp.2.": "vision_adapter.mlp.fc2."}
    model = llama4.Llama4VisionModel(config)
    mlp = model.vision_adapter.mlp
    mlp.fc1, mlp.fc2 = torch.nn.Linear(4 * t.d, 40, bias=False), torch.nn.Linear(40, 44, bias=False)
    state = renamed(w, layers(t.layers, names, "model.layers") | rest)
    x = load(model, state)(pixels(t)).last_hidden_state
    return torch.nn.functional.linear(x, *tensors(w, "mm.model.fc")).reshape(-1, t.text)


def lfm2_rows(t: TileTower, w: Weights) -> torch.Tensor:
    size = {name: value for name, value in sizes(t).items() if name != "image_size"}
    config = siglip2.Siglip2VisionConfig(**size, num_patches=t.grid**2, vision_use_head=False, layer_norm_eps=t.eps)
    state = siglip_state(t, w) | {"embeddings.patch_embedding.weight": colours_inside(t, w)}
    flat, rows, columns = flat_patches(t)
    tower = load(siglip2.Siglip2VisionModel(config), state)
    mask = torch.ones((1, rows * columns), dtype=torch.int64)
    x = tower(flat, pixel_attention_mask=mask, spatial_shapes=torch.tensor([[rows, columns]])).last_hidden_state
    whole = lfm2.Lfm2VlConfig(
        vision_config=config.to_dict(), text_config={**TEXT, "hidden_size": t.text}, projector_hidden_size=40
    )
    names = {"mm.input_norm.": "layer_norm.", "mm.1.": "linear_1.", "mm.2.": "linear_2."}
    projector = load(lfm2.Lfm2VlMultiModalProjector(whole), renamed(w, names))
    return projector(x.reshape(1, rows, columns, -1)).reshape(-1, t.text)


def cohere2_rows(t: TileTower, w: Weights) -> torch.Tensor:
    config = siglip.SiglipVisionConfig(**sizes(t), vision_use_head=False, layer_norm_eps=t.eps)
    x = load(siglip.SiglipVisionModel(config), siglip_state(t, w))(pixels(t)).last_hidden_state
    whole = cohere2.Cohere2VisionConfig(
        vision_config=config.to_dict(),
        text_config={"model_type": "cohere2", "hidden_size": t.text, "num_attention_heads": 2},
        alignment_intermediate_size=40,
    )
    state = renamed(w, {"mm.1.": "linear_1.", "mm.2.": "linear_2."})
    return load(cohere2.Cohere2VisionMultiModalProjector(whole), state)(x).reshape(-1, t.text)


def janus_rows(t: TileTower, w: Weights) -> torch.Tensor:
    size = {name: value for name, value in sizes(t).items() if name != "intermediate_size"}
    config = janus.JanusVisionConfig(**size, mlp_ratio=t.ff / t.d, projection_dim=t.text, layer_norm_eps=t.eps)
    names = {**SIGLIP, "attn_out": "self_attn.projection_layer"}
    rest = {"v.patch_embd.": "embeddings.patch_embedding.", "v.position_embd.": "embeddings.position_embedding."}
    state = renamed(w, layers(t.layers, names, "encoder.layers") | rest | {"v.post_ln.": "post_layernorm."})
    x = load(janus.JanusVisionModel(config), state)(pixels(t)).last_hidden_state
    state = renamed(w, {"mm.0.": "fc1.", "mm.1.": "hidden_layers.0."})
    return load(janus.JanusVisionAlignerMLP(config), state)(x)[0]


def gemma4_unified_rows(t: TileTower, w: Weights) -> torch.Tensor:
    vision = unified.Gemma4UnifiedVisionConfig(
        patch_size=t.patch,
        pooling_kernel_size=3,
        mm_embed_dim=t.d,
        mm_posemb_size=w["v.position_embd.weight"].shape[1],
        output_proj_dims=t.d,
        rms_norm_eps=t.eps,
    )
    text = unified.Gemma4UnifiedTextConfig(hidden_size=t.text)
    names = {"v.patch_embd.": "patch_dense.", "mm.input_projection.": "multimodal_embedder.embedding_projection."}
    names |= {"v.patch_norm.1.": "patch_ln1.", "v.patch_norm.2.": "patch_ln2.", "v.patch_norm.3.": "pos_norm."}
    state = renamed(w, names)
    state["pos_embedding"] = w["v.position_embd.weight"].transpose(1, 0, 2)
    p, x = 3 * t.patch, pixels(t)[0]
    rows, columns = x.shape[1] // p, x.shape[2] // p
    flat = x.reshape(3, rows, p, columns, p).permute(1, 3, 0, 2, 4).reshape(1, rows * columns, -1)
    places = torch.tensor([[x, y] for y in range(rows) for x in range(columns)])[None]
    return load(unified.Gemma4UnifiedVisionEmbedder(vision, text), state)(flat, places).pooler_output[0]


def minicpmv46_rows(t: TileTower, w: Weights) -> torch.Tensor:
    config = minicpm.MiniCPMV4_6VisionConfig(
        **{**sizes(t), "image_size": 70 * t.patch},
        insert_layer_id=t.further["wa_layer_indexes"][0],
        layer_norm_eps=t.eps,
    )
    rest = {"v.patch_embd.": "embeddings.patch_embedding.", "v.position_embd.": "embeddings.position_embedding."}
    rest |= {"v.post_ln.": "post_layernorm.", "v.vit_merger.ln1.": "vit_merger.layer_norm1."}
    rest |= {f"v.vit_merger.attn_{part}.": f"vit_merger.self_attn.{part}_proj." for part in ("q", "k", "v", "out")}
    rest |= {"v.vit_merger.ds_ln.": "vit_merger.pre_norm.", "v.vit_merger.ds_ffn_up.": "vit_merger.linear_1."}
    rest |= {"v.vit_merger.ds_ffn_down.": "vit_merger.linear_2."}
    image = pixels(t)
    rows, columns = image.shape[2] // t.patch, image.shape[3] // t.patch
    strip = image.reshape(1, 3, rows, t.patch, columns * t.patch).permute(0, 1, 3, 2, 4).reshape(1, 3, t.patch, -1)
    tower = load(minicpm.MiniCPMV4_6VisionModel(config), renamed(w, layers(t.layers, SIGLIP, "encoder.layers") | rest))
    x = tower(strip, target_sizes=torch.tensor([[rows, columns]])).last_hidden_state
    merger = minicpm.MiniCPMV4_6DownsampleMLP(t.d, t.text)
    state = renamed(w, {"mm.input_norm.": "pre_norm.", "mm.up.": "linear_1.", "mm.down.": "linear_2."})
    squares = x.reshape(rows // 4, 2, columns // 4, 2, t.d).permute(0, 2, 1, 3, 4).reshape(-1, 4 * t.d)
    return load(merger, state)(squares)


MODELS: dict[str, Callable[[TileTower, Weights], torch.Tensor]] = {
    "gemma3": gemma3_rows,
    "llava": llava_rows,
    "internvl": internvl_rows,
    "idefics3": idefics3_rows,
    "gemma4": gemma4_rows,
    "llama4": llama4_rows,
    "lfm2": lfm2_rows,
    "gemma4_unified": gemma4_unified_rows,
    "cohere2": cohere2_rows,
    "janus": janus_rows,
    "minicpmv46": minicpmv46_rows,
}


if __name__ == "__main__":
    record(MODELS, TOWERS, list(GOLDEN_ROWS), GOLDENS)
