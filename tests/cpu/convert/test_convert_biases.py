"""`ikpy convert`: biases that an architecture has no place for, and those that it cannot do without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.convert.config import Config
from ikpy.convert.families import family
from ikpy.convert.families.base import Family
from ikpy.engine.model import Model
from ikpy.engine.params import ModelParams
from ikpy.errors import UnsupportedError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.checkpoints import convert


def family_of(folder: Path) -> Family:
    """What the converter knows about the architecture of a checkpoint."""
    return family(Config(made.read_json(folder / "config.json"), folder / "config.json"))


def modules_with(targets: frozenset[str], folder: Path) -> list[str]:
    """Modules of layers whose names end as those of the given GGUF tensors do."""
    return [module for module, target in family_of(folder).modules.items() if target in targets]


def weights_of(tensors: made.Tensors, modules: list[str]) -> list[str]:
    """Names of the weights of these modules in all layers."""
    endings = tuple(f".{module}.weight" for module in modules)
    return [name for name in tensors if name.endswith(endings)]


def bias_beside(tensors: made.Tensors, name: str, value: float = 0.0) -> made.Tensors:
    """The bias of a weight, if there is none."""
    bias = f"{name.removesuffix('weight')}bias"
    return {} if bias in tensors else {bias: made.bf16(np.full(tensors[name][1][:1], value, np.float32))}


@pytest.mark.parametrize("name", made.NAMES)
def test_biases_that_are_taken_along_are_loaded(name, tmp_path):
    folder = made.copy(name, tmp_path)
    modules = modules_with(family_of(folder).biases, folder)

    def add(tensors: made.Tensors) -> None:
        for weight in weights_of(tensors, modules):
            tensors.update(bias_beside(tensors, weight))

    made.change_tensors(folder, add)
    file = convert(folder, tmp_path)
    Model.load(file.path, ModelParams(header_only=True))


@pytest.mark.parametrize("name", made.NAMES)
def test_other_biases_are_refused(name, tmp_path):
    folder = made.copy(name, tmp_path)
    biases = family_of(folder).biases
    tensors = made.read_tensors(folder / "model.safetensors")
    n_refused = 0
    for module, target in family_of(folder).modules.items():
        weights = weights_of(tensors, [module])
        if not weights or target in biases:
            continue
        made.write_tensors(folder / "model.safetensors", tensors | bias_beside(tensors, weights[0], 1.0))
        bias = f"{weights[0].removesuffix('weight')}bias"
        with pytest.raises(UnsupportedError, match=rf"has no bias for '{bias}'$"):
            Conversion(folder)
        n_refused += 1
    assert n_refused > 0


@pytest.mark.parametrize(
    ("name", "module", "target"),
    [
        ("qwen2", "self_attn.q_proj", "attn_q"),
        ("qwen2moe", "self_attn.v_proj", "attn_v"),
        ("glm4moe", "self_attn.k_proj", "attn_k"),
        ("gpt-oss", "self_attn.o_proj", "attn_output"),
        ("gpt-oss", "mlp.router", "ffn_gate_inp"),
        ("glm-dsa", "self_attn.indexer.k_norm", "indexer.k_norm"),
    ],
)
def test_biases_that_are_needed(name, module, target, tmp_path):
    folder = made.copy(name, tmp_path)
    made.change_tensors(folder, lambda tensors: tensors.pop(f"model.layers.0.{module}.bias"))
    with pytest.raises(UnsupportedError, match=rf"needs blk\.0\.{target}\.bias, which the checkpoint lacks$"):
        Conversion(folder)
