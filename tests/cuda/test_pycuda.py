"""The package driver over PyCUDA itself, over stub_driver.cpp: names, signatures, threads, the end of a process.

PyCUDA is the installed one, or that which scripts/test puts beside the environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from tests.shared import ROOT

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
PATHS = [*sys.path, str(ROOT / "build" / f"pycuda-{sys.implementation.cache_tag}")]
PYCUDA = PathFinder.find_spec("pycuda", PATHS)
pytestmark = pytest.mark.skipif(
    PYCUDA is None or COMPILER is None or shutil.which("nm") is None,
    reason="PyCUDA, a C++ compiler and nm are needed",
)
NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "Build cuda_99.9"; exit 0; fi
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
echo kernels > "$out"
"""
SCRIPT = """
import ctypes, gc, json, threading
import numpy as np
from ikpy.backends.cuda import devices
from ikpy.backends.cuda.api import DeviceError
from ikpy.backends.cuda.launch import Launch

library, found = ctypes.CDLL("libcuda.so.1"), {}

def count():
    gc.collect()
    names = ("streams", "events", "pinned", "memory", "graphs")
    return [ctypes.c_int.in_dll(library, f"live_{name}").value for name in names]

def number(name):
    return ctypes.c_int.in_dll(library, name).value

def message(action):
    try:
        action()
    except DeviceError as error:
        return str(error)

one, two = devices.available()
found["names"], found["contexts"] = [str(one), str(two)], [number("contexts")]
values, back = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
a, b = one.alloc(400), two.alloc(400)
first, second, event = one.new_stream(), two.new_stream(), one.new_event()
found["contexts"].append(number("contexts"))
first.upload(a, values)
first.send(two, b, a, 400)
first.record(event)
second.wait(event)
second.download(back, b)
second.synchronize()
found["copied"] = bool((back == values).all())
second.fill(b, 0, 200)
second.copy(b + 200, b, 200)
second.download(back, b)
second.synchronize()
found["filled"] = not back.any()
launch = Launch("rms_norm", (2, 1, 1), (32, 1, 1), 60 << 10, [b"x" * 8, b"y" * 4])
first.launch(launch)
graph = first.capture(lambda: first.launch(launch))
first.replay(graph)
found["launches"] = number("launches")
found["parameters"] = number("parameter_bytes")
refused = [launch._replace(grid=(1, 65536, 1)), launch._replace(shared_bytes=228 << 10)]
found["refused"] = [message(lambda: first.launch(each)) for each in refused]
found["errors"] = [message(lambda: one.alloc(1 << 40, "cache_k_l0")), message(lambda: one.pinned(1 << 40))]
event.synchronize()
found["alive"] = count()
del first, second, event, graph
one.release(a)
two.release(b)
found["released"] = count()

def make(device):
    return [device.new_stream(), device.new_event(), device.pinned(64)[8:16]]

def in_threads(*actions):
    threads = [threading.Thread(target=action) for action in actions]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

kept = make(one) + make(two)
found["made"] = count()
in_threads(kept.clear)
found["dropped in a thread"] = count()
in_threads(lambda: kept.extend(make(one)), lambda: kept.extend(make(two)))
with one.session():
    kept.clear()
found["dropped here"] = count()
found["violations"] = number("violations")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that meets the stub driver, and a compiler that compiles nothing."""
    return made(tmp_path_factory.mktemp("driver"))


