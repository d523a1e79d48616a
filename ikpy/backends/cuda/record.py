"""What was found out about a device: whether newer kernels work there, and which kernels are fastest.

Kept beside the cubins, by device, driver, kernel sources and compiler: whatever changes makes the findings void.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikpy.backends.cuda import modules
from ikpy.backends.cuda.api import Device
from ikpy.backends.cuda.launch import ACT_BF16, ACT_TILES, Large
from ikpy.gguf.atomic import write_whole

# Kernels that multiply large products, by the format of the activations that they read.
GEMM_KERNELS = {ACT_BF16: "gemm_bf16", ACT_TILES: "gemm_wgmma"}
# Fields that say whether newer kernels work.
TRIED = ("wgmma", "wgmma_s8")
_log = logging.getLogger(__name__)
# Files and what failed with them: a record is asked for at every load of a model.
_told: set[tuple[Path, str]] = set()


@dataclass
class Record:
    """Findings on one device; None: not looked at.

    wgmma: whether gemm_wgmma gives what gemm_bf16 gives; wgmma_s8: wgmma_TYPE what matmul_TYPE gives. large: how
    large products of the types of a kernel file are computed fastest. milliseconds: what was measured for that.
    """

    path: Path
    device: dict[str, str]
    wgmma: bool | None = None
    wgmma_s8: bool | None = None
    large: dict[str, Large] | None = None
    milliseconds: list[dict[str, Any]] = field(default_factory=list)

    def save(self) -> None:
        """Writes the record, whole or not at all."""
        formats = {format: name for format, name in GEMM_KERNELS.items()}
        large = None
        if self.large is not None:
            large = {
                file: {"tokens": way.tokens, "kernel": formats[way.format], "wgmma": way.wgmma}
                for file, way in self.large.items()
            }
        tried = {name: getattr(self, name) for name in TRIED}
        found = {**self.device, **tried, "large": large, "milliseconds": self.milliseconds}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, (json.dumps(found, indent=1) + "\n").encode())

    def keep(self) -> None:
        """As save; where that is impossible, a warning says so."""
        try:
            self.save()
        except OSError as error:
            _warn_once(self.path, "written", f"{error.strerror}; its kernels are tried again at every start")


def load(device: Device) -> Record:
    """The record of a device; an empty one if there is none, or, with a warning, if it cannot be read."""
    identity = {"device": device.description, "driver": device.software(), "kernels": modules.kernels_digest()}
    key = hashlib.sha256("\0".join(identity.values()).encode()).hexdigest()[:12]
    name = re.sub(r"[^a-z0-9]+", "-", device.description.lower()).strip("-")
    record = Record(modules.cache_dir() / "devices" / f"{name}-{key}.json", identity)
    try:
        _read(record)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        _warn_once(record.path, "read", f"{reason}; nothing counts as known of the device")
        return Record(record.path, identity)
    return record


def _warn_once(path: Path, failed: str, consequence: str) -> None:
    if (path, failed) not in _told:
        _told.add((path, failed))
        _log.warning("the record of a device, %s, cannot be %s: %s", path, failed, consequence)


def _read(record: Record) -> None:
    found = json.loads(record.path.read_text())
    formats = {name: format for format, name in GEMM_KERNELS.items()}
    for name in TRIED:
        if found[name] not in (None, True, False):
            raise ValueError(name)
        setattr(record, name, found[name])
    if found["large"] is not None:
        ways = found["large"].items()
        record.large = {
            file: Large(int(way["tokens"]), formats[way["kernel"]], int(way["wgmma"])) for file, way in ways
        }
    record.milliseconds = list(found["milliseconds"])
