"""Models whose layers differ, with layers that have no cache and no weights, and others, on devices: logits, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.graph.placement import PlacementParams
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.test_arch_deci import HEAD, KINDS, deci, deci_empty_last, deci_without_networks
from tests.cpu.models.test_arch_gemma3n import N, gentle_gemma3n
from tests.cpu.models.test_arch_minicpm import minicpm3, minicpm_long_rope
from tests.cuda.models import emulated, logits_of
from tests.cuda.test_placement_matrix import assert_same

N_PROMPT = 36
PLACES: dict[str, dict[str, Any]] = {
    "all": {},
    "every number of layers": {},
    "uneven": {"tensor_split": (1.0, 5.0)},
    "attention on the CPU": {"rules": (("attn", "CPU"),)},
    "networks on the CPU": {"rules": (("ffn", "CPU"),)},
    "a layer that does not attend on the CPU": {"rules": ((r"blk\.(1|2)\.", "CPU"),)},
    "cache in host memory": {"kv_offload": False},
    "heads and networks divided": {"split_mode": "graph"},
    "divided unevenly": {"split_mode": "graph", "tensor_split": (3.0, 1.0)},
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    "make",
    [deci, deci_without_networks, deci_empty_last, minicpm_long_rope, minicpm3, gentle_gemma3n],
    ids=lambda f: f.__name__,
)
def test_logits_are_those_of_the_cpu(make: Any, where: str, tmp_path: Path) -> None:
    path, context = make()[0].write(tmp_path / "model.gguf"), {"type_k": "f32", "type_v": "f32"}
    truth = logits_of(path, TOKENS, N_PROMPT, **context)
    every = [{"n_gpu_layers": n} for n in range(1, max(len(KINDS), N) + 2)]
    for places in every if where == "every number of layers" else [PLACES[where]]:
        with emulated(2) as kernels:
            ours = logits_of(path, TOKENS, N_PROMPT, placement=PlacementParams(**places), **context)
        assert kernels.launched
        assert_same(ours, truth, 1e-4)


def test_only_layers_that_attend_take_cache_on_a_device(tmp_path: Path) -> None:
    path = deci()[0].write(tmp_path / "model.gguf")
    params = ModelParams(placement=PlacementParams(split_mode="none"))
    with emulated(1):
        context = Context(Model.load(path, params), ContextParams(n_ctx=256, n_threads=1))
        assert context.devices is not None
        found = {name: nbytes for name, nbytes in context.devices.cache_bytes().items() if nbytes}
    assert found == {"CUDA0": 256 * 2 * 2 * HEAD * sum(kv for _, kv, _ in KINDS)}
    assert np.prod(context.kv.tensors[0, "k"].shape[:3]) == 256 * HEAD * KINDS[0][1]
