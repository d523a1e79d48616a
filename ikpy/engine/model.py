"""A loaded model: mapped file, architecture, sizes."""

from __future__ import annotations

import os
from collections import ChainMap, Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ikpy._native import core
from ikpy.backends.cuda import setup
from ikpy.backends.cuda.api import aligned
from ikpy.backends.cuda.devices import device_lines, wanted_devices
from ikpy.backends.cuda.memory import WeightStore
from ikpy.engine.locking import lock_memory
from ikpy.engine.params import ModelParams
from ikpy.errors import FileFormatError
from ikpy.gguf.file_bytes import share_of
from ikpy.gguf.fingerprint import weights_fingerprint
from ikpy.gguf.huge_pages import fitting_reserved_pages
from ikpy.gguf.reader import GGUFFile, TensorInfo
from ikpy.graph.adapters import adapted_tensor
from ikpy.graph.division import OUTPUTS, TIED_OUTPUT, Matrix
from ikpy.graph.ir import I32, Buffer, Value
from ikpy.graph.placement import CPU, EXPERT_NAME, Placement, check_placement, place, placement_lines
from ikpy.graph.weight_parts import whole_name
from ikpy.machine import numa
from ikpy.machine.memory import available_memory
from ikpy.models import architecture, silent
from ikpy.models.base import Architecture
from ikpy.models.hparams import HParams
from ikpy.models.interleaving import interleaved_sizes, interleaved_type
from ikpy.models.keys import Keys
from ikpy.models.weights import WeightSource, page_dropper
from ikpy.quants import registry
from ikpy.quants.model_shape import EXTRA_OUTPUT

MIB = 1 << 20
LEAST_FILLED = 64 * MIB  # the first token has read less before threads have started
NO_MODELS = (
    ("general.type", "adapter", "an adapter: give it with --lora beside its model"),
    ("general.type", "imatrix", "an importance matrix: ikpy quantize takes it with --imatrix"),
    ("general.architecture", "controlvector", "a control vector: give it with --control-vector beside its model"),
    ("general.architecture", "clip", "a projector of images or sound, which belongs to a language model"),
)
"""Keys and values of GGUF files that hold no language model, and what they are."""


Progress = Callable[[float], None]


def open_model(path: str | os.PathLike[str], params: ModelParams, progress: Progress | None = None) -> GGUFFile:
    """The file, mapped or read into memory as the parameters say; progress is told the share that was read.

    Of a file that is read, tensors that lie on devices stay mapped: they are read once, while they are copied there.
    So do tensors that are rearranged into reserved huge pages, and tables of which tokens read few rows.
    """
    check_placement(params.placement, [device.name for device in wanted_devices(params.placement, params.devices)])

    def wanted(file: GGUFFile) -> set[str]:
        check_holds_model(file)
        keys = Keys(file, params.kv_overrides)
        names = set(filter(_lies_on_cpu(file, keys, params), file.tensors)) - architecture(keys.arch).mapped_tables
        rearranged = interleaved_sizes(file.tensors[name] for name in names)
        if params.huge_pages and params.repack and fitting_reserved_pages(sum(rearranged)):
            names = {name for name in names if not interleaved_type(file.tensors[name])}
        return names

    gguf = GGUFFile.open(
        Path(path),
        header_only=params.header_only,
        use_mmap=params.use_mmap,
        reserved_pages=params.huge_pages and not params.repack,
        wanted=wanted,
        progress=progress,
    )
    check_holds_model(gguf)
    if params.use_mmap and not params.read_ahead:
        gguf.stop_read_ahead()
    return gguf


def check_holds_model(gguf: GGUFFile) -> None:
    """FileFormatError for GGUF files that go with a model and hold none, naming the option that takes them."""
    for key, value, what in NO_MODELS:
        if gguf.get(key) == value:
            raise FileFormatError(f"{gguf.path}: this is no model but {what}")


