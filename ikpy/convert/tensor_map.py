"""Which checkpoint tensors make up which GGUF tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ikpy.convert.families.base import Change, Family, Targets, View
from ikpy.convert.model_parts import OTHER_PARTS, TEXT_PART, THINKER
from ikpy.convert.stored_matrix import BLOCK_TYPES
from ikpy.convert.weights import MXFP4_BLOCK, MXFP4_BYTES, Weights
from ikpy.convert.words import to_float32
from ikpy.errors import FileFormatError, UnsupportedError

_PREDICTION = re.compile(r"^model\.mtp_|^mtp\.")
_LAYER = re.compile(
    r"(?:(?:(?:model|backbone|gpt_neox|encoder|transformer(?:\.encoder)?)\.)?layers(?:\.layers)?|(?:transformer\.)?(?:h|blocks|decoder_layer)"
    r"|(?:bert\.)?encoder\.layer|(?:model\.)?transformer_encoder)"
    r"\.(\d+)\.(.+)"
)
_EXPERT = re.compile(r"(?:(?<=experts\.)|(?<=norms\.)|(?<=moe\.))(\d+)(?=\.|$)")
_STACKED = re.compile(r"(?<=\.)\d+$")
_SHARD = re.compile(r"(?<=\.shard_)(\d+)$")
_PROBED = 64
_SUFFIX = re.compile(r"\.(weight|bias)$")


@dataclass(frozen=True)
class Part:
    """What one checkpoint tensor gives to a GGUF tensor; expert is its place in a stack or among shards, else None."""

    source: str
    view: View | None
    expert: int | None


@dataclass
class OutputTensor:
    """A GGUF tensor: parts, change of the values, kind of the sources, shape slowest dimension first; factors of the
    rows of a matrix; whether its columns are divided by their lengths; checkpoint tensor of as many elements that
    multiplies them, "" for none; how often the first row follows the last; whether parts are rows behind each other."""

    name: str
    change: Change | None
    kind: str
    parts: list[Part] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    row_factors: np.ndarray | None = None
    unit_columns: bool = False
    factor: str = ""
    n_repeated: int = 0
    is_sharded: bool = False


@dataclass
class TensorMap:
    """GGUF tensors in file order; names of checkpoint tensors that were left out; those that become values of keys, by
    their names within a layer and by layer.
    """

    outputs: list[OutputTensor]
    skipped_parts: list[str] = field(default_factory=list)
    skipped_layers: list[str] = field(default_factory=list)
    layer_values: dict[str, dict[int, str]] = field(default_factory=dict)


def map_tensors(weights: Weights, family: Family) -> TensorMap:
    """Maps every tensor of a checkpoint; UnsupportedError names one that the family does not know."""
    mapper = _Mapper(weights, family)
    for name in weights.names():
        mapper.take(name)
    return mapper.finish()


class _Mapper:
    def __init__(self, weights: Weights, family: Family) -> None:
        self.weights, self.family = weights, family
        self.outputs: dict[str, OutputTensor] = {}
        self.unknown: list[str] = []
        self.strange_biases: list[str] = []
        self.factors: dict[str, str] = {}
        self.unused_output = ""
        targets = (name for names in family.modules.values() for name in _names(names))
        self.order = {name: i for i, name in enumerate(targets)}
        self.map = TensorMap([])

    def take(self, name: str) -> None:
        if 0 in self.weights.stored(name).shape:
            return
        path = name.removeprefix(THINKER)
        if OTHER_PARTS.search(path):
            self.map.skipped_parts.append(name)
            return
        if _PREDICTION.search(path):
            self.map.skipped_layers.append(name)
            return
        prefix = TEXT_PART.match(path)
        if prefix:
            rest = path[prefix.end() :]
            path = rest if rest.startswith("lm_head") else f"model.{rest}"
        layer = _LAYER.fullmatch(path)
        if layer and int(layer[1]) >= self.family.config.n_layer:
            self.map.skipped_layers.append(name)
        elif layer:
            self._take_layer(name, int(layer[1]), layer[2])
        else:
            self._take_outer(name, path)

    def _take_layer(self, name: str, il: int, path: str) -> None:
        if path in self.family.layer_values or path in self.family.layer_lists:
            self.map.layer_values.setdefault(path, {})[il] = name
            return
        suffix = None if path in self.family.modules else _SUFFIX.search(path)
        module = _SUFFIX.sub("", path) if suffix else path
        shard = _SHARD.search(module)
        if shard and (whole := _SHARD.sub("{n}", module)) in self.family.shards:
            self._add(f"{self.family.shards[whole]}.weight", None, Part(name, None, int(shard[1])), is_sharded=True)
            return
        expert = _EXPERT.search(module)
        if module in self.family.factors:
            self.factors[f"blk.{il}.{self.family.factors[module]}.weight"] = name
            return
        targets = self.family.targets(_EXPERT.sub("{e}", module), il)
        if module in self.family.unused:
            self.map.skipped_parts.append(name)
            return
        if targets is None:
            self.unknown.append(name)
            return
        if suffix and suffix[1] == "bias" and not self.family.biases.issuperset(_names(targets)):
            self.strange_biases.append(name)
            return
        for target in _names(targets):
            full = (
                target
                if target.endswith((".bias", ".scale")) or target in self.family.bare
                else f"{target}.{suffix[1] if suffix else 'weight'}"
            )
            view = self.family.view(target, module)
            part = Part(name, view, int(expert[1]) if expert else None)
            is_bias = full == f"{target}.bias"
            change = self.family.bias_change(target) if is_bias else self.family.change(target)
            self._add(f"blk.{il}.{full}", change, part)

    def _take_outer(self, name: str, path: str) -> None:
        module = _SUFFIX.sub("", path)
        if module in self.family.factors:
            self.factors[f"{self.family.factors[module]}.weight"] = name
            return
        stack = _STACKED.sub("{e}", module)
        place = int(module.rpartition(".")[2]) if stack != module and stack in self.family.outer else None
        target = self.family.outer.get(module if place is None else stack)
        suffix = _SUFFIX.search(path)
        if module in self.family.unused:
            self.map.skipped_parts.append(name)
        elif target is None:
            self.unknown.append(name)
        elif suffix and suffix[1] == "bias":
            if target in self.family.biases:
                self._add(f"{target}.bias", self.family.bias_change(target), Part(name, None, None))
            else:
                self.strange_biases.append(name)
        elif target == "output" and (self._is_tied or not self.family.has_output):
            self.unused_output = name
        else:
            full = f"{target}.{suffix[1] if suffix else 'weight'}"
            self._add(full, self.family.change(target), Part(name, self.family.view(target, module), place))

    @property
    def _is_tied(self) -> bool | None:
        """Whether the token embedding is the output matrix; None if the configuration does not say."""
        value = self.family.config.get("tie_word_embeddings", default=None)
        return None if value is None else bool(value)

    def _add(self, target: str, change: Change | None, part: Part, *, is_sharded: bool = False) -> None:
        is_table = target.removesuffix(".weight").split(".", 2)[-1] in self.family.tables
        kind = self.weights.kind(part.source)
        if is_table and kind != "i32":
            raise UnsupportedError(f"tensor '{part.source}' holds numbers of type {kind}, not integers")
        if kind == "i32" and not is_table:
            raise self.weights.unknown_type(part.source)
        self.weights.check_scales(part.source)
        if kind in BLOCK_TYPES and (change or not self._keeps_blocks(part) or not _takes_blocks(target, kind)):
            kind = "f32"
        output = self.outputs.setdefault(target, OutputTensor(target, change, kind, is_sharded=is_sharded))
        if output.parts and part.expert is None:
            raise FileFormatError(f"tensors '{output.parts[0].source}' and '{part.source}' are both {target}")
        if output.kind != kind:
            output.kind = "f32"  # experts of mixed types
        output.parts.append(part)

    def _keeps_blocks(self, part: Part) -> bool:
        """Whether a view moves whole rows alone: tried on numbers of columns."""
        if part.view is None:
            return True
        columns = np.arange(_PROBED, dtype=np.uint8)
        try:
            seen = part.view(np.broadcast_to(columns, (self.weights.shape(part.source)[0], _PROBED)))
        except (ValueError, IndexError):
            return False
        return seen.shape[-1] == _PROBED and bool((seen == columns).all())

    def finish(self) -> TensorMap:
        self._refuse_unknown()
        self._check_biases()
        self._add_tied_output()
        for output in self.outputs.values():
            self._arrange(output)
            self._take_row_factors(output)
        self._take_factors()
        for name, output in self.outputs.items():
            has_scale = f"{name.removesuffix('.weight')}.scale" in self.outputs
            output.kind = "f32" if output.kind == "nvfp4" and (has_scale or output.is_sharded) else output.kind
        self._check_layers()
        self.map.outputs = sorted(self.outputs.values(), key=self._place)
        return self.map

    def _refuse_unknown(self) -> None:
        if self.unknown:
            method = self.weights.quantization
            raise UnsupportedError(
                f"{self.weights.checkpoint.folder}: tensor {_listed(self.unknown)} has no place in architecture "
                f"{self.family.arch}" + (f" (quantization '{method}')" if method else "")
            )

    def _check_biases(self) -> None:
        """A file with other biases than the architecture knows would not load."""
        folder, arch = self.weights.checkpoint.folder, self.family.arch
        strange = [name for name in self.strange_biases if not self._is_zero_bias(name)]
        if strange:
            raise UnsupportedError(f"{folder}: architecture {arch} has no bias for {_listed(strange)}")
        for name in self.outputs:
            module = name.removesuffix(".weight")
            if module.split(".", 2)[-1] in self.family.needed_biases and f"{module}.bias" not in self.outputs:
                raise UnsupportedError(f"{folder}: architecture {arch} needs {module}.bias, which the checkpoint lacks")

    def _is_zero_bias(self, name: str) -> bool:
        """Whether a bias that the architecture does not have may be left out."""
        if not self.family.drops_zero_biases and not self.weights.is_grouped(name.removesuffix(".bias")):
            return False
        return not to_float32(self.weights.load(name), self.weights.kind(name)).any()

    def _place(self, output: OutputTensor) -> tuple[int, int, int, str]:
        """Sort key: embedding, layers in the order of the family's modules, the rest."""
        if not output.name.startswith("blk."):
            return 0 if output.name.startswith("token_embd") else 2, 0, 0, output.name
        _, layer, rest = output.name.split(".", 2)
        base = rest.removesuffix(".weight").removesuffix(".bias")
        return 1, int(layer), self.order.get(rest, self.order.get(base, 0)), rest

    def _add_tied_output(self) -> None:
        embedding = self.outputs.get("token_embd.weight")
        if embedding is None:
            raise FileFormatError(f"{self.weights.checkpoint.folder}: the token embedding is missing")
        if self._is_tied is False and self.family.writes_texts:
            self._check_untied(embedding.parts[0].source)
        if self.family.needs_output and "output.weight" not in self.outputs:
            self._add("output.weight", self.family.change("output"), embedding.parts[0])

    def _check_untied(self, embedding: str) -> None:
        """The configuration promises an output matrix of its own."""
        weights, output = self.weights, self.unused_output
        if not output:
            if "output.weight" not in self.outputs:
                raise FileFormatError(
                    f"{weights.checkpoint.folder}: the output matrix (lm_head.weight) is missing; config.json says "
                    "that the token embedding is another (tie_word_embeddings false)"
                )
        elif not np.array_equal(weights.load(output), weights.load(embedding)):
            raise FileFormatError(
                f"{weights.checkpoint.folder}: '{output}' is not the token embedding; a GGUF file of architecture "
                f"{self.family.arch} cannot have another output matrix"
            )

    def _arrange(self, output: OutputTensor) -> None:
        """Puts experts in order and computes the shape."""
        folder = self.weights.checkpoint.folder
        if output.is_sharded:
            self._join_shards(output)
            return
        shapes = {self._part_shape(part) for part in output.parts}
        if len(shapes) != 1:
            raise FileFormatError(f"{folder}: the experts of {output.name} differ in shape: {sorted(shapes)}")
        shape = shapes.pop()
        if output.parts[0].expert is not None:
            target = output.name.removesuffix(".weight").split(".", 2)[-1]
            kind, kinds = ("expert", "experts") if "exps" in target else ("part", "parts")
            numbers, needed = [part.expert for part in output.parts], self.family.n_parts(target)
            missing = sorted(set(range(needed)).difference(numbers))
            if missing or len(numbers) != needed:
                which = f"{kind} {missing[0]} is missing" if missing else "there are more"
                raise FileFormatError(f"{folder}: {output.name} needs {needed} {kinds}, found {len(numbers)} ({which})")
            output.parts.sort(key=lambda part: part.expert or 0)
            shape = (len(numbers), *shape)
        rows = self.family.padded_rows(output.name.removesuffix(".weight"))
        if rows > shape[0] > 0:
            output.n_repeated = rows - shape[0]
            output.kind = "f32" if output.kind in BLOCK_TYPES else output.kind
            shape = (rows, *shape[1:])
        output.shape = shape

    def _join_shards(self, output: OutputTensor) -> None:
        """Puts shards in order, whose rows follow each other."""
        folder, n = self.weights.checkpoint.folder, self.family.n_shards
        output.parts.sort(key=lambda part: part.expert or 0)
        numbers = [part.expert for part in output.parts]
        if numbers != list(range(n)):
            missing = next((i for i in range(n) if i not in numbers), None)
            which = f"shard {missing} is missing" if missing is not None else "there are more"
            raise FileFormatError(f"{folder}: {output.name} needs {n} shards, found {len(numbers)} ({which})")
        shapes = [self._part_shape(part) for part in output.parts]
        if any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
            raise FileFormatError(f"{folder}: the shards of {output.name} differ in shape: {sorted(set(shapes))}")
        output.shape = (sum(shape[0] for shape in shapes), shapes[0][1])

    def _take_row_factors(self, output: OutputTensor) -> None:
        if not output.name.startswith("blk."):
            output.unit_columns = self.family.unit_columns(output.name.removesuffix(".weight"))
            if output.unit_columns and output.kind in BLOCK_TYPES:
                output.kind = "f32"
            return
        factors = self.family.row_factors(output.name.split(".", 2)[2].removesuffix(".weight"))
        if factors is not None:
            # Other numbers of rows do not load, which is said by then.
            output.row_factors = factors if len(factors) == output.shape[0] else None
            output.kind = "f32" if output.kind in BLOCK_TYPES else output.kind

    def _take_factors(self) -> None:
        """FileFormatError for a product of which a part is missing, or of parts that do not fit."""
        folder, known = self.weights.checkpoint.folder, set(self.family.factors.values())
        for name, output in self.outputs.items():
            if name.removesuffix(".weight").rpartition(".")[2] in known and name not in self.factors:
                raise FileFormatError(f"{folder}: what '{output.parts[0].source}' is multiplied with is missing")
        for name, source in self.factors.items():
            factored = self.outputs.get(name)
            if factored is None:
                raise FileFormatError(f"{folder}: what '{source}' multiplies ({name}) is missing")
            if math.prod(self.weights.shape(source)) != math.prod(factored.shape):
                raise FileFormatError(f"{folder}: shape {list(self.weights.shape(source))} of '{source}' does not fit")
            factored.factor = source
            factored.kind = "f32" if factored.kind in BLOCK_TYPES else factored.kind

    def _part_shape(self, part: Part) -> tuple[int, ...]:
        """Shape after the view, found without reading: views are applied to an array without memory."""
        shape = self.weights.shape(part.source)
        is_mxfp4 = self.weights.kind(part.source) == "mxfp4"
        if is_mxfp4:
            shape = (*shape[:-1], shape[-1] // MXFP4_BLOCK * MXFP4_BYTES)
        if part.view is not None:
            try:
                shape = part.view(np.broadcast_to(np.uint8(0), shape)).shape
            except (ValueError, IndexError):
                raise FileFormatError(
                    f"{self.weights.checkpoint.folder}: shape {list(shape)} of tensor '{part.source}' does not fit "
                    "config.json"
                ) from None
        return (*shape[:-1], shape[-1] // MXFP4_BYTES * MXFP4_BLOCK) if is_mxfp4 else shape

    def _check_layers(self) -> None:
        found = {int(name.split(".")[1]) for name in self.outputs if name.startswith("blk.")}
        for il in range(self.family.config.n_layer):
            if il not in found and not self.family.is_empty(il):
                raise FileFormatError(f"{self.weights.checkpoint.folder}: the tensors of layer {il} are missing")


def _takes_blocks(target: str, kind: str) -> bool:
    """Whether a tensor may have blocks that a factor belongs to: what is looked up by rows has none."""
    return kind != "nvfp4" or not target.startswith("token_embd")


def _names(targets: Targets) -> tuple[str, ...]:
    return (targets,) if isinstance(targets, str) else targets


def _listed(tensors: list[str]) -> str:
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"'{tensors[0]}'{more}"


def pieces(array: np.ndarray, max_elements: int) -> Iterator[np.ndarray]:
    """The rows of an array [..., n] in order, as contiguous arrays [rows, n] of about max_elements."""
    if array.ndim > 2 and array.size > max_elements and not array.flags.c_contiguous:  # no copy of all of it
        for matrix in array:
            yield from pieces(matrix, max_elements)
        return
    rows = array.reshape(-1, array.shape[-1])
    step = max(1, max_elements // max(1, rows.shape[1]))
    for first in range(0, rows.shape[0], step):
        yield np.ascontiguousarray(rows[first : first + step])
