"""Records the float32 rows that transformers makes of a random picture with the encoder of
tests/cpu/media/hunyuan_tower.py.

pip install torch transformers        # 5.24 or newer
python -m scripts.make_hunyuan_golden
"""

from __future__ import annotations

import numpy as np
import torch
from transformers.models.hunyuan_vl import configuration_hunyuan_vl as configuration
from transformers.models.hunyuan_vl import modeling_hunyuan_vl as modeling

from scripts.tower_goldens import layers, load, renamed
from tests.cpu.media.hunyuan_tower import GOLDEN, GOLDEN_ROWS, TOWER

LAYER = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
MERGER = {
    "mm.pre_norm.": "before_rms.",
    "mm.0.": "proj_conv.",
    "mm.2.": "proj_out.",
    "mm.model.fc.": "mlp.",
    "mm.post_norm.": "after_rms.",
    "mm.image_": "image_",
    "v.image_": "image_",
}


def main() -> None:
    """Writes the file."""
    tower, p = TOWER, TOWER.patch
    w = tower.weights()
    config = configuration.HunYuanVLVisionConfig(
        hidden_size=tower.d,
        intermediate_size=tower.ff,
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        patch_size=p,
        text_hidden_size=tower.text,
        rms_norm_eps=tower.eps,
        max_image_size=tower.side * p,
    )
    config._attn_implementation = "eager"
    names = {old: f"patch_merger.{new}" for old, new in MERGER.items()}
    state = renamed(w, layers(tower.layers, LAYER, "layers") | names)
    state |= {f"embeddings.patch_embedding.{end}": w[f"v.patch_embd.{end}"] for end in ("weight", "bias")}
    table = w["v.position_embd.weight"]  # the first place is that of a class token
    state["embeddings.position_embedding.weight"] = np.concatenate([table[:1], table])
    model = load(modeling.HunYuanVLVisionTransformer(config), state, unused="patch_merger.image_sep")
    image = (tower.picture() / 255 - np.array(tower.mean)) / np.array(tower.std)
    rows, columns = image.shape[0] // p, image.shape[1] // p
    patches = image.reshape(rows, p, columns, p, 3).transpose(0, 2, 4, 1, 3).reshape(rows * columns, -1)
    with torch.no_grad():
        found = model(torch.tensor(patches, dtype=torch.float32), torch.tensor([[1, rows, columns]]))
    kept = found.pooler_output[0].numpy()
    np.savez_compressed(GOLDEN, n=np.int32(len(kept)), rows=kept[list(GOLDEN_ROWS)])
    print(f"{GOLDEN}: {len(kept)} rows, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
