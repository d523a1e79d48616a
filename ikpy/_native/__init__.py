"""Picks the native core for this machine: the best built ISA tier that the CPU supports.

IKPY_ISA=avx512|avxvnni|avx2|portable overrides the choice; the core itself reads IKPY_AMX and IKPY_MAKER.
Attributes: core (the module), tier, available_tiers.
"""

import importlib
import os
from importlib.util import find_spec
from types import ModuleType

from ikpy.errors import UnsupportedError

TIERS = ("avx512", "avxvnni", "avx2", "portable")
AMX_USES = ("0", "1", "bf16", "fp16")
MAKERS = ("amd", "intel")


def _runnable(tier: str, features: dict[str, bool]) -> bool:
    return tier == "portable" or features[tier]


def _built(tier: str) -> bool:
    return find_spec(f"ikpy._native._core_{tier}") is not None


def _select() -> tuple[ModuleType, str, tuple[str, ...]]:
    try:
        cpu = importlib.import_module("ikpy._native.cpu")
    except ImportError as error:
        raise UnsupportedError("ikpy's native modules are not built; run `pip install -e .` in the checkout") from error
    features = cpu.features()
    available = tuple(t for t in TIERS if _built(t) and _runnable(t, features))
    amx = os.environ.get("IKPY_AMX")
    if amx and amx not in AMX_USES:
        raise UnsupportedError(f"IKPY_AMX={amx}: unknown use of the tile unit; give one of {', '.join(AMX_USES)}")
    maker = os.environ.get("IKPY_MAKER")
    if maker and maker not in MAKERS:
        raise UnsupportedError(f"IKPY_MAKER={maker}: unknown maker of CPUs; give one of {', '.join(MAKERS)}")
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
