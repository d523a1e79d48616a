"""Which layers that predict further tokens (multi-token prediction) a planned file has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ikpy.convert.families.base import Family
from ikpy.convert.options import PREDICTION
from ikpy.convert.tensor_paths import Place, place
from ikpy.errors import FileFormatError, UsageError

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_JOINED = "nextn.eh_proj"
_LAST_NORMS = ("nextn.shared_head_norm", "layer_output_norm")


def choose(names: Iterable[str], family: Family, wanted: str, folder: Path) -> None:
    """Tells a family how many prediction layers its file has, and whether it has these alone.

    wanted: one of PREDICTION. FileFormatError for checkpoints that lack some of those that config.json counts, or
    tensors that no loader asks for, UsageError if there are none and nothing else is wanted.
    """
    assert wanted in PREDICTION
    places = [where for where in (place(name, family) for name in names) if where.predicts]
    joins = _modules(family, _JOINED) | set(family.prediction_columns)
    found = _layers(places) if any(_module(where) in joins for where in places) else set()
    family.n_predict = 0 if wanted == "none" else len(found)
    family.predicts_alone = wanted == "only"
    if wanted == "only" and not found:
        kept = f"; files of architecture {family.arch} have none" if not family.prediction_modules else ""
        raise UsageError(f"{folder}: the checkpoint has no prediction layers (--mtp){kept}")
    if family.n_predict:
        listed = family.config.count(*_COUNTS, default=0)
        if missing := sorted(set(range(max(len(found), listed))) - found):
            raise FileFormatError(f"{folder}: prediction layer {missing[0]} is missing; the checkpoint is incomplete")
        for modules in (joins, _modules(family, *_LAST_NORMS)):
            _check_each(places, modules, found, folder)


def _check_each(places: list[Place], modules: set[str], layers: set[int], folder: Path) -> None:
    """FileFormatError for a layer that has none of these modules, which may be of all layers, if there are any."""
    having = {where.layer for where in places if _module(where) in modules}
    missing = sorted(layers - having)
    if modules and missing and None not in having:
        which = "' or '".join(sorted(modules))
        raise FileFormatError(
            f"{folder}: prediction layer {missing[0]} lacks '{which}'; the checkpoint is incomplete (--no-mtp leaves "
            "prediction layers out)"
        )


def _module(where: Place) -> str:
    return where.path.removesuffix(".weight")


def _modules(family: Family, *targets: str) -> set[str]:
    """Modules of prediction layers that become one of these tensors."""
    return {module for module, target in family.prediction_modules.items() if target in targets}


def _layers(places: list[Place]) -> set[int]:
    """Numbers of the prediction layers, from 0 on."""
    return {where.layer for where in places if where.layer is not None}