def made(folder: Path, without: str = "") -> dict[str, str]:
    """The same; without: a function that the driver lacks."""
    assert PYCUDA is not None and PYCUDA.origin is not None and COMPILER is not None
    (extension,) = Path(PYCUDA.origin).parent.glob("_driver*.so")
    stub = folder / "stub.o"
    subprocess.run(
        [COMPILER, "-std=c++17", "-fPIC", "-c", Path(__file__).parent / "stub_driver.cpp", "-o", stub], check=True
    )
    wanted = symbols("-D", "--undefined-only", str(extension)) - symbols("--defined-only", str(stub))
    (folder / "rest.c").write_text(
        "".join(f"int {name}(void) {{ return 999; }}\n" for name in sorted(wanted - {without}))
    )
    library = folder / "libcuda.so.1"
    rest = ["-x", "c", folder / "rest.c"]
    subprocess.run([COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, stub, *rest], check=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(NVCC)
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    paths = {"LD_LIBRARY_PATH": folder, "XDG_CACHE_HOME": folder, "NVCC": nvcc, "PYTHONPATH": os.pathsep.join(PATHS)}
    known = {name: value for name, value in os.environ.items() if not name.startswith("IKPY_CUDA")}
    return {**known, **{name: str(value) for name, value in paths.items()}}


def symbols(*arguments: str) -> set[str]:
    """The driver's functions that nm lists."""
    lines = subprocess.run(["nm", *arguments], capture_output=True, text=True, check=True).stdout.splitlines()
    names = {line.split()[-1].split("@")[0] for line in lines if line.strip()}
    return {name for name in names if name.startswith("cu") and name[2:3].isupper()}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_driver_through_pycuda(environment: dict[str, str]) -> None:
    done = run(environment, "-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["names"] == ["CUDA0 (Stub 0)", "CUDA1 (Stub 1)"] and found["contexts"] == [0, 2]
    assert found["copied"] and found["filled"] and found["launches"] == 2
    assert found["parameters"] == 12
    for text in found["refused"]:
        assert text.startswith("CUDA0: kernel rms_norm, grid (") and "invalid argument" in text
    assert found["errors"][0].startswith(
        "CUDA0: failed to allocate buffer of 1048576.00 MiB for cache_k_l0: 4096.00 MiB are free; offload fewer layers"
    )
    assert "cannot be pinned" in found["errors"][1]
    assert found["alive"] == [2, 1, 0, 2, 1] and found["made"] == [2, 2, 2, 0, 0]
    for moment in ("released", "dropped in a thread", "dropped here"):
        assert found[moment] == [0] * 5, moment
    assert found["violations"] == 0, done.stderr
    assert "PyCUDA" not in done.stderr  # a warning about what was not cleaned up


def test_a_command_through_pycuda(environment: dict[str, str]) -> None:
    """The kernels do nothing, so the text means nothing; everything else is as on GPUs."""
    options = ["-p", "x", "-n", "4", "--temp", "0", "--no-warmup", "-ngl", "99", "--n-cpu-moe", "1", "-t", "1"]
    done = run(environment, "-m", "ikpy", "cli", *options)
    assert done.returncode == 0, done.stderr
    assert "CUDA1: uploaded" in done.stderr and "graph splits = " in done.stderr
    assert "PyCUDA" not in done.stderr and "stub driver" not in done.stderr
    assert (
        "CUDA0: Stub 0, compute capability 9.0, 4096 of 8192 MiB free"
        in run(environment, "-m", "ikpy", "cuda", "info").stdout
    )


def why_none(environment: dict[str, str], **stub: str) -> str:
    """What `ikpy cuda info` says of the devices."""
    return run({**environment, **stub}, "-m", "ikpy", "cuda", "info").stdout


def test_drivers_without_devices(environment: dict[str, str]) -> None:
    assert "the CUDA driver does not start: cuInit failed: no CUDA-capable device" in why_none(
        environment, STUB_INIT="100"
    )
    assert "there is no CUDA GPU" in why_none(environment, STUB_DEVICES="0")


def test_a_driver_that_is_older_than_pycuda(tmp_path: Path) -> None:
    """It lacks a function that PyCUDA was linked with."""
    text = why_none(made(tmp_path, without="cuArrayGetDescriptor_v2"))
    assert "undefined symbol: cuArrayGetDescriptor" in text
    assert "the driver is older than the toolkit that PyCUDA was built with: update it" in text


def generate(environment: dict[str, str], *options: str, **stub: str) -> subprocess.CompletedProcess[str]:
    common = ("-p", "x", "-n", "4", "--temp", "0", "--no-warmup", "-ngl", "99", "-t", "1")
    return run({**environment, **stub}, "-m", "ikpy", "cli", *common, *options)


def test_too_little_memory_is_one_line(environment: dict[str, str]) -> None:
    done = generate(environment, "-c", "2048", STUB_FREE_MIB="9", STUB_DEVICES="1")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert (
        "CUDA0: failed to allocate buffer: " in last and "MiB are needed (weights " in last and "9 MiB are free" in last
    )


def test_what_a_driver_refuses_is_told_once_and_done_otherwise(environment: dict[str, str]) -> None:
    done = generate(environment, STUB_CAPTURE="801", STUB_PEER="217")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("copies between CUDA1 and CUDA0 go through host memory: CUDA1: ") == 1
    assert "do not arrive" not in done.stderr
    for device in ("CUDA0", "CUDA1"):
        assert done.stderr.count(f"launched one by one, which is slower: {device}: cuStreamBeginCapture_v2 failed") == 1


MISUSE = """
import sys
import numpy as np
from ikpy.backends.cuda import devices
from ikpy.backends.cuda.api import DeviceError
from ikpy.backends.cuda.launch import Launch

one, two = devices.available()
a, b = one.alloc(512), two.alloc(512)
stream, other, event, foreign = one.new_stream(), two.new_stream(), one.new_event(), two.new_event()
data, launch = np.zeros(512, np.uint8), Launch("rms_norm", (1, 1, 1), (32, 1, 1), 0, [b"x" * 8])
free = one.alloc(512)
one.release(free)
one.prepare(["rms_norm"])

wrong = {
    "another device's address": lambda: stream.upload(b, data),
    "past the end": lambda: stream.upload(a + 1, data),
    "after free": lambda: stream.fill(free, 0, 512),
    "another device's event": lambda: stream.record(foreign),
    "pageable memory in a capture": lambda: stream.capture(lambda: stream.upload(a, data)),
    "waited for in a capture": lambda: stream.capture(stream.synchronize),
    "a first launch in a capture": lambda: stream.capture(lambda: stream.launch(launch)),
    "another device's graph": lambda: other.replay(stream.capture(lambda: None)),
    "nothing": lambda: stream.launch(launch) or stream.replay(stream.capture(lambda: stream.launch(launch))),
}
try:
    wrong[sys.argv[1]]()
except DeviceError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("misuse", "told"),
    [
        ("another device's address", "512 bytes at .* are no memory of device 0"),
        ("past the end", "512 bytes at .* are no memory of device 0"),
        ("after free", "cuMemsetD8Async: 512 bytes at .* are no memory of device 0"),
        ("another device's event", "cuEventRecord of a Event of another context"),
        ("pageable memory in a capture", "of pageable memory during a capture"),
        ("waited for in a capture", "a captured stream was waited for"),
        ("a first launch in a capture", "a kernel's first launch is captured"),
        ("another device's graph", "cuGraphLaunch of a Executable of another context"),
        ("nothing", ""),
    ],
)
def test_the_stub_enforces_what_drivers_enforce(environment: dict[str, str], misuse: str, told: str) -> None:
    done = run(environment, "-c", MISUSE, misuse)
    complaints = [line for line in done.stderr.splitlines() if line.startswith("stub driver: ")]
    assert done.returncode == 0, done.stderr
    if told:
        assert re.search(told, complaints[0]) and done.stdout.startswith("CUDA")
    else:
        assert not complaints and not done.stdout


AT_EXIT = """
import threading
from ikpy.backends.cuda import devices

kept = []
def work():
    for device in devices.available():
        device.prepare(["rms_norm"])
        kept.extend([device.new_stream(), device.new_event(), device.pinned(64), device.alloc(64)])

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_what_is_left_at_exit_is_the_drivers_matter(environment: dict[str, str]) -> None:
    """Contexts that another thread opened: PyCUDA's destructors would warn of each thing."""
    done = run(environment, "-c", AT_EXIT)
    unexpected = [line for line in done.stderr.splitlines() if "norm.cu" not in line and "compiling" not in line]
    assert done.returncode == 0 and not unexpected


@pytest.mark.parametrize("kernel", ["rope_table", "rms_norm"])
def test_a_kernel_that_takes_the_gpu_along_is_one_line(environment: dict[str, str], kernel: str) -> None:
    """Without a warning for everything that cannot be given back any more."""
    done = generate(environment, STUB_LOST_IN=kernel)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "PyCUDA" not in done.stderr
    assert "an illegal memory access was encountered" in done.stderr.strip().splitlines()[-1]


def test_direct_copies_that_arrive_changed_are_not_used(environment: dict[str, str]) -> None:
    done = generate(environment, STUB_PEER_CORRUPTS="1")
    assert done.returncode == 0, done.stderr
    line = "copies between CUDA1 and CUDA0 go through host memory: direct ones do not arrive as they were sent"
    assert done.stderr.count(line) == 1 and "stub driver" not in done.stderr
    assert "go through host memory" not in generate(environment).stderr
