"""A checkpoint folder: JSON files, and the tensors of its safetensors files as views of mapped memory.

The `safetensors` package gives numpy no bf16 and no fp8, the two types nearly all checkpoints are stored in; the
format is a length, a JSON table and the bytes, so it is read here.
"""

from __future__ import annotations

import json
import mmap
import operator
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.gguf.types import MAX_TENSOR_NAME_BYTES

# safetensors type -> numpy type of the stored words; bf16 and fp8 are kept as bits.
STORAGE = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "F8_E8M0": "u1",
    "U8": "u1",
    "I8": "i1",
    "I32": "<i4",
    "I64": "<i8",
    "BOOL": "u1",
}
_MAX_HEADER = 100_000_000
_MAX_DIMS = 32
_MAX_EXTENT = (1 << 31) - 1
_INDEX = "model.safetensors.index.json"
_THINKER = "thinker_config"
_LFM_AUDIO = "Lfm2AudioForConditionalGeneration"
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: shape with the slowest dimension first, byte range in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int


class Checkpoint:
    """Tensors by name. FileFormatError or UnsupportedError for folders that are incomplete or of another kind.

    has_tensors: without them the configuration and the tokenizer are all that is read.
    """

    def __init__(self, folder: Path, *, has_tensors: bool = True) -> None:
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "no such folder"
            raise FileFormatError(f"{folder}: {problem}; give the folder with config.json and *.safetensors")
        self.folder = folder
        self.config = with_lfm(with_thinker(self.json("config.json", required=True)))
        self.tensors: dict[str, StoredTensor] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for path in self._files() if has_tensors else []:
            for tensor in _read_header(path):
                if tensor.name in self.tensors:
                    raise FileFormatError(f"{path}: tensor '{tensor.name}' is in {self.tensors[tensor.name].path} too")
                self.tensors[tensor.name] = tensor
        if has_tensors:
            self._check_index()

    def json(self, name: str, *, required: bool = False) -> dict[str, Any]:
        """The object in a JSON file; an empty one if the file is absent and not required."""
        path = self.folder / name
        if not path.is_file():
            if required:
                raise FileFormatError(f"{path}: no such file; {self._kind()}")
            return {}
        check_fetched(path)
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise FileFormatError(f"{path}: not a JSON object")
        return value

    def _kind(self) -> str:
        """What a folder without config.json is."""
        if (self.folder / "adapter_config.json").is_file():
            return f"{self.folder} is a LoRA adapter of PEFT, and only whole models are converted"
        return f"{self.folder} is no Hugging Face checkpoint"

    def text(self, name: str) -> str | None:
        """Content of a text file, None if it is absent."""
        path = self.folder / name
        try:
            return path.read_text(encoding="utf-8") if path.is_file() else None
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None

    def texts(self, folder: str, suffix: str) -> dict[str, str]:
        """Contents of the text files with a suffix in a subfolder, by their names without it."""
        names = sorted(path.name for path in (self.folder / folder).glob(f"*{suffix}"))
        return {name.removesuffix(suffix): self.text(f"{folder}/{name}") or "" for name in names}

    def raw(self, name: str) -> np.ndarray:
        """The stored words of a tensor, read-only, as a view of the file."""
        tensor = self.tensors[name]
        dtype = np.dtype(STORAGE[tensor.dtype])
        return np.frombuffer(self._map(tensor.path), dtype, tensor.nbytes // dtype.itemsize, tensor.start).reshape(
            tensor.shape
        )

    def release(self, name: str) -> None:
        """Give the pages of a tensor back; they are read again when they are needed again."""
        tensor = self.tensors[name]
        start = tensor.start // mmap.PAGESIZE * mmap.PAGESIZE
        mapped = self._map(tensor.path)
        if tensor.nbytes and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED, start, tensor.start + tensor.nbytes - start)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[path]

    def _files(self) -> list[Path]:
        self._weight_map: dict[str, str] = self.json(_INDEX).get("weight_map", {})
        if not isinstance(self._weight_map, dict) or not all(isinstance(n, str) for n in self._weight_map.values()):
            raise FileFormatError(f"{self.folder / _INDEX}: 'weight_map' does not give a file for every tensor")
        if self._weight_map:
            names = sorted(set(self._weight_map.values()))
            missing = [name for name in names if not (self.folder / name).is_file()]
            if missing:
                raise FileFormatError(
                    f"{self.folder}: {len(missing)} of {len(names)} shards are missing, the first is {missing[0]}; "
                    "download them again"
                )
            return [self.folder / name for name in names]
        single = self.folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(self.folder.glob("*.safetensors"))
        if not files:
            other = any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt*"))
            hint = "; PyTorch files are not read, save the model as safetensors" if other else ""
            raise UnsupportedError(f"{self.folder}: no safetensors file{hint}")
        return files

    def _check_index(self) -> None:
        for name, file in self._weight_map.items():
            if name not in self.tensors:
                raise FileFormatError(f"{self.folder / file}: tensor '{name}' of {_INDEX} is missing")


def with_thinker(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the values of Omni models' thinker, the part that reads and writes texts, outside of it."""
    thinker = config.get(_THINKER)
    if not isinstance(thinker, dict):
        return config
    named = {name: config[name] for name in ("model_type", "architectures") if name in config}
    return {name: value for name, value in config.items() if name != _THINKER} | thinker | named


def with_lfm(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of LFM2-Audio, which names no type, with those of the model and of its text part."""
    inner = config.get("lfm")
    if config.get("architectures") != [_LFM_AUDIO] or not isinstance(inner, dict):
        return config
    return {"model_type": "lfm2_audio", **config, "text_config": {"model_type": "lfm2", **inner}}


def check_fetched(path: Path) -> None:
    """FileFormatError if a file is only Git LFS's note of where it lies."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise FileFormatError(f"{path}: this is a Git LFS pointer, not the file itself; git lfs pull fetches it")


def _read_header(path: Path) -> list[StoredTensor]:
    check_fetched(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise FileFormatError(f"{path}: not a safetensors file, or cut off (header of {length} bytes)")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"{path}: header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise FileFormatError(f"{path}: header is no table of tensors")
    return [_entry(path, name, entry, 8 + length, size) for name, entry in header.items() if name != "__metadata__"]


def _entry(path: Path, name: str, entry: Any, data_start: int, size: int) -> StoredTensor:
    if len(name) > MAX_TENSOR_NAME_BYTES:
        raise FileFormatError(
            f"{path}: a tensor's name has {len(name)} characters, more than the {MAX_TENSOR_NAME_BYTES} allowed"
        )
    try:
        dtype, shape = str(entry["dtype"]), tuple(map(operator.index, entry["shape"]))
        start, end = map(operator.index, entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise FileFormatError(f"{path}: table entry of tensor '{name}' is malformed") from None
    if dtype not in STORAGE:
        raise UnsupportedError(f"{path}: tensor '{name}' has type {dtype}; known: {', '.join(STORAGE)}")
    nbytes = int(np.prod(shape, dtype=object)) * np.dtype(STORAGE[dtype]).itemsize
    is_possible = len(shape) <= _MAX_DIMS and 0 <= min(shape, default=0) <= max(shape, default=0) <= _MAX_EXTENT
    if not is_possible or start < 0 or end - start != nbytes:
        raise FileFormatError(f"{path}: tensor '{name}' does not fit its {end - start} bytes")
    if data_start + end > size:
        raise FileFormatError(f"{path}: file is cut off: tensor '{name}' ends at byte {data_start + end} of {size}")
    return StoredTensor(name, dtype, shape, path, data_start + start, nbytes)
