"""Records the float32 rows that transformers makes of a random picture, of the checkpoints of
tests/cpu/convert/tower_checkpoints.py; of those that hear, also of a sound.

pip install torch torchvision transformers        # 5.24 or newer
python -m scripts.make_tower_golden
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from scripts import dots_ocr_rows
from tests.cpu.convert import tower_checkpoints as made
from tests.cpu.media.tower_parts import GOLDEN_ROWS, PATCH, TowerCheckpoint

OTHERS = ("language_model", "text_model", "lm_head", "audio_tower")


def pixels(tower: TowerCheckpoint) -> torch.Tensor:
    """The picture f32 [1, 3, h, w]."""
    mean, std = (np.array(tower.colours[f"image_{name}"]) for name in ("mean", "std"))
    values = (tower.picture() / 255 - mean) / std
    return torch.tensor(values.transpose(2, 0, 1)[None], dtype=torch.float32)


def squares(tower: TowerCheckpoint, frames: int) -> dict[str, torch.Tensor]:
    """Patches of equal frames [n, 3 * frames * p * p], square by square of 2 x 2 patches."""
    image = pixels(tower)[0].numpy()
    rows, columns = image.shape[1] // PATCH, image.shape[2] // PATCH
    grid = image.reshape(3, rows // 2, 2, PATCH, columns // 2, 2, PATCH).transpose(1, 4, 2, 5, 0, 3, 6)
    flat = np.repeat(grid.reshape(rows * columns, 3, 1, PATCH * PATCH), frames, axis=2).reshape(rows * columns, -1)
    return {"pixel_values": torch.from_numpy(flat.copy()), "image_grid_thw": torch.tensor([[1, rows, columns]])}


def lines(tower: TowerCheckpoint, *, colours_last: bool) -> tuple[torch.Tensor, int, int]:
    """Patches in reading order [n, elements], and rows and columns of them."""
    image = pixels(tower)[0].numpy()
    rows, columns = image.shape[1] // PATCH, image.shape[2] // PATCH
    grid = image.reshape(3, rows, PATCH, columns, PATCH)
    order = (1, 3, 2, 4, 0) if colours_last else (1, 3, 0, 2, 4)
    return torch.from_numpy(grid.transpose(order).reshape(rows * columns, -1).copy()), rows, columns


def inputs(tower: TowerCheckpoint) -> dict[str, torch.Tensor]:
    """What get_image_features of the model takes."""
    kind = tower.config["model_type"]
    if kind.startswith(("qwen", "glm", "exaone", "minimax", "dots")):
        return squares(tower, 1 if kind == "dots3_note" else 2)
    if kind == "smolvlm":
        return {"pixel_values": pixels(tower)[None]}
    if tower.config["vision_config"].get("model_type") == "pixtral":
        return {"pixel_values": pixels(tower), "image_sizes": torch.tensor([tower.size])}
    if kind == "kimi_k25":
        patches, rows, columns = lines(tower, colours_last=False)
        patches = patches.reshape(-1, 3, PATCH, PATCH)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, rows, columns]])}
    if kind == "minicpmv4_6":
        patches, rows, columns = lines(tower, colours_last=False)
        strip = patches.reshape(-1, 3, PATCH, PATCH).permute(1, 2, 0, 3).reshape(1, 3, PATCH, -1)
        return {"pixel_values": strip, "target_sizes": torch.tensor([[rows, columns]])}
    if kind in ("lfm2_vl", "gemma4"):
        patches, rows, columns = lines(tower, colours_last=True)
        if kind == "gemma4":
            places = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(1, -1, 2)
            return {"pixel_values": patches[None], "image_position_ids": torch.from_numpy(places)}
        shapes, mask = torch.tensor([[rows, columns]]), torch.ones(1, rows * columns, dtype=torch.int32)
        return {"pixel_values": patches[None], "spatial_shapes": shapes, "pixel_attention_mask": mask}
    return {"pixel_values": pixels(tower)}


def for_transformers(tower: TowerCheckpoint, config: dict[str, Any]) -> dict[str, Any]:
    """The names that transformers has for values of Kimi K2.5."""
    if config["model_type"] != "kimi_k25":
        return config
    vision = {name.removeprefix("vt_").removeprefix("init_"): v for name, v in config["vision_config"].items()}
    return {**config, "vision_config": vision, "projection_hidden_size": vision["hidden_size"]}


def opened(tower: TowerCheckpoint) -> torch.nn.Module:
    """The model of a checkpoint."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = made.write(tower, Path(temporary) / "checkpoint")
        path = folder / "config.json"
        path.write_text(json.dumps(for_transformers(tower, json.loads(path.read_text()))))
        config = transformers.AutoConfig.from_pretrained(folder)
        name = config.architectures[0].replace("KimiK25", "Kimi_K25")
        model, info = getattr(transformers, name).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    info["missing_keys"] = [name for name in info["missing_keys"] if not any(part in name for part in OTHERS)]
    if any(info[problem] for problem in ("missing_keys", "mismatched_keys", "unexpected_keys")):
        raise SystemExit(f"{tower.name}: the checkpoint is not what transformers expects: {info}")
    return model.eval()


def features(tower: TowerCheckpoint) -> np.ndarray:
    """Rows [n, elements], with further features behind each other."""
    model = opened(tower)
    with torch.no_grad():
        if tower.config["model_type"] == "llama4":
            states = model.vision_model(pixels(tower)).last_hidden_state
            return model.multi_modal_projector(states.flatten(0, -2)).numpy()
        found = model.model.get_image_features(**inputs(tower))
    parts = [found.pooler_output, *(found.get("deepstack_features") or ())]
    return torch.cat([joined(part) for part in parts], 1).numpy()


def heard(tower: TowerCheckpoint) -> np.ndarray:
    """Rows of a sound."""
    n_mel = tower.config["audio_config"]["num_mel_bins"]
    listen = transformers.WhisperFeatureExtractor(feature_size=n_mel)
    padding = "longest" if tower.config["model_type"].startswith("qwen3") else "max_length"
    found = listen(tower.sound(), sampling_rate=16000, padding=padding, return_attention_mask=True, return_tensors="pt")
    with torch.no_grad():
        features = opened(tower).model.get_audio_features(found.input_features, found.attention_mask)
    return features.pooler_output.numpy()


def joined(part: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Rows of one picture or of several."""
    pictures = part if isinstance(part, tuple | list) else (part,)
    return torch.cat([rows.flatten(0, -2) for rows in pictures])


def main() -> None:
    """Writes the golden files."""
    for tower in (*made.TOWERS, *made.HEARING_ALONE):
        if tower.golden_of:
            continue
        found = {"sound": heard(tower)} if tower.hears else {}
        if "vision_config" in tower.config:
            is_dots = tower.config["model_type"] == "dots_ocr"
            found["rows"] = dots_ocr_rows.rows(tower) if is_dots else features(tower)
        tower.golden.parent.mkdir(exist_ok=True)
        np.savez_compressed(tower.golden, **{name: rows[list(GOLDEN_ROWS)] for name, rows in found.items()})
        sizes = ", ".join(f"{name} {rows.shape}, {np.abs(rows).mean():.2f}" for name, rows in found.items())
        print(f"{tower.name}: {sizes}, {tower.golden.stat().st_size} bytes")


if __name__ == "__main__":
    main()
