"""Quantization plans for DeepSeek-V3's tensor table against sizes that users published, and their command lines."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections import Counter

import pytest

from ikpy.cli.quantize import run
from ikpy.gguf.reader import GGUFFile
from ikpy.quants import registry
from scripts.make_deepseek_header import write_header
from tests.shared import ROOT

# The dense layers, attention and shared experts of all four models.
COMMON = r"""
token_embd\.weight=q8_0
output\.weight=q8_0
output_norm\.weight=q8_0
blk\.[0-2]\..*=q8_0
blk\.[3-9]\.attn_.*=q8_0
blk\.[1-5][0-9]\.attn_.*=q8_0
blk\.60\.attn_.*=q8_0
blk\.[3-9]\.ffn_norm\.weight=q8_0
blk\.[1-5][0-9]\.ffn_norm\.weight=q8_0
blk\.60\.ffn_norm\.weight=q8_0
blk\.[3-9]\.exp_probs_b\.bias=q8_0
blk\.[1-5][0-9]\.exp_probs_b\.bias=q8_0
blk\.60\.exp_probs_b\.bias=q8_0
blk\.[3-9]\.ffn_down_shexp\.weight=q8_0
blk\.[1-5][0-9]\.ffn_down_shexp\.weight=q8_0
blk\.60\.ffn_down_shexp\.weight=q8_0
blk\.[3-9]\.ffn_(gate|up)_shexp\.weight=q8_0
blk\.[1-5][0-9]\.ffn_(gate|up)_shexp\.weight=q8_0
blk\.60\.ffn_(gate|up)_shexp\.weight=q8_0
"""
EXPERTS = r"""
blk\.[3-9]\.ffn_down_exps\.weight={down}
blk\.[1-5][0-9]\.ffn_down_exps\.weight={down}
blk\.60\.ffn_down_exps\.weight={down}
blk\.[3-9]\.ffn_(gate|up)_exps\.weight={up}
blk\.[1-5][0-9]\.ffn_(gate|up)_exps\.weight={up}
blk\.60\.ffn_(gate|up)_exps\.weight={up}
"""
# file type and its number, down and gate/up experts, then what the loader printed for the finished model
PUBLISHED = [
    ("IQ2_K_R4", "iq3_k_r4", "iq2_k_r4", "226.003 GiB", "2.889 BPW"),
    ("IQ4_K_R4", "iq5_k_r4", "iq4_k_r4", "386.183 GiB", "4.936 BPW"),
    ("IQ4_KS_R4", "iq5_ks_r4", "iq4_ks_r4", "367.774 GiB", "4.701 BPW"),
    ("Q4_K_R4", "q6_k_r4", "q4_k_r4", "413.144 GiB", "5.281 BPW"),
]


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory):
    path = tmp_path_factory.mktemp("deepseek") / "DeepSeek-V3-BF16.gguf"
    write_header(str(path))
    assert path.stat().st_blocks * 512 < 16 << 20, "the file should be sparse"
    return str(path)


def test_tensor_table(deepseek):
    with GGUFFile.open(deepseek, header_only=True) as file:
        assert len(file.tensors) == 1147
        parameters = sum(info.element_count for info in file.tensors.values())
        assert f"{parameters / 1e9:.3f} B" == "672.050 B"
        assert Counter(info.type_id for info in file.tensors.values()) == {0: 361, 30: 786}


@pytest.mark.parametrize(("ftype", "down", "up", "size", "bpw"), PUBLISHED)
def test_published_sizes(deepseek, tmp_path, capfd, ftype, down, up, size, bpw):
    rules = ",".join((COMMON + EXPERTS.format(down=down, up=up)).split())
    out = tmp_path / "out.gguf"
    arguments = ["--dry-run", "--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0", "--custom-q", rules]
    assert run([*arguments, deepseek, str(out), ftype, "24"]) == 0
    err = capfd.readouterr().err
    assert f"({size}), {bpw}" in err, [line for line in err.splitlines() if "BPW" in line]
    assert f"tensors: 361 f32, 612 q8_0, 116 {up}, 58 {down}" in err
    number = registry.ftype_by_name(ftype).id
    assert f"file type = {number} ({registry.ftype_display_name(number)})" in err
    # Rules for norms and biases, which are never converted.
    idle = [line for line in err.splitlines() if line.startswith("WARNING: custom rule")]
    assert len(idle) == 7 and all("it matches no tensor that is converted" in line for line in idle)
    assert not out.exists()


# whole command lines, run by a shell; only the program's name and the paths differ

PREPARE = r"""
custom=$(
  echo "$custom" | grep -v '^#' | \
  sed -Ez 's:\n+:,:g;s:,$::;s:^,::'
)
"""
# The recipe of the published IQ2_K_R4 model, with comments as users write them.
COMMENTED = (
    "\n# Token embedding (GPU)\n# NOTE: cannot be a repacked type\n"
    + COMMON
    + "\n# Routed Experts (3-60) (CPU)\n"
    + EXPERTS.format(down="iq3_k_r4", up="iq2_k_r4")
)
LAYER_BY_LAYER = "\n".join(
    rf"blk\.{layers}\.ffn_{part}_exps\.weight={kind}"
    for layers in ("[3-4]", "[5-9]", "1[0-1]", "1[2-8]", "19", "[2-5][0-9]", "60")
    for part, kind in (("down", "q3_k_r4"), ("gate", "q2_k_r4"), ("up", "q2_k_r4"))
)
SHARED_EXPERTS = "\n".join(rf"blk\.{layers}\.ffn_.*shexp\.weight=q8_0" for layers in ("3", "[4-9]", "[1-5][0-9]", "60"))
Q2_K_R4 = COMMON.partition(r"blk\.[3-9]\.attn")[0] + "# MoE experts\n" + LAYER_BY_LAYER + COMMON + SHARED_EXPERTS
EMBEDDINGS_Q8 = r"""\
    --token-embedding-type q8_0 \
    --output-tensor-type q8_0 \
