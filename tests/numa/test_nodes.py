"""Where --numa, --no-mmap, -rtr and -thp put threads and pages, on a machine with several memory nodes.

scripts/test_numa starts one. Pages of the model file are let go of (posix_fadvise) before every case but those about
pages from an earlier reading, so its folder must be on a disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy import default_model_path
from ikpy.machine import numa
from ikpy.machine.page_nodes import cached_pages_by_node
from ikpy.machine.threads import CPU_ROOT, usable_cpus
from tests.shared import ROOT

NODES = numa.nodes()
pytestmark = pytest.mark.skipif(len(NODES) < 2, reason="one memory node; scripts/test_numa starts a machine with two")
FIRST, LAST = (min(NODES), max(NODES)) if NODES else (0, 0)
BIND, INTERLEAVE = 2, 3
POOL = Path("/sys/devices/system/node")

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def balancing_is_off() -> Iterator[None]:
    """Pages that the kernel watches for moving them are in memory, but it does not tell where."""
    before = numa.BALANCING.read_text() if numa.BALANCING.exists() else ""
    if not before:
        yield
    elif os.access(numa.BALANCING, os.W_OK):
        numa.BALANCING.write_text("0")
        yield
        numa.BALANCING.write_text(before)
    elif int(before):
        pytest.skip("pages are being moved: kernel.numa_balancing is on")
    else:
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 13 MB, quantized, on a disk."""
    path = tmp_path_factory.mktemp("numa") / "q8_0.gguf"
    if made := os.environ.get("IKPY_NUMA_MODEL"):
        path.write_bytes(Path(made).read_bytes())
    else:
        command = [sys.executable, "-m", "ikpy", "quantize", str(default_model_path()), str(path), "q8_0"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with path.open("rb+") as handle:
        os.fsync(handle.fileno())  # only pages that are written can be let go of
    return path


@pytest.fixture(scope="module")
def probe() -> Iterator[subprocess.Popen[str]]:
    """The process of `tests.numa.probe`."""
    command = [sys.executable, "-m", "tests.numa.probe"]
    # Threads do not survive a fork.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()


@pytest.fixture
def ask(probe: subprocess.Popen[str], model: Path) -> Ask:
    """Runs the model with options; keep: with the pages that earlier readings left in memory."""

    def request(options: str, *, keep: bool = False, **more: Any) -> dict[str, Any]:
        if not keep:
            descriptor = os.open(model, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        arguments = [str(model)] if more.get("tool") == "read" else ["-m", str(model), *options.split()]
        assert probe.stdin and probe.stdout
        print(json.dumps({"arguments": arguments, **more}), file=probe.stdin, flush=True)
        reply = json.loads(probe.stdout.readline())
        assert "error" not in reply, reply
        places = {name: reply[name] for name in ("weights", "cache", "arena") if name in reply}
        print(f"{options or '(none)'} {more or ''}: threads {reply.get('threads')}, pages by node {places}")
        return reply

    return request


def share(pages: dict[str, int], node: int) -> float:
    """Share of the pages that lie on a node."""
    assert sum(pages.values()) > 0
    return pages.get(str(node), 0) / sum(pages.values())


def even(pages: dict[str, int], slack: float = 0.1) -> bool:
    """Whether all nodes hold about as many pages."""
    return all(abs(share(pages, node) - 1 / len(NODES)) < slack for node in NODES)


def in_turn(n: int) -> list[list[int]]:
    """CPUs of n threads that take turns on the nodes."""
    cpus = [list(own) for own in NODES.values()]
    return sorted(cpus[i % len(cpus)] for i in range(n))


def test_distribute(ask: Ask) -> None:
    """-t threads for a token and -tb for the prompt, in turn on the nodes; weights, cache and arena on all of them."""
    # Several huge pages: a cache of one lies on one node.
    found = ask("--numa distribute -t 2 -tb 4 -c 2048")
    assert found["threads"] == {"prompt": in_turn(4), "token": in_turn(2)}
    assert found["mapped"]
    assert even(found["weights"])
    assert found["maps"] == found["file"]  # as the system counts them
    assert all(str(node) in found[part] for part in ("cache", "arena") for node in NODES)


def test_distribute_without_mapping(ask: Ask) -> None:
    """Huge pages take turns; -rtr has the rearranged weights on all nodes too."""
    found = ask("--numa distribute --no-mmap -rtr -c 256")
    assert not found["mapped"]
    assert found["repacked"] > 4
    assert even(found["weights"], 0.25)
    assert even(found["file"], 0.25)


def test_distribute_keeps_an_inherited_policy(ask: Ask) -> None:
    found = ask("--numa distribute -c 256", policy=[BIND, [LAST]])
    assert found["threads"]["token"] == in_turn(len(found["threads"]["token"]))
    assert share(found["weights"], LAST) > 0.98
    assert "numa: memory as the inherited policy says" in found["log"]


@pytest.mark.parametrize("options", ["", "--no-mmap", "-rtr"])
def test_isolate_stays_on_the_node_it_starts_on(ask: Ask, options: str) -> None:
    """Also with all hardware threads asked for, which are those of the node then."""
    cpus = list(NODES[LAST])
    # May run on every node, but has been moved to the last one's first CPU.
    found = ask(f"--numa isolate -t 0 -c 256 {options}", start=cpus[0])
    assert found["n_threads"] == [len(cpus)] * 2
    assert found["threads"] == {"prompt": [cpus] * len(cpus), "token": [cpus] * len(cpus)}
    assert all(share(found[part], LAST) > 0.98 for part in ("weights", "cache", "arena"))
    assert f"numa: all threads on node {LAST} ({len(cpus)} CPUs)" in found["log"]


def test_pages_of_the_file_do_not_fill_the_node(ask: Ask, model: Path) -> None:
    """On one node, what was read into memory leaves the page cache, which would push weights to other nodes."""
    for mode, kept in (("isolate", False), ("distribute", True)):
        ask(f"--numa {mode} --no-mmap -c 256")
        assert bool(cached_pages_by_node(np.memmap(model, np.uint8, "r"))) == kept


def test_numactl_interleaves_as_inherited(ask: Ask) -> None:
    found = ask("--numa numactl -c 256", policy=[INTERLEAVE, list(NODES)])
    everywhere = sorted(usable_cpus())
    assert set(map(tuple, found["threads"]["token"])) == {tuple(everywhere)}
    assert even(found["weights"])


def test_numactl_on_one_node(ask: Ask) -> None:
    """As under numactl -N 1 -m 1."""
    found = ask("--numa numactl -c 256", cpus=list(NODES[LAST]), policy=[BIND, [LAST]])
    assert set(map(tuple, found["threads"]["token"])) == {NODES[LAST]}
    assert all(share(found[part], LAST) > 0.98 for part in ("weights", "cache", "arena"))
    assert "numa: one memory node for this process, 'numactl' changes nothing" in found["log"]


def test_balancing_is_warned_of(ask: Ask) -> None:
    """Also of a process on one node, whose pages the kernel watches as well."""
    if not os.access(numa.BALANCING, os.W_OK):
        pytest.skip("switching the kernel's balancing on is for the administrator")
    for value in ("1", "0"):
        numa.BALANCING.write_text(value)
        log = ask("--numa numactl -c 256", cpus=list(NODES[LAST]))["log"]
        assert any("numa_balancing is enabled" in line for line in log) == (value == "1")


def test_pages_from_an_earlier_reading(ask: Ask) -> None:
    """They stay where they are when the file is mapped, which the user is told; --no-mmap does without them."""
    ask("", tool="read", cpus=list(NODES[FIRST]))
    mapped = ask("--numa distribute -c 256", keep=True)
    assert share(mapped["weights"], FIRST) > 0.9
    told = [line for line in mapped["log"] if "from an earlier reading" in line]
    assert len(told) == 1
    assert f"node {FIRST} 100 %" in told[0]
    isolated = ask("--numa isolate --no-mmap -c 256", keep=True, start=NODES[LAST][0])
    assert share(isolated["weights"], LAST) > 0.98
    assert not any("from an earlier reading" in line for line in isolated["log"])


def test_no_mode_is_advised(ask: Ask) -> None:
    advice = "note: 2 memory nodes and no --numa"
    assert any(line.startswith(advice) for line in ask("-c 256 -t 2")["log"]) == (len(NODES) == 2)
    inherited = ask("-c 256 -t 2", policy=[INTERLEAVE, list(NODES)])
    assert not any(line.startswith("note:") for line in inherited["log"])


def test_reserved_huge_pages(ask: Ask, model: Path) -> None:
    """-thp takes reserved pages, of all nodes, where enough are free."""
    pools = [POOL / f"node{node}" / "hugepages" / "hugepages-2048kB" / "nr_hugepages" for node in NODES]
    needed = -(-model.stat().st_size // (2 << 20))
    before = [pool.read_text() for pool in pools]
    try:
        for pool in pools:
            pool.write_text(str(needed))
        if any(int(pool.read_text()) < needed for pool in pools):
            pytest.skip("no huge pages can be reserved")
        found = ask("--numa distribute -thp -c 256")
    except PermissionError:
        pytest.skip("reserving huge pages is for the administrator")
    finally:
        for pool, text in zip(pools, before, strict=True):
            if os.access(pool, os.W_OK):
                pool.write_text(text)
    assert "llama_model_loader: using reserved huge pages of 2 MiB" in found["log"]
    assert found["reserved"] == needed * (2 << 20)
    assert even(found["file"], 0.15)


def test_bench_counts_the_cores_of_the_node(ask: Ask) -> None:
    """The default of -t is the physical cores that --numa isolate leaves."""
    found = ask("--numa isolate -p 0 -n 1 -r 1", tool="bench", start=NODES[LAST][0])
    cores = {(CPU_ROOT / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in NODES[LAST]}
    assert found["bench"]["n_threads"] == len(cores)
