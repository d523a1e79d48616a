"""Which GGUF files of a folder or repository are models, as their names tell."""

from __future__ import annotations

import re
from pathlib import PurePath

_COMPANIONS = re.compile(r"mmproj|^mtp-", re.IGNORECASE)
_IMATRIX = re.compile(r"imatrix", re.IGNORECASE)
_MADE_WITH_IMATRIX = re.compile(r".+imatrix[-_.](?:.*[-_.])?(?:(?:I|T)?Q\d|B?F16|F32|MXFP4)", re.IGNORECASE)
"""`m-imatrix-Q4_K_M`: a model; `m-Q8_0.imatrix`, `imatrix-m-Q8_0`: what was found out with one."""


def is_model(path: str) -> bool:
    """Whether a file is a model by its name: no projector, no head that predicts tokens, no importance matrix."""
    name = PurePath(path).name
    if not name.lower().endswith(".gguf") or _COMPANIONS.search(name):
        return False
    return not _IMATRIX.search(name) or _MADE_WITH_IMATRIX.match(name) is not None


def names_imatrix(path: str) -> bool:
    """Whether the file's name says that it is, or was made with, an importance matrix."""
    return _IMATRIX.search(PurePath(path).name) is not None