"""
MIXED_Q5 = (
    r"token_embd\.weight=q8_0,output\.weight=q8_0,output_norm\.weight=q8_0,blk\.[0-2]\..*=q8_0,"
    r"blk\.[3-4]\.ffn_down_exps\.weight=q8_0,blk\.[3-4]\.ffn_gate_exps\.weight=q5_k,"
    r"blk\.[3-4]\.ffn_up_exps\.weight=iq4_xs,blk\.[5-9]\.ffn_(down|gate|up)_exps\.weight=q5_k,"
    r"blk\.1[0-1]\.ffn_.*_exps\.weight=iq4_xs,blk\.1[2-8]\.ffn_(down|gate)_exps\.weight=q5_k,"
    r"blk\.1[2-8]\.ffn_up_exps\.weight=iq4_xs,blk\.19\.ffn_down_exps\.weight=iq4_xs,"
    r"blk\.(19|60|[2-5][0-9])\.ffn_(gate|up)_exps\.weight=iq3_s,blk\.[2-5][0-9]\.ffn_down_exps\.weight=iq4_xs,"
    r"blk\.60\.ffn_down_exps\.weight=iq4_xs,blk\.[3-9]\.attn_.*=q8_0,blk\.[1-5][0-9]\.attn_.*=q8_0,"
    r"blk\.60\.attn_.*=q8_0,blk\.[3-9]\.ffn_norm\.weight=q8_0,blk\.3\.ffn_.*shexp\.weight=q8_0,"
    r"blk\.[4-9]\.ffn_.*shexp\.weight=q8_0,blk\.[1-5][0-9]\.ffn_.*shexp\.weight=q8_0,blk\.60\.ffn_.*shexp\.weight=q8_0"
)
COMMANDS = {
    # script, what the summary says
    "published": (
        f'custom="{COMMENTED}"\n{PREPARE}\n'
        + r"""quantize \
    --imatrix $IMATRIX """
        + EMBEDDINGS_Q8
        + r"""    --custom-q "$custom" \
    $INPUT \
    $OUTPUT \
    IQ2_K_R4 \
    24""",
        "(226.003 GiB), 2.889 BPW",
    ),
    "by layers": (
        f'custom="{Q2_K_R4}"\n{PREPARE}\n'
        + "quantize --imatrix $IMATRIX "
        + EMBEDDINGS_Q8
        + """    --custom-q "$custom" $INPUT $OUTPUT Q2_K_R4 $(nproc)""",
        "361 f32, 612 q8_0, 116 q2_k_r4, 58 q3_k_r4",
    ),
    "lower-case k-quants": (
        f'custom2="{MIXED_Q5}"\nquantize --imatrix $IMATRIX '
        + EMBEDDINGS_Q8
        + '    --custom-q "$custom2" $INPUT $OUTPUT Q5_K 28',
        "file type = 17 (Q5_K - Medium)",
    ),
    "mixture": (
        "quantize --imatrix $IMATRIX $INPUT $OUTPUT IQ2_K_R4 $(nproc)",
        "file type = 338 (IQ2_K_R4 - 2.375 bpw)",
    ),
    "repack": ("quantize --repack $REPACKABLE $OUTPUT IQ2_K_R4", "361 f32, 1 q8_0, 611 q8_0_r8, 174 iq2_k_r4"),
    "repack without a type": ("quantize --repack $REPACKABLE $OUTPUT", "361 f32, 1 q8_0, 611 q8_0_r8, 174 iq2_k_r4"),
}


@pytest.fixture(scope="module")
def repackable(tmp_path_factory):
    path = tmp_path_factory.mktemp("repack") / "DeepSeek-R1-0528-IQ2_K_R4.gguf"
    write_header(str(path), "q8_0", experts="iq2_k")
    return str(path)


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize("name", COMMANDS)
def test_command_lines(deepseek, repackable, tmp_path, name):
    """Users' scripts as they stand; a dry run, as the models are headers only."""
    script, expected = COMMANDS[name]
    entry = b"blk.0.ffn_up.weight"
    values = struct.pack("<ii7168f", 1, 7168, *[1.0] * 7168)
    (tmp_path / "im.dat").write_bytes(struct.pack("<ii", 1, len(entry)) + entry + values)
    paths = {"IMATRIX": str(tmp_path / "im.dat"), "INPUT": deepseek, "OUTPUT": str(tmp_path / "out.gguf")}
    program = f'quantize() {{ "{sys.executable}" -m ikpy quantize --dry-run "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-c", program + script],
        env={**os.environ, **paths, "REPACKABLE": repackable},
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-600:]
    assert expected in done.stderr, [line for line in done.stderr.splitlines() if "tensors:" in line or "BPW" in line]
    assert not (tmp_path / "out.gguf").exists()


def test_imatrix_command_line(tmp_path, capfd):
    """As published, on the bundled model and a text of two chunks."""
    from ikpy.cli.imatrix import run as imatrix

    (tmp_path / "text.txt").write_text((ROOT / "ikpy" / "assets" / "demo-text.txt").read_text()[:5000])
    output = tmp_path / "DeepSeek-V3-0324.imatrix"
    model = str(ROOT / "ikpy" / "assets" / "tiny-mla-moe-f16.gguf")
    arguments = f"--verbosity 1 -m {model} -f {tmp_path / 'text.txt'} -o {output} --ctx-size 512"
    assert imatrix([*arguments.split(), "--numa", "numactl", "--threads", "2"]) == 0
    out, err = capfd.readouterr()
    assert "[1]" in out and "Final estimate: PPL = " in out
    assert "save_imatrix: stored collected data after " in err
    assert "expert coverage: 24 of 24 experts in 3 layers have data" in err
    assert run(["--imatrix", str(output), model, str(tmp_path / "q.gguf"), "IQ2_K_R4", "2"]) == 0
