"""Records the float32 rows that transformers makes of random pictures with the encoder of
tests/cpu/media/deepseek_ocr2_tower.py.

pip install torch transformers        # 5.24 or newer
python -m scripts.make_deepseek_ocr2_golden
"""

from __future__ import annotations

import numpy as np
import torch
from transformers.models.deepseek_ocr2 import configuration_deepseek_ocr2 as configuration
from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as modeling

from scripts.make_deepseek_ocr_golden import sam_sizes, sam_state
from scripts.tower_goldens import State, load
from tests.cpu.media.deepseek_ocr2_tower import GOLDEN, GOLDEN_ROWS, TILE, WHOLE, Ocr2Tower
from tests.cpu.media.projector_files import Weights

LAYER = {
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def state(w: Weights, n_layers: int, queries: str) -> State:
    """Tensors of the second encoder, and its queries for pictures of a size."""
    prefix = "vision_encoder"
    names = {"v.post_ln": f"{prefix}.norm"}
    for il in range(n_layers):
        names |= {f"v.blk.{il}.{mine}": f"{prefix}.layers.{il}.{theirs}" for mine, theirs in LAYER.items()}
    found = {
        f"{names[head]}.{end}": value
        for name, value in w.items()
        for head, _, end in [name.rpartition(".")]
        if head in names
    }
    return found | {"query_768_resolution.weight": w[queries]}


def config(tower: Ocr2Tower) -> configuration.DeepseekOcr2VisionConfig:
    """Of both encoders."""
    sam = configuration.DeepseekOcr2SamVisionConfig(**sam_sizes(tower))
    encoder = configuration.DeepseekOcr2VisionEncoderConfig(
        hidden_size=tower.d,
        intermediate_size=tower.ff,
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        num_key_value_heads=tower.kv,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    return configuration.DeepseekOcr2VisionConfig(sam_config=sam.to_dict(), encoder_config=encoder.to_dict())


def main() -> None:
    """Writes the file."""
    tower = Ocr2Tower()
    w = tower.weights()
    matrix, bias = (torch.from_numpy(w[f"mm.model.fc.{end}"]) for end in ("weight", "bias"))
    found = {}
    for side, name, count in zip((TILE, WHOLE), (768, 1024), tower.states, strict=True):
        model = modeling.DeepseekOcr2VisionModel._from_config(config(tower), attn_implementation="eager")
        # Its choice is by the published sizes: small pictures read what stands for tiles.
        model.query_768_resolution = torch.nn.Embedding(count, tower.d)
        wanted = sam_state(tower, w) | state(w, tower.layers, f"v.resample_query_{name}.weight")
        load(model, wanted, unused="query_1024_resolution")
        picture = np.random.default_rng(3).integers(0, 256, (side, side, 3), dtype=np.uint8)
        pixels = torch.tensor((picture / 255 - 0.5) / 0.5, dtype=torch.float32).permute(2, 0, 1)[None]
        with torch.no_grad():
            rows = torch.nn.functional.linear(model(pixels).last_hidden_state[0], matrix, bias).numpy()
        found[f"rows{side}"] = rows[list(GOLDEN_ROWS)]
    np.savez_compressed(GOLDEN, **found)
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
