"""Where threads and memory go: NUMA modes over a made-up topology, threads by phase, huge pages, read-ahead.

Each case runs in a process of its own, because binding threads lasts. The made-up nodes hold one real CPU each.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ikpy import Batch, Context, ContextParams, Model, default_model_path
from ikpy.cli.parser import parse
from ikpy.engine.params import ModelParams
from ikpy.errors import UsageError
from ikpy.gguf import file_bytes, huge_pages
from ikpy.gguf.reader import GGUFFile
from ikpy.machine import numa
from ikpy.machine.page_nodes import cached_pages_by_node, pages_by_node

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are bound on Linux only")
CPUS = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")

START = """
import json, os, sys
from pathlib import Path
from ikpy.machine import numa, threads
numa.NODES = Path(sys.argv[1])
lines = []
"""
RUN = """
from ikpy import Batch, Context, ContextParams, Model, default_model_path
context = Context(Model.load(default_model_path()), ContextParams(n_ctx=256, n_threads=1, n_threads_batch=2))
before = set(os.listdir("/proc/self/task"))
for _ in range(2):  # the team shrinks for the single token and grows again
    context.kv.clear()
    context.decode(Batch.single(list(range(64))))
    context.decode(Batch.single([5], 64))
context.kv.clear()
context.decode(Batch.single(list(range(64))))
tasks = [t for t in os.listdir("/proc/self/task") if t not in before or t == str(os.getpid())]
print(json.dumps({"lines": lines, "cpus": sorted(sorted(os.sched_getaffinity(int(t))) for t in tasks),
                  "threads": threads.hardware_threads(), "map": Path("/proc/self/numa_maps").read_text()
                  if os.path.exists("/proc/self/numa_maps") else ""}))
"""


def topology(folder: Path, cpu_lists: list[str]) -> Path:
    """A folder like /sys/devices/system/node with these lists of CPUs."""
    for i, cpus in enumerate(cpu_lists):
        (folder / f"node{i}").mkdir(parents=True)
        (folder / f"node{i}" / "cpulist").write_text(cpus + "\n")
    (folder / "possible").write_text("0-1\n")
    return folder


def in_process(code: str, *arguments: object) -> dict:
    """What the code prints as JSON in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-800:]
    return json.loads(done.stdout)


def placed(mode: str, nodes: Path) -> dict:
    return in_process(f"{START}numa.apply({mode!r}, lines.append)\n{RUN}", nodes)


