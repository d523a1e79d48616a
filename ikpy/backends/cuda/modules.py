"""Compiled kernels: cubins in the user cache, by hash of the sources, architecture and compiler version.

A GPU's kernels are compiled by nvcc when they are first needed, or ahead of time by `ikpy cuda build`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ikpy.backends.cuda.api import DeviceError

FOLDER = Path(__file__).parent
KERNELS = FOLDER / "kernels"
NATIVE_INCLUDE = FOLDER.parent.parent / "_native" / "include"
NVCC_FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-lineinfo")
# Turing and later: the first with int8 tensor cores.
OLDEST = (7, 5)
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
# Code that drivers compile for devices which nvcc, or the machine that compiled the kernels, does not know.
VIRTUAL = ("compute_75", "compute_80")
Progress = Callable[[str], None]
# The kernels ask for nothing later than this, so all newer devices share its PTX.
NEWEST_PTX = 80


@dataclass(frozen=True)
class Cubin:
    """A kernel file compiled for one architecture, or to PTX. usage: what ptxas says about registers and spills."""

    source: Path
    path: Path
    usage: str


def architecture(compute_capability: tuple[int, int]) -> str:
    """sm_86 for (8, 6). Raises DeviceError for GPUs that are too old."""
    if compute_capability < OLDEST:
        major, minor = compute_capability
        raise DeviceError(f"compute capability {major}.{minor} is too old: 7.5 (Turing) or later is needed")
    return "sm_{}{}".format(*compute_capability)


def virtual_architecture(arch: str) -> str:
    """compute_80 for sm_80 and everything later, compute_75 for sm_75: what a device's PTX is made for."""
    return f"compute_{min(int(arch.rpartition('_')[2]), NEWEST_PTX)}"


def code_flag(architectures: Sequence[str]) -> str:
    """The option for nvcc that makes code for architectures with the same PTX."""
    (virtual,) = set(map(virtual_architecture, architectures))
    return f"-gencode=arch={virtual},code=[{','.join(architectures)}]"


def only_architecture(stem: str) -> str | None:
    """The one architecture that has the instructions of a kernel file; None: all have them."""
    return "sm_90" if "wgmma" in stem else None


def special_code_flag(arch: str) -> str:
    """As code_flag for files of one architecture, with all of its features: sm_90a, which runs on sm_90."""
    return f"-gencode=arch=compute_{arch.removeprefix('sm_')}a,code={arch}a"


def sources(arch: str) -> list[Path]:
    """The kernel files for an architecture."""
    return [path for path in sorted(KERNELS.glob("*.cu")) if only_architecture(path.stem) in (None, arch)]


def cache_dir() -> Path:
    """Where cubins are kept: $XDG_CACHE_HOME/ikpy/cubin."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ikpy" / "cubin"


@cache
def nvcc() -> str:
    """Path of the compiler: $NVCC, nvcc on the PATH, or in $CUDA_HOME or /usr/local/cuda."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [os.environ.get("NVCC"), shutil.which("nvcc"), *(f"{home}/bin/nvcc" for home in homes if home)]
    for path in candidates:
        if path and shutil.which(path):
            return path
    raise DeviceError(
        "the CUDA compiler nvcc is not found: install the CUDA toolkit (nvidia-cuda-toolkit, cuda-nvcc), or set NVCC "
        "or CUDA_HOME, or copy kernels made by `ikpy cuda build` elsewhere; -ngl 0 uses the CPU"
    )


@cache
def nvcc_version() -> str:
    """Last line of nvcc --version."""
    done = _run([nvcc(), "--version"])
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        raise DeviceError(f"{nvcc()} --version fails: {done.stderr.strip() or done.returncode}")
    return lines[-1]


