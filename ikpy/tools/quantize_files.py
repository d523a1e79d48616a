"""The output files of a quantization run: which tensors each holds, its header and layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.splits import output_prefix, split_path
from ikpy.gguf.types import KEY_SPLIT_COUNT, KEY_SPLIT_NO, KEY_SPLIT_TENSORS, SPLIT_KEYS, GGUFValueType
from ikpy.gguf.writer import GGUFWriter, ShardPlan
from ikpy.quants import registry
from ikpy.tools.quantize_metadata import output_metadata
from ikpy.tools.quantize_plan import Plan, QuantizeOptions, Step


@dataclass(frozen=True)
class OutputFile:
    """One file to write: its steps and its layout (path, header, tensor sizes)."""

    steps: list[Step]
    layout: ShardPlan


def output_files(file: GGUFFile, output: str, options: QuantizeOptions, plan: Plan) -> list[OutputFile]:
    """The files of a plan: one, or with ``keep_split`` one per input file; the first has the model's metadata."""
    count = len(file.shards)
    if not options.keep_split or count < 2:
        return [_output_file(file, output, options, plan, plan.steps, first=True)]
    files = []
    for index in range(count):
        split = {
            KEY_SPLIT_NO: (GGUFValueType.UINT16, index),
            KEY_SPLIT_COUNT: (GGUFValueType.UINT16, count),
            KEY_SPLIT_TENSORS: (GGUFValueType.INT32, len(plan.steps)),
        }
        steps = [step for step in plan.steps if step.source.shard == index]
        path = split_path(output_prefix(output), index, count)
        files.append(_output_file(file, path, options, plan, steps, first=index == 0, split=split))
    return files


def _output_file(
    file: GGUFFile,
    path: str,
    options: QuantizeOptions,
    plan: Plan,
    steps: list[Step],
    *,
    first: bool,
    split: Mapping[str, tuple[GGUFValueType, int]] = MappingProxyType({}),
) -> OutputFile:
    writer = GGUFWriter(path, alignment=file.alignment)
    if first:
        values = output_metadata(file, options, plan.file_type)
        writer.copy_metadata(file, skip=SPLIT_KEYS, replace=values)
    for key, (value_type, value) in split.items():
        writer.add(key, value_type, value)
    for step in steps:
        writer.add_tensor(step.name, step.source.shape, registry.by_name(step.type).id)
    (layout,) = writer.plan()
    return OutputFile(steps, layout)
