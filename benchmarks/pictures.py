"""Encodes a picture on a GPU and on the CPU: time of each, and how far their rows lie apart.

    python -m benchmarks.pictures [SHAPE ...] [--layers N] [--type F16] [--small]

SHAPE: of a published encoder (default: all), with random weights and few layers, as the CPU takes seconds for each.
--small: few patches, for an emulated device (IKPY_CUDA_EMULATE=1). Exit status 1: rows differ by more than BOUND.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ikpy.backends.cuda.devices import available, why_none
from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
from ikpy.graph.placement import DeviceParams
from ikpy.machine.threads import physical_cores
from ikpy.vision.projector import Projector, open_projector

if TYPE_CHECKING:
    from tests.cpu.media.vision_towers import Tower

GATED = {"rms": True, "gated": True, "activation": "silu"}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3vl": {
        "kind": "qwen3vl_merger",
        "d": 1152,
        "heads": 16,
        "ff": 4304,
        "patch": 16,
        "side": 48,
        "text": 4096,
        "activation": "tanh",
    },
    "qwen25vl": {
        "kind": "qwen2.5vl_merger",
        "d": 1280,
        "heads": 16,
        "ff": 3420,
        "patch": 14,
        "text": 3584,
        "windows": 4,
        **GATED,
    },
    "pixtral": {
        "kind": "pixtral",
        "d": 1024,
        "heads": 16,
        "ff": 4096,
        "patch": 16,
        "merge": 1,
        "text": 5120,
        "biases": False,
        **GATED,
    },
}
"""Arguments of `Tower`."""
BOUND = 2e-2
"""Of the largest value: queries, keys and values are f16, activations of some types less exact."""
RUNS = 5


def tower_of(shape: str, layers: int) -> Tower:
    """A random encoder."""
    try:
        from tests.cpu.media.vision_towers import Tower
    except ModuleNotFoundError as error:
        raise SystemExit(f"random encoders need a checkout's tests: {error}") from None
    return Tower(**SHAPES[shape], layers=layers)


def encoder(path: Path, tower: Tower, device: EncoderRuntime | None) -> Projector:
    """The encoder of a file."""
    n_threads = physical_cores()
    projector = open_projector(str(path), n_embd=tower.text, n_threads=n_threads, log=print, device=device)
    projector.take_memory(print)
    return projector


def timed(projector: Projector, picture: np.ndarray, runs: int) -> tuple[np.ndarray, float, float]:
    """Rows, seconds of the first picture and the median of so many later ones."""
    seconds = []
    for _ in range(1 + runs):
        began = time.perf_counter()
        rows = projector.rows(picture).values
        seconds.append(time.perf_counter() - began)
    return rows, seconds[0], statistics.median(seconds[1:])


def main() -> int:
    """Parse, encode, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"{', '.join(SHAPES)} (default: all)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--type", default="f16")
    parser.add_argument("--side", type=int, default=64, help="patches of a side (default: 64)")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.shapes if name not in SHAPES]:
        parser.error(f"{unknown[0]}: the shapes are {', '.join(SHAPES)}")
    if not available():
        parser.error(f"there is no GPU: {why_none()}")
    device, wrong = available()[0], 0
    layers, side, runs = (1, 4, 1) if arguments.small else (arguments.layers, arguments.side, RUNS)
    for name in arguments.shapes or SHAPES:
        tower = tower_of(name, layers)
        with tempfile.TemporaryDirectory() as folder:
            path = tower.write(Path(folder) / "mmproj.gguf", tower.weights(), arguments.type.lower())
            picture = tower.picture(side, side)
            runtime = EncoderRuntime(device, DeviceParams(), print)
            found, first, there = timed(encoder(path, tower, runtime), picture, runs)
            expected, _, here = timed(encoder(path, tower, None), picture, 1)
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        wrong += not error <= BOUND
        speed = f"{device.name} {1e3 * there:.1f} ms (the first {1e3 * first:.0f}), CPU {1e3 * here:.0f} ms"
        print(f"{name}: {layers} layers, {side * side} patches, {arguments.type}: {speed}")
        verdict = "" if error <= BOUND else ": WRONG"
        print(f"{name}: rows differ by {error:.1e} of the largest value{verdict}", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
