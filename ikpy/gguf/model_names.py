"""Which GGUF files of a folder or repository are models, as their names tell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePath

_COMPANIONS = re.compile(r"mmproj|^mtp-", re.IGNORECASE)
_IMATRIX = re.compile(r"imatrix", re.IGNORECASE)
_MADE_WITH_IMATRIX = re.compile(r".+imatrix[-_.](?:.*[-_.])?(?:(?:I|T)?Q\d|B?F16|F32|MXFP4)", re.IGNORECASE)
"""`m-imatrix-Q4_K_M`: a model; `m-Q8_0.imatrix`, `imatrix-m-Q8_0`: what was found out with one."""

PROJECTOR_TYPES = ("F16", "BF16", "Q8_0", "F32")
"""Of projectors, taken in this order."""


def is_model(path: str) -> bool:
    """Whether a file is a model by its name: no projector, no head that predicts tokens, no importance matrix."""
    name = PurePath(path).name
    if not name.lower().endswith(".gguf") or _COMPANIONS.search(name):
        return False
    return not _IMATRIX.search(name) or _MADE_WITH_IMATRIX.match(name) is not None


def is_projector(path: str) -> bool:
    """Whether a file is a projector by its name."""
    name = PurePath(path).name.lower()
    return name.endswith(".gguf") and "mmproj" in name


def projectors_in(folder: Path) -> list[str]:
    """Names of the projectors in a folder; none if it cannot be read."""
    try:
        return sorted(path.name for path in folder.iterdir() if is_projector(path.name))
    except OSError:
        return []


def choose_projector(files: Sequence[str]) -> str | None:
    """The projector among files; None if there is none."""
    found = sorted(filter(is_projector, files))
    wanted = (name for kind in PROJECTOR_TYPES for name in found if has_quant(name, kind))
    return next(wanted, found[0] if found else None)


def has_quant(name: str, quant: str) -> bool:
    """Whether a file name has a quantization as one of its parts."""
    return re.search(rf"(^|[-._/]){re.escape(quant)}([-./]|$)", name, re.IGNORECASE) is not None


def names_imatrix(path: str) -> bool:
    """Whether the file's name says that it is, or was made with, an importance matrix."""
    return _IMATRIX.search(PurePath(path).name) is not None
