"""Small models for the tests of `ikpy quantize`."""

from __future__ import annotations

import numpy as np

from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import registry
from tests.shared import ROOT

MODEL = ROOT / "ikpy" / "assets" / "tiny-mla-moe-f16.gguf"


def write_model(path, tensors, *, limit=None):
    """Writes a model of f32 tensors, values by name; at most ``limit`` tensors to a file."""
    with GGUFWriter(path, split_max_tensors=limit) as writer:
        writer.add("general.architecture", GGUFValueType.STRING, "llama")
        writer.add("llama.block_count", GGUFValueType.UINT32, 2)
        for name, values in tensors.items():
            writer.add_tensor(name, values.shape[::-1], 0)
        for name, values in tensors.items():
            writer.write(name, values)


def small_tensors():
    """Random values of an embedding, a dense matrix and experts."""
    rng = np.random.default_rng(2)
    shapes = {
        "token_embd.weight": (64, 256),
        "blk.0.ffn_up.weight": (96, 256),
        "blk.1.ffn_up_exps.weight": (3, 32, 256),
    }
    return {name: (rng.standard_normal(s) * 0.1).astype(np.float32) for name, s in shapes.items()}


def types_of(path):
    """Names of the types of all tensors of a file."""
    with GGUFFile.open(path) as file:
        return {name: registry.by_id(info.type_id).name for name, info in file.tensors.items()}
