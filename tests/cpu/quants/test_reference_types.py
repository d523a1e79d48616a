"""Types that `ikpy quantize` chooses against those of the reference's own llama-quantize (ik-llama-cpp-python).

Recorded decisions (`test_policy.py`) leave out what depends on the architecture and on the size class of a model:
these models have the layers and vocabularies that such rules ask for, and no data.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import registry
from ikpy.quants.recipe import Recipe, parse_rules
from ikpy.tools.imatrix_file import read_imatrix
from ikpy.tools.quantize_plan import QuantizeOptions, TypeOptions, make_plan

reference = pytest.importorskip("ik_llama_cpp", reason="ik-llama-cpp-python is not installed")
PROGRAM = Path(reference.__file__).parent / "bin" / "llama-quantize"

ROWS = 256
FILE_TYPES = "Q2_K Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S IQ1_S_R4 IQ2_XXS IQ2_KT IQ3_XXS IQ3_XS IQ3_M IQ3_KL IQ5_K".split()
FILE_TYPES_WITH_IMATRIX = "Q4_0 IQ3_XXS IQ3_KT IQ4_XS".split()
TENSOR = re.compile(r"^\[ *\d+/ *\d+\] +(\S+) - \[.*?\], type = +(\S+), (.*)$")


@dataclass(frozen=True)
class Shape:
    """What the choice of types depends on."""

    arch: str
    n_layer: int
    n_head: int = 4
    n_head_kv: int = 1
    n_vocab: int = 512
    n_expert: int = 0
    n_columns: int = 256
    fused: bool = False
    tied: bool = False

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes (ne0 first) by name, in file order."""
        row = (self.n_columns, ROWS)
        found = {"token_embd": row}
        for i in range(self.n_layer):
            attention = ("qkv", "output") if self.fused else ("q", "k", "v", "output")
            found.update({f"blk.{i}.attn_{part}": row for part in attention})
            if self.n_expert:
                found[f"blk.{i}.ffn_gate_inp"] = (self.n_columns, self.n_expert)
            parts = ("up", "down") if self.fused else ("gate", "up", "down")
            for part in parts:
                experts = f"blk.{i}.ffn_{part}_exps", (*row, self.n_expert)
                name, shape = experts if self.n_expert else (f"blk.{i}.ffn_{part}", row)
                found[name] = shape
        if not self.tied:
            found["output"] = row
        return {f"{name}.weight": shape for name, shape in found.items()}

    def write(self, path: Path) -> Path:
        """A file with a complete header, whose data is a hole."""
        writer = GGUFWriter(str(path))
        writer.add("general.architecture", GGUFValueType.STRING, self.arch)
        numbers = {
            "block_count": self.n_layer,
            "context_length": 512,
            "embedding_length": self.n_columns,
            "feed_forward_length": ROWS,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "vocab_size": self.n_vocab,
            "expert_count": self.n_expert,
            "expert_used_count": min(2, self.n_expert),
        }
        for key, number in numbers.items():
            writer.add(f"{self.arch}.{key}", GGUFValueType.UINT32, number)
        for key in ("layer_norm_epsilon", "layer_norm_rms_epsilon"):
            writer.add(f"{self.arch}.attention.{key}", GGUFValueType.FLOAT32, 1e-6)
        for name, shape in self.tensors().items():
            writer.add_tensor(name, shape, registry.by_name("f16").id)
        plan = writer.plan()[0]
        writer.abort()
        path.write_bytes(plan.header)
        os.truncate(path, plan.nbytes)
        return path


SHAPES = {
    "8B": Shape("llama", 32, n_vocab=128256),
    "8B without groups": Shape("llama", 36, n_head_kv=4, n_vocab=128256),
    "70B": Shape("llama", 80, n_head=8, n_vocab=128256),
    "70B of another architecture": Shape("qwen2", 80, n_head=8, n_vocab=152064),
    "80 layers, small vocabulary": Shape("llama", 80, n_head_kv=2, n_vocab=32000),
    "falcon": Shape("falcon", 32, fused=True),
    "tied": Shape("gemma", 18, n_vocab=256000, tied=True),
    "8 experts": Shape("llama", 32, n_expert=8),
    "128 experts": Shape("qwen3moe", 12, n_expert=128),
    "4 experts, short rows": Shape("llama", 12, n_expert=4, n_columns=96),
}


def reference_types(model: Path, *arguments: str) -> dict[str, str]:
    """Type of every tensor in the dry run of the reference; `arguments` end with the file type."""
    if not PROGRAM.exists():
        pytest.skip("this build of ik-llama-cpp-python has no llama-quantize")
    command = [str(PROGRAM), "--dry-run", *arguments[:-1], str(model), str(model.with_name("none.gguf")), arguments[-1]]
    result = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    assert result.returncode == 0, result.stderr[-500:]
    types, name = {}, ""
    for line in result.stderr.splitlines():
        if found := TENSOR.match(line):
            name = found[1]
            types[name] = found[2]
        # Notes on a tensor stand between its name and its new type.
        if found := re.search(r"converting to (\S+) \.\.", line):
            types[name] = found[1]
    return types


def our_types(model: Path, options: QuantizeOptions) -> dict[str, str]:
    with GGUFFile.open(model, header_only=True) as file:
        plan = make_plan(file, options)
    assert plan.problem is None
    return {step.name: step.type for step in plan.steps}


def write_importances(path: Path, shape: Shape) -> Path:
    """Ones for every matrix."""
    data = b""
    tensors = {name: s for name, s in shape.tensors().items() if name != "token_embd.weight"}
    for name, s in tensors.items():
        values = np.ones(s[0] * (s[2] if len(s) > 2 else 1), "<f4")
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, len(values)) + values.tobytes()
    path.write_bytes(struct.pack("<i", len(tensors)) + data)
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_file_types_choose_the_same(tmp_path, name):
    model = SHAPES[name].write(tmp_path / "model.gguf")
    importances = str(write_importances(tmp_path / "im.dat", SHAPES[name]))
    for ftype in FILE_TYPES:
        options = QuantizeOptions(registry.ftype_by_name(ftype), ignore_imatrix_rules=True, dry_run=True)
        assert our_types(model, options) == reference_types(model, "--ignore-imatrix-rules", ftype), ftype
    for ftype in FILE_TYPES_WITH_IMATRIX:
        options = QuantizeOptions(registry.ftype_by_name(ftype), imatrix=read_imatrix(importances), dry_run=True)
        assert our_types(model, options) == reference_types(model, "--imatrix", importances, ftype), ftype


@pytest.mark.parametrize("name", ["8B", "tied", "8 experts"])
def test_rules_and_options_choose_the_same(tmp_path, name):
    """The first rule decides; of options for single tensors that of a tied output matrix yields to rules."""
    model = SHAPES[name].write(tmp_path / "model.gguf")
    rules = r"token_embd=q5_K,blk\.[0-2]\..*=q8_0,(?!blk\.1\d\.)ffn_down=iq4_ks,attn_(k|v)=iq5_k_r4,ffn_=iq3_k"
    types = TypeOptions(output="q4_0", attn_q="iq4_k", ffn_down="q6_K")
    options = QuantizeOptions(
        registry.ftype_by_name("IQ4_KS"), recipe=Recipe(parse_rules(rules)), types=types, dry_run=True
    )
    arguments = ["--custom-q", rules, "--output-tensor-type", "q4_0", "--attn-q-type", "iq4_k"]
    arguments += ["--ffn-down-type", "q6_K", "IQ4_KS"]
    assert our_types(model, options) == reference_types(model, *arguments)
