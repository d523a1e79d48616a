"""Records the float32 rows that transformers makes of a random picture with the encoder of
tests/cpu/media/granite4_tower.py.

pip install torch transformers        # 5.24 or newer
python -m scripts.make_granite4_golden
"""

from __future__ import annotations

import numpy as np
import torch
from transformers.models.granite4_vision import modeling_granite4_vision as modeling

from scripts.tower_goldens import State, layers, load, renamed
from tests.cpu.convert.granite4_vision_checkpoints import BLOCK, LAYER
from tests.cpu.media.granite4_tower import GOLDEN, GOLDEN_ROWS, HEAD, QUERY, SIDE, TOWER, WINDOW
from tests.cpu.media.projector_files import Weights


def block_state(w: Weights, i: int, target: str) -> State:
    """Tensors of a block under transformers' names."""
    p = f"v.proj_blk.{i}."
    found = renamed(w, {f"{p}{old}.": f"{target}.{new}." for old, new in BLOCK.items()})
    return found | {f"{target}.query": w[f"{p}query"][None], f"{target}.image_positions": w[f"{p}img_pos"][None]}


def main() -> None:
    """Writes the file."""
    tower = TOWER
    w, side = tower.weights(), SIDE * tower.patch
    n = tower.layers
    spatial = [i for i, (_, corner) in enumerate(tower.blocks) if corner >= 0]
    means = [i for i, (_, corner) in enumerate(tower.blocks) if corner < 0]
    config = modeling.Granite4VisionConfig(
        text_config={
            "model_type": "granite4_vision_text",
            "hidden_size": tower.text,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 8,
            "vocab_size": 8,
            "pad_token_id": 0,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": tower.d,
            "intermediate_size": tower.ff,
            "num_hidden_layers": n,
            "num_attention_heads": tower.heads,
            "image_size": side,
            "patch_size": tower.patch,
            "vision_use_head": False,
        },
        qformer_config={
            "model_type": "blip_2_qformer",
            "num_hidden_layers": 1,
            "intermediate_size": 40,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
        },
        downsample_rate=f"{QUERY}/{WINDOW}",
        image_grid_pinpoints=[[side, 2 * side]],
        # Layers counted from the end, as in published files.
        deepstack_layer_map=[[tower.blocks[i][0] - n, i] for i in means],
        spatial_vision_layer=tower.blocks[spatial[0]][0] - n,
        spatial_target_layers=[0, 1, 2, 3],
        use_image_newline_parameter=True,
        image_token_id=7,
        attn_implementation="eager",
    )
    assert config.qformer_config.hidden_size // config.qformer_config.num_attention_heads == HEAD
    tower_names = {"v.post_ln.": "vision_tower.post_layernorm."}
    state = renamed(w, layers(n, LAYER, "vision_tower.encoder.layers") | tower_names)
    state |= {f"vision_tower.embeddings.patch_embedding.{e}": w[f"v.patch_embd.{e}"] for e in ("weight", "bias")}
    state["vision_tower.embeddings.position_embedding.weight"] = w["v.position_embd.weight"]
    for place, i in enumerate(means):
        state |= block_state(w, i, f"layerwise_projectors.{place}")
    for corner in range(4):  # those that the tests' file lacks are not looked at
        i = next((i for i in spatial if tower.blocks[i][1] == corner), spatial[0])
        state |= block_state(w, i, f"spatial_projectors.{corner}")
    state["image_newline"] = w["v.image_newline"]
    model = load(modeling.Granite4VisionModel(config), state, unused="language_model")
    image = np.random.default_rng(3).integers(0, 256, (side, 2 * side, 3), dtype=np.uint8)
    values = (image / 255 - np.array(tower.mean)) / np.array(tower.std)
    tiles = np.stack([values[:, :side], values[:, :side], values[:, side:]]).transpose(0, 3, 1, 2)
    with torch.no_grad():
        found = model.get_image_features(
            torch.tensor(tiles[None], dtype=torch.float32),
            torch.tensor([[side, 2 * side]]),
            vision_feature_select_strategy="full",
            return_dict=True,
        )
    parts = {}
    for place, (_, features) in enumerate(found.deepstack_features):
        corner = place - len(means)
        i = means[place] if corner < 0 else next((i for i in spatial if tower.blocks[i][1] == corner), None)
        parts[i] = features[0].numpy()
    rows = np.concatenate([parts[i] for i in range(len(tower.blocks))], axis=1)
    np.savez_compressed(GOLDEN, n=np.int32(len(rows)), rows=rows[list(GOLDEN_ROWS)])
    print(f"{GOLDEN}: {len(rows)} rows, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
