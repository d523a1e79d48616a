"""Records what llama.cpp makes of sounds with the encoders of tests/cpu/media/sound_kinds.py: marks and rows.

pip install xllamacpp        # its library keeps the C functions of llama.cpp's mtmd.h
python -m scripts.make_peer_sounds [NAME ...]
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

from scripts.make_peer_pictures import POINTER, Peer, call, library, spelled, write_text_model
from tests.cpu.media.sound_kinds import (
    GOLDENS,
    LIKE_LLAMA_CPP,
    PEER_COLUMNS,
    PEER_ROWS,
    TEXT_AROUND,
    TOWERS,
    peer_sounds,
)


class SoundPeer(Peer):
    """llama.cpp with a text model and a projector of sound."""

    def bitmap(self, media: np.ndarray) -> int:
        samples = np.ascontiguousarray(media, np.float32)
        make = self.lib.mtmd_bitmap_init_from_audio
        make.argtypes, make.restype = [ctypes.c_size_t, POINTER], POINTER
        return make(len(samples), samples.ctypes.data)


def record(lib: ctypes.CDLL, name: str) -> Path:
    """Writes what sounds become."""
    tower = TOWERS[name]
    with tempfile.TemporaryDirectory() as folder:
        model, projector = Path(folder) / "text.gguf", Path(folder) / "mmproj.gguf"
        tokens = write_text_model(model, tower.text, [mark for mark in TEXT_AROUND[name] if mark])
        peer = SoundPeer(lib, model, tower.write(projector, tower.weights()), tower.text)
        found = [peer.pieces(samples) for samples in peer_sounds(name)]
    if name == "qwen3a":
        found = [[*pieces[:-2], pieces[-1]] for pieces in found]
    texts = [[spelled(tokens, p) if isinstance(p, list) else len(p) for p in pieces] for pieces in found]
    arrays = [p for pieces in found for p in pieces if isinstance(p, np.ndarray)]
    rows = np.stack([p[list(PEER_ROWS), :PEER_COLUMNS] for p in arrays]).astype(np.float16)
    peaks = np.array([np.abs(p).max() for p in arrays], np.float16)
    path = GOLDENS / f"peer_{name}.npz"
    np.savez_compressed(
        path, pieces=json.dumps(texts), rows=rows, peaks=peaks, peer=f"xllamacpp {version('xllamacpp')}"
    )
    return path


def main() -> None:
    """Writes the files."""
    lib = library()
    call(lib, "llama_backend_init", None)
    GOLDENS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or LIKE_LLAMA_CPP:
        print(f"{name}: {record(lib, name).stat().st_size} bytes")


if __name__ == "__main__":
    main()
