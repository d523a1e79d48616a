"""Records what llama.cpp makes of random pictures with the files of tests/cpu/media/tower_kinds.py,
deepseek_ocr2_tower.py, granite4_tower.py, hunyuan_tower.py and mobilenet_tower.py: marks, rows, proportions.

pip install xllamacpp        # its library keeps the C functions of llama.cpp's mtmd.h
python -m scripts.make_peer_towers
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from scripts.make_peer_pictures import Peer, call, library, spelled, write_text_model
from tests.cpu.media import deepseek_ocr2_tower as ocr2
from tests.cpu.media import granite4_tower as granite
from tests.cpu.media import hunyuan_tower as hunyuan
from tests.cpu.media import mobilenet_tower as mobile
from tests.cpu.media.tower_kinds import (
    STEP3VL,
    STEP_MARKS,
    TEXT_AROUND,
    TOWERS,
    peer_pictures,
    peer_tower,
    step_pictures,
)
from tests.cpu.media.vision_towers import GOLDENS, PEER_COLUMNS, Tower


def record(
    lib: ctypes.CDLL,
    tower: Tower | ocr2.Ocr2Tower | mobile.MobileTower,
    marks: tuple[str, ...],
    pictures: Sequence[np.ndarray],
    path: Path,
    type_name: str = "f32",
    arch: str = "llama",
    n_deep: int = 0,
) -> None:
    """Writes what pictures become beside a text model."""
    width = tower.text * (1 + len(tower.deep) + n_deep)
    with tempfile.TemporaryDirectory() as folder:
        model, projector = Path(folder) / "text.gguf", Path(folder) / "mmproj.gguf"
        tokens = write_text_model(model, tower.text if n_deep else width, marks, arch, n_deep)
        peer = Peer(lib, model, tower.write(projector, tower.weights(), type_name), width)
        found = [peer.pieces(image) for image in pictures]
    texts = [[spelled(tokens, p) if isinstance(p, list) else len(p) for p in pieces] for pieces in found]
    arrays = [p for pieces in found for p in pieces if isinstance(p, np.ndarray)]
    rows = np.stack([p[[1, -2]][:, :PEER_COLUMNS] for p in arrays]).astype(np.float16)
    peaks = np.array([np.abs(p).max() for p in arrays], np.float16)
    peer_name = f"xllamacpp {version('xllamacpp')}"
    np.savez_compressed(path, pieces=json.dumps(texts), rows=rows, peaks=peaks, peer=peer_name)


def main() -> None:
    """Writes the files."""
    lib = library()
    call(lib, "llama_backend_init", None)
    GOLDENS.mkdir(exist_ok=True)
    for name in TOWERS:
        path = GOLDENS / f"peer_{name}.npz"
        tower = peer_tower(name)
        record(lib, tower, tuple(mark for mark in TEXT_AROUND[name] if mark), peer_pictures(tower), path)
        print(f"{name}: {path.stat().st_size} bytes")
    record(lib, STEP3VL, STEP_MARKS, step_pictures(), GOLDENS / "peer_step3vl.npz")
    record(lib, ocr2.PUBLISHED, (), [ocr2.peer_picture()], ocr2.PEER)
    record(lib, hunyuan.TOWER, hunyuan.MARKS, hunyuan.peer_pictures(), hunyuan.PEER, arch="hunyuan_vl")
    n_deep = len(granite.TOWER.blocks) - 1
    record(lib, granite.TOWER, (), granite.pictures(), granite.PEER, arch="granite", n_deep=n_deep)
    marks = ("<start_of_image>", "<end_of_image>")
    record(lib, mobile.PEER_TOWER, marks, mobile.peer_pictures(), mobile.PEER, "f16")


if __name__ == "__main__":
    main()
