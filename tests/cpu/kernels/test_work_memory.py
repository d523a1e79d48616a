"""The work memory of a context: the most that a micro-batch of any number of tokens needs."""

from __future__ import annotations

import pytest

from ikpy._native import core
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.graph.ir import PLANNED_ADDRESS
from ikpy.graph.plan import CompiledPlan
from ikpy.graph.work import work_bytes
from tests.shared import DATA

N_TOKENS = 40
THREADS = [1, 7, 24]
MODELS = [("qwen3moe", 0), ("deepseek2-v3-mla", 1), ("deepseek2-v3-mla", 3)]


def planned(name: str, mla: int, n_threads: int) -> Context:
    model = Model.load(DATA / "zoo" / f"{name}.gguf", ModelParams(header_only=True, mla=mla))
    return Context(model, ContextParams(n_ctx=2048, n_ubatch=N_TOKENS, n_threads=n_threads, mla=mla))


@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize(("name", "mla"), MODELS)
def test_what_any_number_of_tokens_needs_is_reserved(name: str, mla: int, n_threads: int) -> None:
    plans = planned(name, mla, n_threads)._plans
    needed = []
    for n in range(1, N_TOKENS + 1):
        plan = plans.build(n, n).cpu_plan(PLANNED_ADDRESS)
        assert plan
        needed.append(plan.work_bytes(n_threads))
    assert plans.work_bytes == max(needed)


@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize(("name", "mla"), MODELS)
def test_attention_for_other_numbers_of_tokens(name: str, mla: int, n_threads: int) -> None:
    """What attention for five tokens says about others is what their own graphs say."""
    plans = planned(name, mla, n_threads)._plans
    five = plans.build(5, 5)
    nodes = [node for node in five.cpu_nodes if node.kind == "attention"]
    own = work_bytes(core, nodes, five.arena, range(0), n_threads)
    for n in (2, 17, 40):
        built = plans.build(n, n)
        others = [node for node in built.cpu_nodes if node.kind == "attention"]
        needed = CompiledPlan(core, others, built.arena, PLANNED_ADDRESS).work_bytes(n_threads)
        assert work_bytes(core, nodes, five.arena, range(n, n + 1), n_threads) == max(own, needed), f"{n} tokens"
