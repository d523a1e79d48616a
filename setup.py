"""Builds the native modules: the Cython core once per ISA tier, plus what has no kernels once.

Environment: IKPY_TIERS=avx512,avxvnni,avx2,portable picks tiers; IKPY_DEBUG_BUILD=1 gives a bounds-checked build
without optimization; IKPY_SANITIZE=address,undefined (or thread) one that stops at memory faults, undefined behaviour
or races (scripts/test_sanitized runs it); IKPY_JOBS sets the compile jobs.
"""

import contextlib
import copy
import functools
import hashlib
import itertools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import Cython
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
NATIVE = Path("ikpy/_native")
SANITIZERS = [name for name in os.environ.get("IKPY_SANITIZE", "").split(",") if name]
CHECKED = bool(SANITIZERS) or os.environ.get("IKPY_DEBUG_BUILD") == "1"

COMMON_FLAGS = [
    "-std=c++17",
    "-fopenmp",
    "-Wall",
    "-Wno-unused-function",
    "-fvisibility=hidden",
    "-fno-math-errno",
]
SANITIZE = [f"-fsanitize={','.join(SANITIZERS)}"] if SANITIZERS else []
if SANITIZERS:
    # Checks of every pointer multiply the time that intrinsics take to compile; AddressSanitizer finds what matters of
    # them. Python's own flags may define what happens when signed numbers overflow.
    PARTS = ["-fno-sanitize=null,object-size,pointer-overflow,vptr", "-fno-sanitize-recover=all", "-fno-wrapv"]
    OPTIMIZE = ["-O1", "-g1", "-D_GLIBCXX_ASSERTIONS", *SANITIZE, *PARTS]
else:
    OPTIMIZE = ["-O1", "-g", "-D_GLIBCXX_ASSERTIONS"] if CHECKED else ["-O3", "-g0"]
# -O3 unrolls loops that other tiers write as intrinsics, which takes twice as long. Prompts are as fast without;
# single tokens of row-interleaved types up to 11 times, most others the same, IQ1_BN 0.3 and IQ1_KT, IQ4_KT 0.6 times.
OPTIMIZE_PORTABLE = OPTIMIZE if CHECKED else ["-O2", "-ftree-vectorize", "-g0"]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt"]
TIER_FLAGS = {
    "portable": [],
    "avx2": AVX2_FLAGS,
    "avxvnni": [*AVX2_FLAGS, "-mavxvnni"],
    # Tuned for generic CPUs GCC keeps addresses in vector registers: products of 7 tokens took up to 1.5 times as long.
    "avx512": ["-march=x86-64-v4", "-mtune=icelake-server", "-mavx512vnni", "-mprefer-vector-width=512"],
}
# Headers of the compiler that every file of a tier reads before its own, parsed once: half a second of each file.
PRECOMPILED = NATIVE / "include" / "ikpy" / "precompiled.hpp"
# A core that takes objects of another one where no file that they are made from has this word.
SHARED_OBJECTS = {"_core_avxvnni": ("_core_avx2", b"__AVXVNNI__")}
# Files of AVX-512 products in which GCC spends up to two thirds of its time on joining four instructions; two are as
# good (products of 1 and 8 tokens, 75 types: 1.02 and 1.00 times the rate).
JOINED = ("weights_grid.cpp", "weights_lanes.cpp", "weights_interleaved.cpp")
JOIN_TWO = "--param=max-combine-insns=2"
# Modules without kernels, which are the same for all tiers; what they share is declared in their .pxd files.
PLAIN = ("batches", "cells", "draws", "faults", "inputs", "steps", "tables", "windows")
BUILD_KIND = "-".join(["sanitized", *SANITIZERS]) if SANITIZERS else "debug" if CHECKED else "release"
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": CHECKED,
    "wraparound": CHECKED,
    "cdivision": True,
    "initializedcheck": CHECKED,
    "embedsignature": True,
}


