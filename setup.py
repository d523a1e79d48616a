"""Builds the native modules: the Cython core once per ISA tier, plus the CPU feature probe.

Environment: IKPY_TIERS=avx512,avx2,portable picks tiers; IKPY_DEBUG_BUILD=1 gives a bounds-checked build
without optimization; IKPY_JOBS sets the compile jobs.
"""

import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
NATIVE = Path("ikpy/_native")
DEBUG = os.environ.get("IKPY_DEBUG_BUILD") == "1"

COMMON_FLAGS = [
    "-std=c++17",
    "-fopenmp",
    "-Wall",
    "-Wno-unused-function",
    "-fvisibility=hidden",
    "-fno-math-errno",
]
OPTIMIZE = ["-O1", "-g", "-D_GLIBCXX_ASSERTIONS"] if DEBUG else ["-O3", "-g0"]
TIER_FLAGS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt"],
    "avx512": ["-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"],
}
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": DEBUG,
    "cdivision": True,
    "initializedcheck": DEBUG,
    "embedsignature": True,
}


def selected_tiers() -> list[str]:
    """Tiers to build: all that the target architecture knows, unless IKPY_TIERS names some."""
    available = ["portable"]
    if platform.machine().lower() in ("x86_64", "amd64"):
        available += ["avx2", "avx512"]
    wanted = os.environ.get("IKPY_TIERS")
    if not wanted:
        return available
    chosen = [t.strip() for t in wanted.split(",") if t.strip()]
    unknown = set(chosen) - set(available)
    if unknown:
        raise SystemExit(f"IKPY_TIERS: unknown tier {', '.join(sorted(unknown))}; known: {', '.join(available)}")
    return chosen


def tier_source(tier: str) -> str:
    """A copy of core.pyx under the tier's module name: Cython derives the init function from the file name."""
    target = ROOT / "build" / "tiers" / f"_core_{tier}.pyx"
    target.parent.mkdir(parents=True, exist_ok=True)
    text = (ROOT / NATIVE / "core.pyx").read_text()
    if not target.exists() or target.read_text() != text:
        target.write_text(text)
    return str(target.relative_to(ROOT))


def core_extension(tier: str) -> Extension:
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / NATIVE).rglob("*.cpp") if p.parent != ROOT / NATIVE)
    headers = sorted(str(p.relative_to(ROOT)) for p in (ROOT / NATIVE).rglob("*.hpp"))
    flags = COMMON_FLAGS + OPTIMIZE + TIER_FLAGS[tier]
    return Extension(
        f"ikpy._native._core_{tier}",
        sources=[tier_source(tier), *sources],
        include_dirs=[str(NATIVE / "include"), str(NATIVE)],
        depends=headers,
        extra_compile_args=flags,
        extra_link_args=["-fopenmp"],
        define_macros=[
            ("IKPY_TIER", f'"{tier}"'),
            ("IKPY_BUILD_FLAGS", '"' + " ".join(flags).replace('"', "") + '"'),
        ],
        language="c++",
    )


class ParallelBuild(build_ext):
    """Compiles the files of each extension on several cores and skips objects that are up to date."""

    def build_extensions(self) -> None:
        jobs = int(os.environ.get("IKPY_JOBS") or os.cpu_count() or 1)
        compile_one = self.compiler._compile
        newest_header = max(p.stat().st_mtime for p in (ROOT / NATIVE).rglob("*.hpp"))

        def compile_parallel(
            sources,
            output_dir=None,
            macros=None,
            include_dirs=None,
            debug=0,
            extra_preargs=None,
            extra_postargs=None,
            depends=None,
        ):
            macros, objects, post, pre, build = self.compiler._setup_compile(
                output_dir, macros, include_dirs, sources, depends, extra_postargs
            )
            options = self.compiler._get_cc_args(pre, debug, extra_preargs)
            stamp = Path(self.build_temp) / "flags.txt"

            def one(item):
                obj, (src, ext) = item
                target = Path(obj)
                newest = max(Path(src).stat().st_mtime, newest_header, (ROOT / "setup.py").stat().st_mtime)
                if not target.exists() or target.stat().st_mtime < newest:
                    compile_one(obj, src, ext, options, post, macros)

            stamp.parent.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(one, build.items()))
            return objects

        self.compiler.compile = compile_parallel
        super().build_extensions()

    def build_extension(self, ext) -> None:
        # Objects of different tiers must not share a folder.
        base = self.build_temp
        self.build_temp = str(Path(base) / ext.name.rsplit(".", 1)[-1] / ("debug" if DEBUG else "release"))
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = base


def main() -> None:
    probe = Extension("ikpy._native.cpu", [str(NATIVE / "cpu.pyx")])
    if not shutil.which(os.environ.get("CXX", "g++")) and not os.environ.get("CXX"):
        raise SystemExit("ikpy needs a C++17 compiler: install g++ (Debian/Ubuntu: apt install g++) or set CXX")
    extensions = cythonize(
        [probe, *(core_extension(t) for t in selected_tiers())],
        compiler_directives=DIRECTIVES,
        build_dir="build/cython",
    )
    setup(ext_modules=extensions, cmdclass={"build_ext": ParallelBuild})


main()