def _lies_on_cpu(gguf: GGUFFile, keys: Keys, params: ModelParams) -> Callable[[str], bool]:
    """Which tensors have their place on the CPU."""
    devices = setup.placement_devices(wanted_devices(params.placement, params.devices), params.placement)
    sizes = {info.name: info.nbytes for info in gguf.tensors.values()}
    placement = place(sizes, architecture(keys.arch).n_layers(keys), params.placement, devices)
    return lambda name: placement.device_of(name) == CPU


def _matrices(tensors: Iterable[TensorInfo], arch: Architecture, weights: Mapping[str, Value]) -> dict[str, Matrix]:
    """All matrices that a model multiplies with; embeddings of encoders are looked up only."""
    unused = OUTPUTS if arch.is_encoder else ()
    factored = {name for name, value in weights.items() if value.buffer.factor is not None}
    return {
        info.name: Matrix(info.shape[0], info.shape[1], registry.by_id(info.type_id), info.name in factored)
        for info in tensors
        if len(info.shape) > 1 and info.name not in unused
    }


@dataclass(frozen=True)
class Beside:
    """What a model that drafts for another one shares with it.

    lent: tensors of the other's file. fixed: devices of tensors that do not go by the placement. weights: what the
    other one has on devices.
    """

    lent: Mapping[str, TensorInfo] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)
    weights: WeightStore | None = None

    def settle(self, placement: Placement) -> None:
        """Takes what is lent out of a placement, where it counts as no tensor of the file, and adds what is fixed."""
        for name in self.lent:
            del placement.tensors[name]
            placement.tied &= name != TIED_OUTPUT
        placement.tensors |= self.fixed


