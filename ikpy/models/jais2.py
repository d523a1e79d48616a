"""jais2: Jais 2, blocks of nemotron with wholly rotated heads."""

from __future__ import annotations

from ikpy.models.nemotron import Nemotron


class Jais2(Nemotron):
    """Checkpoints hold the norm weights as they are."""

    rotates_whole_head = True
