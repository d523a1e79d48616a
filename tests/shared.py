"""Where tests find data: tests/data in the checkout, and the shared folder beside it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
SHARED = Path(os.environ.get("IKPY_SHARED") or ROOT.parent / "shared")
