"""Rows of dots.ocr's encoder in float64, by the names of its checkpoints: transformers does not have the model."""

from __future__ import annotations

import math

import numpy as np

from tests.cpu.convert import tower_checkpoints as made
from tests.cpu.media.tower_parts import HEADS, LAYERS, PATCH, N, TowerCheckpoint


class _Encoder:
    """Rotation by row in the first half of each half of a head's pairs, by column in the second."""

    def __init__(self, tower: TowerCheckpoint) -> None:
        self.weights = {name: values.astype(np.float64) for name, values in made.weights(tower).items()}
        self.tower = tower

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        w = self.weights[f"vision_tower.{name}.weight"]
        return x @ w.reshape(len(w), -1).T + self.weights.get(f"vision_tower.{name}.bias", 0.0)

    def rms_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.weights[f"vision_tower.{name}.weight"]

    def layer_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return x * self.weights[f"vision_tower.{name}.weight"] + self.weights[f"vision_tower.{name}.bias"]

    def patches(self) -> tuple[np.ndarray, np.ndarray]:
        """Patches square by square [n, 3 p p], and their angles [n, 1, pairs]."""
        mean, std = (np.array(self.tower.colours[f"image_{name}"]) for name in ("mean", "std"))
        image = (self.tower.picture() / 255 - mean) / std
        rows, columns = image.shape[0] // PATCH, image.shape[1] // PATCH
        grid = image.reshape(rows // 2, 2, PATCH, columns // 2, 2, PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1)
        places = places.reshape(rows // 2, 2, columns // 2, 2, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 2, 1)
        quarter = N // HEADS // 4
        angles = places * 10000.0 ** (-np.arange(quarter) / quarter)
        return grid.reshape(rows * columns, -1), angles.reshape(rows * columns, 1, -1)

    def rotated(self, x: np.ndarray, angles: np.ndarray) -> np.ndarray:
        """x [n, heads, elements], whose halves are the parts of pairs."""
        a, b = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(self, name: str, x: np.ndarray, angles: np.ndarray) -> np.ndarray:
        q, k, v = self.linear(f"{name}.qkv", x).reshape(len(x), 3, HEADS, -1).transpose(1, 0, 2, 3)
        q, k = self.rotated(q, angles), self.rotated(k, angles)
        scores = np.exp(np.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1]))
        mixed = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), v)
        return self.linear(f"{name}.proj", mixed.reshape(len(x), -1))

    def rows(self) -> np.ndarray:
        """All rows [n / 4, elements of the text model]."""
        pixels, angles = self.patches()
        x = self.rms_norm("patch_embed.patchifier.norm", self.linear("patch_embed.patchifier.proj", pixels))
        for il in range(LAYERS):
            p = f"blocks.{il}"
            x = x + self.attention(f"{p}.attn", self.rms_norm(f"{p}.norm1", x), angles)
            y = self.rms_norm(f"{p}.norm2", x)
            gate = self.linear(f"{p}.mlp.fc1", y)
            x = x + self.linear(f"{p}.mlp.fc2", gate / (1 + np.exp(-gate)) * self.linear(f"{p}.mlp.fc3", y))
        x = self.layer_norm("merger.ln_q", self.rms_norm("post_trunk_norm", x)).reshape(len(x) // 4, -1)
        x = self.linear("merger.mlp.0", x)
        x = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
        return self.linear("merger.mlp.2", x)


def rows(tower: TowerCheckpoint) -> np.ndarray:
    """All rows of the tower's picture."""
    return _Encoder(tower).rows().astype(np.float32)
