"""Plans the GGUF file of a language model from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ikpy.convert.chat_templates import checkpoint_templates, given_template
from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families import family
from ikpy.convert.layer_gaps import check_gaps
from ikpy.convert.loading import check_loads
from ikpy.convert.output_tensor import OutputTensor
from ikpy.convert.planned_file import FILE_TYPES, PlannedFile, PlannedTensor, half_type
from ikpy.convert.prediction import choose
from ikpy.convert.projectors import has_projector
from ikpy.convert.rope import scaling_notes
from ikpy.convert.stored_matrix import BLOCK_TYPES, WEIGHT
from ikpy.convert.tensor_map import map_tensors
from ikpy.convert.tokenizer import tokenizer_keys
from ikpy.convert.weights import Weights
from ikpy.convert.words import to_float32
from ikpy.errors import FileFormatError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.writer import GGUFWriter
from ikpy.models.classifier import LABELS
from ikpy.quants import registry
from ikpy.vocab import BUILTIN_TEMPLATES

_BLOCK_FILE_TYPES = {
    "q4_0": "Q4_0",
    "q4_1": "Q4_1",
    "nvfp4": "NVFP4",
    "mxfp4": "MXFP4",
}  # of checkpoints with such blocks
# Read by the loader as f32, or too small for anything else to matter.
_ALWAYS_F32 = (
    "norm.weight",
    "_conv_base",
    ".bias",
    "ffn_gate_inp.weight",
    "attn_sinks.weight",
    "position_embd.weight",
    "attn_rel_b.weight",
    "token_types.weight",
    *(f"ssm_conv1d{part}.weight" for part in ("", "_q", "_k", "_v")),
    "ssm_a",
    "ssm_d",
    "shortconv.conv.weight",
    *(f"time_mix_{name}.weight" for name in ("first", "lerp_fused", "w1", "w2", "decay_w1", "decay_w2")),
    "ple_conv1d.weight",
    # DeepSeek V4, Qwen4-Exp: what mixes the residual streams; and the positions within a group of compressed tokens.
    "hc_attn_fn.weight",
    "hc_ffn_fn.weight",
    "output_hc_fn.weight",
    "hc_attn_inject.weight",
    "hc_ffn_inject.weight",
    "_ape.weight",
    # Gemma 3n: what mixes the residual streams.
    "altup_correct_coef.weight",
    "altup_predict_coef.weight",
    "altup_router.weight",
)
PREDICTING_PREFIX = "mtp-"
"""Of the names of files that have prediction layers alone."""
_STORED_AS = {"q4_0": "INT4", "q4_1": "INT4 with zero points", "nvfp4": "NVFP4"}
QUANTIZATION_VERSION = 2


class Conversion(PlannedFile):
    """The file of a language model: its architecture, and what PlannedFile has."""

    def _read(self, folder: Path) -> None:
        """Everything but the numbers. Files are JSON of any form: what is not looked at raises Python's own errors."""
        self.checkpoint = Checkpoint(folder)
        config = Config(self.checkpoint.config, self.checkpoint.folder / "config.json")
        self.family = family(config)
        self.texts = self._read_target()
        self.weights = Weights(self.checkpoint, rounds=self.options.outtype != "f32")
        choose(self.weights.names(), self.family, self.options.prediction, self.checkpoint.folder)
        mapped = map_tensors(self.weights, self.family)
        self.layer_values = mapped.layer_values
        matrices = [output for output in mapped.outputs if _is_matrix(output)]
        # What is decoded from codes is in neither type.
        plain = [m for m in matrices if not all(self.weights.matrix(part.source) for part in m.parts)]
        self.outtype = self._output_type(plain or matrices)
        extra = self.family.extra_tensors()
        constants = [
            PlannedTensor(OutputTensor(name, None, kind, shape=values.shape), kind, values)
            for name, values in extra.items()
            for kind in ["i64" if values.dtype == np.int64 else "f32"]
        ]
        planned = [PlannedTensor(output, self._tensor_type(output)) for output in mapped.outputs]
        self.tensors = constants + planned + [factor for tensor in planned for factor in self._factors(tensor)]
        self.name = self.options.model_name or Path(self.checkpoint.folder).resolve().name
        self.notes = self.family.notes() + scaling_notes(config)
        if mapped.skipped_layers:
            self.notes.append(self._prediction_note(mapped.skipped_layers))
        if mapped.skipped_parts:
            hint = "; --mmproj writes the encoder of pictures or sound" if has_projector(self.checkpoint) else ""
            parts = f"{len(mapped.skipped_parts)} tensors of other parts are left out"
            self.notes.append(f"{parts} (the text model alone{hint})")
        self.notes += self._integer_notes()
        if n := self.weights.cache_scales():
            self.notes.append(f"{n} scales of FP8 caches are left out: caches have the type that is asked for")
        self.metadata = self._metadata()
        prefix = PREDICTING_PREFIX if self.family.predicts_alone else ""
        usual = self.checkpoint.folder / f"{prefix}{self.name}-{self.outtype.upper()}.gguf"
        self.path = self.options.outfile or str(usual)
        header = self._declared(GGUFWriter(self.path)).plan()[0].header
        check_loads(GGUFFile.of_header(header, str(self.checkpoint.folder)), self.family, mapped.outputs)
        check_gaps((output.name for output in mapped.outputs), self.family, self.checkpoint.folder)

    def _read_target(self) -> Checkpoint:
        """The checkpoint whose tokenizer the file gets: that of the model which a drafter reads, of which the family is
        told. UsageError unless --target is given for drafters alone.
        """
        folder, target = self.checkpoint.folder, self.options.target
        if bool(target) != self.family.reads_target and not self.family.may_read_target:
            raise UsageError(
                f"{folder}: a drafter; --target names the folder of the model that it reads (config.json and tokenizer)"
                if self.family.reads_target
                else f"{folder}: --target is for drafters, and this is a model"
            )
        if not target:
            return self.checkpoint
        found = Checkpoint(Path(target), has_tensors=False)
        self.family.take_target(Config(found.config, found.folder / "config.json"), self.checkpoint)
        return found

    @property
    def arch(self) -> str:
        return self.family.arch

    def _prediction_note(self, skipped: list[str]) -> str:
        """Which tensors of prediction layers are left out, and why."""
        count = f"{len(skipped)} tensors of prediction layers (MTP) are left out"
        if self.options.prediction == "none":
            return count
        if not self.family.prediction_modules:
            return f"{count}: files of this architecture have none"
        if not self.family.n_predict:
            return f"{count}: what joins their inputs is missing"
        return f"{count}: files of this architecture have no place for them"

    # types

    def _tensor_type(self, output: OutputTensor) -> str:
        if output.kind in ("mxfp4", "i32") or (output.kind in BLOCK_TYPES and _is_matrix(output)):
            return output.kind
        if not _is_matrix(output):
            return "f32"
        if output.shape[-1] % registry.by_name(self.outtype).block_elements:
            return half_type([output])
        return self.outtype

    def _factors(self, tensor: PlannedTensor) -> Iterator[PlannedTensor]:
        """What the numbers of NVFP4 blocks are to be multiplied by: one for a matrix, or for each of a stack."""
        if tensor.type != "nvfp4":
            return
        matrices = (self.weights.matrix(part.source) for part in tensor.output.parts)
        values = np.array([matrix.factor() for matrix in matrices if matrix], np.float32)
        if (values != 1).any():
            name = f"{tensor.output.name.removesuffix(WEIGHT)}.scale"
            yield PlannedTensor(OutputTensor(name, None, "f32", shape=values.shape), "f32", values)

    def _integer_notes(self) -> list[str]:
        """Why matrices of integers are written as floats, each reason with an example."""
        found: dict[tuple[str, str], list[str]] = {}
        for tensor in self.tensors:
            integers = [m for m in (self.weights.matrix(part.source) for part in tensor.output.parts) if m]
            if integers and tensor.type not in BLOCK_TYPES:
                reason = next((m.no_blocks for m in integers if m.no_blocks), "")
                types = {m.block_type for m in integers}
                is_mixed = len(integers) < len(tensor.output.parts) or len(types) > 1
                mixed = f"some experts are no {_STORED_AS[types.pop()]}" if is_mixed else "no whole rows"
                found.setdefault((tensor.type, reason or mixed), []).append(tensor.output.name)
        notes = []
        if rounded := [t.output.name for t in self.tensors if t.type == "q4_1" and self._is_rounded(t)]:
            notes = [
                f"{len(rounded)} tensors of integers are written as q4_1, which rounds the products of zero points and "
                f"scales to f16 (--outtype f32 keeps all values), the first is {rounded[0]}"
            ]
        return notes + [
            f"{len(names)} tensors of integers are decoded and written as {kind} ({reason}), the first is {names[0]}"
            for (kind, reason), names in found.items()
        ]

    def _is_rounded(self, tensor: PlannedTensor) -> bool:
        matrices = (self.weights.matrix(part.source) for part in tensor.output.parts)
        return any(matrix.is_rounded for matrix in matrices if matrix)

    # metadata

    def _metadata(self) -> dict[str, Any]:
        types = {tensor.type for tensor in self.tensors}
        file_type = next((name for t, name in _BLOCK_FILE_TYPES.items() if t in types), FILE_TYPES[self.outtype])
        arch = self.arch
        values: dict[str, Any] = {
            "general.architecture": arch,
            "general.type": "model",
            "general.name": self.name,
            "general.file_type": registry.ftype_by_name(file_type).id,
            "general.quantization_version": QUANTIZATION_VERSION,
        }
        n_vocab = self._n_vocab()
        keys_of_model = self.family.keys()
        if self.family.n_predict:
            keys_of_model |= self.family.prediction_keys(keys_of_model)
        values |= {f"{arch}.{key}": value for key, value in keys_of_model.items()}
        values[f"{arch}.vocab_size"] = n_vocab
        for tensor in self.tensors:
            if tensor.output.name == "token_types.weight":
                values["tokenizer.ggml.token_type_count"] = tensor.output.shape[0]
        if values.get(f"{arch}.{LABELS}") == []:
            values[f"{arch}.{LABELS}"] = self._usual_labels()
        values |= self._layer_values()
        keys = tokenizer_keys(
            self.texts,
            n_vocab,
            self.notes,
            name=self.name,
            pre=self.options.pre,
            usual_pre=self.family.usual_pre,
        )
        return values | keys | self.family.keys_of_tokens() | self._templates()

    def _n_vocab(self) -> int:
        """Tokens of the vocabulary: rows of the embedding, or those of the target."""
        if self.family.reads_target:
            return self.family.n_vocab
        return next(t.output.shape[0] for t in self.tensors if t.output.name == "token_embd.weight")

    def _usual_labels(self) -> list[str]:
        """What transformers calls scores of which config.json does not say the names."""
        rows = {tensor.output.name: tensor.output.shape[0] for tensor in self.tensors}
        return [f"LABEL_{i}" for i in range(rows.get("cls.output.weight") or rows.get("cls.weight", 1))]

    def _layer_values(self) -> dict[str, list[float] | np.ndarray]:
        """Keys that list a number per layer, or hold the integers of a tensor of one layer."""
        values: dict[str, list[float] | np.ndarray] = self._layer_lists()
        for module, (key, default) in self.family.layer_values.items():
            sources = self.layer_values.get(module)
            if sources is None and default is not None:
                values[key] = [default] * self.family.config.n_layer
                continue
            missing = [il for il in range(self.family.config.n_layer) if il not in (sources or {})]
            if missing or not sources:
                raise FileFormatError(
                    f"{self.checkpoint.folder}: layer {missing[0]} lacks {module}; the checkpoint is incomplete"
                )
            values[key] = [self._number(sources[il]) for il in sorted(sources)]
        return values

    def _layer_lists(self) -> dict[str, list[float] | np.ndarray]:
        """Keys that hold the integers of a tensor of one layer, u64."""
        values: dict[str, list[float] | np.ndarray] = {}
        for module, key in self.family.layer_lists.items():
            sources = list(self.layer_values.get(module, {}).values())
            if not sources and not self.family.needs_list(module):
                continue
            if len(sources) != 1:
                raise FileFormatError(f"{self.checkpoint.folder}: one layer must have {module}, found {len(sources)}")
            stored = self.checkpoint.raw(sources[0])
            if stored.dtype.kind not in "iu" or (stored < 0).any():
                raise FileFormatError(f"{self.checkpoint.folder}: '{sources[0]}' must hold integers, none below 0")
            values[f"{self.family.arch}.{key}"] = stored.reshape(-1).astype(np.uint64)
        return values

    def _number(self, source: str) -> float:
        """The value of a tensor that holds one."""
        numbers = to_float32(self.weights.load(source), self.weights.kind(source)).reshape(-1)
        if len(numbers) != 1 or not np.isfinite(numbers[0]):
            raise FileFormatError(f"{self.checkpoint.folder}: tensor '{source}' is not one finite number")
        return float(numbers[0])

    def _templates(self) -> dict[str, Any]:
        path = self.options.chat_template_file
        keys = given_template(path) if path else checkpoint_templates(self.checkpoint)
        if not keys and self.family.template:
            return {"tokenizer.chat_template": BUILTIN_TEMPLATES[self.family.template]}
        if not keys and self.family.writes_texts:
            self.notes.append("the checkpoint has no chat template: conversations will be written as ChatML")
        return keys


def _is_matrix(output: OutputTensor) -> bool:
    return len(output.shape) > 1 and not output.name.endswith(_ALWAYS_F32)