@functools.cache
def compiler_knows(flag: str) -> bool:
    """Whether the compiler takes a flag; g++ knows AVX-VNNI from 11 on."""
    command = [*shlex.split(os.environ.get("CXX") or "g++"), flag, "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def selected_tiers() -> list[str]:
    """Tiers to build: all that the target architecture and the compiler know, unless IKPY_TIERS names some."""
    available = ["portable"]
    if platform.machine().lower() in ("x86_64", "amd64"):
        available += ["avx2", "avx512"]
        if compiler_knows("-mavxvnni"):
            available.append("avxvnni")
        else:
            print("the tier avxvnni is left out: this compiler does not know -mavxvnni", file=sys.stderr)
    wanted = os.environ.get("IKPY_TIERS")
    if not wanted:
        return available
    chosen = [t.strip() for t in wanted.split(",") if t.strip()]
    unknown = set(chosen) - set(available)
    if unknown:
        raise SystemExit(f"IKPY_TIERS: unknown tier {', '.join(sorted(unknown))}; known: {', '.join(available)}")
    return [tier for tier in available if tier in chosen]


def staged(name: str, source: str) -> str:
    """A copy of a .pyx under a module's name, as Cython derives the init function from it; written when it differs.

    Cython compares time stamps; that of the copy says when the text changed here. A module's own .pxd counts only
    where it lies beside the .pyx.
    """
    target = ROOT / "build" / "cython" / f"{name}.pyx"
    target.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".pxd", ".pyx"):
        original, copy = (ROOT / NATIVE / source).with_suffix(suffix), target.with_suffix(suffix)
        if not original.exists():
            copy.unlink(missing_ok=True)
        elif not copy.exists() or copy.read_text() != original.read_text():
            copy.write_text(original.read_text())
    return str(target.relative_to(ROOT))


def plain_extension(name: str) -> Extension:
    """A module without kernels, which is the same for all tiers."""
    flags = ["-std=c++17", "-Wall", *OPTIMIZE]
    return Extension(
        f"ikpy._native.{name}",
        [staged(name, f"{name}.pyx")],
        extra_compile_args=flags,
        extra_link_args=SANITIZE,
        language="c++",
    )


def core_extension(tier: str) -> Extension:
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / NATIVE).rglob("*.cpp") if p.parent != ROOT / NATIVE)
    headers = sorted(str(p.relative_to(ROOT)) for p in (ROOT / NATIVE).rglob("*.hpp"))
    optimize = OPTIMIZE_PORTABLE if tier == "portable" else OPTIMIZE
    flags = COMMON_FLAGS + optimize + TIER_FLAGS[tier]
    return Extension(
        f"ikpy._native._core_{tier}",
        sources=[staged(f"_core_{tier}", "core.pyx"), *sources],
        include_dirs=[str(NATIVE / "include"), str(NATIVE)],
        depends=headers,
        extra_compile_args=flags,
        extra_link_args=["-fopenmp", *SANITIZE],
        define_macros=[
            ("IKPY_TIER", f'"{tier}"'),
            ("IKPY_BUILD_FLAGS", '"' + " ".join(flags).replace('"', "") + '"'),
        ],
        language="c++",
    )


