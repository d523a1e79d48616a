"""Which checkpoint tensors make up which GGUF tensors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import numpy as np

from ikpy.convert.families.base import Change, Family, Targets
from ikpy.convert.model_parts import OTHER_PARTS, THINKER
from ikpy.convert.output_tensor import OutputTensor, Part
from ikpy.convert.stored_matrix import BLOCK_TYPES
from ikpy.convert.tensor_order import sort_key
from ikpy.convert.tensor_paths import SUFFIX, Place, place
from ikpy.convert.tensor_shapes import Arranger
from ikpy.convert.weights import Weights
from ikpy.convert.words import to_float32
from ikpy.errors import FileFormatError, UnsupportedError

SHARED_WITH_PREDICTION = ("token_embd", "output_norm", "output")
"""Outer tensors that a file of prediction layers alone has."""
# What layers behind the last one have if they predict further tokens.
_PREDICTS = re.compile(r"(^|[._])(eh_proj|enorm|hnorm|shared_head|final_layernorm)\.")
_EXPERT = re.compile(r"(?:(?<=experts\.)|(?<=norms\.)|(?<=moe\.))(\d{1,9})(?=\.|$)")
_STACKED = re.compile(r"(?<=\.)\d{1,9}$")
_SHARD = re.compile(r"(?<=\.shard_)(\d{1,9})$")
_PROBED = 64


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
        self.weights, self.family, self.names = weights, family, set(weights.names())
        self.arranger = Arranger(weights, family)
        self.outputs: dict[str, OutputTensor] = {}
        self.unknown: list[str] = []
        self.strange_biases: list[str] = []
        self.factors: dict[str, str] = {}
        self.unused_output = ""
        self.later: dict[int, list[str]] = {}
        known = (*family.modules.values(), *family.prediction_modules.values())
        targets = (name for names in known for name in _names(names))
        self.order = {name: i for i, name in enumerate(targets)}
        self.map = TensorMap([])

    def take(self, name: str) -> None:
        if 0 in self.weights.stored(name).shape or self._repeats(name):
            return
        if OTHER_PARTS.search(name.removeprefix(THINKER)):
            self.map.skipped_parts.append(name)
            return
        where = place(name, self.family)
        if where.path in self.family.own_tensors:
            return
        if where.predicts:
            self._take_prediction(name, where)
        elif self.family.predicts_alone and (where.layer is not None or not self._is_shared(where.path)):
            return
        elif where.layer is not None:
            self._take_layer(name, where.layer, where.path)
        else:
            self._take_outer(name, where.path)

    def _is_shared(self, path: str) -> bool:
        """Whether prediction layers need an outer tensor of the model."""
        return self.family.outer.get(SUFFIX.sub("", path)) in SHARED_WITH_PREDICTION

    def _take_prediction(self, name: str, where: Place) -> None:
        """A tensor of layers that predict further tokens, which may be of all of them."""
        family, module = self.family, SUFFIX.sub("", where.path)
        end = family.prediction_ends.get(module)
        if not family.n_predict or (end and not family.predicts_alone):
            self.map.skipped_layers.append(name)
            if where.layer is not None and not where.apart:
                self.later.setdefault(family.config.n_layer + where.layer, []).append(name)
        elif end:
            self._add(f"{end}.weight", None, Part(name, None, None))
        else:
            first, n = (0, family.n_predict) if where.layer is None else (where.layer, 1)
            for number in range(first, first + n):
                self._take_layer(name, family.config.n_layer + number, where.path)

    def _targets(self, module: str, il: int) -> Targets | None:
        """What a module of a layer becomes, which may be one that predicts."""
        family = self.family
        if il < family.config.n_layer:
            return family.targets(module, il)
        return family.prediction_modules.get(module) or family.modules.get(module)

    def _take_layer(self, name: str, il: int, path: str) -> None:
        if path in self.family.layer_values or path in self.family.layer_lists:
            self.map.layer_values.setdefault(path, {})[il] = name
            return
        suffix = None if path in self.family.modules else SUFFIX.search(path)
        module = SUFFIX.sub("", path) if suffix else path
        shard = _SHARD.search(module)
        if shard and (whole := _SHARD.sub("{n}", module)) in self.family.shards:
            self._add(f"{self.family.shards[whole]}.weight", None, Part(name, None, int(shard[1])), is_sharded=True)
            return
        expert = _EXPERT.search(module)
        if module in self.family.factors:
            self.factors[f"blk.{il}.{self.family.factors[module]}.weight"] = name
            return
        predicts = il >= self.family.config.n_layer
        row = self.family.prediction_rows.get(module) if predicts and suffix and suffix[1] == "weight" else None
        if row is not None:
            self._add(f"blk.{il}.attn_qkv.weight", None, Part(name, None, row), is_sharded=True)
            return
        column = self.family.prediction_columns.get(module) if predicts else None
        if column is not None:
            self._add(f"blk.{il}.nextn.eh_proj.weight", None, Part(name, None, column), joins_columns=True)
            return
        targets = self._targets(_EXPERT.sub("{e}", module), il)
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
            part = Part(name, view, int(expert[1]) if expert else self.family.place(module))
            is_bias = full == f"{target}.bias"
            change = self.family.bias_change(target) if is_bias else self.family.change(target)
            self._add(f"blk.{il}.{full}", change, part)

    def _take_outer(self, name: str, path: str) -> None:
        module = SUFFIX.sub("", path)
        if module in self.family.factors:
            self.factors[f"{self.family.factors[module]}.weight"] = name
            return
        stack = _STACKED.sub("{e}", module)
        place = int(module.rpartition(".")[2]) if stack != module and stack in self.family.outer else None
        target = self.family.outer.get(module if place is None else stack)
        suffix = SUFFIX.search(path)
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

    def _repeats(self, name: str) -> bool:
        """Whether a tensor is another one once more. FileFormatError if it has other values than that."""
        others = [f"{other}.weight" for other in self.family.repeated.get(name.removesuffix(".weight"), ())]
        found = next((other for other in others if other in self.names), "")
        if found and not np.array_equal(self.weights.load(name), self.weights.load(found)):
            raise FileFormatError(
                f"{self.weights.checkpoint.folder}: '{name}' is not '{found}'; a file has one of them"
            )
        return bool(found)

    @property
    def _is_tied(self) -> bool | None:
        """Whether the token embedding is the output matrix; None if the configuration does not say."""
        value = self.family.config.get("tie_word_embeddings", default=None)
        return None if value is None else bool(value)

    def _add(
        self,
        target: str,
        change: Change | None,
        part: Part,
        *,
        is_sharded: bool = False,
        joins_columns: bool = False,
    ) -> None:
        is_table = target.removesuffix(".weight").split(".", 2)[-1] in self.family.tables
        kind = self.weights.kind(part.source)
        if is_table and kind != "i32":
            raise UnsupportedError(f"tensor '{part.source}' holds numbers of type {kind}, not integers")
        if kind == "i32" and not is_table:
            raise self.weights.unknown_type(part.source)
        self.weights.check_scales(part.source)
        if kind in BLOCK_TYPES and (
            joins_columns or change or not self._keeps_blocks(part) or not _takes_blocks(target, kind)
        ):
            kind = "f32"
        output = self.outputs.setdefault(
            target, OutputTensor(target, change, kind, is_sharded=is_sharded, joins_columns=joins_columns)
        )
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
            self.arranger.arrange(output)
            self._take_row_factors(output)
        self._take_factors()
        for name, output in self.outputs.items():
            has_scale = f"{name.removesuffix('.weight')}.scale" in self.outputs
            output.kind = "f32" if output.kind == "nvfp4" and (has_scale or output.is_sharded) else output.kind
        self._check_layers()
        self.map.outputs = sorted(self.outputs.values(), key=lambda output: sort_key(output.name, self.order))
        return self.map

    def _refuse_unknown(self) -> None:
        if self.unknown:
            method = self.weights.quantization
            predicts = self.family.n_predict and place(self.unknown[0], self.family).predicts
            raise UnsupportedError(
                f"{self.weights.checkpoint.folder}: tensor {_listed(self.unknown)} has no place in architecture "
                f"{self.family.arch}"
                + (f" (quantization '{method}')" if method else "")
                + ("; --no-mtp leaves prediction layers out" if predicts else "")
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

    def _add_tied_output(self) -> None:
        embedding = self.outputs.get("token_embd.weight")
        if embedding is None:
            if self.family.needs_embedding:
                raise FileFormatError(f"{self.weights.checkpoint.folder}: the token embedding is missing")
            return
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

    def _check_layers(self) -> None:
        found = {int(name.split(".")[1]) for name in self.outputs if name.startswith("blk.")}
        first, n = self.family.config.n_layer if self.family.predicts_alone else 0, self.family.config.n_layer
        for il in range(first, n + self.family.n_predict):
            if il not in found and not (il < n and self.family.is_empty(il)):
                raise FileFormatError(f"{self.weights.checkpoint.folder}: the tensors of layer {il} are missing")
        for il, names in self.later.items():
            if not any(_PREDICTS.search(name) for name in names):
                raise FileFormatError(
                    f"{self.weights.checkpoint.folder}: '{names[0]}' is of layer {il}, but num_hidden_layers of "
                    f"config.json is {self.family.config.n_layer} (ikpy quantize --prune-layers leaves layers out)"
                )


def _takes_blocks(target: str, kind: str) -> bool:
    """Whether a tensor may have blocks that a factor belongs to: what is looked up by rows has none."""
    return kind != "nvfp4" or not target.startswith("token_embd")


def _names(targets: Targets) -> tuple[str, ...]:
    return (targets,) if isinstance(targets, str) else targets


def _listed(tensors: list[str]) -> str:
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"'{tensors[0]}'{more}"
