"""Which layers that predict further tokens (multi-token prediction) a planned file has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ikpy.convert.families.base import Family
from ikpy.convert.options import PREDICTION
from ikpy.convert.tensor_paths import place
from ikpy.errors import FileFormatError, UsageError

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_JOINED = "nextn.eh_proj"


def choose(names: Iterable[str], family: Family, wanted: str, folder: Path) -> None:
    """Tells a family how many prediction layers its file has, and whether it has these alone.

    wanted: one of PREDICTION. FileFormatError for checkpoints that lack some of those that config.json counts,
    UsageError if there are none and nothing else is wanted.
    """
    assert wanted in PREDICTION
    found = _found(names, family)
    family.n_predict = 0 if wanted == "none" else len(found)
    family.predicts_alone = wanted == "only"
    if wanted == "only" and not found:
        kept = f"; files of architecture {family.arch} have none" if not family.prediction_modules else ""
        raise UsageError(f"{folder}: the checkpoint has no prediction layers (--mtp){kept}")
    listed = family.config.count(*_COUNTS, default=0)
    missing = sorted(set(range(max(len(found), listed))) - found)
    if family.n_predict and missing:
        raise FileFormatError(f"{folder}: prediction layer {missing[0]} is missing; the checkpoint is incomplete")


def _found(names: Iterable[str], family: Family) -> set[int]:
    """Numbers of the prediction layers that files of this family have, from 0 on."""
    places = [where for where in (place(name, family) for name in names) if where.predicts]
    joins = {module for module, target in family.prediction_modules.items() if target == _JOINED}
    joins |= set(family.prediction_columns)
    if not any(where.path.removesuffix(".weight") in joins for where in places):
        return set()
    return {where.layer for where in places if where.layer is not None}
