"""The first log lines of the generating tools."""

from __future__ import annotations

import time

from ikpy.cli.params import CommonParams
from ikpy.engine.sampling_params import RANDOM_SEED


def banner_lines(params: CommonParams) -> list[str]:
    """Build, compiler and seed; a random seed is chosen here and stored in the parameters."""
    if params.sampling.seed == RANDOM_SEED:
        params.sampling.seed = int(time.time())
    return [*build_lines(), f"main: seed  = {params.sampling.seed}"]


def build_lines() -> list[str]:
    """Build and compiler."""
    from ikpy.tools.machine import build_commit, build_number, compiler, target

    return [
        f"main: build = {build_number()} ({build_commit()})",
        f"main: built with {compiler()} for {target()}",
    ]
