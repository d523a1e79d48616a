"""Optional tensors of a layer: where one layer has one, all layers of the kind do, or the checkpoint is incomplete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from ikpy.convert.families.base import Family
from ikpy.errors import FileFormatError

# Optional tensors -> the one that every layer with a place for them has. Biases belong to their weights.
_BESIDE = {
    "attn_k_norm.weight": "attn_k.weight",
    "attn_q_norm.weight": "attn_q.weight",
    "attn_v.weight": "attn_k.weight",
    "exp_probs_b.bias": "ffn_gate_inp.weight",
    "indexer.q_proj.weight": "attn_q.weight",
    "ffn_down_exps.scale": "ffn_down_exps.weight",
    "layer_output_scale.weight": "attn_norm.weight",
    "ssm_norm.weight": "ssm_in.weight",
}


def check_gaps(names: Iterable[str], family: Family, folder: Path) -> None:
    """FileFormatError if a tensor is missing in some layers only, or in a layer that has none, names being those of the
    planned GGUF file.

    Loading finds the tensors that no layer can do without. The others would count as zeros or as ones.
    """
    layers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if name.startswith("blk."):
            _, il, rest = name.split(".", 2)
            layers[rest].add(int(il))
    for rest, found in layers.items():
        strange = [il for il in found if family.must_lack(rest, il)]
        if strange:
            raise FileFormatError(f"{folder}: layer {min(strange)} has {rest}, which config.json says it has not")
        lacking = {il for il in layers.get(_anchor(rest), found) - found if not family.may_lack(rest, il)}
        if lacking:
            raise FileFormatError(
                f"{folder}: layer {min(lacking)} lacks {rest}, which layer {min(found)} has; the checkpoint is "
                "incomplete"
            )


def _anchor(rest: str) -> str:
    return _BESIDE.get(rest, f"{rest.removesuffix('.bias')}.weight")
