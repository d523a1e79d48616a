"""Towers of transformers with the weights of those of the tests, and files of the rows that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

State = dict[str, np.ndarray]
COMPUTED = ("inv_freq", "time_position", "position_ids")
"""Parts of names of what modules compute themselves."""


def renamed(weights: Mapping[str, np.ndarray], names: Mapping[str, str]) -> State:
    """Tensors under other beginnings of names; those that are not named are left out."""
    found = {}
    for name, value in weights.items():
        for old, new in names.items():
            if name.startswith(old):
                found[new + name[len(old) :]] = value
                break
    return found


def layers(n: int, names: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Names of the parts of n layers."""
    return {f"v.blk.{i}.{old}.": f"{prefix}.{i}.{new}." for i in range(n) for old, new in names.items()}


def load(module: torch.nn.Module, state: State, unused: str = "-") -> torch.nn.Module:
    """A module with all of its weights replaced but those whose names begin with `unused`."""
    tensors = {name: torch.from_numpy(value.copy()) for name, value in state.items()}
    missing, unexpected = module.load_state_dict(tensors, strict=False)
    missing = [name for name in missing if not name.startswith(unused) and not any(part in name for part in COMPUTED)]
    if missing or unexpected:
        raise SystemExit(f"{type(module).__name__}: missing {missing}, unexpected {unexpected}")
    return module.eval()


def record(
    models: Mapping[str, Callable[[Any, Any], torch.Tensor]], towers: Mapping[str, Any], kept: list[int], folder: Path
) -> None:
    """Writes the number of rows that each model makes of the picture of its tower, and the kept ones of them."""
    folder.mkdir(exist_ok=True)
    for name, rows in models.items():
        with torch.no_grad():
            found = rows(towers[name], towers[name].weights()).numpy()
        path = folder / f"{name}.npz"
        np.savez_compressed(path, n=np.int32(len(found)), rows=found[kept])
        print(f"{name}: {len(found)} rows, |values| {np.abs(found).mean():.2f}, {path.stat().st_size} bytes")
