"""Models whose layers lie on other machines: the same logits to the last bit as on this one."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda.api import DeviceError, DeviceMemoryError
from ikpy.backends.cuda.devices import available
from ikpy.backends.remote import hosts
from ikpy.engine.batch import Batch
from ikpy.engine.fit import fit
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.sequence_state import load_sequence, save_sequence
from ikpy.errors import UsageError
from ikpy.graph.placement import PlacementParams
from tests.cpu.engine.remote_hosts import ON_CPU, RunningHost, context_on, evaluated, running, tokens_for
from tests.shared import DATA

ZOO = sorted((DATA / "zoo").glob("*.gguf"))
QWEN3, MOE = DATA / "zoo" / "qwen3.gguf", DATA / "zoo" / "qwen3moe.gguf"


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[RunningHost, RunningHost]]:
    with running() as one, running("-m", "600") as other:
        yield one, other


@pytest.fixture(autouse=True)
def no_hosts() -> Iterator[None]:
    yield
    hosts.use(())


@pytest.mark.parametrize("path", ZOO, ids=lambda path: path.stem)
def test_all_layers_on_one_host(path: Path, two: tuple[RunningHost, RunningHost]) -> None:
    here = context_on(path, ON_CPU)
    tokens = tokens_for(here, 40)
    wanted = evaluated(here, tokens, 30)
    hosts.use([two[0].endpoint])
    there = context_on(path, PlacementParams())
    assert there.model.placement.output == two[0].name
    assert set(there.model.placement.caches) == {two[0].name}
    assert np.array_equal(evaluated(there, tokens, 30), wanted)


@pytest.mark.parametrize("path", ZOO, ids=lambda path: path.stem)
def test_layers_shared_by_two_hosts_and_this_machine(path: Path, two: tuple[RunningHost, RunningHost]) -> None:
    here = context_on(path, ON_CPU)
    tokens = tokens_for(here, 40)
    wanted = evaluated(here, tokens, 30)
    hosts.use([host.endpoint for host in two])
    there = context_on(path, PlacementParams(n_gpu_layers=here.model.hparams.n_layer, tensor_split=(1, 1)))
    assert {host.name for host in two} <= set(there.model.placement.layers)
    assert there.model.placement.output == "CPU"
    assert np.array_equal(evaluated(there, tokens, 30), wanted)


@pytest.mark.parametrize("kv_offload", [True, False])
def test_experts_on_a_host(two: tuple[RunningHost, RunningHost], kv_offload: bool) -> None:
    """-ot exps=RPC[...] with the layers here, and the layers there with the experts here."""
    here = context_on(MOE, ON_CPU)
    tokens = tokens_for(here, 40)
    wanted = evaluated(here, tokens, 30)
    hosts.use([two[0].endpoint])
    for placement in (
        PlacementParams(n_gpu_layers=999, rules=(("exps", two[0].name), (".*", "CPU")), kv_offload=False),
        PlacementParams(rules=(("exps", "CPU"),), kv_offload=kv_offload),
    ):
        log: list[str] = []
        there = context_on(MOE, placement, log)
        assert any("exps" in line and "overridden" in line for line in log)
        assert np.array_equal(evaluated(there, tokens, 30), wanted), placement


def test_tensor_split_counts_hosts(two: tuple[RunningHost, RunningHost]) -> None:
    hosts.use([host.endpoint for host in two])
    layers = context_on(QWEN3, PlacementParams(tensor_split=(0, 1))).model.placement.layers
    assert set(layers) == {two[1].name}
    with pytest.raises(UsageError, match="-ts has 3 values for 2 devices"):
        context_on(QWEN3, PlacementParams(tensor_split=(1, 1, 1)))
    with pytest.raises(UsageError, match="available buffer types: CPU, RPC"):
        context_on(QWEN3, PlacementParams(rules=(("x", "RPC[elsewhere:1]"),)))
    with pytest.raises(UsageError, match="holds whole layers only"):
        context_on(QWEN3, PlacementParams(split_mode="graph"))


def test_a_host_says_what_memory_is_left(two: tuple[RunningHost, RunningHost]) -> None:
    hosts.use([two[1].endpoint])
    (device,) = available()
    assert device.memory() == (600 << 20, 600 << 20)
    address = device.alloc(100 << 20)
    assert device.memory().free == 500 << 20
    device.release(address)
    assert device.memory().free == 600 << 20
    context = context_on(QWEN3, PlacementParams())
    used = device.memory().total - device.memory().free
    assert context.devices is not None
    assert used >= context.devices.needs[device.name].total > 0


def test_fit_keeps_to_the_memory_of_a_host(two: tuple[RunningHost, RunningHost]) -> None:
    hosts.use([two[1].endpoint])
    settings = ContextParams(n_ctx=256, n_ubatch=16, n_threads=1)
    assert fit(QWEN3, ModelParams(), settings, margin=10).n_gpu_layers == 999


def test_too_little_memory_is_one_line() -> None:
    with running("-m", "1") as small:
        hosts.use([small.endpoint])
        with pytest.raises(DeviceMemoryError, match=r"RPC\[127.*MiB are needed"):
            context_on(DATA / "zoo" / "deepseek2-lite.gguf", PlacementParams(), n_ctx=4096)


def test_state_of_a_sequence(two: tuple[RunningHost, RunningHost], tmp_path: Path) -> None:
    hosts.use([host.endpoint for host in two])
    split = PlacementParams(tensor_split=(1, 1))
    first, second = context_on(QWEN3, split), context_on(QWEN3, split)
    tokens = tokens_for(first, 40)
    evaluated(first, tokens[:30], 30)
    save_sequence(tmp_path / "state", first, 0, tokens[:30].tolist())
    assert load_sequence(tmp_path / "state", second, 0, 256)[0] == tokens[:30].tolist()
    following = [Batch.single(tokens[30:], 30, logits="all") for _ in range(2)]
    assert np.array_equal(first.decode(following[0]), second.decode(following[1]))
    here = context_on(QWEN3, ON_CPU)
    load_sequence(tmp_path / "state", here, 0, 256)
    assert np.array_equal(here.decode(Batch.single(tokens[30:], 30, logits="all")), first_again(second, tokens))


def first_again(context: object, tokens: np.ndarray) -> np.ndarray:
    """Logits of the tokens behind a state once more."""
    context.kv.rewind(0, 30)  # type: ignore[attr-defined]
    return context.decode(Batch.single(tokens[30:], 30, logits="all"))  # type: ignore[attr-defined]


def test_shift_copy_and_removal_of_cells(two: tuple[RunningHost, RunningHost]) -> None:
    def outcome(placement: PlacementParams) -> np.ndarray:
        context = context_on(QWEN3, placement, n_seq_max=2)
        tokens = tokens_for(context, 60)
        evaluated(context, tokens[:40], 40)
        context.kv.seq_cp(0, 1)
        context.kv.seq_rm(0, 4, 20)
        context.kv.seq_add(0, 20, -1, -16)
        parts = [context.decode(Batch.single(tokens[40:50], 24, logits="all"))]
        parts.append(context.decode(Batch.single(tokens[50:], 40, seq_id=1, logits="all")))
        context.kv.clear()
        return np.concatenate([*parts, evaluated(context, tokens[:20], 20)])

    wanted = outcome(ON_CPU)
    hosts.use([host.endpoint for host in two])
    assert np.array_equal(outcome(PlacementParams(tensor_split=(1, 1))), wanted)


def test_two_contexts_and_growing_batches(two: tuple[RunningHost, RunningHost]) -> None:
    """Programs of several contexts and shapes, whose memory moves and is given back."""
    here = context_on(QWEN3, ON_CPU, n_ubatch=64)
    tokens = tokens_for(here, 64)
    hosts.use([two[0].endpoint])
    (device,) = available()
    contexts = [context_on(QWEN3, PlacementParams(), n_ubatch=64) for _ in range(2)]
    for n in (1, 5, 17, 64, 33, 2):
        for context in (here, *contexts):
            context.kv.clear()
        wanted = here.decode(Batch.single(tokens[:n], 0, logits="all"))
        for context in contexts:
            assert np.array_equal(context.decode(Batch.single(tokens[:n], 0, logits="all")), wanted)
    assert device.memory().free < device.memory().total
    contexts.clear()
    del context
    assert device.memory().free == device.memory().total


def test_weights_are_kept_on_the_disk_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = context_on(QWEN3, ON_CPU)
    tokens = tokens_for(here, 20)
    wanted = evaluated(here, tokens, 10)
    with running("-c") as host:
        for attempt in range(3):
            hosts.use([host.endpoint])
            assert np.array_equal(evaluated(context_on(QWEN3, PlacementParams()), tokens, 10), wanted), attempt
            hosts.use(())
            kept = [path for path in (tmp_path / "ikpy" / "rpc").rglob("*") if path.is_file()]
            assert kept
            if attempt == 0:
                times = {path: path.stat().st_mtime_ns for path in kept}
            elif attempt == 1:
                assert {path: path.stat().st_mtime_ns for path in kept} == times
                for path in kept:  # damaged ones are sent again
                    path.write_bytes(b"x" * path.stat().st_size)
            else:
                assert not any(path.read_bytes().startswith(b"xxxx") for path in kept)


def test_a_host_that_dies_is_one_line() -> None:
    with running() as host:
        hosts.use([host.endpoint])
        context = context_on(QWEN3, PlacementParams())
        tokens = tokens_for(context, 20)
        evaluated(context, tokens, 10)
        host.process.kill()
        began = time.monotonic()
        time.sleep(1.5)  # its child notices
        for _ in range(2):
            with pytest.raises(DeviceError, match=re.escape(host.name) + ".*load the model again") as caught:
                context.decode(Batch.single(tokens[:1], 20))
            assert "\n" not in str(caught.value)
        assert time.monotonic() - began < 60
        with pytest.raises(DeviceError, match=r"no connection: .*rpc-server"):
            context_on(QWEN3, PlacementParams())


def test_a_worker_that_dies_leaves_the_host() -> None:
    """What a client sends can end its own process only; the next one is served."""
    with running() as host:
        hosts.use([host.endpoint])
        context = context_on(QWEN3, PlacementParams())
        children = Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGSEGV)
        with pytest.raises(DeviceError, match="connection was lost"):
            evaluated(context, tokens_for(context, 20), 10)
        again = context_on(QWEN3, PlacementParams())
        assert evaluated(again, tokens_for(again, 20), 10).shape[0] == 20
        assert any("ended by SIGSEGV" in line for line in host.log)


def test_a_second_program_is_refused(two: tuple[RunningHost, RunningHost]) -> None:
    from ikpy.backends.remote.device import RemoteDevice

    hosts.use([two[0].endpoint])
    available()
    with pytest.raises(DeviceError, match="serves another program"):
        RemoteDevice(0, "127.0.0.1", two[0].port)
