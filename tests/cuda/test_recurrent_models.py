"""Models with recurrent layers on devices: logits, and what becomes of their states, against the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.memory import memory_report
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.sequence_state import load_sequence, save_sequence
from ikpy.engine.session import put_state, take_state
from ikpy.graph.placement import PlacementParams
from ikpy.tools.run_logs import state_lines
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.test_arch_bailingmoe3 import bailingmoe3, bailingmoe3_low_rank
from tests.cpu.models.test_arch_falcon_h1 import falcon_h1
from tests.cpu.models.test_arch_glm5_next import glm5_next
from tests.cpu.models.test_arch_granite_hybrid import granite_hybrid, granite_hybrid_moe
from tests.cpu.models.test_arch_jamba import falcon_mamba, jamba, mamba
from tests.cpu.models.test_arch_kimi_k3 import kimi_k3, kimi_k3_plain
from tests.cpu.models.test_arch_kimi_linear import kimi_linear
from tests.cpu.models.test_arch_lfm2 import lfm2, lfm2moe
from tests.cpu.models.test_arch_mamba2 import mamba2
from tests.cpu.models.test_arch_nemotron_h import nemotron_h, nemotron_h_latent, nemotron_h_moe
from tests.cpu.models.test_arch_plamo import plamo2
from tests.cpu.models.test_arch_qwen3next import qwen3next, qwen3next_grouped, qwen35moe
from tests.cpu.models.test_arch_qwen4exp import qwen4exp
from tests.cpu.models.test_arch_rwkv import arwkv7, arwkv7_plain, rwkv6, rwkv6qwen2, rwkv7
from tests.cuda.test_placement_matrix import worst

TOLERANCE = 3e-3  # other formats of activations and other orders of sums than the CPU's
KEPT = 9  # more tokens than the kernel for few takes
ON_CPU = PlacementParams(n_gpu_layers=0)
MODELS = [
    qwen35moe,
    qwen3next,
    qwen3next_grouped,
    kimi_linear,
    bailingmoe3,
    bailingmoe3_low_rank,
    kimi_k3,
    kimi_k3_plain,
    lfm2,
    lfm2moe,
    nemotron_h,
    nemotron_h_moe,
    nemotron_h_latent,
    granite_hybrid,
    granite_hybrid_moe,
    falcon_h1,
    mamba2,
    jamba,
    mamba,
    falcon_mamba,
    plamo2,
    glm5_next,
    qwen4exp,
    rwkv7,
    arwkv7,
    arwkv7_plain,
    rwkv6,
    rwkv6qwen2,
]
PLACES = {
    "whole": PlacementParams(split_mode="none"),
    "first layers on the CPU": PlacementParams(n_gpu_layers=3, split_mode="none"),
    "two devices": PlacementParams(tensor_split=(1.0, 1.0)),
    "heads and networks divided": PlacementParams(split_mode="graph", tensor_split=(1.0, 1.0)),
    "experts on the CPU": PlacementParams(rules=(("exps", "CPU"),)),
    "states on the CPU": PlacementParams(kv_offload=False),
}


def new_context(path: Path, placement: PlacementParams, *, header_only: bool = False, n_seq: int = 4) -> Context:
    params = ModelParams(placement=placement, header_only=header_only)
    return Context(
        Model.load(path, params),
        ContextParams(n_ctx=256, n_ubatch=16, n_threads=1, n_seq_max=n_seq, n_kept_states=KEPT),
    )


def states_of(context: Context) -> dict[str, int]:
    """Bytes of the states on each device."""
    assert context.devices is not None
    return context.devices.state_bytes()


@pytest.fixture(
    scope="module",
    params=[qwen35moe, kimi_linear, kimi_k3, lfm2moe, nemotron_h_moe, jamba, glm5_next, qwen4exp, rwkv7],
    ids=lambda f: f.__name__,
)
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return request.param()[0].write(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def truth(path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """What the CPU gives for the steps of the model at `path`."""
    return list(steps(new_context(path, ON_CPU), tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="module", params=MODELS, ids=lambda f: f.__name__)
def sequences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A model of each layout, and what the CPU gives for two sequences of it."""
    path = request.param()[0].write(tmp_path_factory.mktemp("model") / "model.gguf")
    return path, two_sequences(new_context(path, ON_CPU))


def two_sequences(context: Context) -> np.ndarray:
    """Logits of two prompts, then of both in one batch, of more tokens than the kernel for few takes."""
    context.decode(Batch.single(TOKENS[:20]))
    context.decode(Batch.single(TOKENS[20:26], 0, 1))
    both = Batch()
    both.add(TOKENS[20:29].tolist(), 20, 0, "all")
    both.add(TOKENS[26:31].tolist(), 6, 1, "all")
    return context.decode(both)


def hold(ours: np.ndarray, truth: np.ndarray) -> None:
    assert np.isfinite(ours).all()
    assert np.abs(ours - truth).max() <= TOLERANCE * np.abs(truth).max(), worst(ours, truth)


