"""Layers of draft files that read states or caches of a model (EAGLE-3, DFlash, drafters of Gemma 4)."""

from __future__ import annotations

import os
from pathlib import Path

from ikpy.engine.model import Model
from ikpy.errors import UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.models import architecture, silent
from ikpy.models.base import Architecture, Decoder
from ikpy.models.gemma4_assistant import Gemma4Assistant
from ikpy.models.keys import Keys
from ikpy.models.layer_reading import LayerReading
from ikpy.models.weights import WeightSource


def reading_layer(model: Model, path: str | os.PathLike[str]) -> Model:
    """The layers as a model of their own, on the CPU. From then on contexts of ``model`` that keep the states of tokens
    keep what the layers read.

    UsageError for files and models that do not go together.
    """
    arch, weights, own = _opened(model, path)
    if not isinstance(arch, LayerReading):
        raise UsageError(f"'{path}' is no drafter that reads layers of a model but a model ({arch.hp.arch})")
    target = model.arch
    if not isinstance(target, Decoder) or type(target).build is not Decoder.build:
        what = f"a model of architecture {model.hparams.arch}"
        raise UsageError(f"--spec-type {arch.drafts_as}: {what} cannot give what the drafter reads")
    if arch.target_size != model.hparams.n_embd:
        width = model.hparams.n_embd
        raise UsageError(f"'{path}' reads states of {arch.target_size} numbers, those of the model have {width}")
    target.layer_inputs = arch.beside(own, model.hparams.n_layer)
    return Model(weights.gguf, arch, model.params, {**own.values, **weights.values})


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
