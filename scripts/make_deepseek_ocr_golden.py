"""Records the float32 rows that transformers makes of random pictures with the encoder of
tests/cpu/media/deepseek_ocr_tower.py, and logits of the text part of
tests/cpu/convert/deepseek_ocr_checkpoints.py (its Unlimited-OCR has those of DeepSeek-OCR, the text part beside a
window).

pip install torch transformers        # 5.24 or newer
python -m scripts.make_deepseek_ocr_golden
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.models.unlimited_ocr import configuration_unlimited_ocr as configuration
from transformers.models.unlimited_ocr import modeling_unlimited_ocr as modeling

from scripts.tower_goldens import State, load
from tests.cpu.convert.deepseek_ocr_checkpoints import LANGUAGE, TEXT
from tests.cpu.convert.seeded_checkpoints import tokens, weights
from tests.cpu.media.deepseek_ocr2_tower import Ocr2Tower
from tests.cpu.media.deepseek_ocr_tower import GOLDEN, GOLDEN_ROWS, OcrTower
from tests.cpu.media.projector_files import Weights

LOGIT_ROWS = (0, 3, 30, 69)
N_COLUMNS = 96

SAM_LAYER = {
    "pre_ln": "layer_norm1",
    "post_ln": "layer_norm2",
    "attn.qkv": "attn.qkv",
    "attn.out": "attn.proj",
    "mlp.lin1": "mlp.lin1",
    "mlp.lin2": "mlp.lin2",
}
SAM = {
    "v.sam.patch_embd": "patch_embed.projection",
    "v.sam.neck.0": "neck.conv1",
    "v.sam.neck.1": "neck.layer_norm1",
    "v.sam.neck.2": "neck.conv2",
    "v.sam.neck.3": "neck.layer_norm2",
    "v.sam.net_2": "proj.conv1",
    "v.sam.net_3": "proj.conv2",
}
CLIP_LAYER = {"ln1": "layer_norm1", "ln2": "layer_norm2", "attn_out": "self_attn.out_proj"}
CLIP_LAYER |= {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}


def sam_state(tower: OcrTower, w: Weights) -> State:
    """Tensors of the first encoder."""
    found = {"sam_encoder.pos_embed": w["v.sam.pos_embd.weight"][None]}
    names = dict(SAM)
    for il in range(tower.sam_layers):
        names |= {f"v.sam.blk.{il}.{mine}": f"layers.{il}.{theirs}" for mine, theirs in SAM_LAYER.items()}
        for part in "hw":
            found[f"sam_encoder.layers.{il}.attn.rel_pos_{part}"] = w[f"v.sam.blk.{il}.attn.pos_{part}.weight"]
    for name, value in w.items():
        head, _, tail = name.rpartition(".")
        if head in names:
            found[f"sam_encoder.{names[head]}.{tail}"] = value
    return found


def clip_state(tower: OcrTower, w: Weights) -> State:
    """Tensors of the second one."""
    prefix = "vision_encoder"
    found = {
        f"{prefix}.embeddings.class_embedding": w["v.class_embd"],
        f"{prefix}.embeddings.position_embedding.weight": w["v.position_embd.weight"],
    }
    for end in ("weight", "bias"):
        found[f"{prefix}.pre_layrnorm.{end}"] = w[f"v.pre_ln.{end}"]
        for il in range(tower.layers):
            target = f"{prefix}.encoder.layers.{il}"
            for mine, theirs in CLIP_LAYER.items():
                found[f"{target}.{theirs}.{end}"] = w[f"v.blk.{il}.{mine}.{end}"]
            parts = np.split(w[f"v.blk.{il}.attn_qkv.{end}"], 3)
            found |= {f"{target}.self_attn.{x}_proj.{end}": part for x, part in zip("qkv", parts, strict=True)}
    return found


def sam_sizes(tower: OcrTower | Ocr2Tower) -> dict[str, Any]:
    """Of the first encoder, as its configuration names them."""
    return {
        "hidden_size": tower.sam,
        "num_hidden_layers": tower.sam_layers,
        "num_attention_heads": tower.sam_heads,
        "mlp_dim": 2 * tower.sam,
        "output_channels": tower.neck,
        "downsample_channels": [2 * tower.neck, tower.d],
        "image_size": 16 * tower.side,
        "patch_size": 16,
        "window_size": tower.window,
        "global_attn_indexes": [2],
    }


def config(tower: OcrTower) -> configuration.UnlimitedOcrVisionConfig:
    """Of both encoders."""
    sam = configuration.UnlimitedOcrSamVisionConfig(**sam_sizes(tower))
    clip = configuration.UnlimitedOcrVisionEncoderConfig(
        hidden_size=tower.d,
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        intermediate_size=tower.ff,
        image_size=tower.side // 4,
        patch_size=1,
    )
    return configuration.UnlimitedOcrVisionConfig(sam_config=sam.to_dict(), encoder_config=clip.to_dict())


def logits() -> np.ndarray:
    """Of the tokens of seeded checkpoints [T, V], without a window."""
    sizes = {name: value for name, value in LANGUAGE.items() if name not in ("architectures", "model_type")}
    text = configuration.UnlimitedOcrTextConfig(**sizes, layer_types=["full_attention"] * LANGUAGE["num_hidden_layers"])
    text._experts_implementation = "eager"
    model = modeling.UnlimitedOcrTextModel._from_config(text, attn_implementation="eager")
    w = weights(TEXT)
    head = w.pop("lm_head.weight")
    state = {name.removeprefix("model."): value for name, value in w.items() if ".experts." not in name}
    for il in range(text.num_hidden_layers):
        for target, names in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            found = [
                np.concatenate([w[f"model.layers.{il}.mlp.experts.{e}.{name}_proj.weight"] for name in names])
                for e in range(text.n_routed_experts)
                if f"model.layers.{il}.mlp.gate.weight" in w
            ]
            if found:
                state[f"layers.{il}.mlp.experts.{target}"] = np.stack(found)
    load(model, state)
    with torch.no_grad():
        states = model(torch.from_numpy(tokens())[None].long(), use_cache=False).last_hidden_state[0]
        return torch.nn.functional.linear(states, torch.from_numpy(head)).numpy()


def main() -> None:
    """Writes the file."""
    tower = OcrTower()
    w = tower.weights()
    model = modeling.UnlimitedOcrVisionModel._from_config(config(tower), attn_implementation="eager")
    load(model, sam_state(tower, w) | clip_state(tower, w))
    matrix, bias = (torch.from_numpy(w[f"mm.model.fc.{end}"]) for end in ("weight", "bias"))
    found = {}
    for side in (128, 64):
        picture = np.random.default_rng(3).integers(0, 256, (side, side, 3), dtype=np.uint8)
        pixels = torch.tensor((picture / 255 - 0.5) / 0.5, dtype=torch.float32).permute(2, 0, 1)[None]
        with torch.no_grad():
            rows = torch.nn.functional.linear(model(pixels).last_hidden_state[0], matrix, bias).numpy()
        found[f"rows{side}"] = rows[list(GOLDEN_ROWS if len(rows) > 1 else (0,))]
    found |= {"logits": logits()[list(LOGIT_ROWS), :N_COLUMNS], "logit_rows": np.int32(LOGIT_ROWS)}
    np.savez_compressed(GOLDEN, **found)
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
