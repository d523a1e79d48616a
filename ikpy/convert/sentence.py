"""What Sentence Transformers puts behind a model: modules.json, pooling, matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.weights import Weights
from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.models.hparams import POOLINGS

# How a pooling's configuration names it, alone or as pooling_mode_NAME -> that of GGUF files.
_POOLINGS = {"mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls", "lasttoken": "last"}
_IDENTITY = "Identity"
_SILENT = ("Transformer", "Normalize")


def modules(folder: Path) -> list[tuple[str, Path]]:
    """Class name and folder of every module behind the model; none for other checkpoints."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        found = [(str(entry["type"]).rsplit(".", 1)[-1], str(entry["path"])) for entry in listed]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise FileFormatError(f"{path}: no list of modules: {error}") from None
    outside = next((place for _, place in found if place == ".." or place not in ("", Path(place).name)), "")
    if outside:
        raise FileFormatError(f"{path}: '{outside}' is no folder beside it")
    return [(kind, folder / place) for kind, place in found if kind not in _SILENT]


def pooling_number(folder: Path) -> int | None:
    """What `pooling_type` of a GGUF file is for a checkpoint; None where it does not say."""
    found = [place for kind, place in modules(folder) if kind == "Pooling"]
    if not found:
        return None
    values = _settings(found[0])
    named = values.get("pooling_mode")
    flags = [key.removeprefix("pooling_mode_") for key, on in values.items() if key.startswith("pooling_mode_") and on]
    chosen = [named] if isinstance(named, str) else flags
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise UnsupportedError(f"{found[0]}: pooling {chosen} cannot be said in a GGUF file")
    return POOLINGS.index(_POOLINGS[chosen[0]])


def dense_matrices(folder: Path) -> list[np.ndarray]:
    """Matrices f32 [n_out, n_in] behind pooling. UnsupportedError for modules that are more than that."""
    found = []
    for kind, place in modules(folder):
        if kind == "Pooling":
            continue
        if kind != "Dense":
            raise UnsupportedError(f"{place}: a module '{kind}' cannot be said in a GGUF file")
        values = _settings(place)
        activation = str(values.get("activation_function", _IDENTITY)).rsplit(".", 1)[-1]
        if values.get("bias", True) or activation != _IDENTITY:
            raise UnsupportedError(f"{place}: a matrix with a bias or an activation cannot be said in a GGUF file")
        found.append(Weights(Checkpoint(place)).load("linear.weight", "f32"))
    return found


def _settings(place: Path) -> dict[str, Any]:
    path = place / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise FileFormatError(f"{path}: not a JSON object")
    return values