def test_cpu_lists() -> None:
    assert numa.parse_cpu_list("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert numa.parse_cpu_list("\n") == ()


def test_nodes_hold_usable_cpus_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs this process may not use and nodes without CPUs (memory only) are left out; order is numeric."""
    monkeypatch.setattr(numa, "NODES", topology(tmp_path, ["", *["500-501"] * 9, f"{CPUS[0]},500"]))
    assert numa.nodes() == {10: (CPUS[0],)}
    monkeypatch.setattr(numa, "NODES", tmp_path / "missing")
    assert numa.nodes() == {}


@needs_two
def test_distribute_binds_threads_to_nodes_in_turn(tmp_path: Path) -> None:
    found = placed("distribute", topology(tmp_path, [str(CPUS[0]), str(CPUS[1])]))
    assert found["cpus"] == [[CPUS[0]], [CPUS[1]]]
    assert found["lines"][0] == "numa: threads take turns on nodes 0, 1"
    assert found["threads"] == len(CPUS)  # the binding of the first thread is not taken for a limit
    spread = not any("not spread" in line for line in found["lines"])
    assert not (spread and found["map"]) or "interleave" in found["map"]


@needs_two
def test_loading_after_a_computation_uses_all_cpus(tmp_path: Path) -> None:
    """The thread that computed is bound to its node then; threads that read or rearrange weights are not."""
    code = f"""{START}
numa.apply("distribute", lines.append)
from ikpy import Batch, Context, ContextParams, Model, default_model_path
Context(Model.load(default_model_path()), ContextParams(n_ctx=256, n_threads=1)).decode(Batch.single([5]))
with threads.pool(1) as pool:
    print(json.dumps([sorted(os.sched_getaffinity(0)), sorted(pool.submit(os.sched_getaffinity, 0).result())]))
"""
    assert in_process(code, topology(tmp_path, [str(CPUS[0]), str(CPUS[1])])) == [[CPUS[0]], CPUS]


@needs_two
def test_isolate_keeps_all_threads_on_one_node(tmp_path: Path) -> None:
    found = placed("isolate", topology(tmp_path, [str(CPUS[0]), str(CPUS[1])]))
    assert found["cpus"] in ([[CPUS[0]]] * 2, [[CPUS[1]]] * 2)
    assert found["threads"] == 1
    assert found["lines"][0] == f"numa: all threads on node {CPUS.index(found['cpus'][0][0])} (1 CPUs)"


@needs_two
def test_numactl_keeps_what_was_inherited(tmp_path: Path) -> None:
    found = placed("numactl", topology(tmp_path, [str(CPUS[0]), str(CPUS[1])]))
    assert found["cpus"] == [CPUS, CPUS]
    assert found["lines"][0] == f"numa: CPUs as inherited: {len(CPUS)} on nodes 0, 1"


def test_one_node_changes_nothing(tmp_path: Path) -> None:
    found = placed("distribute", topology(tmp_path, [",".join(map(str, CPUS))]))
    assert found["cpus"] == [CPUS, CPUS]
    assert found["lines"] == ["numa: one memory node for this process, 'distribute' changes nothing"]


def test_balancing_kernel_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "nodes", lambda: {0: (CPUS[0],), 1: (CPUS[-1],)})
    monkeypatch.setattr(numa, "BALANCING", tmp_path / "balancing")
    for text, warned in (("1\n", True), ("0\n", False)):
        (tmp_path / "balancing").write_text(text)
        lines: list[str] = []
        numa.apply("numactl", lines.append)
        assert any("numa_balancing is enabled" in line for line in lines) == warned


def test_kernel_is_warned_of_on_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process bound to one node (numactl -N) has its pages watched as well; other bits mean other things."""
    monkeypatch.setattr(numa, "nodes", lambda: {1: (CPUS[0],)})
    monkeypatch.setattr(numa, "BALANCING", tmp_path / "balancing")
    for text, warned in (("1\n", True), ("2\n", False), ("3\n", True)):
        (tmp_path / "balancing").write_text(text)
        lines: list[str] = []
        numa.apply("numactl", lines.append)
        assert any("numa_balancing is enabled" in line for line in lines) == warned


@needs_two
def test_isolate_bounds_thread_counts(tmp_path: Path) -> None:
    """-t 0 (all hardware threads) is read before the threads are bound; the default of bench is counted after."""
    code = f"""{START}
import io, contextlib
from ikpy.cli import bench, start
with contextlib.redirect_stderr(io.StringIO()):
    params = start.start("cli", ["--numa", "isolate", "-t", "0", "-tb", "64", "-td", "5"], "")
    numa.apply = lambda *_: None  # bound by now
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        bench.run("--numa isolate -p 0 -n 1 -r 1 -o json".split())
print(json.dumps([params.n_threads, params.n_threads_batch, params.speculative.n_threads,
                  json.loads(out.getvalue())[0]["n_threads"]]))
"""
    assert in_process(code, topology(tmp_path, [str(CPUS[0]), str(CPUS[1])])) == [1, 1, 1, 1]


def test_inherited_policy_is_kept(tmp_path: Path) -> None:
    """Memory that numactl -m or --interleave has placed stays there; threads still take turns."""
    code = f"""{START}
numa.interleave([0])
numa.interleave = lambda nodes: 1 / 0
numa.apply("distribute", lines.append)
print(json.dumps(lines))
"""
    nodes = topology(tmp_path, [str(CPUS[0]), str(CPUS[-1])])
    if in_process(f"{START}print(json.dumps(numa.interleave([0])))", nodes):
        pytest.skip("memory policies are refused here")
    assert in_process(code, nodes)[:2] == [
        "numa: threads take turns on nodes 0, 1",
        "numa: memory as the inherited policy says",
    ]


def test_advice_without_a_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_policy", lambda: 0)
    monkeypatch.setattr(numa, "NODES", topology(tmp_path / "two", [str(CPUS[0]), str(CPUS[-1])]))
    assert numa.advice().startswith("note: 2 memory nodes and no --numa")
    monkeypatch.setattr(numa, "_policy", lambda: 3)
    assert numa.advice() == ""
    monkeypatch.setattr(numa, "_policy", lambda: 0)
    monkeypatch.setattr(numa, "NODES", topology(tmp_path / "one", [str(CPUS[0])]))
    assert numa.advice() == ""


@pytest.mark.parametrize(
    ("policy", "mode", "pages", "told"),
    [
        (3, "distribute", {0: 90, 1: 10}, True),
        (3, "distribute", {0: 60, 1: 40}, False),
        (3, "numactl", {0: 100}, True),
        (2, "distribute", {0: 100}, False),
        (0, "isolate", {0: 80, 9: 20}, True),
        (0, "isolate", {0: 100}, False),
        (3, "distribute", {0: 10}, False),
    ],
)
def test_advice_on_cached_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: int, mode: str, pages: dict[int, int], told: bool
) -> None:
    """Of the share of pages on the wrong nodes, once enough of the file is in memory."""
    monkeypatch.setattr(numa, "_policy", lambda: policy)
    monkeypatch.setattr(numa, "NODES", topology(tmp_path, [str(CPUS[0]), str(CPUS[-1])]))
    monkeypatch.setattr(numa, "cached_pages_by_node", lambda area: Counter(pages))
    assert ("earlier reading" in numa.advice_on_file(mode, [np.zeros(1, np.uint8)])) == told


def test_pages_by_node(tmp_path: Path) -> None:
    """Pages count once they are touched; those of a file also when another process reads them."""
    memory = mmap.mmap(-1, 64 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[: 16 * mmap.PAGESIZE] = 1
    found = pages_by_node(array.ctypes.data, array.nbytes)
    if not found:
        pytest.skip("this system does not tell where pages are")
    assert found.total() == 16
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * mmap.PAGESIZE))
    assert cached_pages_by_node(np.memmap(path, np.uint8, "r")).total() == 64


