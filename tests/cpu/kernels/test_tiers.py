"""Every ISA tier built here gives the same logits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ikpy._native import TIERS, available_tiers
from tests.shared import DATA, ROOT

MODELS = ("deepseek2-v3-mla", "qwen3moe", "llama-ropefreqs")

CHILD = """
import sys
import numpy as np
from ikpy import Batch, Context, ContextParams, Model
from ikpy._native import tier

results = {"tier": np.array(tier)}
for path in sys.argv[2:]:
    context = Context(Model.load(path), ContextParams(n_ctx=256, n_threads=2))
    ids = np.random.default_rng(5).integers(3, 1000, 50)
    logits = [context.decode(Batch.single(ids[:40], logits="all"))]
    logits += [context.decode(Batch.single(ids[i : i + 1], i)) for i in range(40, 50)]
    results[path] = np.concatenate(logits)
np.savez(sys.argv[1], **results)
"""


def run_tier(tier: str, out: Path) -> dict[str, np.ndarray]:
    """Logits per model, computed by a process of that tier."""
    paths = [str(DATA / "zoo" / f"{name}.gguf") for name in MODELS]
    env = {**os.environ, "IKPY_ISA": tier, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", CHILD, str(out), *paths], check=True, env=env, cwd=ROOT)
    return dict(np.load(out))


@pytest.mark.parametrize("tier", [t for t in TIERS if t != "avx512"])
def test_tiers_agree(tier: str, tmp_path: Path) -> None:
    if tier not in available_tiers:
        pytest.skip(f"tier {tier} is not built or this CPU cannot run it")
    best = run_tier(available_tiers[0], tmp_path / "best.npz")
    other = run_tier(tier, tmp_path / "other.npz")
    assert str(other.pop("tier")) == tier
    for name, logits in other.items():
        error = np.abs(logits - best[name])
        worst = np.unravel_index(error.argmax(), error.shape)
        assert error[worst] < 5e-3, f"{Path(name).stem}: {tier} differs by {error[worst]:.5f} at {worst}"


PRODUCTS = "exact_for_all_token_counts or bounds or extreme or test_experts"
OTHER_TIERS = [t for t in TIERS if t != "avx512"]
OTHER_WAYS = [{"IKPY_ISA": t} for t in OTHER_TIERS] + [{"IKPY_ISA": "avx512", "IKPY_AMX": "0"}]


def check_tests(file: str, variables: dict[str, str], *options: str) -> None:
    """Tests of a file in a process with these variables."""
    if variables["IKPY_ISA"] not in available_tiers:
        pytest.skip(f"tier {variables['IKPY_ISA']} is not built or this CPU cannot run it")
    env = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, file]
    done = subprocess.run(command, check=False, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]  # no tests at all are status 5


@pytest.mark.parametrize("variables", OTHER_WAYS, ids=lambda v: "-".join(v.values()))
def test_products(variables: dict[str, str]) -> None:
    """Products of all types in the tiers of other machines: this one's are tested by test_matmul.py itself."""
    check_tests("tests/cpu/kernels/test_matmul.py", variables, "-k", PRODUCTS)


@pytest.mark.parametrize("variables", OTHER_WAYS, ids=lambda v: "-".join(v.values()))
def test_sparse_attention(variables: dict[str, str]) -> None:
    """On one thread: how work is divided among them is the same code in all tiers."""
    check_tests("tests/cpu/kernels/test_sparse_attention.py", variables, "-k", "not 3_threads")


@pytest.mark.parametrize("file", ("test_chained_groups.py", "test_weighted_sums.py"))
def test_rounded_sums_of_shorter_vectors(file: str) -> None:
    check_tests(f"tests/cpu/kernels/{file}", {"IKPY_ISA": "avxvnni"})


@pytest.mark.parametrize("tier", OTHER_TIERS)
@pytest.mark.parametrize(
    "ops",
    (
        "recurrent_ops",
        "ssm_scan",
        "channel_scan",
        "wkv",
        "hyper_connections",
        "compress_cells",
        "chosen_stretches",
        "chosen_blocks",
        "routing",
    ),
)
def test_ops(ops: str, tier: str) -> None:
    check_tests(f"tests/cpu/kernels/test_{ops}.py", {"IKPY_ISA": tier})


