"""The cache of compiled kernels, with a stand-in for nvcc."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ikpy.backends.cuda import modules
from ikpy.backends.cuda.api import DeviceError
from ikpy.cli import main

NVCC = r"""#!/bin/sh
if [ "$1" = --version ]; then echo "Build cuda_99.9"; exit 0; fi
if [ "$1" = --list-gpu-code ]; then echo sm_80; echo sm_86; exit 0; fi
echo "$*" >> "$NVCC_LOG"
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
case $1 in *"$NVCC_FAILS"*) [ -n "$NVCC_FAILS" ] && { echo "error: no such thing" >&2; exit 2; };; esac
echo "ptxas info    : Function properties for some_kernel" >&2
echo "    0 bytes stack frame, $NVCC_SPILL bytes spill stores, $NVCC_SPILL bytes spill loads" >&2
echo cubin > "$out"
"""


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiler that writes its arguments to the returned file; two kernel files and a header."""
    compiler, log = tmp_path / "nvcc", tmp_path / "log"
    compiler.write_text(NVCC)
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    for name in ("norm.cu", "rope.cu", "common.cuh"):
        (kernels / name).write_text(f"// {name}")
    log.write_text("")
    monkeypatch.setattr(modules, "KERNELS", kernels)
    for name, value in {"NVCC": compiler, "NVCC_LOG": log, "NVCC_FAILS": "", "NVCC_SPILL": "0"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    modules.nvcc.cache_clear()
    modules.nvcc_version.cache_clear()
    yield log
    modules.nvcc.cache_clear()
    modules.nvcc_version.cache_clear()


def test_kernels_are_compiled_once(nvcc: Path) -> None:
    lines: list[str] = []
    first = modules.build("sm_86", lines.append)
    assert [c.path.read_text() for c in first] == ["cubin\n"] * 2
    assert lines[0].startswith("compiling 2 CUDA kernel files for sm_86 with Build cuda_99.9")
    assert len(lines) == 3 and lines[-1].startswith("  [2/2]")
    commands = nvcc.read_text().splitlines()
    assert len(commands) == 2 and all("-cubin -gencode=arch=compute_80,code=[sm_86]" in command for command in commands)
    assert modules.build("sm_86", lines.append) == first and len(lines) == 3
    (modules.KERNELS / "rope.cu").write_text("// changed")
    modules.build("sm_86", lines.append)
    assert len(nvcc.read_text().splitlines()) == 3
    (modules.KERNELS / "common.cuh").write_text("// changed")
    modules.build("sm_90", lines.append, files={"norm"})
    assert len(nvcc.read_text().splitlines()) == 4
    assert not list(modules.cache_dir().rglob("tmp*"))


def test_files_of_one_architecture(nvcc: Path) -> None:
    """They are compiled with the features that only it has, and not for others."""
    (modules.KERNELS / "gemm_wgmma.cu").write_text("// wgmma")
    for arch, compiled in (("sm_80", False), ("sm_120", False), ("sm_90", True)):
        names = [cubin.source.name for cubin in modules.build(arch, lambda _: None)]
        assert ("gemm_wgmma.cu" in names) == compiled
    assert sum("-gencode=arch=compute_90a,code=sm_90a" in line for line in nvcc.read_text().splitlines()) == 1


def test_only_the_files_of_the_kernels_are_compiled(nvcc: Path) -> None:
    found = modules.cubins((8, 6), ["rms_norm", "layer_norm"])
    assert set(found) == {"rms_norm", "layer_norm"} and len(set(found.values())) == 1
    assert len(nvcc.read_text().splitlines()) == 1
    with pytest.raises(DeviceError, match="no kernel file holds kq_mask"):
        modules.cubins((8, 6), ["rms_norm", "kq_mask"])


def test_another_compiler_compiles_again(nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = modules.build("sm_86", lambda line: None)
    compiler = Path(os.environ["NVCC"])
    compiler.write_text(NVCC.replace("cuda_99.9", "cuda_100.0"))
    modules.nvcc_version.cache_clear()
    second = modules.build("sm_86", lambda line: None)
    assert len(nvcc.read_text().splitlines()) == 4
    assert not {cubin.path for cubin in first} & {cubin.path for cubin in second}
    # Kernels made elsewhere run without a compiler: the latest ones.
    for cubin in second:
        os.utime(cubin.path, (2e9, 2e9))
    monkeypatch.setenv("NVCC", "")
    monkeypatch.setenv("PATH", "")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(modules.shutil, "which", lambda path: None)
    modules.nvcc.cache_clear()
    modules.nvcc_version.cache_clear()
    assert modules.build("sm_86", lambda line: None) == second


def test_a_compiler_that_fails_is_not_needed_where_another_one_made_the_kernels(
    nvcc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = modules.cubins((8, 6), ["rms_norm"])
    Path(os.environ["NVCC"]).write_text(NVCC.replace("cuda_99.9", "cuda_100.0"))
    modules.nvcc_version.cache_clear()
    monkeypatch.setenv("NVCC_FAILS", "norm")
    assert modules.cubins((8, 6), ["rms_norm"]) == made
    assert "nvcc cannot compile norm.cu for sm_86" in (text := capsys.readouterr().err) and "another compiler" in text
    with pytest.raises(DeviceError, match=r"cannot compile norm\.cu for sm_80"):
        modules.cubins((8, 0), ["rms_norm"])


def test_messages_of_the_compiler_are_shown(nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_FAILS", "rope")
    with pytest.raises(DeviceError, match=r"compile rope.cu for sm_80: error: no such thing \(all in .*\)$"):
        modules.build("sm_80", lambda _: None)
    assert (modules.cache_dir() / "sm_80" / "rope.log").read_text() == "error: no such thing\n"


@pytest.mark.parametrize(
    ("complaint", "remedy"),
    [
        ("nvcc fatal   : Unsupported gpu architecture 'sm_120'", "this CUDA toolkit is older than the GPU"),
        ("sh: 1: gcc: not found", "install a C++ compiler (g++)"),
        ("#error -- unsupported GNU version! gcc versions later than 12 are not supported!", "NVCC_PREPEND_FLAGS="),
        ("nvcc fatal   : Failed to preprocess host compiler properties.", "install a C++ compiler"),
    ],
)
def test_what_helps_against_complaints_of_the_compiler(
    nvcc: Path, complaint: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Path(os.environ["NVCC"])
    compiler.write_text(NVCC.replace("error: no such thing", complaint))
    monkeypatch.setenv("NVCC_FAILS", "rope")
    with pytest.raises(DeviceError, match=f"{re.escape(remedy)}.*all in") as caught:
        modules.build("sm_80", lambda _: None)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_one_failure_stops_the_rest(nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(20):
        (modules.KERNELS / f"zz{i}.cu").write_text("")
    monkeypatch.setenv("NVCC_FAILS", "norm")
    with pytest.raises(DeviceError, match=r"norm\.cu"):
        modules.build("sm_80", lambda _: None, jobs=1)
    assert len(nvcc.read_text().splitlines()) < 20


def test_a_cache_that_cannot_be_written(nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match=r"cannot be kept in .*: Not a directory; XDG_CACHE_HOME names another place"):
        modules.build("sm_80", lambda _: None)


def test_a_compiler_that_cannot_be_started(nvcc: Path) -> None:
    modules.nvcc()
    Path(os.environ["NVCC"]).unlink()
    with pytest.raises(DeviceError, match=r"nvcc cannot be started: No such file"):
        modules.nvcc_version()


def test_old_gpus_are_refused() -> None:
    assert modules.architecture((7, 5)) == "sm_75" and modules.architecture((12, 0)) == "sm_120"
    with pytest.raises(DeviceError, match=r"compute capability 6.1 is too old: 7.5 \(Turing\) or later"):
        modules.architecture((6, 1))


def test_missing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if os.path.exists("/usr/local/cuda/bin/nvcc"):
        monkeypatch.setattr(modules.shutil, "which", lambda _: None)
    modules.nvcc.cache_clear()
    with pytest.raises(DeviceError, match="nvcc is not found: install the CUDA toolkit"):
        modules.nvcc()


def unknown_architecture(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Makes nvcc one that refuses an architecture."""
    plain = modules._run

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        if any(f"[{arch}]" in part for part in command):
            return subprocess.CompletedProcess(command, 1, "", "nvcc fatal : Unsupported gpu architecture")
        return plain(command)

    monkeypatch.setattr(modules, "_run", run)


def test_devices_that_nvcc_does_not_know_get_ptx(
    nvcc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown_architecture(monkeypatch, "sm_130")
    found = modules.cubins((13, 0), ["rope", "rms_norm"])
    assert {name: path.suffix for name, path in found.items()} == {"rope": ".ptx", "rms_norm": ".ptx"}
    assert "CUDA kernels for sm_130: Build cuda_99.9 does not know it; the driver compiles" in capsys.readouterr().err
    assert all("-ptx -gencode=arch=compute_80,code=[compute_80]" in line for line in nvcc.read_text().splitlines())
    # What nvcc knows and still does not compile is an error.
    unknown_architecture(monkeypatch, "sm_86")
    with pytest.raises(DeviceError, match="Unsupported gpu architecture; this CUDA toolkit is older than the GPU"):
        modules.cubins((8, 6), ["rope"])


def test_without_nvcc_code_of_an_older_device_of_the_generation_is_used(
    nvcc: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arch in ("sm_80", "sm_75"):
        modules.build(arch, lambda _: None)
    Path(os.environ["NVCC"]).unlink()
    modules.nvcc_version.cache_clear()
    for capability in ((8, 0), (8, 6), (8, 9)):
        assert modules.cubins(capability, ["rope"])["rope"].parent.name == "sm_80"
    assert "CUDA kernels for sm_89: those for sm_80 are used" in capsys.readouterr().err
    # Another generation runs no such code, but PTX.
    with pytest.raises(DeviceError, match="nvcc cannot be started"):
        modules.cubins((9, 0), ["rope"])


def test_ptx_from_elsewhere(nvcc: Path) -> None:
    assert main(["cuda", "build", "--arch", "compute_80"]) == 0
    Path(os.environ["NVCC"]).unlink()
    modules.nvcc_version.cache_clear()
    assert modules.cubins((12, 1), ["rope"])["rope"].parent.name == "compute_80"


def test_build_from_the_command_line(
    nvcc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cuda", "build", "--arch", "sm_80,sm_90", "--no-spills"]) == 0
    assert "sm_90: 2 files in" in capsys.readouterr().out
    monkeypatch.setenv("NVCC_SPILL", "8")
    assert main(["cuda", "build", "--arch", "sm_80", "--force", "--no-spills"]) == 1
    out = capsys.readouterr().out
    assert "sm_80: spills: norm.cu: some_kernel: 8 bytes spill stores, 8 bytes spill loads" in out
    assert main(["cuda", "build", "--arch", "80"]) == 1
    assert main(["cuda", "frobnicate"]) == 1
    assert main(["cuda"]) == 0