def _headers_digest() -> str:
    """Hash of everything that kernel files may include."""
    digest = hashlib.sha256()
    # Lists of types (weights_*.cu) are included by other kernel files.
    lists = sorted(KERNELS.glob("weights_*.cu"))
    for path in [*sorted(KERNELS.rglob("*.cuh")), *lists, *sorted(NATIVE_INCLUDE.rglob("*.hpp"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def kernels_digest() -> str:
    """Hash of all kernels with what they include, and of the compiler."""
    digest = hashlib.sha256(_headers_digest().encode() + " ".join(NVCC_FLAGS).encode())
    for path in sorted(KERNELS.glob("*.cu")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{digest.hexdigest()[:20]}-{_compiler_tag()}"


def _key(source: Path, headers: str) -> str:
    parts = [source.read_bytes(), headers.encode(), " ".join(NVCC_FLAGS).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _compiler_tag() -> str | None:
    """Short name of the compiler's version, None without a compiler."""
    try:
        return hashlib.sha256(nvcc_version().encode()).hexdigest()[:8]
    except DeviceError:
        return None


def _target(source: Path, arch: str, headers: str, folder: Path) -> Path:
    """Place of a cubin. Without a compiler the latest one of these sources, whatever compiler made it elsewhere."""
    name, tag = f"{source.stem}-{_key(source, headers)}", _compiler_tag()
    suffix = "ptx" if arch in VIRTUAL else "cubin"
    elsewhere = _made_elsewhere(source, arch, headers, folder) if tag is None else None
    return elsewhere or folder / arch / f"{name}-{tag}.{suffix}"


def _made_elsewhere(source: Path, arch: str, headers: str, folder: Path) -> Path | None:
    """The latest cubin of these sources, whatever compiler made it."""
    suffix = "ptx" if arch in VIRTUAL else "cubin"
    made = (folder / arch).glob(f"{source.stem}-{_key(source, headers)}-*.{suffix}")
    return max(made, key=lambda path: path.stat().st_mtime, default=None)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise DeviceError(f"{command[0]} cannot be started: {error.strerror}") from error


# What nvcc complains about when the machine is not set up for it, and what helps.
REMEDIES = (
    (
        r"unsupported (GNU|clang) version",
        "name a C++ compiler that this nvcc takes: NVCC_PREPEND_FLAGS='-ccbin g++-12'",
    ),
    (r"host compiler|sh: .*not found|cc1plus|gcc: not found|No such file or directory", "install a C++ compiler (g++)"),
    (r"Unsupported gpu architecture|not defined for option 'gpu", "this CUDA toolkit is older than the GPU: update it"),
    (r"No space left", "make room in the folder, or name another one with XDG_CACHE_HOME"),
)


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """The first complaint of a compiler, and what helps against it if that is known."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    first = next((line for line in lines if re.search(r"\b(error|fatal)\b", line)), lines[0] if lines else "")
    help_ = next((remedy for pattern, remedy in REMEDIES if re.search(pattern, done.stderr)), "")
    return (first or f"status {done.returncode}") + (f"; {help_}" if help_ else "")


def compile_cubin(source: Path, arch: str, target: Path) -> str:
    """Compiles a kernel file; returns what ptxas reports. Raises DeviceError with the compiler's first complaint."""
    try:
        return _compile(source, arch, target)
    except OSError as error:
        raise DeviceError(
            f"compiled kernels cannot be kept in {target.parent}: {error.strerror}; XDG_CACHE_HOME names another place"
        ) from error


def _compile(source: Path, arch: str, target: Path) -> str:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.with_stem("kernel").name
        includes = [f"-I{KERNELS}", f"-I{NATIVE_INCLUDE}"]
        command = [
            nvcc(),
            "-ptx" if arch in VIRTUAL else "-cubin",
            special_code_flag(arch) if only_architecture(source.stem) else code_flag([arch]),
            "-Xptxas=-v",
            *NVCC_FLAGS,
            *includes,
            "-o",
            str(made),
            str(source),
        ]
        done = _run(command)
        if done.returncode:
            log = target.parent / f"{source.stem}.log"
            log.write_text(done.stderr)
            raise DeviceError(f"nvcc cannot compile {source.name} for {arch}: {_reason(done)} (all in {log})")
        usage = target.with_suffix(".ptxas")
        usage.write_text(done.stderr)
        os.replace(made, target)
    return done.stderr


def build(
    arch: str,
    progress: Progress,
    *,
    files: Collection[str] | None = None,
    folder: Path | None = None,
    jobs: int | None = None,
    force: bool = False,
) -> list[Cubin]:
    """Cubins for one architecture of the kernel files with these stems, of all by default.

    Compiles those that the cache lacks, all of them with force.
    """
    folder = folder or cache_dir()
    headers = _headers_digest()
    chosen = [source for source in sources(arch) if files is None or source.stem in files]
    targets = [(source, _target(source, arch, headers, folder)) for source in chosen]
    missing = [(source, target) for source, target in targets if force or not target.exists()]
    if missing:
        progress(f"compiling {len(missing)} CUDA kernel files for {arch} with {nvcc_version()} (kept in {folder})")
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            futures = {pool.submit(compile_cubin, source, arch, target): source for source, target in missing}
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    future.result()
                    progress(f"  [{done}/{len(missing)}] {futures[future].name}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # an error, or Ctrl-C, need not wait for the others
                raise
    return [Cubin(source, target, _usage(target)) for source, target in targets]


def _usage(target: Path) -> str:
    path = target.with_suffix(".ptxas")
    return path.read_text() if path.exists() else ""


def spills(cubins: Sequence[Cubin]) -> list[str]:
    """Kernels whose registers spill to memory: `file: kernel: N bytes stores, M bytes loads`."""
    found = []
    for cubin in cubins:
        kernel = ""
        for line in cubin.usage.splitlines():
            if "Function properties for" in line:
                kernel = line.rsplit(" ", 1)[-1]
            if "spill stores" in line and " 0 bytes spill stores, 0 bytes spill loads" not in line:
                found.append(f"{cubin.source.name}: {kernel}: {line.split(',', 1)[-1].strip()}")
    return found


def cubins(compute_capability: tuple[int, int], kernels: Collection[str]) -> dict[str, Path]:
    """The cubin that holds each kernel, compiled with progress on standard error if it is not in the cache.

    Where that is impossible, cubins that another compiler made elsewhere, code of an older architecture that the device
    runs as well, or PTX.
    """
    from ikpy.backends.cuda.launch import kernel_file

    files = {name: kernel_file(name) for name in kernels}
    arch, stems = architecture(compute_capability), set(files.values())
    try:
        made = build(arch, _print, files=stems)
    except DeviceError as error:
        found = _of_another_compiler(arch, stems, error) or _substitute(arch, stems)
        if found is None:
            raise
        made = found
    paths = {cubin.source.stem: cubin.path for cubin in made}
    missing = sorted(name for name, file in files.items() if file not in paths)
    if missing:
        raise DeviceError(f"no kernel file holds {', '.join(missing)}")
    return {name: paths[file] for name, file in files.items()}


def _of_another_compiler(arch: str, stems: Collection[str], error: DeviceError) -> list[Cubin] | None:
    """Cubins of kernel files that came from another machine, None if some are missing; error: why they are wanted."""
    folder, headers = cache_dir(), _headers_digest()
    chosen = [source for source in sources(arch) if source.stem in stems]
    made = [(source, _made_elsewhere(source, arch, headers, folder)) for source in chosen]
    found = [Cubin(source, path, "") for source, path in made if path is not None]
    if not found or len(found) < len(stems):
        return None
    _print(f"{error}; those for {arch} that another compiler made are used")
    return found


def _substitute(arch: str, stems: Collection[str]) -> list[Cubin] | None:
    """Code of kernel files for a device that nvcc cannot compile for; None if there is none."""
    compiler = _compiler_tag()
    if compiler is not None and _knows(arch):
        return None  # what hinders it there is to be mended
    folder, headers = cache_dir(), _headers_digest()
    number = int(arch.removeprefix("sm_"))
    # Devices run the code of earlier ones of their generation.
    older = [f"sm_{n}" for n in range(number - 1, number // 10 * 10 - 1, -1)]
    for other in (*older, virtual_architecture(arch)):
        chosen = [source for source in sources(other) if source.stem in stems]
        targets = [_target(source, other, headers, folder) for source in chosen]
        if len(chosen) == len(stems) and all(target.exists() for target in targets):
            _print(f"CUDA kernels for {arch}: those for {other} are used")
            return [Cubin(source, target, "") for source, target in zip(chosen, targets, strict=True)]
    if compiler is None:
        return None
    _print(f"CUDA kernels for {arch}: {nvcc_version()} does not know it; the driver compiles them, which takes long")
    return build(virtual_architecture(arch), _print, files=stems)


def _knows(arch: str) -> bool:
    """Whether nvcc compiles for an architecture."""
    done = _run([nvcc(), "--list-gpu-code"])
    return done.returncode != 0 or arch in done.stdout.split()


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
