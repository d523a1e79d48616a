"""Checkpoint folders for the tests of `ikpy convert`: the tiny ones of tests/data/convert, copied and changed."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ikpy.convert import Conversion, ConvertOptions
from ikpy.gguf.reader import GGUFFile
from tests.shared import DATA

CHECKPOINTS = DATA / "convert"
NAMES = sorted(folder.name for folder in CHECKPOINTS.iterdir())

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name -> safetensors type, shape, bytes."""


def copy(name: str, folder: Path) -> Path:
    """A writable copy of a tiny checkpoint."""
    target = folder / name
    shutil.copytree(CHECKPOINTS / name, target)
    return target


def amend(folder: Path, file: str = "config.json", *, drop: tuple[str, ...] = (), **values: Any) -> None:
    """Change and remove values of a JSON file."""
    path = folder / file
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in {**old, **values}.items() if k not in drop}), encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file, an object."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def read_tensors(path: Path) -> Tensors:
    """All tensors of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    table = json.loads(data[8 : 8 + length])
    table.pop("__metadata__", None)
    body = data[8 + length :]
    return {k: (v["dtype"], tuple(v["shape"]), body[slice(*v["data_offsets"])]) for k, v in table.items()}


def write_tensors(path: Path, tensors: Tensors) -> None:
    """A safetensors file."""
    table: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    header = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(data for _, _, data in tensors.values()))


def change_tensors(folder: Path, change: Any) -> None:
    """Rewrite model.safetensors with change(tensors) applied in place."""
    path = folder / "model.safetensors"
    tensors = read_tensors(path)
    change(tensors)
    write_tensors(path, tensors)


def split_into_shards(folder: Path, n_shards: int) -> None:
    """Replace model.safetensors by shards with an index."""
    tensors = read_tensors(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(n_shards):
        name = f"model-{i + 1:05d}-of-{n_shards:05d}.safetensors"
        part = {k: v for j, (k, v) in enumerate(tensors.items()) if j % n_shards == i}
        write_tensors(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def bf16(values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """An entry of Tensors with values cut to bf16."""
    return "BF16", values.shape, (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()


def write_sparse_mixtral(folder: Path, *, n_embd: int, n_ff: int, n_expert: int) -> int:
    """A Mixtral layer whose weights are a hole in a sparse file (zeros, no disk space); returns bytes of weights."""
    source = CHECKPOINTS / "mixtral"
    shutil.copytree(source, folder)
    amend(
        folder, hidden_size=n_embd, intermediate_size=n_ff, num_local_experts=n_expert, num_hidden_layers=1, head_dim=16
    )
    block = "model.layers.0"
    shapes = {
        "model.embed_tokens": (384, n_embd),
        "lm_head": (384, n_embd),
        "model.norm": (n_embd,),
        f"{block}.input_layernorm": (n_embd,),
        f"{block}.post_attention_layernorm": (n_embd,),
        f"{block}.self_attn.q_proj": (64, n_embd),
        f"{block}.self_attn.k_proj": (32, n_embd),
        f"{block}.self_attn.v_proj": (32, n_embd),
        f"{block}.self_attn.o_proj": (n_embd, 64),
        f"{block}.block_sparse_moe.gate": (n_expert, n_embd),
    }
    for e in range(n_expert):
        for name, shape in (("w1", (n_ff, n_embd)), ("w2", (n_embd, n_ff)), ("w3", (n_ff, n_embd))):
            shapes[f"{block}.block_sparse_moe.experts.{e}.{name}"] = shape
    table: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        table[f"{name}.weight"] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    header = json.dumps(table).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with path.open("r+b") as file:
        file.truncate(8 + len(header) + at)
    return at


def convert(folder: Path, tmp_path: Path, **options: object) -> GGUFFile:
    """The converted file, opened."""
    path = str(tmp_path / "out.gguf")
    Conversion(folder, ConvertOptions(outfile=path, **options)).write()  # type: ignore[arg-type]
    return GGUFFile.open(path)
