"""Picks the native core for this machine: the best built ISA tier that the CPU supports.

IKPY_ISA=avx512|avxvnni|avx2|portable overrides the choice; the core itself reads IKPY_AMX, IKPY_VBMI,
IKPY_MAKER, IKPY_GATHERS and IKPY_FETCH.
Attributes: core (the module), tier, available_tiers.
"""

import importlib
import os
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from ikpy.errors import UnsupportedError

TIERS = ("avx512", "avxvnni", "avx2", "portable")
READ_BY_CORE = {
    "IKPY_AMX": ("use of the tile unit", ("0", "1", "bf16", "fp16")),
    "IKPY_VBMI": ("use of byte permutes", ("0", "1")),
    "IKPY_MAKER": ("maker of CPUs", ("amd", "intel")),
    "IKPY_GATHERS": ("speed of gathers", ("fast", "slow")),
    "IKPY_FETCH": ("way of fetching weights", ("lines", "pages")),
}
"""Variables, what they choose, and their values."""


def _runnable(tier: str, features: dict[str, bool]) -> bool:
    return tier == "portable" or features[tier]


def _built(tier: str) -> bool:
    return find_spec(f"ikpy._native._core_{tier}") is not None


def _select() -> tuple[ModuleType, str, tuple[str, ...]]:
    try:
        cpu = importlib.import_module("ikpy._native.cpu")
    except ImportError as error:
        checkout = Path(__file__).resolve().parents[2]
        raise UnsupportedError(
            f"ikpy's native modules are not built in {checkout}: run `pip install -e .` there; or, where "
            "ikpy is installed, start Python in another folder, as this one hides it"
        ) from error
    features = cpu.features()
    available = tuple(t for t in TIERS if _built(t) and _runnable(t, features))
    for name, (what, values) in READ_BY_CORE.items():
        value = os.environ.get(name)
        if value and value not in values:
            raise UnsupportedError(f"{name}={value}: unknown {what}; give one of {', '.join(values)}")
    wanted = os.environ.get("IKPY_ISA")
    if wanted and wanted not in available:
        raise UnsupportedError(
            f"IKPY_ISA={wanted}: not available here; this build and CPU offer: {', '.join(available) or 'nothing'}"
        )
    if not available:
        raise UnsupportedError("no native module of ikpy was built for this CPU; rebuild with `pip install -e .`")
    tier = wanted or available[0]
    return importlib.import_module(f"ikpy._native._core_{tier}"), tier, available


core, tier, available_tiers = _select()
