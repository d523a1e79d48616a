"""Ctrl-C that arrives where Python cannot raise: in `__del__` and in callbacks of weak references, as those of imports.

The interpreter prints such a KeyboardInterrupt as ignored and goes on. Here it comes again a moment later.
"""

import _thread
import sys
import threading
from typing import Any

AGAIN_SECONDS = 0.05


def install() -> None:
    """Let lost interrupts come again, for the rest of the process."""
    before = sys.unraisablehook
    if getattr(before, "brings_interrupts_back", False):
        return

    def hook(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            # Not at once: that would end in this function, where it is lost as well.
            again = threading.Timer(AGAIN_SECONDS, _thread.interrupt_main)
            again.daemon = True
            again.start()
        else:
            before(lost)

    hook.brings_interrupts_back = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook
