"""Records what llama.cpp makes of random pictures with the files of tests/cpu/media/tile_towers.py: marks,
rows, proportions.

pip install xllamacpp        # its library keeps the C functions of llama.cpp's mtmd.h
python -m scripts.make_peer_pictures
"""

from __future__ import annotations

import ctypes
import json
import math
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp

from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.graph.ir import F32
from tests.cpu.media.tile_towers import GOLDENS, PEER_COLUMNS, TOWERS, peer_pictures
from tests.cpu.media.tile_weights import TileTower

POINTER = ctypes.c_void_p
MARKER = b"<__media__>"
N_HEAD, N_FF = 2, 32
# Offsets in mtmd_context_params of that version.
USE_GPU, N_THREADS, FLASH = 0, 20, 40


class Struct(ctypes.Structure):
    """A structure that is passed by value, with room for later versions of it."""

    _fields_ = (("bytes", ctypes.c_ubyte * 512),)


class Text(ctypes.Structure):
    """mtmd_input_text."""

    _fields_ = (
        ("text", ctypes.c_char_p),
        ("length", ctypes.c_size_t),
        ("add_special", ctypes.c_bool),
        ("parse_special", ctypes.c_bool),
    )


def library() -> ctypes.CDLL:
    """llama.cpp."""
    folder = Path(xllamacpp.__file__).parent
    return ctypes.CDLL(str(next(folder.glob("*.so"))))


def call(lib: ctypes.CDLL, name: str, result: Any, *args: Any) -> Any:
    """A C function; arguments are pointers and what ctypes knows."""
    function = getattr(lib, name)
    function.restype = result
    kinds = {int: POINTER, bytes: ctypes.c_char_p}
    function.argtypes = [kinds.get(type(a), type(a)) for a in args]
    return function(*args)


def write_text_model(path: Path, n: int, special: Sequence[str], arch: str = "llama", n_deep: int = 0) -> list[str]:
    """A random llama, hunyuan_vl, or granite with parts of rows for n_deep layers, with rows of n elements; its tokens:
    the special ones and bytes."""
    tokens = ["<unk>", "<s>", "</s>", *special, *(f"<0x{i:02X}>" for i in range(256))]
    random, n_layer = np.random.default_rng(1), 1 + n_deep
    shapes = {"token_embd": (len(tokens), n), "output": (len(tokens), n), "output_norm": (n,)}
    for p in (f"blk.{il}" for il in range(n_layer)):
        shapes |= {f"{p}.{name}_norm": (n,) for name in ("attn", "ffn")}
        shapes |= {f"{p}.attn_{name}": (n, n) for name in ("q", "k", "v", "output")}
        shapes |= {f"{p}.ffn_gate": (N_FF, n), f"{p}.ffn_up": (N_FF, n), f"{p}.ffn_down": (n, N_FF)}
        if arch == "hunyuan_vl":
            shapes |= {f"{p}.attn_{name}_norm": (n // N_HEAD,) for name in "qk"}
    sizes = {"block_count": n_layer, "embedding_length": n, "attention.head_count": N_HEAD, "feed_forward_length": N_FF}
    floats = {"attention.layer_norm_rms_epsilon": 1e-5}
    arrays = {}
    if arch == "hunyuan_vl":
        floats["rope.freq_base"] = 20.0  # all pairs turn
        arrays["rope.dimension_sections"] = [n // N_HEAD // 8] * 4
    if arch == "granite":
        floats |= {"logit_scale": 2.0, "residual_scale": 0.5, "embedding_scale": 3.0, "attention.scale": 0.3}
        arrays["deepstack_mapping"] = [-1, *range(1, n_layer)]
    with GGUFWriter(path) as out:
        out.add("general.architecture", GGUFValueType.STRING, arch)
        for name, value in {**sizes, "context_length": 512, "vocab_size": len(tokens)}.items():
            out.add(f"{arch}.{name}", GGUFValueType.UINT32, value)
        for name, number in floats.items():
            out.add(f"{arch}.{name}", GGUFValueType.FLOAT32, number)
        for name, values in arrays.items():
            out.add_array(f"{arch}.{name}", GGUFValueType.INT32, values)
        out.add("tokenizer.ggml.model", GGUFValueType.STRING, "llama")
        out.add("tokenizer.ggml.add_space_prefix", GGUFValueType.BOOL, False)
        out.add_array("tokenizer.ggml.tokens", GGUFValueType.STRING, tokens)
        out.add_array("tokenizer.ggml.scores", GGUFValueType.FLOAT32, [0.0] * len(tokens))
        kinds = [2, 3, 3] + [3] * len(special) + [6] * 256
        out.add_array("tokenizer.ggml.token_type", GGUFValueType.INT32, kinds)
        for name, shape in shapes.items():
            out.add_tensor(f"{name}.weight", shape[::-1], F32)
        for name, shape in shapes.items():
            out.write(f"{name}.weight", random.normal(0, 1 / math.sqrt(n), shape).astype(np.float32))
    return tokens


def spelled(tokens: list[str], ids: Sequence[int]) -> str:
    """Text of tokens."""
    words = (tokens[i] for i in ids)
    return "".join(chr(int(word[3:5], 16)) if word.startswith("<0x") else word for word in words)


class Peer:
    """llama.cpp with a text model and a projector."""

    def __init__(self, lib: ctypes.CDLL, model: Path, projector: Path, n: int) -> None:
        self.lib, self.n = lib, n
        self.model = call(
            lib,
            "llama_model_load_from_file",
            POINTER,
            str(model).encode(),
            call(lib, "llama_model_default_params", Struct),
        )
        params = call(lib, "mtmd_context_params_default", Struct)
        address = ctypes.addressof(params)
        ctypes.c_bool.from_address(address + USE_GPU).value = False
        ctypes.c_int.from_address(address + N_THREADS).value = 1
        ctypes.c_int.from_address(address + FLASH).value = 0
        self.context = call(lib, "mtmd_init_from_file", POINTER, str(projector).encode(), self.model, params)
        if not self.context:
            raise SystemExit(f"llama.cpp does not load {projector}")

    def bitmap(self, media: np.ndarray) -> int:
        """A picture as llama.cpp wants it."""
        height, width, _ = media.shape
        pixels = np.ascontiguousarray(media)
        make = self.lib.mtmd_bitmap_init
        make.argtypes, make.restype = [ctypes.c_uint32, ctypes.c_uint32, POINTER], POINTER
        return make(width, height, pixels.ctypes.data)

    def pieces(self, media: np.ndarray) -> list[list[int] | np.ndarray]:
        """Tokens and rows of a picture, in order."""
        lib, bitmap = self.lib, self.bitmap(media)
        chunks = call(lib, "mtmd_input_chunks_init", POINTER)
        text, bitmaps = Text(MARKER, len(MARKER), False, True), (POINTER * 1)(bitmap)
        lib.mtmd_tokenize.argtypes = [POINTER, POINTER, ctypes.POINTER(Text), ctypes.POINTER(POINTER), ctypes.c_size_t]
        if lib.mtmd_tokenize(self.context, chunks, ctypes.byref(text), bitmaps, 1):
            raise SystemExit(f"llama.cpp refuses media of {media.shape}")
        return [self.piece(chunks, i) for i in range(call(lib, "mtmd_input_chunks_size", ctypes.c_size_t, chunks))]

    def piece(self, chunks: int, i: int) -> list[int] | np.ndarray:
        """Piece i."""
        lib = self.lib
        chunk = call(lib, "mtmd_input_chunks_get", POINTER, chunks, i)
        if call(lib, "mtmd_input_chunk_get_type", ctypes.c_int, chunk) == 0:
            count = ctypes.c_size_t()
            lib.mtmd_input_chunk_get_tokens_text.argtypes = [POINTER, POINTER]
            lib.mtmd_input_chunk_get_tokens_text.restype = ctypes.POINTER(ctypes.c_int32)
            return lib.mtmd_input_chunk_get_tokens_text(chunk, ctypes.addressof(count))[: count.value]
        rows = call(lib, "mtmd_input_chunk_get_n_tokens", ctypes.c_size_t, chunk)
        if call(lib, "mtmd_encode_chunk", ctypes.c_int, self.context, chunk):
            raise SystemExit("llama.cpp fails to encode a picture")
        found = call(lib, "mtmd_get_output_embd", ctypes.POINTER(ctypes.c_float), self.context)
        return np.ctypeslib.as_array(found, (rows, self.n)).copy()


def record(lib: ctypes.CDLL, tower: TileTower, path: Path) -> int:
    """Writes what a tower's pictures become; returns the number of pieces."""
    with tempfile.TemporaryDirectory() as folder:
        model, projector = Path(folder) / "text.gguf", Path(folder) / "mmproj.gguf"
        tokens = write_text_model(model, tower.text, tower.special)
        peer = Peer(lib, model, tower.write(projector, tower.peer_weights()), tower.text)
        found = [peer.pieces(image) for image in peer_pictures(tower)]
    texts = [[spelled(tokens, p) if isinstance(p, list) else len(p) for p in pieces] for pieces in found]
    arrays = [p for pieces in found for p in pieces if isinstance(p, np.ndarray)]
    rows = np.stack([p[[1, -2], :PEER_COLUMNS] for p in arrays]).astype(np.float16)
    peaks = np.array([np.abs(p).max() for p in arrays], np.float16)
    peer_name = f"xllamacpp {version('xllamacpp')}"
    np.savez_compressed(path, pieces=json.dumps(texts), rows=rows, peaks=peaks, peer=peer_name)
    return len(arrays)


def main() -> None:
    """Writes the files."""
    lib = library()
    call(lib, "llama_backend_init", None)
    GOLDENS.mkdir(exist_ok=True)
    for name, tower in TOWERS.items():
        path = GOLDENS / f"peer_{name}.npz"
        n = record(lib, tower, path)
        print(f"{name}: {n} pieces with rows, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
