"""Kernel files cut down to the kernels that a test launches, which compile in seconds; optionally with mistakes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from ikpy.backends.cuda import modules
from ikpy.backends.cuda.launch import kernel_file
from tests.cuda.ptx.launcher import Library

_LISTED = re.compile(r"^IKPY_(?:WEIGHT_TYPE|FLOAT_TYPE|FLASH)\((\w+),.*$", re.MULTILINE)


class CutLibrary(Library):
    """As Library, of files in a folder that hold one weight type, or one kernel of attention, each.

    edits: text of the kernels' files, and what stands there instead.
    """

    def __init__(self, arch: int, folder: Path, edits: Mapping[str, str] | None = None) -> None:
        super().__init__(arch)
        self._folder, self._edits = folder, dict(edits or {})
        self._seen: set[str] = set()

    def source(self, kernel: str) -> Path:
        stem = kernel_file(kernel)
        folder = self._folder / kernel
        if not folder.exists():
            self._write(folder, stem, {kernel, kernel.partition("_")[2]})
        return folder / f"{stem}.cu"

    def _write(self, folder: Path, stem: str, kept: set[str]) -> None:
        folder.mkdir(parents=True)
        for name in {stem, stem.replace("wgmma_", "weights_")}:
            path = modules.KERNELS / f"{name}.cu"
            if path.exists():
                text = _LISTED.sub(lambda m: m[0] if m[1] in kept else "", path.read_text())
                (folder / path.name).write_text(self._edited(text))
        if self._edits:
            for path in modules.KERNELS.glob("*.cuh"):
                (folder / path.name).write_text(self._edited(path.read_text()))
            shutil.copytree(modules.KERNELS / "unpack", folder / "unpack")

    def _edited(self, text: str) -> str:
        for old, new in self._edits.items():
            if old in text:
                self._seen.add(old)
                text = text.replace(old, new)
        return text

    def all_edited(self) -> bool:
        """Whether the files that were compiled had every text that was to be edited."""
        return self._seen == set(self._edits)