def test_file_pages_are_let_go_of_on_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, n, advice: calls.append((start, n)))
    path = default_model_path()
    for others, expected in ((["500"], path.stat().st_size), ([], 0)):
        folder = tmp_path / str(len(others))
        monkeypatch.setattr(numa, "NODES", topology(folder, [",".join(map(str, CPUS)), *others]))
        calls.clear()
        GGUFFile.open(path, use_mmap=False).close()
        assert sum(n for _, n in calls) == expected


def test_reserved_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest pages of which enough are free, whole ones; none at all where mmap fails or too few are left."""
    asked: list[tuple[int, int]] = []

    def fake(descriptor: int, size: int, flags: int = 0) -> object:
        asked.append((size, 1 << (flags >> 26)))
        if size > 1 << 30:
            raise OSError(errno.ENOMEM, "no memory")
        return "memory"

    monkeypatch.setattr(huge_pages, "POOLS", tmp_path)
    for kib, free, promised in ((2048, 12, 2), (1048576, 2, 0)):
        pool = tmp_path / f"hugepages-{kib}kB"
        pool.mkdir()
        (pool / "free_hugepages").write_text(f"{free}\n")
        (pool / "resv_hugepages").write_text(f"{promised}\n")
    monkeypatch.setattr(huge_pages.mmap, "mmap", fake)
    assert huge_pages.reserved_memory(5 << 20) == ("memory", 1 << 30)
    assert huge_pages.reserved_memory((1 << 30) + 1) is None
    assert asked == [(1 << 30, 1 << 30), (2 << 30, 1 << 30)]
    (tmp_path / "hugepages-1048576kB" / "free_hugepages").write_text("0\n")
    assert huge_pages.reserved_memory((4 << 20) + 1) == ("memory", 2 << 20)
    assert asked[-1] == (6 << 20, 2 << 20)
    assert huge_pages.reserved_memory(21 << 20) is None


def test_reserved_pages_that_cannot_be_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free pages may all be on nodes that this process must not use; reading then takes other memory."""
    preadv, failures = os.preadv, [OSError(errno.EFAULT, "Bad address")]

    def read(*arguments: object) -> int:
        if failures:
            raise failures.pop()
        return preadv(*arguments)

    size = default_model_path().stat().st_size
    monkeypatch.setattr(file_bytes, "reserved_memory", lambda n: (huge_pages.private_memory(n), 2 << 20))
    with GGUFFile.open(default_model_path(), use_mmap=False, reserved_pages=True) as file:
        assert file.shards[0].page_size == 2 << 20
    monkeypatch.setattr(os, "preadv", read)
    with GGUFFile.open(default_model_path(), use_mmap=False, reserved_pages=True) as file:
        assert file.shards[0].page_size == 0
        assert file.shards[0].data.nbytes == size
        assert not failures


def test_modes_of_the_command_line() -> None:
    for words, mode in (
        ("distribute", "distribute"),
        ("ISOLATE", "isolate"),
        ("numactl", "numactl"),
        ("", "distribute"),
    ):
        params = parse(["-m", "m.gguf", "--numa", words], "cli")
        assert params.model.numa == mode
        assert not params.model_params().read_ahead
    assert parse(["-m", "m.gguf"], "cli").model_params().read_ahead
    with pytest.raises(UsageError, match="distribute, isolate, numactl"):
        parse(["--numa", "mirror"], "cli")
    with pytest.raises(UsageError, match="distribute isolate numactl"):
        numa.apply("mirror", print)


def test_threads_by_phase() -> None:
    """-t for single tokens, -tb for everything longer, in every plan that runs."""
    context = Context(Model.load(default_model_path()), ContextParams(n_ctx=256, n_threads=1, n_threads_batch=3))
    position = 0
    for tokens in (40, 1, 2, 1):
        context.decode(Batch.single(list(range(tokens)), position))
        position += tokens
    assert [context._plans.get(tokens, 1).n_threads for tokens in (40, 1, 2)] == [3, 1, 3]


def mapping_flags(address: int) -> set[str]:
    """VmFlags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    pytest.skip("this kernel does not tell the flags of mappings")


def weight_flags(**params: object) -> set[str]:
    model = Model.load(default_model_path(), ModelParams(**params))
    data = model.gguf.data(model.gguf.tensors["blk.1.ffn_down_exps.weight"])
    return mapping_flags(np.asarray(data).ctypes.data)


def test_read_ahead_stops_for_numa() -> None:
    assert "rr" not in weight_flags()
    assert "rr" in weight_flags(read_ahead=False)


def test_weights_in_huge_pages() -> None:
    """-thp (--no-mmap) asks for them; a mapped file has none."""
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("a kernel without transparent huge pages")
    assert not parse(["-thp"], "cli").model_params().use_mmap
    assert "hg" in weight_flags(use_mmap=False)
    assert "hg" not in weight_flags()
