"""Reading the experts that tokens are sent to ahead of their products, for models that are larger than memory.

A product meets the pages of a file that are not in memory one after the other and waits for each. Threads that know all
chosen experts of a layer keep the drive busy with many reads at a time (docs/performance.md, "Models larger than
memory").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ikpy._native import core
from ikpy.backends.cuda.plan import Told
from ikpy.engine.model import MIB, Model
from ikpy.errors import ResourceError
from ikpy.gguf.reader import GGUFFile
from ikpy.graph.assign import EXPERT_KINDS, FUSED_KINDS, Step
from ikpy.graph.ir import Buffer, Node, Value
from ikpy.graph.placement import CPU
from ikpy.machine.memory import machine_memory

Record = tuple[int, int, int, int]
"""Address of the first expert, bytes from one to the next, bytes of one, stage."""


class ExpertReads:
    """A reader of experts, told by the plans of a context which of them are needed.

    Raises ResourceError if its threads cannot be started.
    """

    def __init__(self, gguf: GGUFFile, n_threads: int) -> None:
        self._gguf = gguf
        try:
            self.reader = core.ExpertReader(n_threads)
        except OSError as error:
            raise ResourceError(f"{n_threads} threads that read experts ahead cannot be started: {error}") from error

    def number_layers(self, nodes: Sequence[Node]) -> None:
        """Gives the expert groups of a plan the number of the layer that is read once they are made.

        Weights that lie in memory of their own (repacked, read without a mapping) are not read.
        """
        groups: dict[Buffer, tuple[Node, list[Record]]] = {}
        for stage, node in enumerate(nodes):
            if node.kind == "moe_group":
                groups[node.dst.buffer] = node, []
            if node.kind in EXPERT_KINDS:
                group = next(v for v in node.src if v is not None and v.buffer in groups)
                groups[group.buffer][1].extend(self._records(node, stage))
        for group_node, records in groups.values():
            if records:
                group_node.ip = [group_node.ip[0], self._add_layer(records, group_node.ip[0]) + 1]

    def number_uploads(self, steps: Sequence[Step]) -> dict[Buffer, Told]:
        """What is to be told the offsets [E + 1] of expert groups whose experts a device takes from host memory.

        By buffer of the groups.
        """
        groups: dict[Buffer, tuple[int, list[Record]]] = {}
        for stage, step in enumerate(steps):
            if step.uploads and step.node.kind in EXPERT_KINDS:
                group, n_experts = step.node.src[2], step.node.ip[4]
                assert group is not None
                groups.setdefault(group.buffer, (n_experts, []))[1].extend(self._records(step.node, stage))
        return {
            buffer: partial(self.reader.ask, self._add_layer(records, n_experts))
            for buffer, (n_experts, records) in groups.items()
            if records
        }

    def _add_layer(self, records: list[Record], n_experts: int) -> int:
        """Number of a layer, which is the same in all plans: other places of its products are no other stages."""
        matrices = np.array(records, np.int64)
        matrices[:, 3] = np.unique(matrices[:, 3], return_inverse=True)[1]
        return self.reader.add_layer(matrices, n_experts)

    def _records(self, product: Node, stage: int) -> list[Record]:
        weights = product.src[: 2 if product.kind in FUSED_KINDS else 1]
        return [_record(w, stage) for w in weights if w is not None and self._gguf.maps(_address(w))]


def expert_reads(model: Model, log: Callable[[str], None]) -> ExpertReads | None:
    """What reads the experts of a model for a context, if its parameters want that and there is anything to read."""
    params = model.params
    if params.prefetch_experts is False:
        return None
    if not model.hparams.n_expert or not params.use_mmap:
        if params.prefetch_experts:
            why = "the weights are not mapped" if model.hparams.n_expert else "the model has no experts"
            log(f"warning: experts are not read ahead: {why}")
        return None
    nbytes, memory = model.mapped_bytes.get(CPU, 0), machine_memory(swap=False)
    if params.prefetch_experts is None and nbytes <= memory:
        return None
    log(f"experts are read ahead by {params.prefetch_threads} threads: {nbytes / MIB:.0f} MiB of weights are mapped")
    return ExpertReads(model.gguf, params.prefetch_threads)


def _address(weight: Value) -> int:
    assert weight.buffer.address is not None
    return weight.buffer.address + weight.offset


def _record(weight: Value, stage: int) -> Record:
    """Of expert weights [K, N, E]."""
    return _address(weight), weight.strides[2], weight.strides[1] * weight.shape[1], stage