class Model:
    """Weights stay in the mapped file; nothing is copied but what the architecture derives."""

    def __init__(
        self, gguf: GGUFFile, arch: Architecture, params: ModelParams, weights: Mapping[str, Value] | None = None
    ) -> None:
        self.gguf = gguf
        self.arch = arch
        self.params = params
        self.weights: Mapping[str, Value] = weights or {}
        self.placement = Placement({}, (), (), CPU)
        self.devices: setup.DeviceSetup | None = None
        self.own_bytes = 0
        self.reader: Model | None = None
        """The drafter that reads inputs of the layers, if there is one."""
        self.lent: frozenset[str] = frozenset()
        """Tensors of the model that this one drafts for."""
        self.replaced: set[str] = set()
        """Tensors that are not used in the mapping (repacked, decoded, joined); own_bytes is what took their place."""

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | GGUFFile,
        params: ModelParams | None = None,
        *,
        log: Callable[[str], None] | None = None,
        progress: Progress | None = None,
    ) -> Model:
        """Opens a GGUF file (the first part of a split one) or takes an open one; checks that the model is complete.

        progress: is told the share (0 to 1) of the tensors, by bytes, that are ready.
        Raises FileFormatError or UnsupportedError with one line that names the file, tensor or key.
        """
        params = params or ModelParams()
        log = log or silent
        gguf = path if isinstance(path, GGUFFile) else open_model(path, params)
        keys = Keys(gguf, params.kv_overrides)
        weights = WeightSource(
            gguf,
            log,
            header_only=params.header_only,
            repack=_lies_on_cpu(gguf, keys, params) if params.repack else None,
            reserved_pages=params.huge_pages,
            taken=progress and share_of(sum(info.nbytes for info in gguf.tensors.values()) or 1, progress),
        )
        arch = architecture(keys.arch)(keys, weights, log)
        if weights.has(EXTRA_OUTPUT):
            weights.skip(EXTRA_OUTPUT)
            log(f"llm_load_tensors: note: tensor {EXTRA_OUTPUT} is not used")
        weights.check_all_used()
        if progress:
            progress(1.0)  # tensors that are skipped count as well
        model = cls(gguf, arch, params, weights.values)
        model.own_bytes = sum(weights.own_bytes.values())
        model.replaced = weights.replaced
        model.place(log)
        if model.own_bytes:
            name = "CPU_REPACK" if params.repack else "CPU_COPY"
            log(f"llm_load_tensors: {name:>10} buffer size = {model.own_bytes / MIB:8.2f} MiB")
        if params.repack:
            log(f"============ Repacked {len(weights.repacked)} tensors")
        model.log_decoded_types(log, set(weights.repacked))
        for name in arch.mapped_tables & gguf.tensors.keys():
            gguf.read_by_rows(gguf.tensors[name])
        model._lock(model._buffers_on_cpu(weights.own_bytes), log)
        model._fill()
        if params.check_tensors and not params.header_only:
            model.check_finite()
        return model

    def prediction_head(self, number: int = 0) -> Model:
        """A multi-token prediction layer as a model of its own, on the CPU; its contexts read states.

        Raises UsageError if the architecture or the file has none.
        """
        weights = WeightSource(self.gguf, silent, header_only=self.params.header_only)
        head = Model(self.gguf, self.arch.prediction_head(weights, number), self.params, weights.values)
        head._lock(head._buffers_on_cpu(weights.own_bytes), silent)
        return head

    def prediction_heads(self) -> list[Model]:
        """All layers that predict a token each, the first one at least. Raises UsageError as `prediction_head`."""
        return [self.prediction_head(number) for number in range(max(1, self.arch.n_prediction_heads))]

    def prepare(self, mla: int, log: Callable[[str], None]) -> None:
        """Computes what contexts of this mode of latent attention need and neither the file nor an earlier one has."""
        n_known = len(self.arch.derived)
        self.arch.prepare(mla)
        self._lock([b for b in self.arch.derived[n_known:] if self.placement.device_of(b.name) == CPU], log)

    def _lock(self, buffers: Iterable[Buffer], log: Callable[[str], None]) -> None:
        """Locks memory that the CPU reads, where that is wanted."""
        if self.params.use_mlock and not self.params.header_only:
            lock_memory([(buffer.address, buffer.nbytes) for buffer in buffers if buffer.address is not None], log)

    def _fill(self) -> None:
        """Lets mapped weights that the CPU reads come into memory from now on, where there is room for all of them.

        On machines of several memory nodes pages belong to the node of the thread that first needs them.
        """
        params = self.params
        if not params.fill or not params.use_mmap or not params.read_ahead or params.use_mlock or params.header_only:
            return
        kept = self.replaced | self.arch.mapped_tables
        tensors = [info for name, info in self.gguf.tensors.items() if name not in kept]
        tensors = [t for t in tensors if self.placement.device_of(t.name) == CPU]
        if params.defer_experts:
            tensors = [t for t in tensors if not EXPERT_NAME.match(t.name)]
        nbytes = sum(t.nbytes for t in tensors)
        if LEAST_FILLED <= nbytes <= available_memory() and len(numa.nodes()) <= 1:
            self.gguf.fill(tensors)

    def place(self, log: Callable[[str], None], beside: Beside | None = None) -> None:
        """Decides where the tensors go, and which devices of this machine are used."""
        beside = beside or Beside()
        tensors = {info.name: info for info in self.gguf.tensors.values()} | dict(beside.lent)
        devices = wanted_devices(self.params.placement, self.params.devices)
        seen = setup.placement_devices(devices, self.params.placement)
        heads = [self.arch.divisible_heads(il) for il in range(self.hparams.n_layer)]
        matrices = _matrices(tensors.values(), self.arch, self.weights)
        sizes = {name: info.nbytes for name, info in tensors.items()}
        placed = {name: nbytes for name, nbytes in sizes.items() if name not in beside.fixed}
        self.placement = place(placed, self.hparams.n_layer, self.params.placement, seen, matrices, heads)
        taken = dict(self.params.placement.taken)
        self.devices = setup.device_setup(devices, self.placement, self.params.devices, taken)
        beside.settle(self.placement)
        self.lent = frozenset(beside.lent)
        for line in (*device_lines(devices), *placement_lines(self.placement, sizes, seen, self.replaced)):
            log(line)
        if self.devices and beside.weights is not None:
            self.devices.weights = beside.weights
        if self.devices and not self.params.use_mlock:
            self.devices.weights.when_uploaded(page_dropper(self.gguf))
        self.arch.buffer_of = self.placement.device_of

    def _buffers_on_cpu(self, own: Container[str]) -> list[Buffer]:
        """Memory of the weights that the CPU reads: where the file has them, or what took their place (``own``); not
        that of tables that stay in the file."""
        tables = self.arch.mapped_tables
        used = (name for name in self.weights if name in own or (name not in self.replaced and name not in tables))
        return [self.weights[name].buffer for name in used if self.placement.device_of(name) == CPU]

    def log_decoded_types(self, log: Callable[[str], None], repacked: Container[str] = ()) -> None:
        """Notes the matrix types whose products decode to float first: correct, but slower than with an unpacker."""
        tensors = self.gguf.tensors.values()
        matrices = Counter(t.type_id for t in tensors if len(t.shape) > 1 and t.name not in repacked)
        for type_id, count in sorted(matrices.items()):
            if type_id != I32 and core.has_decoder(type_id) and not core.has_unpacker(type_id):
                log(
                    f"llm_load_tensors: note: {count} tensors of type {registry.by_id(type_id).name} have no unpacker; "
                    "their products decode to float first (slower)"
                )

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata of the file, with the values of kv_overrides."""
        return ChainMap(dict(self.params.kv_overrides), self.gguf.metadata)  # type: ignore[arg-type]

    @property
    def hparams(self) -> HParams:
        """Hyper-parameters of the architecture."""
        return self.arch.hp

    @property
    def n_params(self) -> int:
        """Number of weights in the file."""
        return sum(t.element_count for t in self.gguf.tensors.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.gguf.tensors.values())

    @property
    def mapped_bytes(self) -> dict[str, int]:
        """Bytes of the tensors that are used as they are in the file, per device where they have their place."""
        sizes = {info.name: 0 if info.name in self.replaced else info.nbytes for info in self.gguf.tensors.values()}
        return self.placement.bytes_per_device(sizes)

    def further_bytes(self, weights: Iterable[Buffer]) -> dict[str, int]:
        """Bytes of weights on a device that are no tensors of files: derived ones and those of adapters."""
        files = [self.gguf, *([self.reader.gguf] if self.reader else [])]
        known = self.lent.union(*(file.tensors for file in files))
        found: dict[str, int] = {}
        for buffer in weights:
            if whole_name(buffer.name) not in known:
                kind = "derived" if adapted_tensor(buffer.name) == buffer.name else "adapter"
                found[kind] = found.get(kind, 0) + aligned(buffer.nbytes)
        return found

    def left_out(self, device: str, weights: Iterable[Buffer]) -> dict[str, int]:
        """Bytes of tensors that have their place on a device and are none of the weights that graphs read there."""
        used = self.replaced.union(whole_name(buffer.name) for buffer in weights)
        found: dict[str, int] = {}
        for name, info in self.gguf.tensors.items():
            placed = self.placement.device_of(name)
            division = self.placement.divisions.get(name)
            held = division.nbytes(info.nbytes) if division and placed != CPU else {placed: info.nbytes}
            if name not in used and held.get(device):
                found[name] = held[device]
        return found

    @cached_property
    def fingerprint(self) -> int:
        """Tells models of the same shapes and types apart."""
        return weights_fingerprint(self.gguf)

    def check_finite(self) -> None:
        """Decodes every tensor and raises FileFormatError naming the first with a NaN or infinity."""
        for info in self.gguf.tensors.values():
            row, column = self._first_bad(info)
            if row >= 0:
                raise FileFormatError(
                    f"{self.gguf.path}: tensor '{info.name}' has invalid data at row {row}, column {column}"
                )

    def _first_bad(self, info: TensorInfo) -> tuple[int, int]:
        kind = registry.by_id(info.type_id)
        ne0 = info.shape[0]
        n_rows = info.element_count // ne0
        step = max(kind.interleave, (1 << 22) // ne0 // kind.interleave * kind.interleave)
        data = self.gguf.data(info)
        row_nbytes = kind.row_nbytes(ne0)
        for row in range(0, n_rows, step):
            n = min(step, n_rows - row)
            values = core.dequantize(data[row * row_nbytes : (row + n) * row_nbytes], info.type_id, ne0, n)
            if not np.isfinite(values).all():
                bad = np.argwhere(~np.isfinite(values))[0]
                return row + int(bad[0]), int(bad[1])
        return -1, -1
