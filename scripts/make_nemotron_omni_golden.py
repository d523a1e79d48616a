"""Records the float32 rows that transformers makes of a random picture with the checkpoint of
tests/cpu/convert/nemotron_omni_checkpoints.py; those of a sound must be what tests/data has of its encoder.

pip install torch torchvision transformers        # 5.24 or newer
python -m scripts.make_nemotron_omni_golden
"""

from __future__ import annotations

import numpy as np
import torch
from transformers.models.nemotron_h_omni import modeling_nemotron_h_omni as modeling
from transformers.models.parakeet.feature_extraction_parakeet import ParakeetFeatureExtractor

from tests.cpu.convert import nemotron_omni_checkpoints as made
from tests.cpu.media.sound_kinds import GOLDEN_ROWS as SOUND_ROWS
from tests.cpu.media.sound_kinds import GOLDENS, golden_sound
from tests.cpu.media.tile_towers import golden_picture

RENAMED = {
    "mlp1.0.": "multi_modal_projector.layer_norm.",
    "mlp1.1.": "multi_modal_projector.linear_1.",
    "mlp1.3.": "multi_modal_projector.linear_2.",
    "sound_encoder.encoder.": "audio_tower.",
    "sound_projection.norm.": "embed_audio.layer_norm.",
    "sound_projection.linear1.": "embed_audio.linear_1.",
    "sound_projection.linear2.": "embed_audio.linear_2.",
    f"{made.PATCHES}.video_embedder": "vision_model.embeddings.video_patch_projection",
    f"{made.PATCHES}.embedder": "vision_model.embeddings.patch_projection",
    f"{made.PATCHES}.pos_embed": "vision_model.embeddings.position_embedding",
    f"{made.PATCHES}.cls_token.token": "vision_model.embeddings.cls_register_token",
    f"{made.RADIO}.model.blocks.": "vision_model.encoder.layer.",
}
UNREAD = ("feature_extractor", "input_conditioner")


def state() -> dict[str, torch.Tensor]:
    """Tensors of the checkpoint under the names of transformers' modules."""
    found = {}
    for name, value in (made.picture_state() | made.sound_state()).items():
        tensor, module = torch.from_numpy(np.array(value)), name
        for old, new in RENAMED.items():
            module = new + module.removeprefix(old) if module.startswith(old) else module
        module = module.replace("attn.proj", "attention.o_proj").replace(f"{made.RADIO}.", "vision_model.")
        if "attn.qkv" in module:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                found[module.replace("attn.qkv", f"attention.{part}_proj")] = rows
        elif not any(part in module for part in UNREAD):
            found[module] = tensor
    return found


def opened() -> modeling.NemotronH_Omni_Reasoning_V3:
    """The model, whose text part is any."""
    config, tower = made.config(), made.PICTURES
    config["vision_config"] = {
        "hidden_size": tower.d,
        "num_hidden_layers": tower.layers,
        "num_attention_heads": tower.heads,
        "mlp_ratio": tower.ff / tower.d,
        "patch_size": tower.patch,
        "max_img_size": made.STORED * tower.patch,
        "num_cls_tokens": 2,
        "num_registers": 1,
        "video_temporal_patch_size": 2,
    }
    config["sound_config"].pop("model_type")  # published files have a name that transformers does not know
    config["llm_config"] |= {"num_hidden_layers": 1, "layers_block_type": ["attention"], "vocab_size": 8}
    config["llm_config"] |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    names = ("architectures", "model_type", "ps_version")
    values = {key: value for key, value in config.items() if key not in names}
    whole = modeling.NemotronH_Omni_Reasoning_V3_Config(**values, attn_implementation="eager")
    model = modeling.NemotronH_Omni_Reasoning_V3(whole).float()
    missing, unexpected = model.load_state_dict(state(), strict=False)
    missing = [name for name in missing if not name.startswith("language_model") and "layer_scale" not in name]
    if missing or unexpected:
        raise SystemExit(f"missing {missing}, unexpected {unexpected}")
    return model.eval()


def main() -> None:
    """Writes the file."""
    model, tower = opened(), made.PICTURES
    values = (golden_picture(tower) / 255 - np.array(tower.mean)) / np.array(tower.std)
    grid, size = tower.grid, tower.patch
    patches = values.reshape(grid, size, grid, size, 3).transpose(0, 2, 4, 1, 3).reshape(grid**2, -1)
    listen = ParakeetFeatureExtractor(feature_size=made.SOUND.mel)
    frames = listen(golden_sound("parakeet"), sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        pixels = torch.tensor(patches, dtype=torch.float32)
        rows = model.get_image_features(pixels, torch.tensor([[grid, grid]])).pooler_output[0].numpy()
        heard = model.get_audio_features(frames["input_features"], frames["attention_mask"]).pooler_output.numpy()
    known = np.load(GOLDENS / "parakeet.npz")
    error = np.abs(heard[list(SOUND_ROWS)] - known["rows"]).max()
    print(f"sound: {len(heard)} rows, {known['n']} known, {error:.1e} apart")
    np.savez_compressed(made.GOLDEN, n=np.int32(len(rows)), rows=rows[list(made.GOLDEN_ROWS)])
    print(f"{made.GOLDEN}: {rows.shape}, |values| {np.abs(rows).mean():.2f}, {made.GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