class ParallelBuild(build_ext):
    """Compiles the files of each extension on several cores and keeps the objects in build/objects.

    pip builds editable installs in a temporary folder, so the objects must lie elsewhere to be found by the next
    build. An object is used again if a hash over compiler, command and the contents of everything it includes is
    the same; time stamps do not count.
    """

    def build_extensions(self) -> None:
        compiler = self.compiler
        self.commands = [compiler.compiler_so, getattr(compiler, "compiler_so_cxx", compiler.compiler_so)]
        self.versions = [compiler_version(command) for command in self.commands]
        self.compile_one = compiler._compile
        self.current: set[str] = set()  # objects of this run
        # What is up to date is decided per object; time stamps say nothing of a module that another kind of build
        # has linked.
        self.force = compiler.force = True
        everything = self.extensions
        # Of modules of one file several are built at once, of the cores their files.
        for self.parallel, one_file in ((jobs(), True), (None, False)):
            self.extensions = [ext for ext in everything if (len(ext.sources) == 1) == one_file]
            super().build_extensions()
        self.extensions = everything

    def build_extension(self, ext) -> None:
        """Build one extension, its objects in a folder of their own: tiers share sources."""
        own = copy.copy(self)  # others may be built at the same time
        own.compiler = copy.copy(self.compiler)
        own.compiler.compile = own.compile_parallel
        python = f"{sys.implementation.cache_tag}-{platform.machine()}"
        own.module = ext.name.rsplit(".", 1)[-1]
        own.build_temp = str(Path("build", "objects", python, BUILD_KIND, own.module))
        super(ParallelBuild, own).build_extension(ext)

    def compile_parallel(
        self,
        sources,
        output_dir=None,
        macros=None,
        include_dirs=None,
        debug=0,
        extra_preargs=None,
        extra_postargs=None,
        depends=None,
    ) -> list[str]:
        """What replaces the compiler's own compile(); returns the objects to link."""
        macros, objects, post, pre, items = self.compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        options = self.compiler._get_cc_args(pre, debug, extra_preargs)
        header = Path(self.build_temp, PRECOMPILED.name) if self.module.startswith("_core_") else None
        without_header = post
        if header:
            post = ["-include", str(header), *post]
        joined = {obj: [JOIN_TWO] for obj in objects if self.joins_two(items[obj][0])}
        linked = [self.shared(obj) or obj for obj in objects]

        def command(obj: str) -> bytes:
            flags = [*post, *joined.get(obj, [])]
            return repr((self.versions, self.commands, options, flags)).encode() + (ROOT / PRECOMPILED).read_bytes()

        def one(obj: str) -> None:
            src, ext = items[obj]
            key = Path(f"{obj}.key")
            key.unlink(missing_ok=True)
            start = time.time()
            flags = [*post, *joined.get(obj, []), "-MMD", "-MF", f"{obj}.d"]
            self.compile_one(obj, src, ext, options, flags, macros)
            # A file that was written meanwhile may not be what was compiled.
            if all(Path(name).stat().st_mtime < start for name in dependencies(obj)):
                key.write_text(object_key(obj, command(obj)))

        missing = [obj for obj in linked if obj in items and not is_current(obj, command(obj))]
        missing.sort(key=lambda obj: obj not in joined)  # what takes longest first

        with self.precompiled(header if missing else None, options, without_header), ThreadPoolExecutor(jobs()) as pool:
            list(pool.map(one, missing))
        self.current.update(linked)
        return linked

    @contextlib.contextmanager
    def precompiled(self, header: Path | None, options: list[str], post: list[str]):
        """Keep the compiled form of PRECOMPILED beside a copy of it, some 60 MB, while files are compiled."""
        if not header:
            yield
            return
        header.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / PRECOMPILED, header)
        form = Path(f"{header}.gch")
        try:
            self.spawn([*self.commands[1], *options, "-x", "c++-header", str(header), "-o", str(form), *post])
            yield
        finally:
            form.unlink(missing_ok=True)

    def joins_two(self, source: str) -> bool:
        """Whether a file is one of JOINED, and the compiler knows the parameter."""
        return self.module == "_core_avx512" and Path(source).name in JOINED and compiler_knows(JOIN_TWO)

    def shared(self, obj: str) -> str | None:
        """The object of another core that does for this one."""
        other, word = SHARED_OBJECTS.get(self.module, ("", b""))
        twin = obj.replace(f"/{self.module}/", f"/{other}/", 1)
        if twin not in self.current or any(word in Path(name).read_bytes() for name in dependencies(twin)):
            return None
        return twin


def jobs() -> int:
    """Compilers that run at a time."""
    return int(os.environ.get("IKPY_JOBS") or os.cpu_count() or 1)


def compiler_version(command: list[str]) -> bytes:
    """What a compiler, which may stand behind a launcher such as ccache, says of itself."""
    program = list(itertools.takewhile(lambda word: not word.startswith("-"), command))
    return subprocess.run([*program, "--version"], capture_output=True, check=True).stdout


def dependencies(obj: str) -> list[str]:
    """Files that an object was compiled from, system headers aside."""
    rule = Path(f"{obj}.d").read_text().replace("\\\n", " ").partition(": ")[2]
    return [name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", rule) if name]


def object_key(obj: str, command: bytes) -> str:
    """Hash over the command and all files that an object was compiled from."""
    return hashlib.sha256(command + b"".join(map(file_hash, dependencies(obj)))).hexdigest()


def is_current(obj: str, command: bytes) -> bool:
    """Whether an object exists and compiling again would give the same."""
    try:
        return Path(obj).exists() and Path(f"{obj}.key").read_text() == object_key(obj, command)
    except OSError:
        return False


@functools.cache
def file_hash(name: str) -> bytes:
    """Hash of a file's name and contents."""
    return hashlib.sha256(name.encode() + b"\0" + Path(name).read_bytes()).digest()


class CleanBuild(build):
    """A build that starts with an empty lib folder: files of earlier builds must not get into a wheel."""

    def run(self) -> None:
        """Empty the lib folder and build."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


def main() -> None:
    probe = Extension("ikpy._native.cpu", [staged("cpu", "cpu.pyx")])
    plain = [plain_extension(name) for name in PLAIN]
    if not shutil.which(os.environ.get("CXX", "g++")) and not os.environ.get("CXX"):
        raise SystemExit("ikpy needs a C++17 compiler: install g++ (Debian/Ubuntu: apt install g++) or set CXX")
    extensions = cythonize(
        [probe, *plain, *(core_extension(t) for t in selected_tiers())],
        compiler_directives=DIRECTIVES,
        build_dir=f"build/cython/{BUILD_KIND}-{Cython.__version__}",
    )
    setup(ext_modules=extensions, cmdclass={"build": CleanBuild, "build_ext": ParallelBuild})


if __name__ == "__main__":
    main()
