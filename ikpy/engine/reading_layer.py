"""The layers of a draft file that read inputs of a model's layers (EAGLE-3, DFlash, DSpark)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ikpy.engine.draft_placement import draft_model_params
from ikpy.engine.model import Beside, Model
from ikpy.engine.params import ModelParams
from ikpy.errors import UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.graph.division import TIED_OUTPUT
from ikpy.graph.placement import CPU, MIB
from ikpy.models import architecture, silent
from ikpy.models.base import Architecture, Decoder
from ikpy.models.gemma4_assistant import Gemma4Assistant
from ikpy.models.keys import Keys
from ikpy.models.layer_reading import JOINING, LayerReading
from ikpy.models.weights import WeightSource


def reading_layer(
    model: Model,
    path: str | os.PathLike[str],
    params: ModelParams | None = None,
    *,
    log: Callable[[str], None] = silent,
) -> Model:
    """The layers as a model of their own, the same one for the same file. From then on contexts of ``model`` that keep
    the states of tokens keep what the layers read.

    ``params``: where they go; as the model by default. UsageError for files and models that do not go together.
    """
    if model.reader is not None and Path(model.reader.gguf.path) == Path(path):
        return model.reader
    arch, weights, own = _opened(model, path)
    if not isinstance(arch, LayerReading):
        raise UsageError(f"'{path}' is no drafter that reads layers of a model but a model ({arch.hp.arch})")
    params = params or draft_model_params(model.params, undivided=True)
    target = model.arch
    if not isinstance(target, Decoder) or type(target).build is not Decoder.build:
        what = f"a model of architecture {model.hparams.arch}"
        raise UsageError(f"--spec-type {arch.drafts_as}: {what} cannot give what the drafter reads")
    if arch.target_size != model.hparams.n_embd:
        width = model.hparams.n_embd
        raise UsageError(f"'{path}' reads states of {arch.target_size} numbers, those of the model have {width}")
    target.layer_inputs = arch.beside(own, model.hparams.n_layer)
    layers = Model(weights.gguf, arch, params, {**own.values, **weights.values})
    _place(layers, model, arch, own, log)
    model.reader = layers
    return layers


def _place(layers: Model, model: Model, arch: LayerReading, own: WeightSource, log: Callable[[str], None]) -> None:
    """Decides where the layers go that read a model; ``own``: what they have of it."""
    lent = {name: model.gguf.tensors[name] for name in own.values if name == arch.output.name}
    fixed = dict.fromkeys(layers.gguf.tensors.keys() & set(arch.host_tensors), CPU)
    fixed[JOINING] = model.placement.device_of(JOINING)
    layers.place(log, Beside(lent, fixed, model.devices.weights if model.devices else None))
    for name, info in lent.items():
        device = _output_device(layers, name)
        if device != CPU and (device != _output_device(model, name) or name in model.placement.divisions):
            log(f"llm_load_tensors: note: {device} gets a copy of {name} ({info.nbytes / MIB:.2f} MiB) of the model")


def cache_reading_layers(model: Model, path: str | os.PathLike[str]) -> Model:
    """The layers of a drafter that attend to caches of ``model``, as a model of its own, on the CPU.

    UsageError for files and models that do not go together.
    """
    arch, weights, own = _opened(model, path)
    assert isinstance(arch, Gemma4Assistant)
    arch.beside(model.arch, own)
    return Model(weights.gguf, arch, model.params, {**own.values, **weights.values})


def _opened(model: Model, path: str | os.PathLike[str]) -> tuple[Architecture, WeightSource, WeightSource]:
    """The architecture of a draft file, its tensors, and those of the model, of which none is taken yet."""
    header_only = model.params.header_only
    gguf = GGUFFile.open(Path(path), header_only=header_only)
    keys = Keys(gguf)
    weights, own = (WeightSource(file, silent, header_only=header_only) for file in (gguf, model.gguf))
    arch = architecture(keys.arch)(keys, weights, silent)
    weights.check_all_used()
    n_own, n_known = arch.hp.n_vocab, model.hparams.n_vocab
    if n_own > n_known:
        raise UsageError(f"'{path}' guesses {n_own} tokens, the model knows {n_known}: it needs the same vocabulary")
    return arch, weights, own


def _output_device(model: Model, name: str) -> str:
    """Where a model multiplies with its output matrix, which may be the token embeddings."""
    placement = model.placement
    is_tied = name == TIED_OUTPUT and name not in placement.overridden
    return placement.output if is_tied else placement.device_of(name)