ENCODING_CHILD = """
import hashlib, sys
import numpy as np
from ikpy._native import core
from ikpy.quants import registry

rng = np.random.default_rng(1)
values = (rng.standard_normal((4, 1024)) * 0.03).astype(np.float32)
weights = rng.gamma(1.0, 1.0, 1024).astype(np.float32)
for name in sys.argv[1:]:
    kind = registry.by_name(name).id
    encoded = core.quantize(values, kind, weights)
    decoded = core.dequantize(encoded, kind, 1024, 4, True)
    error = (weights * (values - decoded) ** 2).sum() / (weights * values**2).sum()
    print(hashlib.sha256(encoded).hexdigest(), error)
"""
TRELLIS = ("iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt")
LEVELS = ("iq4_nl", "iq4_xs", "iq4_k", "iq5_k", "iq6_k", "iq4_ks", "iq5_ks", "iq2_kl", "q4_1", "q5_1")


def encoded_by(tier: str, types: tuple[str, ...]) -> tuple[list[str], np.ndarray]:
    """Hashes of what a process of that tier writes, and the relative squared errors, of every type."""
    if tier not in available_tiers:
        pytest.skip(f"tier {tier} is not built or this CPU cannot run it")
    env = {**os.environ, "IKPY_ISA": tier, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ENCODING_CHILD, *types]
    out = subprocess.run(command, check=True, env=env, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert len(out) == 2 * len(types)
    return out[::2], np.array(out[1::2], float)


@pytest.mark.parametrize("tier", [t for t in TIERS if t != "avx512"])
def test_trellis_encoders_look_at_the_same_vectors(tier: str) -> None:
    """Narrow vectors of the machine do not mean fewer candidates: the errors are the same but for rounding."""
    errors = [encoded_by(isa, TRELLIS)[1] for isa in (available_tiers[0], tier)]
    assert np.abs(errors[1] / errors[0] - 1).max() < 5e-4, dict(zip(TRELLIS, zip(*errors, strict=True), strict=True))


@pytest.mark.parametrize("tier", ["avx2", "avxvnni"])
def test_encoders_write_the_same_bytes(tier: str) -> None:
    """Levels that are looked up in registers or gathered, and vectors of a trellis, where both tiers fuse products."""
    types = LEVELS + TRELLIS
    (best, _), (other, _) = encoded_by(available_tiers[0], types), encoded_by(tier, types)
    assert {name: (a, b) for name, a, b in zip(types, best, other, strict=True) if a != b} == {}


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("IKPY_ISA", "avx1024", "IKPY_ISA=avx1024: not available here"),
        ("IKPY_MAKER", "via", "IKPY_MAKER=via: unknown maker of CPUs; give one of amd, intel"),
        ("IKPY_GATHERS", "0", "IKPY_GATHERS=0: unknown speed of gathers; give one of fast, slow"),
        ("IKPY_FETCH", "all", "IKPY_FETCH=all: unknown way of fetching weights; give one of lines, pages"),
        ("IKPY_VBMI", "off", "IKPY_VBMI=off: unknown use of byte permutes; give one of 0, 1"),
    ],
)
def test_unknown_choice_is_an_error(variable: str, value: str, error: str) -> None:
    env = {**os.environ, variable: value, "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, "-m", "ikpy", "info"], env=env, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert child.returncode == 1
    assert error in child.stderr


def test_a_checkout_that_hides_the_installed_package_says_so(tmp_path: Path) -> None:
    """Python finds the folder it is started in before what is installed; modules are not built in there."""
    for name in ("__init__.py", "errors.py", "_native/__init__.py"):
        target = tmp_path / "ikpy" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((ROOT / "ikpy" / name).read_text())
    env = {**os.environ, "PYTHONPATH": ""}
    child = subprocess.run(
        [sys.executable, "-c", "import ikpy._native"],
        env=env,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    last = child.stderr.splitlines()[-1]
    assert f"native modules are not built in {tmp_path.resolve()}: run `pip install -e .` there" in last
    assert "start Python in another folder" in last
