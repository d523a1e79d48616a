"""Where a checkpoint tensor belongs: to a layer, to a layer that predicts further tokens, or to the whole model."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ikpy.convert.families.base import Family
from ikpy.convert.model_parts import TEXT_PART, THINKER

_LAYER = re.compile(
    r"(?:(?:(?:model|backbone|gpt_neox|encoder|transformer(?:\.encoder)?)\.)?layers(?:\.layers)?|(?:(?:transformer|rwkv)\.)?(?:h|blocks|decoder_layer)"
    r"|(?:bert\.)?encoder\.layer|(?:model\.)?transformer_encoder)"
    r"\.(\d{1,9})\.(.+)"
)
_APART = re.compile(r"^(?:model\.)?mtp[._]")
SUFFIX = re.compile(r"\.(weight|bias)$")


@dataclass(frozen=True)
class Place:
    """layer: number of the layer, None for none. predicts: whether the tensor is one of prediction layers, which are
    counted from 0; None is all of them then. path: its name there. apart: whether these layers have names of their own
    instead of being numbered behind the last one.
    """

    layer: int | None
    predicts: bool
    path: str
    apart: bool = False


def place(name: str, family: Family) -> Place:
    """Where a tensor of this name belongs in checkpoints of a family."""
    path = family.usual_name(text_path(name))
    layer = _LAYER.fullmatch(path)
    if layer and SUFFIX.sub("", path) not in family.outer:
        number = int(layer[1]) - family.config.n_layer
        return Place(int(layer[1]), False, layer[2]) if number < 0 else Place(number, True, layer[2])
    if not _APART.match(path):
        return Place(None, False, path)
    found = family.prediction_place(path)
    return Place(found[0], True, found[1], apart=True) if found else Place(None, True, path, apart=True)


def text_path(name: str) -> str:
    """The name of a tensor in a checkpoint of the language model alone."""
    name = name.removeprefix(THINKER)
    prefix = TEXT_PART.match(name)
    if not prefix:
        return name
    rest = name[prefix.end() :]
    return rest if rest.startswith(("lm_head", "backbone.")) else f"model.{rest}"