@pytest.mark.parametrize("where", PLACES)
def test_sequences_in_one_batch(sequences: tuple[Path, np.ndarray], where: str, cuda_devices: int) -> None:
    placement = PLACES[where]
    if cuda_devices < 2 and placement.tensor_split:
        pytest.skip("needs two GPUs")
    path, truth = sequences
    hold(two_sequences(new_context(path, placement)), truth)


def steps(context: Context, folder: Path) -> Iterator[np.ndarray]:
    """Logits behind everything that can happen to a state: sequences that share it, go back to checkpoints and behind
    wrong guesses, are saved and loaded."""
    kv, text = context.kv, [int(t) for t in TOKENS]

    def go_on(tokens: list[int], start: int, seq: int) -> np.ndarray:
        return context.decode(Batch.single(tokens, start, seq, logits="all"))

    members = [(0, 1)] * 10
    positions = np.arange(10, dtype=np.int32)
    yield context.decode(Batch(np.array(text[:10], np.int32), positions, members, np.ones(10, np.bool_)))
    yield go_on(text[10:13], 10, 0)
    yield go_on(text[3:7], 10, 1)
    kv.seq_cp(0, 2)
    yield go_on(text[:2], 13, 2)
    kv.keep_checkpoint(0)
    yield go_on(text[13:24], 13, 0)  # too many for copies
    assert kv.rewind(0, 14) == 13
    yield go_on(text[2:4], 13, 0)
    kv.seq_rm(1)
    yield go_on(text[5:9], 0, 1)
    saved = take_state(context, 2, text[:15])
    yield go_on(text[7:9], 15, 2)
    put_state(context, 3, saved)
    yield go_on(text[7:9], 15, 3)
    save_sequence(folder / "state", context, 1, text[5:9])
    for start, right, wrong in ((17, 1, 3), (18, 3, 7), (21, 2, 1), (23, 4, 0)):
        yield go_on(text[start : start + right] + text[:wrong], start, 3)[:right]
        kv.seq_rm(3, start + right, -1)
    both = Batch()
    both.add(text[:4], 17, 2, "all")
    both.add(text[3:8], 27, 3, "all")
    yield context.decode(both)
    kv.seq_rm(2, 19, -1)
    kv.seq_rm(3, 28, -1)
    both = Batch()
    both.add(text[:2], 19, 2, "all")
    both.add(text[3:4], 28, 3, "all")
    yield context.decode(both)
    kv.clear()
    assert load_sequence(folder / "state", context, 2, 100)[0] == text[5:9]
    yield go_on(text[9:12], 4, 2)


@pytest.mark.parametrize("where", PLACES)
def test_what_becomes_of_states(
    where: str, path: Path, truth: list[np.ndarray], tmp_path: Path, cuda_devices: int
) -> None:
    placement = PLACES[where]
    if cuda_devices < 2 and placement.tensor_split:
        pytest.skip("needs two GPUs")
    ours = list(steps(new_context(path, placement), tmp_path))
    assert len(ours) == len(truth)
    for found, expected in zip(ours, truth, strict=True):
        hold(found, expected)


def test_states_are_where_the_layers_are(path: Path, cuda_devices: int) -> None:
    """Also in the plan of the memory, which is made of the header alone, and in the log."""
    context = new_context(path, PLACES["whole"])
    recurrent = context.kv.recurrent
    assert recurrent is not None
    tokens = sum(4 * value.n_elements for (_, name), value in recurrent.tensors.items() if name == "tokens")
    on_host = {"CPU": tokens} if tokens else {}  # where n-grams are looked up
    assert states_of(context) == {**on_host, "CUDA0": recurrent.nbytes - tokens}
    planned = new_context(path, PLACES["whole"], header_only=True)
    assert memory_report(planned).devices == memory_report(context).devices
    lines = state_lines(recurrent, states_of(context))
    assert lines[len(on_host)].startswith("llama_memory_recurrent:      CUDA0 RS buffer size = ")
    assert len(lines) == 3 + len(on_host) and f"copies of {KEPT} states of every sequence" in lines[-1]
    on_cpu = new_context(path, PLACES["states on the CPU"])
    assert states_of(on_cpu) == {"CPU": recurrent.nbytes}
    parted = states_of(new_context(path, PLACES["first layers on the CPU"]))
    assert set(parted) == {"CPU", "CUDA0"} and sum(parted.values()) == recurrent.nbytes


def test_every_node_gives_what_the_cpu_gives(path: Path, cuda_devices: int) -> None:
    """`ikpy cuda check`, which looks at the states as well."""
    context = new_context(path, PLACES["whole"])
    errors = list(context.compare_devices())
    assert context.kv.recurrent is not None
    kinds = {"conv": "causal_conv", "delta": "gated_delta_rule", "ssm": "ssm_scan", "wkv": "wkv"}
    expected = {kinds[name.partition("_")[0]] for _, name in context.kv.recurrent.tensors if name != "tokens"}
    assert expected <= {each.kind for each in errors}
    assert [each for each in errors if each.error > TOLERANCE] == []
