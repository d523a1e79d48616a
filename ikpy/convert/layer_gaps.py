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
    "exp_probs_b": "ffn_gate_inp.weight",
    "exp_probs_b.bias": "ffn_gate_inp.weight",
    "indexer.q_proj.weight": "attn_q.weight",
    "ffn_down_exps.scale": "ffn_down_exps.weight",
    "ffn_routed_norm.weight": "ffn_routed_up.weight",
    "layer_output_scale.weight": "attn_norm.weight",
    "ssm_norm.weight": "ssm_in.weight",
}
# What a prediction layer has if the other layers do; the rest may differ.
_ALSO_PREDICTING = ("exp_probs_b", "exp_probs_b.bias", "attn_q_norm.weight", "attn_k_norm.weight")
# What layers of attention have that may have a gate.
_GATED = ("attn_q_norm.weight", "attn_kv_a_norm.weight")


def check_gaps(names: Iterable[str], family: Family, folder: Path) -> None:
    """FileFormatError if a tensor is missing in some layers only, or in a layer that has none, names being those of the
    planned GGUF file.

    Loading finds the tensors that no layer can do without. The others would count as zeros or as ones. Prediction
    layers need not be as the others in everything.
    """
    layers: dict[str, set[int]] = defaultdict(set)
    predicting: dict[str, set[int]] = defaultdict(set)
    outer = family.needed_outer_tensors()
    for name in names:
        outer -= {name}
        if name.startswith("blk."):
            _, il, rest = name.split(".", 2)
            (layers if int(il) < family.config.n_layer else predicting)[rest].add(int(il))
    if family.predicts_alone:
        return
    if outer:
        raise FileFormatError(f"{folder}: {min(outer)} is missing; the checkpoint is incomplete")
    for rest in sorted(family.needed_tensors()):
        without = set(range(family.config.n_layer)) - layers.get(rest, set())
        if without:
            raise FileFormatError(f"{folder}: layer {min(without)} lacks {rest}; the checkpoint is incomplete")
    for rest, found in layers.items():
        strange = [il for il in found if family.must_lack(rest, il)]
        if strange:
            raise FileFormatError(f"{folder}: layer {min(strange)} has {rest}, which config.json says it has not")
        anchors = _GATED if rest == "attn_gate.weight" else (_anchor(rest),)
        expected = set[int]().union(*(layers.get(anchor, found) for anchor in anchors))
        lacking = {il for il in expected - found if not family.may_lack(rest, il)}
        if rest in _ALSO_PREDICTING:
            lacking |= predicting[_anchor(rest)] - predicting[rest]
        if lacking:
            raise FileFormatError(
                f"{folder}: layer {min(lacking)} lacks {rest}, which layer {min(found)} has; the checkpoint is "
                "incomplete"
            )


def _anchor(rest: str) -> str:
    return _BESIDE.get(rest, f"{rest.removesuffix('.bias')}.weight")
